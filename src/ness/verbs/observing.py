"""A guard that observes: layers under watch, books that are opened for them, sums over ranks."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from ness import distributed
from ness._precision import ordinary_tensors
from ness.errors import NessError, NessWarning
from ness.layers.names import listed
from ness.statistics.moments import Moments
from ness.statistics.padding import Masking
from ness.statistics.recorder import Recorder, nothing_seen, watching
from ness.updates.install import is_constrained
from ness.updates.layer_state import LayerState
from ness.verbs.comparing import remember

if TYPE_CHECKING:
    from ness.guard import NullSpace


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
            f"padding may count as rows in {listed(new)}: {guard._unmasked[new[0]]}. All rows of these layers count, so "
            "more is protected than need be; guard.unmasked has the reasons",
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
