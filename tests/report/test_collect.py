import json
from pathlib import Path

import pytest

from ness import NessError
from ness.report.collect import collect
from report.making import result, write


def test_reads_every_run_below_a_folder_and_a_run_folder_itself(tmp_path: Path) -> None:
    for seed in (2, 1):
        folder = write(tmp_path / "deep" / f"run{seed}", result(seed=seed))
        (folder / "result.old.json").write_text("not read")
    assert [one.seed for one in collect([tmp_path]).records] == [1, 2]
    assert [one.seed for one in collect([folder]).records] == [1]
    twice = collect([tmp_path / "deep", tmp_path])
    assert (len(twice.records), twice.problems) == (2, ())


def test_what_cannot_be_counted_is_listed_and_stops_nothing(tmp_path: Path) -> None:
    write(tmp_path / "a", result())
    write(tmp_path / "b", {**result(seed=2), "accuracy": 5})
    (write(tmp_path / "c", {}) / "result.json").write_text("{")
    (write(tmp_path / "d", {}) / "result.json").write_text("[]")
    (write(tmp_path / "e", {}) / "result.json").rename(tmp_path / "e/config.json")
    (tmp_path / "e/config.json").write_text(json.dumps(result(seed=3)))
    write(tmp_path / "f", result())
    (tmp_path / "g").mkdir()
    (tmp_path / "g/config.json").write_text('{"someone": "else\'s"}')
    found = collect([tmp_path])
    assert len(found.records) == 1
    assert [(one.folder.name, one.state) for one in found.problems] == [
        ("b", "damaged"), ("c", "damaged"), ("d", "damaged"), ("e", "unfinished"), ("f", "repeated"),
    ]  # fmt: skip
    assert "accuracy is no list of rows" in str(found.problems[0])


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(NessError, match="no finished run"):
        collect([tmp_path])
    (write(tmp_path / "c", {}) / "result.json").write_text("{")
    with pytest.raises(NessError, match=r"no finished run under .*c: damaged: result.json cannot be read"):
        collect([tmp_path])
    with pytest.raises(NessError, match="is no folder"):
        collect([tmp_path / "missing"])
