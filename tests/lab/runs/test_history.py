from ness.lab.runs.run_folder import History, history


def task(number: int, time: float = 10.0) -> dict:
    return {"event": "task", "time": time, "task": number}


def epoch(number: int, count: int) -> dict:
    return {"event": "epoch", "task": number, "epoch": count, "valid_accuracy": 50.0 + count}


def learnt(number: int, *accuracy: float) -> dict:
    return {"event": "learnt", "task": number, "accuracy": accuracy, "epochs": 3, "seconds": 2.0}


def test_lessons_epochs_and_where_it_is_now() -> None:
    now = history([task(0), epoch(0, 1), learnt(0, 90.0), task(1, 20.0), epoch(1, 1), epoch(1, 2)])
    assert now == History(((90.0,),), (3,), (2.0,), 2, 52.0, 20.0)


def test_taken_up_from_an_older_checkpoint() -> None:
    cut = [task(0), learnt(0, 90.0), task(1), learnt(1, 80.0, 70.0), task(2), epoch(2, 5)]
    now = history([*cut, {"event": "resumed", "time": 99.0, "tasks": 1, "epoch": 2}])
    assert (now.learnt, now.epoch, now.since) == (1, 2, 99.0)
    now = history(
        [*cut, {"event": "resumed", "time": 99.0, "tasks": 1, "epoch": 2}, epoch(1, 3), learnt(1, 81.0, 71.0)]
    )
    assert now.accuracy == ((90.0,), (81.0, 71.0))


def test_begun_again_and_lines_that_are_not_whole() -> None:
    now = history([task(0), learnt(0, 90.0), {"event": "epoch"}, {}, {"event": "learnt", "task": "x"}, task(0, 50.0)])
    assert now == History(since=50.0)


def test_tasks_learnt_at_once_are_one_lesson() -> None:
    assert history([task(0), learnt(0, 90.0, 80.0, 70.0)]).learnt == 1


def test_why_it_failed_until_somebody_goes_on() -> None:
    failed = {"event": "failed", "time": 30.0, "reason": "diverged"}
    assert history([task(0), epoch(0, 1), failed]).failed == "diverged"
    assert history([task(0), epoch(0, 1), failed]).epoch == 1
    assert history([task(0), failed, task(0)]).failed is None
