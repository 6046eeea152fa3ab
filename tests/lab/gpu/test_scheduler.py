"""Lanes: who goes on when, what becomes of errors, and how many there are."""

import os
from collections import deque

import pytest
import torch

from ness import NessError
from ness.lab.gpu.coroutines import Coroutine, Pause, pause
from ness.lab.gpu.scheduler import Lane, allow_many_streams, lanes_for, next_lane, side_by_side

CPU = torch.device("cpu")


def counting(log: list[str], name: str, pauses: int, fails: bool = False) -> str:
    for number in range(pauses):
        log.append(f"{name}{number}")
        pause()
    if fails:
        raise NessError(f"{name} went wrong")
    return name


def waiting(number: int, at: Pause) -> Lane:
    return Lane(number, Coroutine(lambda: counting([], "", 1)), None, pause=at)


def test_results_come_in_the_order_given_and_work_between_tasks_is_not_scattered() -> None:
    log: list[str] = []
    runs = [lambda n=n, p=p: counting(log, n, p) for n, p in (("a", 3), ("b", 1), ("c", 2))]
    assert side_by_side(runs, CPU, lanes=2) == ["a", "b", "c"]
    assert log == ["a0", "a1", "a2", "b0", "c0", "c1"]


def test_a_lane_that_trains_goes_on_before_one_between_tasks() -> None:
    between, training = waiting(0, None), waiting(1, "epoch")
    active = deque([between, training])
    assert [next_lane(active), next_lane(active)] == [training, between]


def test_a_lane_about_to_train_goes_on_before_one_between_tasks() -> None:
    between, ready = waiting(0, None), waiting(1, "steps")
    assert next_lane(deque([between, ready])) is ready


def test_a_lane_whose_epoch_is_not_done_lets_others_go_on(monkeypatch) -> None:
    monkeypatch.setattr(Lane, "ready", lambda self: self.number != 1)
    between, training = waiting(0, None), waiting(1, "epoch")
    assert next_lane(deque([training, between])) is between


def test_one_lane_is_one_after_another() -> None:
    log: list[str] = []
    side_by_side([lambda n=n: counting(log, n, 2) for n in "ab"], CPU, lanes=1)
    assert log == ["a0", "a1", "b0", "b1"]


def test_an_error_ends_its_own_lane_only() -> None:
    log: list[str] = []
    runs = [lambda n=n: counting(log, n, 2, fails=n == "b") for n in "abc"]
    first, second, third = side_by_side(runs, CPU, lanes=3)
    assert (first, third) == ("a", "c")
    assert isinstance(second, NessError)
    assert str(second) == "b went wrong"


def test_no_two_lanes_at_work_share_streams_and_a_place_is_taken_over_with_its_last_event(monkeypatch) -> None:
    made: list[tuple[int, int]] = []

    def streams(device: torch.device) -> tuple[int, int]:
        made.append((2 * len(made), 2 * len(made) + 1))
        return made[-1]

    last: dict[tuple[int, int], str] = {}

    def go_on(self: Lane) -> None:
        assert self.event == last.get(self.streams)
        self.event = last[self.streams] = f"after {self.number}"
        self.pause = self.work.send(None)

    monkeypatch.setattr("ness.lab.gpu.scheduler.streams_on", streams)
    monkeypatch.setattr(Lane, "go_on", go_on)
    monkeypatch.setattr(Lane, "ready", lambda self: True)
    runs = [lambda n=n: counting([], n, 0, fails=n == "b") for n in "abcde"]
    side_by_side(runs, CPU, lanes=2)
    assert set(last) == set(made)
    assert len(made) == 2


def test_lanes_are_for_gpus() -> None:
    assert lanes_for(CPU, None) == 1
    assert lanes_for(CPU, 1) == 1
    with pytest.raises(NessError, match="--lanes 3: lanes share a GPU and --device is cpu"):
        lanes_for(CPU, 3)


@pytest.mark.parametrize(("before", "after"), [(None, "32"), ("4", "4")])
def test_the_users_number_of_hardware_queues_stands(before: str | None, after: str, monkeypatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", before or "")
    if before is None:
        monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    allow_many_streams()
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == after
