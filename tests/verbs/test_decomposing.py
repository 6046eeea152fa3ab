"""Layers decomposed side by side: in order, with the time left, and without a trace where it breaks off."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

import ness
from helpers import named
from ness.verbs import decomposing
from ness.verbs.decomposing import side_by_side

pytestmark = pytest.mark.filterwarnings("ignore::ness.NessWarning")


@pytest.fixture
def _two_threads() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_two_threads")
def test_wide_layers_are_worked_on_at_once_and_come_in_order() -> None:
    meet = threading.Barrier(2, timeout=20)
    work = {"a": lambda: (meet.wait(), "A")[1], "b": lambda: "B", "c": lambda: (meet.wait(), "C")[1]}
    told: list[Any] = []
    found = list(side_by_side(work, {"a": 600, "b": 4, "c": 600}, lambda *what: told.append(what)))
    assert found == [("a", "A"), ("b", "B"), ("c", "C")]
    assert told == [(1, 3, "a"), (2, 3, "b"), (3, 3, "c")]
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("_two_threads")
def test_what_breaks_off_leaves_no_thread_behind() -> None:
    def fails() -> None:
        raise ness.NessError("enough")

    before = threading.active_count()
    with pytest.raises(ness.NessError, match="enough"):
        list(side_by_side({"a": fails, "b": fails}, {"a": 600, "b": 600}, None))
    assert threading.active_count() == before
    assert torch.get_num_threads() == 2


def test_the_time_left_goes_by_the_cube_of_the_width(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 8.0, 9.0])
    monkeypatch.setattr(decomposing.time, "monotonic", lambda: next(now))
    told = []

    def progress(done: int, total: int, name: str, *, seconds_left: float) -> None:
        told.append((done, total, name, seconds_left))

    list(side_by_side({"a": lambda: 0, "b": lambda: 0}, {"a": 20, "b": 10}, progress))
    assert told == [(1, 2, "a", 1.0), (2, 2, "b", 0.0)]


@pytest.mark.usefixtures("_two_threads")
def test_constrain_side_by_side_gives_what_one_after_the_other_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    bases, left = [], []
    for narrowest in (30, 10**6):
        monkeypatch.setattr(decomposing, "NARROWEST", narrowest)
        torch.manual_seed(0)
        model = named(a=nn.Linear(40, 50), b=nn.Linear(50, 60), head=nn.Linear(60, 3))
        guard = ness.NullSpace(model, rule=ness.Rank(10))
        guard.observe(torch.randn(200, 40))
        guard.constrain(progress=lambda done, total, name, seconds_left: left.append(seconds_left))
        bases.append([held.constraint.update.basis for held in guard._protected.values()])  # type: ignore[union-attr]
        guard.merge()
    for ours, theirs in zip(*bases, strict=True):
        torch.testing.assert_close(ours @ ours.mT, theirs @ theirs.mT, rtol=1e-5, atol=1e-5)
    assert len(left) == 6
    assert left[2] == left[5] == 0.0
    assert all(seconds >= 0 for seconds in left)
