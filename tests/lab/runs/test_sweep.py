import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

import tiny
from ness import NessError
from ness.lab import registry
from ness.lab.methods.base import Method
from ness.lab.runs import sweep as grid_module
from ness.lab.runs.run import Options, folder_of, run
from ness.lab.runs.run_folder import RunFolder
from ness.lab.runs.sweep import jobs, run_all


@pytest.fixture(autouse=True)
def _known(monkeypatch) -> None:
    tiny.make_known(monkeypatch)


def silent(job, seed):
    return lambda event: None


def test_a_change_reaches_the_methods_that_have_it() -> None:
    found = jobs(["finetune", "ness"], "tiny", "fixed", {"eps": 0.05, "lr": 0.2})
    assert [job.settings.lr for job in found] == [0.2, 0.2]
    assert found[1].settings.eps == 0.05
    with pytest.raises(NessError, match=r"none of finetune, frozen has a setting 'eps'"):
        jobs(["finetune", "frozen"], "tiny", "fixed", {"eps": 0.05})


def test_all_is_every_method() -> None:
    assert [job.method.name for job in jobs(["all"], "tiny", "fixed", {})] == sorted(registry.all_methods())


def test_one_failure_does_not_stop_the_others_and_finished_ones_are_kept(tmp_path: Path) -> None:
    bad, good = tiny.job("finetune", lr=1e25), tiny.job("frozen", epochs=1)
    grid = run_all([(bad, 1), (good, 1), (good, 2)], Options(tmp_path), silent)
    assert [outcome.result["seed"] for outcome in grid.outcomes] == [1, 2]
    assert list(grid.failures) == ["finetune on tiny, seed 1"]
    assert "diverged" in grid.failures["finetune on tiny, seed 1"]
    again = run_all([(good, 1), (good, 2)], Options(tmp_path), silent)
    assert [outcome.how for outcome in again.outcomes] == ["there", "there"]


def test_after_the_time_no_run_is_begun_and_what_is_finished_still_counts(tmp_path: Path) -> None:
    job = tiny.job("frozen", epochs=1)
    run_all([(job, 2)], Options(tmp_path), silent)
    grid = run_all([(job, 1), (job, 2), (job, 3)], Options(tmp_path, stop_after=0.0), silent)
    assert [outcome.result["seed"] for outcome in grid.outcomes] == [2]
    assert grid.not_begun == ["frozen on tiny, seed 1", "frozen on tiny, seed 3"]
    (line,) = grid.complaints()
    assert line.startswith("2 runs were not begun, since the time of --stop-after was over")
    in_time = run_all([(job, 1), (job, 2), (job, 3)], Options(tmp_path, stop_after=1e6), silent)
    assert [outcome.how for outcome in in_time.outcomes] == ["run", "there", "run"]


def test_again_and_out_of_time_nothing_that_is_finished_is_thrown_away(tmp_path: Path) -> None:
    job = tiny.job("frozen", epochs=1)
    (outcome,) = run_all([(job, 1)], Options(tmp_path), silent).outcomes
    grid = run_all([(job, 1)], Options(tmp_path, again=True, stop_after=0.0), silent)
    assert grid.not_begun == ["frozen on tiny, seed 1"]
    assert "1 run was not begun" in grid.complaints()[0]
    assert "without --again" in grid.complaints()[0]
    (there,) = run_all([(job, 1)], Options(tmp_path), silent).outcomes
    assert (there.how, there.result) == ("there", outcome.result)


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_a_time_that_is_none_is_refused(seconds: float, tmp_path: Path) -> None:
    with pytest.raises(NessError, match=r"--stop-after .* expected a number of seconds"):
        run_all([(tiny.job("frozen"), 1)], Options(tmp_path, stop_after=seconds), silent)


@contextmanager
def held_elsewhere(path: Path) -> Iterator[threading.Event]:
    """A run's folder in other hands until the event is set. (A lock is a file handle's, so another thread will do.)"""
    held, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with RunFolder(path).held():
            held.set()
            leave.wait(30)

    other = threading.Thread(target=hold)
    other.start()
    assert held.wait(30)
    try:
        yield leave
    finally:
        leave.set()
        other.join()


def test_a_run_that_another_process_has_is_waited_for_after_all_others(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(grid_module, "LOOK_EVERY", 0.01)
    job, said, learnt = tiny.job("frozen", epochs=1), [], []

    def hear(job, seed):
        return lambda event: learnt.append(seed) if event.kind == "begun" else None

    with held_elsewhere(folder_of(job, 1, tmp_path)) as leave:

        def say(line: str) -> None:
            said.append(line)
            assert learnt == [2]  # what is free was run before anybody waits
            leave.set()

        grid = run_all([(job, 1), (job, 2)], Options(tmp_path), hear, say)
    assert [outcome.how for outcome in grid.outcomes] == ["run", "run"]  # taken over from one who did not finish it
    assert [outcome.result["seed"] for outcome in grid.outcomes] == [1, 2]
    assert grid.complaints() == []
    (line,) = said
    assert line.startswith("waiting for frozen on tiny, seed 1, which process ")
    assert line.endswith("runs; Ctrl-C leaves it to them")


def test_what_another_process_finished_meanwhile_is_taken_from_it(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(grid_module, "LOOK_EVERY", 0.01)
    job = tiny.job("frozen", epochs=1)
    done = run(job, 1, Options(tmp_path / "other")).folder / "result.json"
    with held_elsewhere(folder := folder_of(job, 1, tmp_path)) as leave:

        def finish(line: str) -> None:
            (folder / "result.json").write_bytes(done.read_bytes())
            leave.set()

        grid = run_all([(job, 1)], Options(tmp_path), silent, finish)
    assert [outcome.how for outcome in grid.outcomes] == ["there"]


def test_nobody_waits_for_others_beyond_the_time_or_to_run_again(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(grid_module, "LOOK_EVERY", 0.01)
    job = tiny.job("frozen", epochs=1)
    with held_elsewhere(folder_of(job, 1, tmp_path)):
        late = run_all([(job, 1)], Options(tmp_path, stop_after=0.3), silent)
        assert late.not_begun == ["frozen on tiny, seed 1"]
        again = run_all([(job, 1)], Options(tmp_path, again=True), silent)
        assert "is held by process" in again.failures["frozen on tiny, seed 1"]


def test_an_error_of_a_methods_own_ends_its_run_and_no_other(tmp_path: Path) -> None:
    class Broken(Method):
        def after_task(self, lesson):
            raise ValueError("mine")

    broken = tiny.job(replace(registry.all_methods()["finetune"], name="broken", build=Broken), epochs=1)
    grid = run_all([(broken, 1), (tiny.job("frozen", epochs=1), 1)], Options(tmp_path), silent)
    assert [outcome.result["method"] for outcome in grid.outcomes] == ["frozen"]
    said = grid.failures["broken on tiny, seed 1"]
    assert said.startswith("ValueError: mine (where it came from: ")
    written = Path(said.partition("came from: ")[2].removesuffix(")")).read_text()
    assert 'raise ValueError("mine")' in written
    assert '"failed"' in (folder_of(broken, 1, tmp_path) / "events.jsonl").read_text()


@pytest.mark.parametrize("seconds", [-1.0, float("inf")])
def test_a_pause_between_checkpoints_that_is_none_is_refused(seconds: float, tmp_path: Path) -> None:
    with pytest.raises(NessError, match="--save-every"):
        run_all([(tiny.job("frozen", epochs=1), 1)], Options(tmp_path, save_every=seconds), silent)
