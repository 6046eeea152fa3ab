from pathlib import Path

import pytest

from ness import NessError
from ness.report.write import write
from report.making import record


def test_tables_and_a_figure_for_each_row(tmp_path: Path) -> None:
    written = write([record(seed=1), record(seed=2), record("a/b method")], tmp_path / "report")
    names = [path.name for path in written]
    assert names[:3] == ["table.md", "table.csv", "table.tex"]
    assert names[3:] == [
        f"accuracy-digits-{method}.{kind}"
        for method in ("finetune-d-finetune", "a_b_method-d-a_b_method")
        for kind in ("png", "svg", "pdf")
    ]
    assert all(path.stat().st_size > 100 for path in written)
    assert sorted(path.name for path in (tmp_path / "report").iterdir()) == sorted(names)


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NessError, match="cannot write the report"):
        write([record()], tmp_path / "file")
