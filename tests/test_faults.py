"""Faults, power loss and kills: a few of them here, all of them in `make test-kill` and `make reliability`."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import campaign
from faults import Disk, Step, watched
from ness import _files
from ness.lab import registry

METHODS = sorted(registry.all_methods())
STRIDES = {"run": 17, "table": 31, "guard": 1, "statistics": 1, "report": 13, "download": 1}
MOMENTS = {"json": 100, "guard": 30, "checkpoints": 15, "run": 12}


@pytest.fixture(autouse=True)
def _known() -> Iterator[None]:
    with campaign.Known():
        yield


@pytest.mark.parametrize("name", campaign.FAULTS)
def test_a_call_that_fails_leaves_the_old_state_or_the_new_one(name: str, tmp_path: Path) -> None:
    found = campaign.FAULTS[name](tmp_path, STRIDES[name])
    assert found["said"] > 0
    assert sum(found.values()) - found["said"] >= 5


@pytest.mark.parametrize("name", campaign.POWER)
def test_power_loss_leaves_the_old_state_or_the_new_one(name: str, tmp_path: Path) -> None:
    assert campaign.POWER[name](tmp_path, MOMENTS[name]) >= MOMENTS[name] // 2


@pytest.mark.parametrize("forgotten", ["fsync of the file", "fsync of the folder"])
def test_the_simulator_notices_what_is_not_flushed(forgotten: str, tmp_path: Path, monkeypatch) -> None:
    if forgotten == "fsync of the file":
        real = Disk.do
        monkeypatch.setattr(
            Disk,
            "do",
            lambda disk, step: real(disk, step) if step.name != "fsync" or step.inode not in disk.files else None,
        )
    else:
        monkeypatch.setattr(_files, "sync_folder", lambda folder: None)
    with pytest.raises((AssertionError, FileNotFoundError, campaign.ness.NessError)):
        campaign.power_of_json(tmp_path, 100)


def test_a_disk_forgets_what_was_not_flushed_and_nothing_else(tmp_path: Path) -> None:
    import random

    disk = Disk(str(tmp_path))
    steps = [
        Step("create", f"{tmp_path}/a", inode=1), Step("write", f"{tmp_path}/a", inode=1, data=b"safe"),
        Step("fsync", f"{tmp_path}/a", inode=1), Step("fsync", str(tmp_path), inode=99),
        Step("write", f"{tmp_path}/a", inode=1, data=b" and not"),
        Step("create", f"{tmp_path}/b", inode=2), Step("write", f"{tmp_path}/b", inode=2, data=b"gone"),
    ]  # fmt: skip
    for step in steps:
        disk.do(step)
    seen = set()
    for number in range(200):
        disk.after_power_loss(random.Random(number), tmp_path / str(number))
        seen.add(((tmp_path / str(number) / "a").read_bytes()[:4], (tmp_path / str(number) / "b").exists()))
    assert seen == {(b"safe", True), (b"safe", False)}


def test_what_is_watched_is_counted_and_the_nth_call_fails(tmp_path: Path) -> None:
    with watched(tmp_path) as seen:
        _files.write_bytes(tmp_path / "x", b"1")
    assert {"open", "write", "fsync", "replace"} <= set(seen.names)
    with watched(tmp_path, seen.names.index("write") + 1, 28), pytest.raises(campaign.ness.NessError, match="No space"):
        _files.write_bytes(tmp_path / "x", b"2")
    assert (tmp_path / "x").read_bytes() == b"1"
    assert os.open.__module__ == "posix"


def by_itself(*words: str) -> str:
    """A campaign in a process that has not trained: autograd does not survive a fork."""
    argv = [sys.executable, str(Path(campaign.__file__)), *words]
    here = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(argv, capture_output=True, text=True, env=here)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_killed_at_counted_calls_a_run_ends_bit_equal() -> None:
    assert "kills: " in by_itself("kills", "1", "--methods", "finetune")


@pytest.mark.kill
@pytest.mark.parametrize("method", METHODS)
def test_every_method_killed_at_counted_calls_ends_bit_equal(method: str) -> None:
    by_itself("kills", "6", "--methods", method)


@pytest.mark.kill
@pytest.mark.parametrize("name", campaign.FAULTS)
def test_every_call_that_fails_leaves_the_old_state_or_the_new_one(name: str, tmp_path: Path) -> None:
    campaign.FAULTS[name](tmp_path, 1)
