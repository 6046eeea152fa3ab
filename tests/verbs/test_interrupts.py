"""All or nothing: an interrupt or an error anywhere leaves model and guard as before a verb, or as after it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ness
from interrupting import differences, everything, run_traced, sweep
from ness.verbs import changes
from ness.verbs.changes import uninterrupted

pytestmark = pytest.mark.filterwarnings("ignore::ness.NessWarning")

Make = Callable[[], ness.NullSpace]
Verb = Callable[[ness.NullSpace], object]


class Small(nn.Module):
    """A convolution, a norm, a linear layer and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(2, 3, 2), nn.BatchNorm1d(3)
        self.linear, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.linear(self.norm(self.conv(x)).relu().mean(2)).relu())


class Attending(nn.Module):
    """A convolution, a norm, attention and a head: five layers in three modules."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(2, 4, 2), nn.BatchNorm1d(4)
        self.attention, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.conv(x)).relu().mT
        return self.head((h + self.attention(h, h, h, need_weights=False)[0]).mean(1))


X = torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(0))


def fresh(kind: type[nn.Module] = Small, rule: ness.Rule | None = None, **options: Any) -> ness.NullSpace:
    torch.manual_seed(1)
    model = kind()
    next(model.head.parameters()).requires_grad_(False)  # so that flags differ
    model.norm.eval()  # and modes
    return ness.NullSpace(model, rule=ness.Rank(2) if rule is None else rule, exclude="head", **options)


def observed(*args: Any, **options: Any) -> ness.NullSpace:
    guard = fresh(*args, **options)
    guard.observe(X)
    return guard


def trained(guard: ness.NullSpace, **options: Any) -> ness.NullSpace:
    guard.constrain(**options)
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in guard.parameters():
            parameter.add_(torch.randn(parameter.shape) / 10)
    return guard


def second_task(*args: Any, **options: Any) -> ness.NullSpace:
    """A task with norms and private directions of its own is learnt, merged and observed."""
    guard = trained(observed(*args, norm="per_task", **options), task="b", private=1)
    guard.merge()
    guard.observe(X * 2)
    return guard


def inside(guard: ness.NullSpace) -> None:
    with guard.observing():
        guard.model(X)


#: name -> (the guard before, the verb, what must work after it)
VERBS: dict[str, tuple[Make, Verb, Verb]] = {
    "observe": (fresh, lambda g: g.observe([X, X]), lambda g: g.constrain()),
    "constrain": (observed, lambda g: g.constrain(), lambda g: g.discard()),
    "merge": (lambda: trained(observed()), lambda g: g.merge(), lambda g: g.observe(X)),
    "discard": (lambda: trained(observed()), lambda g: g.discard(), lambda g: g.constrain()),
    "use": (second_task, lambda g: g.use("first"), lambda g: g.use("b")),
}

A = Attending
MORE: dict[str, tuple[Make, Verb, Verb]] = {
    "observe attention": (lambda: fresh(A), lambda g: g.observe([X, X]), lambda g: g.constrain()),
    "observe again": (
        lambda: merged(trained(observed(A))),
        lambda g: g.observe([X, X]),
        lambda g: g.constrain(),
    ),
    "observing": (lambda: fresh(A), inside, lambda g: g.constrain()),
    "constrain attention": (lambda: observed(A), lambda g: g.constrain(), lambda g: g.discard()),
    "constrain sgd": (lambda: observed(A), lambda g: g.constrain(form="sgd"), lambda g: g.discard()),
    "constrain rank": (
        lambda: observed(A),
        lambda g: g.constrain(rank=1, generator=torch.Generator().manual_seed(3)),
        lambda g: g.discard(),
    ),
    "constrain private": (
        lambda: second_task(A),
        lambda g: g.constrain(task="c", private=1),
        lambda g: g.discard(),
    ),
    "constrain within": (
        lambda: observed(A, ness.Within(0.5)),
        lambda g: g.constrain(max_drift=0.3),
        lambda g: g.discard(),
    ),
    "merge sgd": (lambda: trained(observed(A), form="sgd"), lambda g: g.merge(), lambda g: g.observe(X)),
    "merge rank": (lambda: trained(observed(A), rank=1), lambda g: g.merge(), lambda g: g.observe(X)),
    "merge private": (
        lambda: trained(second_task(A), task="c", private=1),
        lambda g: g.merge(),
        lambda g: g.use("b"),
    ),
    "merge within": (lambda: trained(observed(A, ness.Within(0.5))), lambda g: g.merge(), lambda g: g.observe(X)),
    "discard sgd": (lambda: trained(observed(A), form="sgd"), lambda g: g.discard(), lambda g: g.constrain()),
    "discard private": (
        lambda: trained(second_task(A), task="c", private=1),
        lambda g: g.discard(),
        lambda g: g.use("first"),
    ),
    "use attention": (lambda: second_task(A), lambda g: g.use("first"), lambda g: g.use("b")),
    "load_state": (
        lambda: fresh(A, norm="per_task"),
        lambda g: g.load_state(*trained(observed(A, norm="per_task"), task="b", private=1).state()),
        lambda g: g.discard(),
    ),
}


def merged(guard: ness.NullSpace) -> ness.NullSpace:
    guard.merge()
    return guard


@pytest.mark.parametrize("name", VERBS)
def test_an_interrupt_at_any_line_leaves_all_as_before_or_as_after(name: str) -> None:
    make, verb, then = VERBS[name]
    before, _ = sweep(make, verb, X, then=then)
    assert before > 100


@pytest.mark.parametrize("name", VERBS)
def test_ctrl_c_at_any_line_leaves_all_as_before_or_as_after(name: str) -> None:
    """The signal itself; over the few lines that change the model it is held back, and comes then."""
    make, verb, then = VERBS[name]
    before, after = sweep(make, verb, X, how="signal", then=then)
    assert before > 100
    assert after > 10


@pytest.mark.slow
@pytest.mark.parametrize("how", ["raise", "signal"])
@pytest.mark.parametrize("name", MORE)
def test_an_interrupt_at_any_line_of_any_form_leaves_all_as_before_or_as_after(name: str, how: str) -> None:
    make, verb, then = MORE[name]
    sweep(make, verb, X, how=how, then=then)


@pytest.mark.slow
@pytest.mark.parametrize("name", VERBS)
def test_an_interrupt_inside_torch_leaves_all_as_before_or_as_after(name: str) -> None:
    """Lines of torch and of Python's own modules as well, every 5th."""
    make, verb, then = VERBS[name]
    sweep(make, verb, X, then=then, every=5, sources="")


def test_the_sweep_finds_a_change_that_is_not_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes.Change, "settle", lambda self: setattr(self.guard, "_unfinished", None))
    make, verb, then = VERBS["constrain"]
    with pytest.raises(AssertionError, match="not as before"):
        sweep(make, verb, X, then=then)


# -- errors ---------------------------------------------------------------------------------------------------------


class Fails(Exception):
    """An error of somebody else's."""


def untouched(guard: ness.NullSpace, verb: Verb, error: type[BaseException]) -> None:
    before = everything(guard, X)
    with pytest.raises(error):
        verb(guard)
    assert differences(before, everything(guard, X)) == []


def test_an_error_of_the_models_own_forward_leaves_all_as_before() -> None:
    guard = fresh()
    calls: list[Any] = []

    def fails(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise Fails

    guard.model.linear.register_forward_pre_hook(fails)
    untouched(guard, lambda g: g.observe([X, X, X]), Fails)
    guard.observe([X, X])
    assert guard.grams["linear"].count == 6


@pytest.mark.parametrize("error", [Fails, KeyboardInterrupt, MemoryError, SystemExit])
@pytest.mark.parametrize("again", [False, True])
def test_a_loader_that_raises_leaves_all_as_before(error: type[BaseException], again: bool) -> None:
    def loader() -> Iterator[Tensor]:
        yield X
        yield X
        raise error

    untouched(observed() if again else fresh(), lambda g: g.observe(loader()), error)


@pytest.mark.parametrize("error", [Fails, KeyboardInterrupt, MemoryError])
def test_an_eigen_solver_that_raises_leaves_all_as_before(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    guard, eigh, calls = observed(), torch.linalg.eigh, []

    def fails(gram: Tensor) -> Any:
        calls.append(gram)
        if len(calls) == 2:
            raise error
        return eigh(gram)

    monkeypatch.setattr(torch.linalg, "eigh", fails)
    untouched(guard, lambda g: g.constrain(), error)
    guard.constrain()
    guard.discard()


def test_eigen_solvers_that_all_fail_leave_all_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("did not converge")

    guard = observed()
    for module, name in ((torch.linalg, "eigh"), (torch.linalg, "svd"), (np.linalg, "eigh")):
        monkeypatch.setattr(module, name, fails)
    untouched(guard, lambda g: g.constrain(), ness.NessError)


@pytest.mark.parametrize("name", ["constrain", "merge", "discard", "use"])
def test_memory_that_runs_out_while_weights_are_written_leaves_all_as_before(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, verb, _ = VERBS[name]
    if name in ("constrain", "discard"):  # here weights are written where the task in use has a private part
        make = second_task if name == "constrain" else (lambda: trained(second_task(), task="c", private=1))
        verb = (lambda g: g.constrain(task="c")) if name == "constrain" else verb
    guard, write, calls = make(), torch.Tensor.copy_, []

    def fails(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        calls.append(1)
        if len(calls) == 2:
            raise MemoryError
        return write(self, *args, **kwargs)

    before = everything(guard, X)
    monkeypatch.setattr(torch.Tensor, "copy_", fails)
    with pytest.raises(MemoryError):
        verb(guard)
    monkeypatch.setattr(torch.Tensor, "copy_", write)
    assert differences(before, everything(guard, X)) == []
    verb(guard)


def test_a_progress_callback_that_raises_leaves_all_as_before() -> None:
    def fails(done: int, total: int, name: str) -> None:
        if done == total:
            raise Fails

    untouched(observed(), lambda g: g.constrain(progress=fails), Fails)


def test_a_constrain_that_breaks_off_leaves_torch_its_number_of_threads() -> None:
    before = torch.get_num_threads()

    def fails(*_: Any) -> None:
        torch.set_num_threads(before + 1)
        raise Fails

    untouched(observed(), lambda g: g.constrain(progress=fails), Fails)
    assert torch.get_num_threads() == before


def test_a_progress_callback_of_observe_hears_of_every_batch_and_may_stop_it() -> None:
    told: list[Any] = []

    def progress(*what: Any) -> None:
        told.append(what)
        if len(told) == 3:
            raise Fails

    guard = fresh()
    guard.observe([X, X], progress=progress)
    assert told == [(1, 2, "batch 0"), (2, 2, "batch 1")]
    untouched(guard, lambda g: g.observe(iter([X, X]), progress=progress), Fails)
    assert told[2] == (1, None, "batch 0")


def test_an_error_inside_observing_leaves_whole_passes_and_ctrl_c_nothing() -> None:
    def breaks(guard: ness.NullSpace, error: type[BaseException]) -> None:
        with guard.observing():
            guard.model(X)
            raise error

    guard = fresh()
    with pytest.raises(Fails):
        breaks(guard, Fails)
    assert guard.grams["linear"].count == 3
    before = everything(guard, X)
    with pytest.raises(KeyboardInterrupt):
        breaks(guard, KeyboardInterrupt)
    assert differences(before, everything(guard, X)) == []


def test_a_half_done_change_is_settled_by_the_next_verb(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two interrupts, the second in the undoing: the guard remembers what it has not put back yet."""
    guard, restore, calls = observed(), changes.Snapshot.restore, []
    before = everything(guard, X)

    def fails(*_: Any) -> None:
        calls.append(1)
        raise KeyboardInterrupt

    monkeypatch.setattr(changes.Snapshot, "restore", fails)
    total = 0
    while guard._unfinished is None:
        total += 1
        with pytest.raises(KeyboardInterrupt):
            run_traced(guard.constrain, total)
    assert guard._unfinished is not None
    monkeypatch.setattr(changes.Snapshot, "restore", restore)
    with pytest.raises(ness.NessError, match="not constrained"):
        guard.merge()
    assert differences(before, everything(guard, X)) == []
    guard.constrain()


# -- signals --------------------------------------------------------------------------------------------------------


def test_ctrl_c_is_held_back_and_delivered_to_the_handler_that_was_there() -> None:
    came: list[str] = []
    before = signal.signal(signal.SIGINT, lambda *_: came.append("mine"))
    try:

        def work() -> None:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            came.append("done")

        uninterrupted(work)
        assert came == ["done", "mine"]
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_ctrl_c_is_ignored_where_it_was_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        uninterrupted(lambda: signal.raise_signal(signal.SIGINT))
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
