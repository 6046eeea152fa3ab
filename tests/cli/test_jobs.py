"""`--jobs N`: a table on several processes, whatever happens to them."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import fatal
from ness.cli.main import main
from ness.lab.runs import checkpoint
from running import children, facts, gone_soon

PLAN = """
benchmark = "tiny"
seeds = [1]
[[row]]
method = "fatal"
name = "dies once"
kills = 1
marks = "{once}"
[[row]]
method = "fatal"
name = "dies always"
kills = 9
marks = "{always}"
[[row]]
method = "fatal"
name = "raises"
raises = true
[[row]]
method = "finetune"
name = "diverges"
lr = 1e25
[[row]]
method = "finetune"
"""


@pytest.fixture(autouse=True)
def place(monkeypatch, tmp_path: Path) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    with fatal.known(monkeypatch, tmp_path / "site"):
        yield tmp_path


def test_workers_that_die_are_replaced_and_every_other_run_is_as_without_them(capsys, tmp_path: Path) -> None:
    marks = {name: tmp_path / name for name in ("once", "always")}
    for folder in marks.values():
        folder.mkdir()
    Path("plan.toml").write_text(PLAN.format(**marks))
    command = ["table", "--plan", "plan.toml", "--save-every", "0"]
    assert main([*command, "--out", "with", "--jobs", "2"]) == 1
    said = capsys.readouterr()
    assert len(list(marks["once"].iterdir())) == 1
    assert len(list(marks["always"].iterdir())) == 3  # no more: it is a row that failed, and no loop
    assert said.err.count("dies once on tiny, seed 1: its worker (process ") == 1
    assert (
        "was killed by SIGKILL (often: the machine was out of memory); it goes on from its last checkpoint" in said.err
    )
    assert "dies once on tiny, seed 1: goes on after 1 tasks and 0 epochs" in said.err
    assert "ness: dies always on tiny, seed 1: its worker (process " in said.err
    assert "for the third time: it is not tried again, but its checkpoint is kept" in said.err
    assert "ness: raises on tiny, seed 1: RuntimeError: as it was asked to (where it came from: " in said.err
    assert "ness: diverges on tiny, seed 1: task 1, epoch" in said.err
    log = next(
        path for path in Path("with").glob("tiny-fatal-*/events.jsonl") if "for the third time" in path.read_text()
    )
    assert json.loads(log.read_text().splitlines()[-1])["event"] == "failed"  # `ness watch` says so, too
    assert checkpoint.paths(log.parent)

    for name in ("1", "2", "3", "4", "5", "6", "7", "8"):
        (marks["always"] / name).touch()
    (marks["always"] / "9").touch()  # nothing kills any more: the plain command, and what the workers made
    assert main([*command, "--out", "without"]) == 1
    plain, found = facts(Path("without")), facts(Path("with"))
    assert len(found) == 2
    assert found == {name: plain[name] for name in found}


def test_what_is_finished_needs_no_worker_and_tune_takes_jobs_too(capsys, monkeypatch) -> None:
    tune = ["tune", "--benchmark", "tiny", "--method", "finetune", "--over", "lr=0.01,0.05", "--epochs", "1"]
    tune += ["--first-tasks", "2"]
    assert main([*tune, "--out", "with", "--jobs", "2"]) == 0
    chosen = capsys.readouterr().out
    monkeypatch.setattr("ness.lab.runs.workers.Pool", None)
    assert main([*tune, "--out", "with", "--jobs", "2"]) == 0
    assert capsys.readouterr().out == chosen
    assert main([*tune, "--out", "without"]) == 0
    assert capsys.readouterr().out == chosen
    assert facts(Path("with")) == facts(Path("without"))
    table = ["table", "--benchmark", "tiny", "--methods", "finetune", "--out", "late", "--jobs", "2"]
    assert main([*table, "--stop-after", "0"]) == 1
    assert "1 run was not begun, since the time of --stop-after was over" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--jobs", "0"], "--jobs 0: expected 1 to 256 worker processes"),
        (["--jobs", "257"], "--jobs 257: expected 1 to 256 worker processes"),
        (["--jobs", "2", "--lanes", "2"], "--lanes 2"),
        (["--jobs", "2", "--device", "cuda"], "torch sees no GPU here"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_written(flags: list[str], words: str, capsys) -> None:
    assert main(["table", "--benchmark", "tiny", "--methods", "finetune", *flags]) == 2
    assert words in capsys.readouterr().err
    assert not Path("runs").exists()


def started(tmp_path: Path, *more: str) -> "subprocess.Popen[str]":
    """A table of two long runs on two workers, in a session of its own as a terminal gives it."""
    path = os.pathsep.join([str(tmp_path / "site"), str(Path(fatal.__file__).parent), *sys.path])
    command = [sys.executable, "-m", "ness", "table", "--benchmark", "tiny", "--methods", "fatal", "--seeds", "1", "2"]
    command += ["--save-every", "0", "--out", "cut", *more]
    return subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=True,
    )


def both_are_under_way(command: "subprocess.Popen[str]", out: Path) -> list[int]:
    """The processes that the command has started, once both runs have a checkpoint."""
    until = time.monotonic() + 120
    while len({path.parent for path in out.glob("*/checkpoint-*")}) < 2:
        assert command.poll() is None
        assert time.monotonic() < until
        time.sleep(0.02)
    found = children(command.pid)
    assert len(found) >= 2
    return found


def test_ctrl_c_ends_all_workers_and_says_from_where_the_command_goes_on(tmp_path: Path) -> None:
    command = started(tmp_path, "--jobs", "2", "--naps", "0.2")
    processes = both_are_under_way(command, tmp_path / "cut")
    os.killpg(command.pid, signal.SIGINT)  # as a terminal does: to all of the group
    _, said = command.communicate(timeout=60)
    assert command.returncode == 130
    assert gone_soon(processes)
    assert "ness: interrupted; the same command goes on with fatal on tiny, seed " in said
    assert "Traceback" not in said
    assert not list((tmp_path / "cut").glob("*/holder.json"))  # the runs were left tidily
    table = ["table", "--benchmark", "tiny", "--methods", "fatal", "--seeds", "1", "2", "--naps", "0.2"]
    assert main([*table, "--out", "cut"]) == 0
    assert main([*table, "--out", "whole"]) == 0
    assert facts(tmp_path / "cut") == facts(tmp_path / "whole")


def test_workers_end_with_a_command_that_is_killed(tmp_path: Path) -> None:
    command = started(tmp_path, "--jobs", "2", "--naps", "5")
    until = time.monotonic() + 120
    while len(list((tmp_path / "cut").glob("*/config.json"))) < 2:
        assert command.poll() is None
        assert time.monotonic() < until
        time.sleep(0.02)
    processes = children(command.pid)
    command.kill()
    command.communicate()
    assert gone_soon(processes)
