import json
import os
import platform
import time
from pathlib import Path

import pytest

import tiny
from ness.lab.runs import queue
from ness.lab.runs.queue import RunRequest
from ness.lab.runs.run import Options, folder_of
from ness.lab.runs.status import Standing, StatusMonitor, time_left
from ness.lab.runs.sweep import run_all


@pytest.fixture(autouse=True)
def _known(monkeypatch) -> None:
    tiny.make_known(monkeypatch)


def begun(path: Path, process: int, host: str) -> None:
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "holder.json").write_text(json.dumps({"process": process, "host": host, "since": ""}))
    events = [
        {"event": "task", "time": 100.0, "task": 0},
        {"event": "epoch", "task": 0, "epoch": 1, "valid_accuracy": 5.0},
    ]
    (path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))


def test_what_was_asked_for_is_noted_once_and_damage_is_passed_over(tmp_path: Path) -> None:
    work = [(tiny.job(), 1), (tiny.job(), 2)]
    queue.note(tmp_path, work)
    with (tmp_path / queue.NAME).open("a") as file:
        file.write('{"folder": 5}\n{"hal')
    queue.note(tmp_path, [*work, (tiny.job("joint"), 1)])
    found = queue.read(tmp_path)
    assert [(one.method, one.seed, one.lessons) for one in found] == [
        ("finetune", 1, 3),
        ("finetune", 2, 3),
        ("joint", 1, 1),
    ]


def test_done_running_stopped_waiting_damaged(tmp_path: Path) -> None:
    job = tiny.job(epochs=1)
    run_all([(job, 1)], Options(out=tmp_path), lambda job, seed: lambda event: None)
    queue.note(tmp_path, [(job, seed) for seed in (2, 3, 4, 5, 6)])
    folders = {seed: folder_of(job, seed, tmp_path) for seed in (2, 3, 4, 5, 6)}
    begun(folders[2], os.getpid(), platform.node())
    begun(folders[3], 2**22 + 5, platform.node())  # a number that no process has
    begun(folders[4], 1, "elsewhere")
    begun(folders[6], 1, "elsewhere")
    (folders[6] / "result.json").write_text("{")
    watched = StatusMonitor(tmp_path)
    now = time.time()
    states = {one.asked.seed: one.state for one in watched.look(now)}
    assert states == {1: "done", 2: "running", 3: "stopped", 4: "running", 5: "waiting", 6: "damaged"}
    assert {one.asked.seed: one.state for one in watched.look(now + 5000)}[4] == "stopped"  # silent for too long
    second = watched.look(160.0)[1]
    assert (second.spent, second.history.epoch, second.share) == (60.0, 1, pytest.approx(1 / 3))
    assert time_left(watched.look(now)) is not None


def test_a_run_that_nobody_noted_is_seen_too(tmp_path: Path) -> None:
    run_all([(tiny.job(epochs=1), 1)], Options(out=tmp_path), lambda job, seed: lambda event: None)
    (tmp_path / queue.NAME).unlink()
    (one,) = StatusMonitor(tmp_path).look()
    assert (one.state, one.asked.method) == ("done", "finetune")


def standing(method: str, state: str, seconds: float = 0.0, epoch: int = 0) -> Standing:
    from ness.lab.runs.run_folder import History

    asked = RunRequest("f", "b", method, "fixed", 1, 1, 10)
    result = {"total_seconds": seconds} if state == "done" else None
    return Standing(asked, state, History(epoch=epoch), result, seconds)  # type: ignore[arg-type]


def test_time_left_by_those_most_alike() -> None:
    done = [standing("a", "done", 10.0), standing("b", "done", 30.0)]
    assert time_left([*done, standing("b", "waiting"), standing("c", "waiting")]) == 30.0 + 20.0
    assert time_left([*done, standing("a", "running", 5.0, 5), standing("a", "running", 5.0, 5)]) == 5.0
    assert time_left([standing("a", "running", 8.0, 2)]) == pytest.approx(32.0)  # its own pace
    assert time_left([standing("a", "running", 8.0, 2), standing("b", "waiting")]) == pytest.approx(72.0)
    assert time_left([standing("a", "waiting")]) is None
    assert time_left(done) == 0.0
