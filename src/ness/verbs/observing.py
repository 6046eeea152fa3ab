"""A guard that observes: layers under watch, books that are opened for them, sums over ranks."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch

from ness import distributed
from ness._precision import ordinary_tensors
from ness.errors import NessError, NessWarning
from ness.layers.names import listed
from ness.statistics.moments import Moments
from ness.statistics.padding import Masking, MaskOf, check_mask_of, masks_of, masks_of_batch
from ness.statistics.recorder import Forward, Recorder, batches_of, call_model, nothing_seen, passes_of, watching
from ness.updates.install import is_constrained
from ness.updates.layer_state import LayerState
from ness.verbs.comparing import remember

if TYPE_CHECKING:
    from ness.guard import NullSpace


class Observes:
    """The verbs of a guard that look on."""

    @property
    def unmasked(self) -> dict[str, str]:
        """Layers whose rows may count padding, with the reason: their shapes did not tell which rows are tokens."""
        return dict(cast("NullSpace", self)._unmasked)

    def observe(
        self, batches: Any, forward: Forward | None = None, task: str | None = None, mask: MaskOf | None = None
    ) -> None:
        """Look at what must not change: one forward pass a batch, all layers at once, no sample kept.

        Padding is no row: where a batch (a mapping, or an object with keys) has an `attention_mask` (batch, tokens),
        the statistics are those of the unpadded sequences; an encoder-decoder's other side follows its
        `decoder_attention_mask`. Poolers and others with one row a sample count all rows; where shapes leave a doubt
        all rows count, and the layer is in `unmasked`.

        Args:
            batches: an iterable of batches, or one tensor. A batch is a tensor, (input, target), or a dict that the
                model is called with; any other form needs `forward`.
            forward: `forward(model, batch)`, how the model is run on one batch.
            task: names what the model knows now ("first" by default).
            mask: `mask(batch)` says which tokens are real, instead of `attention_mask`: (batch, tokens), True or 1
                where a token is real; None where all are. For (input, mask) batches: `mask=lambda batch: batch[1]`.

        Raises:
            NessError: there was no batch, or no row that is no padding; a mask is 3-D or 4-D, or is one that is added
                to scores; or NaN or Inf in a batch: the statistics are then those of the batches before it. That comes
                at the end, or within 64 batches, since asking the device after each would make it wait.

        >>> from torch import nn
        >>> from ness import NullSpace
        >>> model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 2))
        >>> guard = NullSpace(model)
        >>> tokens = torch.tensor([[5, 6, 7], [8, 0, 0]])
        >>> guard.observe([(tokens, tokens != 0)], mask=lambda batch: batch[1])
        >>> guard.grams["1"].count
        4
        """
        guard = cast("NullSpace", self)
        check_mask_of(mask)
        before = set(guard._unmasked)
        with observed(guard, task) as recorder:
            index = -1
            for index, batch in enumerate(batches_of(batches)):
                recorder.drop()
                assert recorder.masking is not None
                recorder.masking.begin(masks_of_batch(batch, mask, guard.model), fixed=mask is not None)
                call_model(guard.model, batch, forward)
                recorder.end(f"batch {index}")
            if index < 0:
                nothing_seen("there was no batch")
            recorder.check_rows()
        warn_of_padding(guard, before, depth=2)

    @contextmanager
    def observing(self, task: str | None = None) -> Iterator[None]:
        """Observe the forward passes that the caller runs inside the `with`.

        A call's own `attention_mask` says which of its tokens are padding; `masked` does where calls have none.
        """
        guard = cast("NullSpace", self)
        before = set(guard._unmasked)
        with observed(guard, task) as recorder, passes_of(guard.model, recorder):
            yield
            recorder.check_rows()
        warn_of_padding(guard, before, depth=3)

    @contextmanager
    def masked(self, mask: Any) -> Iterator[None]:
        """Say which tokens of the forward passes inside are real; inside `observing()`.

        Args:
            mask: (batch, tokens), True or 1 where a token is real and 0 where it is padding; None: all are real; or a
                mapping with `attention_mask` and `decoder_attention_mask`.

        Raises:
            NessError: not inside `observing()`, or a mask that does not say which tokens are padding.

        >>> from torch import nn
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
        if guard._masking is None:
            raise NessError("masked: the guard is not observing; use it inside `with guard.observing():`")
        with guard._masking.holding(masks_of(mask, guard.model)):
            yield


@contextmanager
def observed(guard: NullSpace, task: str | None) -> Iterator[Recorder]:
    """Watch every layer inside the `with`; what was observed is complete at its end, whole passes alone."""
    if guard.constrained or any(is_constrained(module) for module in guard.model.modules()):
        raise NessError("observe: the model is constrained; call merge() or discard() first")
    guard._refresh()
    guard._tasks.name_observed(task)
    with ordinary_tensors():
        for protected in guard._protected.values():
            protected.rebase_anchor()
    known = set(guard._protected)
    masking = Masking(guard.model)
    recorder = Recorder(lambda name: accumulator(guard, name), guard.statistics_dtype, masking)
    try:
        with masking.following(), watching(guard.model, guard._found.layers.values(), recorder.record):
            guard._masking = masking
            yield recorder
        recorder.check()
    except BaseException as error:
        try:
            recorder.check()
        except NessError as problem:
            error.add_note(str(problem))
        raise
    finally:
        guard._masking = None
        guard._unmasked |= recorder.unmasked
        unseen = [name for name, held in guard._protected.items() if name not in known and held.gram.count == 0]
        for name in unseen:
            del guard._protected[name]
        with ordinary_tensors():
            for protected in guard._protected.values():
                protected.commit_pending()
            remember(guard)


def warn_of_padding(guard: NullSpace, before: Collection[str], depth: int) -> None:
    """Name the layers, once each, whose rows may count padding."""
    new = [name for name in guard._unmasked if name not in before]
    if new:
        warnings.warn(
            f"padding may count as rows in {listed(new)}: {guard._unmasked[new[0]]}. All rows of these layers count, "
            "so more is protected than need be; guard.unmasked has the reasons",
            NessWarning,
            stacklevel=depth + 1,
        )


def device_of_books(guard: NullSpace, name: str) -> torch.device:
    """Where the statistics of a layer live."""
    if name in guard._protected:
        return guard._protected[name].anchor.device
    return guard.statistics_device or guard._found.layers[name].weight.device


def accumulator(guard: NullSpace, name: str) -> Moments:
    """Where new rows of a layer are added."""
    if name not in guard._protected:
        protect(guard, [name])
    return guard._protected[name].accumulator()


def protect(guard: NullSpace, names: Iterable[str]) -> None:
    """Open the books of layers that are seen for the first time, in the model's order on every rank."""
    new = {
        name: LayerState(guard._found.layers[name], device_of_books(guard, name), guard.rule.relative)
        for name in names
        if name not in guard._protected
    }
    every = guard._protected | new
    guard._protected = {name: every[name] for name in guard._found.layers if name in every}


def reduce(guard: NullSpace) -> None:
    """Bring the statistics of all ranks together; a layer that only others saw is known here from now on."""
    waiting = any(protected.pending is not None for protected in guard._protected.values())
    if not distributed.active() or not distributed.total(int(waiting)):
        return
    protect(guard, (name for name in guard._found.layers if distributed.total(int(name in guard._protected))))
    for protected in guard._protected.values():
        protected.reduce()
    if guard._remainder.task is None:  # this rank has not observed itself
        remember(guard)
