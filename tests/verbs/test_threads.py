"""Threads: one observes a model at a time, and what other threads run meanwhile does not count."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import ness
from interrupting import differences, everything


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))


X = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))


class Meanwhile:
    """Batches of which the second waits until `work` has been done in another thread."""

    def __init__(self, work: Callable[[], object]) -> None:
        self.work, self.error = work, None

    def __iter__(self) -> Iterator[Tensor]:
        yield X
        thread = threading.Thread(target=self._run, name="the other")
        thread.start()
        thread.join(60)
        assert not thread.is_alive()
        yield X

    def _run(self) -> None:
        try:
            self.work()
        except ness.NessError as error:
            self.error = error


def test_observe_from_two_threads_at_once_is_refused() -> None:
    guard = ness.NullSpace(small())
    second = Meanwhile(lambda: guard.observe(X * 2))
    modes = [module.training for module in guard.model.modules()]
    guard.observe(second)
    assert "one thread observes it at a time" in str(second.error)
    assert "'MainThread' is observing" in str(second.error)
    assert {gram.count for gram in guard.grams.values()} == {16}
    assert [module.training for module in guard.model.modules()] == modes
    guard.observe(X)


@pytest.mark.parametrize("part", [False, True])
def test_another_guard_of_the_model_or_a_part_is_refused_in_another_thread(part: bool) -> None:
    model = small()
    guard, other = ness.NullSpace(model), ness.NullSpace(model[0] if part else model)
    second = Meanwhile(lambda: other.observe(X))
    guard.observe(second)
    assert "is observing" in str(second.error)
    assert other.grams == {}
    other.observe(X)


@pytest.mark.parametrize("verb", ["constrain", "use", "release"])
def test_a_model_that_is_observed_is_not_changed_by_another_thread(verb: str) -> None:
    guard = ness.NullSpace(small(), rule=ness.Rank(1))
    guard.observe(X)
    verbs = {
        "constrain": guard.constrain,
        "use": lambda: guard.use("first"),
        "release": lambda: ness.release(guard.model),
    }
    second = Meanwhile(verbs[verb])
    guard.observe(second)
    assert f"{verb}: thread 'MainThread' is observing the model" in str(second.error)
    assert not guard.constrained
    assert {gram.count for gram in guard.grams.values()} == {24}


def test_passes_of_other_threads_do_not_count() -> None:
    guard, alone = ness.NullSpace(small()), ness.NullSpace(small())
    guard.observe(Meanwhile(lambda: guard.model(X * 100)))
    alone.observe([X, X])
    for name, gram in guard.grams.items():
        assert torch.equal(gram.matrix, alone.grams[name].matrix)
        assert gram.count == alone.grams[name].count


def test_passes_of_other_threads_do_not_count_inside_observing() -> None:
    guard, alone = ness.NullSpace(small()), ness.NullSpace(small())
    with guard.observing():
        for batch in Meanwhile(lambda: guard.model(X * 100)):
            guard.model(batch)
    alone.observe([X, X])
    for name, gram in guard.grams.items():
        assert torch.equal(gram.matrix, alone.grams[name].matrix)


def test_a_pass_of_another_thread_that_lasts_longer_does_not_count() -> None:
    """It begins before the observing thread's pass, and ends inside of it."""
    model, began, go_on = small(), threading.Event(), threading.Event()
    slow = threading.local()

    def wait(*_: object) -> None:
        if getattr(slow, "yes", False):
            began.set()
            assert go_on.wait(60)

    model[1].register_forward_pre_hook(wait)

    def other() -> None:
        slow.yes = True
        model(X * 100)

    guard, alone = ness.NullSpace(model), ness.NullSpace(small())
    with guard.observing():
        thread = threading.Thread(target=other)
        thread.start()
        assert began.wait(60)
        model(X)
        go_on.set()
        thread.join(60)
    alone.observe(X)
    for name, gram in guard.grams.items():
        assert torch.equal(gram.matrix, alone.grams[name].matrix)


def test_many_threads_at_once_give_what_the_first_gives() -> None:
    model = small()
    guard, start = ness.NullSpace(model), threading.Barrier(4)
    before = [module.training for module in model.modules()]
    fast_path, refused, done = torch.backends.mha.get_fastpath_enabled(), [], []

    def observe() -> None:
        start.wait(60)
        for _ in range(20):
            try:
                guard.observe([X] * 3)
                done.append(1)
            except ness.NessError as error:
                refused.append(str(error))

    threads = [threading.Thread(target=observe) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(done) + len(refused) == 80
    assert all("is observing" in text for text in refused)
    assert {gram.count for gram in guard.grams.values()} == {24 * len(done)}
    expected = X.double().T @ X.double() * 3 * len(done)
    assert torch.allclose(guard.grams["0"].matrix[0, :6, :6], expected, rtol=1e-9)
    assert [module.training for module in model.modules()] == before
    assert torch.backends.mha.get_fastpath_enabled() == fast_path
    assert all(not module._forward_hooks and "_ness_claim" not in module.__dict__ for module in model.modules())


def test_models_of_their_own_are_observed_side_by_side() -> None:
    first, second = ness.NullSpace(small()), ness.NullSpace(small())
    meanwhile = Meanwhile(lambda: second.observe(X))
    fast_path = torch.backends.mha.get_fastpath_enabled()
    first.observe(meanwhile)
    assert meanwhile.error is None
    assert second.grams["0"].count == 8
    assert torch.backends.mha.get_fastpath_enabled() == fast_path


def test_two_guards_in_one_thread_may_look_at_the_same_passes() -> None:
    model = small()
    first, second = ness.NullSpace(model), ness.NullSpace(model, rule=ness.Within(0.1))
    with first.observing(), second.observing():
        model(X)
    assert first.grams["0"].count == second.grams["0"].count == 8


def test_a_guard_that_observes_is_not_asked_to_observe_again() -> None:
    guard = ness.NullSpace(small())
    guard.observe(X)
    before = everything(guard, X)
    with pytest.raises(ness.NessError, match="this guard is observing already"), guard.observing():
        guard.observe(X)
    assert differences(before, everything(guard, X)) == []


def test_a_copy_that_is_made_while_observing_can_be_observed() -> None:
    model = small()
    guard = ness.NullSpace(model)
    with guard.observing():
        model(X)
        twin = copy.deepcopy(model)
    ness.NullSpace(twin).observe(X)
