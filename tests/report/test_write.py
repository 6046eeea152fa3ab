from pathlib import Path

import pytest

from ness import NessError
from ness.report.collect import Found
from ness.report.records import from_result
from ness.report.write import write
from report.making import record, with_certificate


def names(stem: str, endings: str) -> list[str]:
    return [f"{stem}.{ending}" for ending in endings.split()]


def test_tables_and_figures(tmp_path: Path) -> None:
    found = Found((record(seed=1), record(seed=2), from_result(with_certificate(), "")))
    written = [path.relative_to(tmp_path).as_posix() for path in write(found, tmp_path, each_run=True)]
    stem, ness = "digits-finetune-d-finetune", "digits-ness-d-ness"
    assert written[:4] == ["report.html", *names("table", "md csv tex")]
    tables = ["times-digits", f"accuracy-{stem}", f"accuracy-{ness}", f"certificate-{ness}"]
    figures = [
        "acc-bwt-digits",
        "average-digits",
        "compare-digits",
        "times-digits",
        f"accuracy-{stem}",
        f"course-{stem}",
    ]
    figures += [f"accuracy-{ness}", f"course-{ness}", f"certificate-{ness}"]
    figures += [f"runs/accuracy-{stem}-seed1", f"runs/accuracy-{stem}-seed2", f"runs/accuracy-{ness}-seed1"]
    expected = [name for table in tables for name in names(f"tables/{table}", "md csv tex")]
    expected += [name for figure in figures for name in names(f"figures/{figure}", "png svg pdf")]
    assert written[4:] == expected
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.*")) == sorted(written)
    assert all((tmp_path / name).stat().st_size > 20 for name in written)


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NessError, match="cannot write the report"):
        list(write(Found((record(),)), tmp_path / "file"))
