import json
from pathlib import Path

import pytest

import tiny
from ness import NessError
from ness.lab.runs import queue
from ness.lab.runs.dispatch import MOST_LOSSES, MOST_LOST_PLACES, Dispatch
from ness.lab.runs.jobs import JobDescription
from ness.lab.runs.queue import Lengths, RunRequest
from ness.lab.runs.run import Options, Outcome, folder_of, run
from ness.lab.runs.run_folder import RunLocked
from ness.lab.runs.sweep import jobs
from ness.lab.training.loop import Event


@pytest.fixture(autouse=True)
def _known(monkeypatch) -> None:
    tiny.make_known(monkeypatch)


def dispatch(work, options: Options) -> Dispatch:
    return Dispatch(work, options, lambda job, seed: lambda event: None, lambda line: None)


def taken(one: Dispatch) -> list[int]:
    found = []
    while (number := one.take()) is not None:
        found.append(number)
    return found


def test_without_records_the_runs_of_most_epochs_come_first_and_equals_in_the_order_asked_for(tmp_path: Path) -> None:
    work = [(tiny.job("finetune", epochs=epochs), seed) for seed in (1, 2) for epochs in (2, 5, 3)]
    assert taken(dispatch(work, Options(tmp_path))) == [1, 4, 2, 5, 0, 3]


def test_what_was_recorded_in_the_folder_orders_the_runs_and_so_does_what_ends_now(tmp_path: Path) -> None:
    short, long = tiny.job("finetune", epochs=1), tiny.job("frozen", epochs=1)
    for job, seconds in ((short, 1.0), (long, 9.0)):
        run(job, 1, Options(tmp_path))
        path = folder_of(job, 1, tmp_path) / "result.json"
        result = json.loads(path.read_text())
        del result["sha256"]
        path.write_text(json.dumps({**result, "total_seconds": seconds}))
    one = dispatch([(short, 2), (long, 2), (short, 3)], Options(tmp_path))
    assert one.expected(0) == pytest.approx(1.0)
    assert taken(one) == [1, 0, 2]
    one = dispatch([(short, 2), (long, 2), (short, 3)], Options(tmp_path))
    one.waiting.remove(0)
    one.ended(0, Outcome(tmp_path, {"total_seconds": 99.0}, "run"))
    assert taken(one) == [2, 1]


def test_two_thirds_of_a_run_that_is_begun_are_not_counted_again(tmp_path: Path) -> None:
    job = tiny.job("finetune", epochs=1)
    folder = folder_of(job, 1, tmp_path)
    calls = 0

    def cut(event: Event) -> None:
        nonlocal calls
        calls += event.kind == "learnt"
        if calls == 2:
            raise KeyboardInterrupt

    queue.note(tmp_path, [(job, 1)])  # as the command that began it did
    with pytest.raises(KeyboardInterrupt):
        run(job, 1, Options(tmp_path, save_every=0.0), cut)
    assert (folder / "config.json").exists()
    one = dispatch([(job, 1), (job, 2)], Options(tmp_path))
    assert one.expected(0) == pytest.approx(one.expected(1) / 3)
    assert taken(one) == [1, 0]


def test_a_run_that_loses_its_worker_goes_on_but_not_for_ever(tmp_path: Path) -> None:
    one = dispatch([(tiny.job("frozen"), 1)], Options(tmp_path, again=True))
    for count in range(MOST_LOSSES):
        assert one.take() == 0
        assert one.options_of(0).again == (count == 0)  # what it has made since is not thrown away
        one.heard(0, Event("begun", {}))
        one.lost(0, "gone")
    assert one.over
    assert str(one.ends[0]) == "gone, for the third time: it is not tried again, but its checkpoint is kept"
    other = dispatch([(tiny.job("frozen"), 1)], Options(tmp_path))
    for _ in range(MOST_LOST_PLACES - 1):
        assert other.take() == 0
        other.lost(0, "its node is gone", place=True)
    assert other.take() == 0
    assert not other.losses


def test_a_run_that_another_process_has_is_tried_again_later_and_with_again_it_has_failed(tmp_path: Path) -> None:
    work = [(tiny.job("frozen"), 1)]
    one = dispatch(work, Options(tmp_path))
    one.ended(one.take() or 0, RunLocked(tmp_path, "process 1"))
    assert one.take() is None
    assert not one.over
    one._looked = 0.0
    assert one.take() == 0
    again = dispatch(work, Options(tmp_path, again=True))
    again.ended(again.take() or 0, RunLocked(tmp_path, "process 1"))
    assert again.over


def test_lengths_come_from_the_most_alike() -> None:
    lengths = Lengths()
    one = RunRequest("", "tiny", "ness", "fixed", 1, 3, 3)
    lengths.add(one, 9.0, 8.0)
    lengths.add(RunRequest("", "tiny", "ness", "fixed eps=1", 1, 3, 3), 9.0, 4.0)
    lengths.add(RunRequest("", "tiny", "finetune", "fixed", 1, 3, 3), 9.0, 3.0)
    assert lengths.expected(one, 9.0) == 8.0
    assert lengths.expected(RunRequest("", "tiny", "ness", "other", 1, 3, 3), 9.0) == 6.0
    assert lengths.expected(RunRequest("", "tiny", "gpm", "fixed", 1, 3, 3), 9.0) == 5.0
    assert lengths.expected(RunRequest("", "tiny", "gpm", "fixed", 1, 3, 6), 18.0) == pytest.approx(10.0)


def test_a_job_is_the_same_job_after_its_description_and_another_version_of_it_is_refused() -> None:
    for job in jobs(["all"], "tiny", "fixed", {"epochs": 2}):
        there = JobDescription.of(job).job()
        assert (there.digest, there.label, there.title) == (job.digest, job.label, job.title)
    described = JobDescription.of(tiny.job("frozen"))
    with pytest.raises(NessError, match="expected 0123456789; install one version of ness"):
        JobDescription(**{**vars(described), "digest": "0123456789"}).job()
    with pytest.raises(NessError, match="install one version of ness"):
        JobDescription(**{**vars(described), "settings": {"unheard_of": 1}}).job()
