"""A guard that compares: the model as it was when it was last observed, put back for a pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ness.comparison import Comparison, compare_outputs
from ness.errors import NessError, warn
from ness.layers.norms import NormValues
from ness.statistics.recorder import Forward
from ness.updates.install import uninstall
from ness.verbs.changes import Change, uninterrupted
from ness.verbs.checks import refuse_sharded
from ness.verbs.remainder import Swap
from ness.verbs.transitions import updates_of

if TYPE_CHECKING:
    from ness.guard import NullSpace


def compare(guard: NullSpace, batches: Any, forward: Forward | None) -> Comparison:
    """See `NullSpace.compare`."""
    refuse_sharded(guard.model, "compare", "compare in a process without sharding: NullSpace.load(folder, model)")
    if not guard._protected:
        raise NessError("compare: nothing was observed yet; call observe(old_inputs) first")
    layers = [protected.layer for protected in guard._protected.values()]
    others, unknown = guard._remainder.differences(guard.model, layers, _norms_as_observed(guard))
    comparison = compare_outputs(guard.model, batches, forward, lambda: _as_observed(guard, others), unknown)
    if unknown:
        warn(f"compare: {comparison.left_out()}")
    return comparison


def _norms_as_observed(guard: NullSpace) -> NormValues:
    """Norms of the task in use, where another one was in use when the model was last observed."""
    return {} if guard._tasks.in_use == guard._remainder.task else guard._tasks.norms_in_use()


@contextmanager
def _as_observed(guard: NullSpace, others: Sequence[Swap]) -> Iterator[None]:
    """The model as it was when last observed, with the private part of the task in use.

    `others`: what differs outside the protected layers, each with its old value.
    """
    updates = updates_of(guard) if guard.constrained else []
    parts, writes = guard._tasks.private_in_use(), list(others)
    for name, protected in guard._protected.items():
        writes += protected.swaps(protected.with_private(protected.anchor, parts.get(name)))
    modules = [module for update in updates for module in update.layer.modules]
    change = Change(guard, writes, lambda: uninstall(updates), None, modules)
    try:
        uninterrupted(change.apply)
        yield
    finally:
        uninterrupted(change.settle)
