"""The stopwatch: every second belongs to one phase, others' seconds to none."""

from pathlib import Path

import pytest
import torch

import tiny
from ness.lab.gpu.coroutines import Coroutine, own_time, pause
from ness.lab.gpu.scheduler import side_by_side
from ness.lab.runs.environment import PHASES, Stopwatch, table, together
from ness.lab.runs.run import Options, run


class Clock:
    """A clock that is set by hand."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_an_inner_phase_is_not_the_outer_ones() -> None:
    clock = Clock()
    watch = Stopwatch(clock)
    clock.now = 1.0
    with watch.phase("statistics"):
        clock.now = 3.0
        with watch.phase("observing"):
            clock.now = 7.0
        clock.now = 8.0
    clock.now = 10.0
    found = watch.times()
    assert found == dict.fromkeys(PHASES, 0.0) | {"other": 3.0, "statistics": 3.0, "observing": 4.0}
    assert sum(found.values()) == clock.now


def test_a_phase_that_fails_has_ended() -> None:
    clock = Clock()
    watch = Stopwatch(clock)

    def fails() -> None:
        with watch.phase("steps"):
            clock.now = 1.0
            raise ValueError("its own")

    with pytest.raises(ValueError, match="its own"):
        fails()
    clock.now = 3.0
    assert (watch.times()["steps"], watch.times()["other"]) == (1.0, 2.0)


def test_others_seconds_do_not_count_but_the_hosts_waiting_does() -> None:
    clock = Clock()
    watch = Stopwatch(clock)

    def work() -> str:
        with own_time(watch), watch.phase("steps"):
            clock.now += 1.0
            pause()
            clock.now += 2.0
        return "done"

    timed = Coroutine(work)
    next(timed)
    clock.now += 100.0  # others run, and of this the host waited half a second for this very work
    with pytest.raises(StopIteration) as end:
        timed.send(0.5)
    assert end.value.value == "done"
    assert watch.times()["steps"] == 3.5


def test_lanes_share_the_hosts_time() -> None:
    clock = Clock()
    watches = [Stopwatch(clock) for _ in range(3)]

    def lane(watch: Stopwatch) -> None:
        with own_time(watch), watch.phase("steps"):
            for _ in range(4):
                clock.now += 1.0
                pause()

    side_by_side([lambda w=w: lane(w) for w in watches], torch.device("cpu"), 3)
    assert [watch.times()["steps"] for watch in watches] == [4.0, 4.0, 4.0]
    assert clock.now == 12.0


def test_a_run_says_where_its_time_went(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.make_known(monkeypatch)
    outcome = run(tiny.job("ness", epochs=1), 1, Options(tmp_path, save_every=0.0))
    times = outcome.result["times"]
    assert set(times) == set(PHASES)
    assert times["capture"] == 0.0  # there is no graph on a CPU
    for name in ("start", "steps", "evaluation", "observing", "decomposition", "checkpoints"):
        assert times[name] > 0, name
    assert sum(times.values()) == pytest.approx(sum(outcome.times.values()), abs=0.5)


def test_a_run_that_was_cut_counts_both_stretches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = tiny.trainer("finetune", epochs=1)
    one.advance()
    one.advance()
    tensors, manifest = one.state()
    manifest["times"]["steps"] += 1000.0
    again = tiny.trainer("finetune", epochs=1)
    again.load_state(tensors, manifest)
    assert again.times()["steps"] >= 1000.0
    assert again.watch.times()["steps"] < 1000.0


def test_the_table_adds_up_to_the_whole_command() -> None:
    lines = table([together({"steps": 2.0}), {"steps": 1.0, "start": 1.0}], 8.0)
    shown = {name: float(seconds) for name, seconds, _ in lines[1:]}
    assert shown.pop("whole command") == sum(shown.values()) == 8.0
    assert shown["outside the runs"] == 4.0
