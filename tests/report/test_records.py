import json
from pathlib import Path

import pytest

from ness import NessError
from ness.report import records
from report.making import record, result


def test_reads_every_result_below_a_folder(tmp_path: Path) -> None:
    for seed in (2, 1):
        folder = tmp_path / "deep" / f"run{seed}"
        folder.mkdir(parents=True)
        (folder / "result.json").write_text(json.dumps(result(seed=seed)))
        (folder / "result.old.json").write_text("not read")
    found = records.read(tmp_path)
    assert [one.seed for one in found] == [1, 2]
    assert found[0].scores.acc == 74.5


@pytest.mark.parametrize(("text", "message"), [("{", "cannot be read"), ("{}", "is no result of a run")])
def test_a_result_that_is_none_is_named(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text(text)
    with pytest.raises(NessError, match=message):
        records.read(tmp_path)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(NessError, match="no finished run"):
        records.read(tmp_path)
    with pytest.raises(NessError, match="is no folder"):
        records.read(tmp_path / "missing")


def test_forward_transfer_only_with_the_same_seed_alone() -> None:
    alone = record("alone", 1, [[88.0, None], [88.0, 76.0]])
    found = records.with_forward_transfer([record(seed=1), record(seed=2), alone])
    assert [one.scores.forward for one in found] == [-2.0, None, None]
