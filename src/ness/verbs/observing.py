"""A guard that observes: layers under watch, books that are opened for them, sums over ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sized
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from ness import distributed
from ness._precision import ordinarily
from ness.errors import NessError, warn
from ness.layers.names import listed
from ness.statistics.moments import GramSums, Moments
from ness.statistics.padding import Masking, MaskOf, check_mask_of, masks_of, masks_of_batch
from ness.statistics.recorder import (
    Forward,
    NotFinite,
    Recorder,
    batches_of,
    call_model,
    nothing_seen,
    passes_of,
)
from ness.statistics.watch import Watch
from ness.updates import accounts
from ness.updates.install import is_constrained
from ness.updates.layer_state import LayerState
from ness.verbs.changes import Around, whole
from ness.verbs.checks import refuse_sharded
from ness.verbs.remainder import Remainder

if TYPE_CHECKING:
    from ness.guard import NullSpace

Progress = Callable[[int, int | None, str], object]  # (batches done, of how many, name of the last)
CLAIM = "_ness_claim"  # module.__dict__ key: which thread observes this module


class Claim:
    """A thread's right to observe a model: its train mode and its hooks are one, so two threads cannot share them."""

    def __init__(self) -> None:
        self.thread, self.held = threading.current_thread(), True

    def __deepcopy__(self, memo: dict[int, Any]) -> Claim:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _released, ()

    def take(self, model: nn.Module) -> None:
        """Mark all modules, or refuse and mark none."""
        for name, module in model.named_modules():
            other = module.__dict__.setdefault(CLAIM, self)  # one step, whoever else tries
            if other.bars():
                self.release(model)
                raise NessError(
                    f"observe: thread {other.thread.name!r} is observing {name or 'this model'!r} already; the train "
                    "mode and the hooks of a model are one, so one thread observes it at a time. Wait for the other"
                )
            if not other.held:
                module.__dict__[CLAIM] = self

    def bars(self) -> bool:
        """Whether another thread has it."""
        return self.held and self.thread is not threading.current_thread()

    def release(self, model: nn.Module) -> None:
        """Take the marks away."""
        self.held = False
        for module in model.modules():
            if module.__dict__.get(CLAIM) is self:
                module.__dict__.pop(CLAIM, None)


def _released() -> Claim:
    claim = Claim()
    claim.held = False
    return claim


def refuse_observed(model: nn.Module, verb: str) -> None:
    """Refuse to change a model that another thread observes."""
    for module in model.modules():
        claim = module.__dict__.get(CLAIM)
        if claim is not None and claim.bars():
            raise NessError(
                f"{verb}: thread {claim.thread.name!r} is observing the model; wait for it, else what it sees is "
                "neither the model before nor the model after"
            )


class Observes:
    """The verbs of a guard that look on."""

    @property
    def unmasked(self) -> dict[str, str]:
        """Layers whose rows may count padding, with the reason: their shapes did not tell which rows are tokens."""
        return dict(cast("NullSpace", self)._unmasked)

    def observe(
        self,
        batches: Any,
        forward: Forward | None = None,
        task: str | None = None,
        mask: MaskOf | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Look at what must not change: one forward pass a batch, all layers at once, no sample kept.

        Padding is no row: where a batch (a mapping, or an object with keys) has an `attention_mask` (batch, tokens),
        the statistics are those of the unpadded sequences; an encoder-decoder's other side follows its
        `decoder_attention_mask`. Poolers and others with one row per sample count all rows; where shapes leave a doubt
        all rows count, and the layer is in `unmasked`.

        Args:
            batches: an iterable of batches, or one tensor. A batch is a tensor, (input, target), or a dict that the
                model is called with; any other form needs `forward`.
            forward: `forward(model, batch)`, how the model is run on one batch.
            task: names what the model knows now ("first" by default).
            mask: `mask(batch)` says which tokens are real, instead of `attention_mask`: (batch, tokens), True or 1
                where a token is real; None where all are. For (input, mask) batches: `mask=lambda batch: batch[1]`.
            progress: `progress(done, total, name)` is called after each batch; total is None where `batches` has no
                length.

        Raises:
            NessError: there was no batch, or no row that is no padding; a mask is 3-D or 4-D, or is one that is added
                to scores; or NaN or Inf in a batch: the statistics are then those of the batches before it. That comes
                at the end, or within 64 batches, since asking the device after each would make it wait. Or another
                thread observes the model. After any other error, of the model or of `batches`, and after Ctrl-C,
                model and guard are as before. Passes that other threads run meanwhile do not count.

        >>> from torch import Tensor, nn
        >>> from ness import NullSpace
        >>> model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 2))
        >>> guard = NullSpace(model)
        >>> tokens = torch.tensor([[5, 6, 7], [8, 0, 0]])
        >>> guard.observe([(tokens, tokens != 0)], mask=lambda batch: batch[1])
        >>> guard.grams["1"].count
        4
        """
        _observe(cast("NullSpace", self), batches, forward, task, mask, progress)

    @contextmanager
    def observing(self, task: str | None = None) -> Iterator[None]:
        """Observe the forward passes that the caller runs inside the `with`.

        A call's own `attention_mask` says which of its tokens are padding; `masked` does where calls have none. After
        an error inside whole passes before it count, after Ctrl-C none.
        """
        guard = cast("NullSpace", self)
        around = Around(guard)
        before = set(guard._unmasked)
        try:
            with observed(guard, task) as recorder, passes_of(guard.model, recorder):
                yield
                recorder.check_rows()
            warn_of_padding(guard, before)
        except BaseException:
            around.restore()
            raise

    @contextmanager
    def masked(self, mask: Any) -> Iterator[None]:
        """Say which tokens of the forward passes inside are real; inside `observing()`.

        Args:
            mask: (batch, tokens), True or 1 where a token is real and 0 where it is padding; None: all are real; or a
                mapping with `attention_mask` and `decoder_attention_mask`.

        Raises:
            NessError: not inside `observing()`, or a mask that does not say which tokens are padding.

        >>> from torch import Tensor, nn
        >>> from ness import NullSpace
        >>> model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 2))
        >>> guard = NullSpace(model)
        >>> tokens = torch.tensor([[5, 6, 7], [8, 0, 0]])
        >>> with guard.observing(), guard.masked(tokens != 0):
        ...     _ = model(tokens)
        >>> guard.grams["1"].count
        4
        """
        guard = cast("NullSpace", self)
        watched = guard._observation
        if watched is None or watched.claim.bars():
            raise NessError("masked: the guard is not observing; use it inside `with guard.observing():`")
        with watched.masking.holding(masks_of(mask, guard.model)):
            yield


@whole
def _observe(
    guard: NullSpace,
    batches: Any,
    forward: Forward | None,
    task: str | None,
    mask: MaskOf | None,
    progress: Progress | None,
) -> None:
    check_mask_of(mask)
    before = set(guard._unmasked)
    with observed(guard, task, undo=True) as recorder:
        assert recorder.masking is not None
        index, found = -1, batches_of(batches)
        total = len(found) if isinstance(found, Sized) else None
        for index, batch in enumerate(found):
            recorder.drop()
            recorder.masking.begin(masks_of_batch(batch, mask, guard.model), fixed=mask is not None)
            call_model(guard.model, batch, forward)
            recorder.end(f"batch {index}")
            if progress is not None:
                progress(index + 1, total, f"batch {index}")
        if index < 0:
            nothing_seen("there was no batch")
        recorder.check_rows()
    warn_of_padding(guard, before)


class observed:
    """Watch every layer inside the `with`; what was observed is the guard's at its end, and not before.

    Args:
        guard: the guard, not constrained.
        task: names what the model knows now.
        undo: an error leaves the guard as it was; without it, whole passes before an error count. NaN or Inf in a batch
            leaves the batches before it, and Ctrl-C nothing, in both cases.
    """

    def __init__(self, guard: NullSpace, task: str | None, undo: bool = False) -> None:
        self.guard, self.task, self.undo = guard, task, undo
        self.claim = Claim()
        self.watch: Watch | None = None
        self.accounts: dict[str, Moments] = {}  # of the layers seen inside
        self.masking = Masking(guard.model)
        self.recorder = Recorder(self._open, self.masking)

    def __enter__(self) -> Recorder:
        guard = self.guard
        refuse_sharded(guard.model, "observe", "observe and constrain first, then shard")
        if guard.constrained:
            raise NessError("observe: the model is constrained; call merge() or discard() first")
        if any(is_constrained(module) for module in guard.model.modules()):
            raise NessError(
                "observe: the model is constrained by another guard; merge() or discard() that one first, or if it is "
                "gone, ness.release(model)"
            )
        if guard._observation is not None and not guard._observation.claim.bars():
            raise NessError("observe: this guard is observing already; end that first, or let it see these batches too")
        try:
            self.claim.take(guard.model)
            guard._observation = self
            guard._refresh()
            self.tasks = guard._tasks.copy()
            self.tasks.name_observed(self.task)
            self.states = {name: protected.copy() for name, protected in guard._protected.items()}
            self.watch = Watch(guard.model, guard._found.layers.values(), self.recorder.record, self.masking)
            self.watch.open()
        except BaseException:
            self.abort()
            raise
        return self.recorder

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            problem = self._close(error)
        except BaseException:
            self.abort()
            raise
        if problem is not None and error is None:
            raise problem
        if problem is not None and error is not None:
            error.add_note(str(problem))

    def _close(self, error: BaseException | None) -> NotFinite | None:
        """The model as it was, then the guard's new fields in one step; returns what was wrong with a pass."""
        assert self.watch is not None
        self.watch.close()
        counts = isinstance(error, NotFinite) or (
            isinstance(error, Exception) and not self.undo and bool(self.accounts) and not self.recorder.ending
        )
        problem = None
        if error is None or counts:
            try:
                self.recorder.check()
            except NotFinite as found:
                problem = found
            ordinarily(self._commit)
        self.abort()
        return problem

    def abort(self) -> None:
        """End it: the model is as it was before, and what is not the guard's by now never will be."""
        if self.watch is not None:
            self.watch.close()
        self.recorder.account_of = self.accounts.__getitem__  # no cycle: a guard that is dropped goes at once
        self.claim.release(self.guard.model)
        if self.guard._observation is self:
            self.guard._observation = None

    def _open(self, name: str) -> Moments:
        """Where new rows of a layer are booked."""
        if name not in self.accounts:
            if name not in self.states:
                self.states = protect(self.guard, self.states, [name])
            self.accounts[name] = accounts.account(self.states[name])
        return self.accounts[name]

    def _commit(self) -> None:
        guard = self.guard
        unseen = [n for n in self.states if n not in guard._protected and not self.accounts[n].gram.count]
        states = {name: held for name, held in self.states.items() if name not in unseen}
        rebase(states.values())  # before the new rows enter, which drift from here
        known: GramSums = {}
        for name, state in states.items():
            if name in self.accounts:
                accounts.take(state, self.accounts[name], known)
        rest = remembered(guard, states, self.tasks.in_use)
        unmasked = guard._unmasked | self.recorder.unmasked
        guard.__dict__.update(_protected=states, _tasks=self.tasks, _remainder=rest, _unmasked=unmasked)


def warn_of_padding(guard: NullSpace, before: Collection[str]) -> None:
    """Name the layers, once each, whose rows may count padding."""
    new = [name for name in guard._unmasked if name not in before]
    if new:
        warn(
            f"padding may count as rows in {listed(new)}: {guard._unmasked[new[0]]}. All rows of these layers count, "
            "so more is protected than need be; guard.unmasked has the reasons"
        )


def rebase(states: Iterable[LayerState]) -> None:
    """Move the anchors of layers whose weights have changed; the device is asked once, for all of them."""
    asked: dict[torch.device, list[tuple[LayerState, Tensor]]] = {}
    for state in states:
        moved = state.moved()
        asked.setdefault(moved.device, []).append((state, moved))
    for answers in asked.values():
        if bool(torch.stack([moved for _, moved in answers]).any()):
            for state, moved in answers:
                if bool(moved):
                    state.rebase_anchor()


def remembered(guard: NullSpace, states: dict[str, LayerState], task: str) -> Remainder:
    """What no protected layer holds as it is now, for `compare`."""
    return guard._remainder.renewed(guard.model, [state.layer for state in states.values()], task)


def device_of_books(guard: NullSpace, states: dict[str, LayerState], name: str) -> torch.device:
    """Where the statistics of a layer live."""
    if name in states:
        return states[name].anchor.device
    return guard.statistics_device or guard._found.layers[name].weight.device


def new_state(guard: NullSpace, name: str, device: torch.device) -> LayerState:
    """A layer of which nothing is known yet."""
    return LayerState(
        guard._found.layers[name], device, guard.rule.relative, guard.statistics_dtype, guard._statistics_folder
    )


def protect(guard: NullSpace, states: dict[str, LayerState], names: Iterable[str]) -> dict[str, LayerState]:
    """These states and those of layers that are seen for the first time, in the model's order on every rank."""
    new = {name: new_state(guard, name, device_of_books(guard, states, name)) for name in names if name not in states}
    every = states | new
    return {name: every[name] for name in guard._found.layers if name in every}


def reduce(guard: NullSpace) -> None:
    """Bring the statistics of all ranks together; a layer that only others saw is known here from now on."""
    waiting = any(protected.pending is not None for protected in guard._protected.values())
    if not distributed.active() or not distributed.total(int(waiting)):
        return
    states = {name: protected.copy() for name, protected in guard._protected.items()}
    states = protect(guard, states, [n for n in guard._found.layers if distributed.total(int(n in states))])
    last = None
    for state in states.values():
        last = accounts.reduce(state, last)
    rest = guard._remainder
    if rest.task is None:  # this rank has not observed itself
        rest = remembered(guard, states, guard._tasks.in_use)
    guard.__dict__.update(_protected=states, _remainder=rest)
