"""The steps between a plain model and a constrained one, and from one task's weights to another's.

Each plans first and touches nothing; `ness.verbs.changes` then makes the change whole, or not at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ness.errors import NessError
from ness.layers.norms import affine_parameters, norm_swaps, read_norms
from ness.tasks import Tasks
from ness.updates.install import BEFORE, freeze_norm, install, stored_statistics, strip, uninstall
from ness.updates.layer_state import LayerState, Swap
from ness.updates.loading import arrange_checks
from ness.updates.optimizers import OptimizerWatch
from ness.updates.private import PrivatePart
from ness.updates.update import Form, Update
from ness.verbs.changes import carry_out
from ness.verbs.checks import refuse_sharded
from ness.verbs.observing import refuse_observed
from ness.verbs.release import Before, Hold, Owner, records, warn_of_rounding

if TYPE_CHECKING:
    from ness.guard import NullSpace

States = dict[str, LayerState]
SHARDED = (
    "keep what was learnt with guard.save(folder) or export_lora(folder), and go on in a process without sharding: "
    "NullSpace.load(folder, model), then merge()"
)
TWIN = ", or merge a float32 copy: twin, guard_of_twin = copy.deepcopy((model, guard))"


def updates_of(guard: NullSpace) -> list[Update]:
    """The updates in training, in the model's order."""
    return updates_in(guard._protected)


def updates_in(states: Mapping[str, LayerState]) -> list[Update]:
    """The updates that these layers hold."""
    constraints = [state.constraint for state in states.values() if state.constraint is not None]
    return [constraint.update for constraint in constraints if constraint.update is not None]


def enter(
    guard: NullSpace, states: States, tasks: Tasks, form: Form, writes: list[Swap], others: Mapping[str, Any]
) -> None:
    """Freeze everything that is not excluded, put the updates in place.

    Args:
        guard: the guard, not constrained.
        states: its layers with their constraints.
        tasks: its tasks, one of them begun.
        form: of the updates.
        writes: tensors of the model, each with the value it starts from.
        others: further fields of the guard that change.
    """
    fields = {
        "_protected": states,
        "_tasks": tasks,
        "_form": form,
        "_flags": [(p, p.requires_grad) for p in guard.model.parameters()],
        "_phase": "constrained",
    }
    updates = updates_in(states)
    watch = OptimizerWatch(guard.model, updates, form)
    owner = Owner(guard, watch)
    fields |= {"_watch_optimizers": watch, "_hold": Hold(guard.model, owner)}
    modules = [module for update in updates for module in update.layer.modules]
    arrange = partial(_constrained, guard, updates, records(guard, owner))
    carry_out(guard, writes, arrange, {**others, **fields}, modules)


def _constrained(guard: NullSpace, updates: list[Update], kept: Mapping[nn.Module, Before]) -> None:
    for module, record in kept.items():
        module.__dict__[BEFORE] = record
    for name, parameter in guard.model.named_parameters(remove_duplicate=False):
        if name not in guard._found.excluded:
            parameter.requires_grad_(False)
            parameter.grad = None  # else an optimizer that was made before would move it once more
    if guard.norm == "per_task":
        for parameter in affine_parameters(guard._found.norms):
            parameter.requires_grad_(True)
    else:
        for module in guard._found.norms.values():
            if stored_statistics(module):
                freeze_norm(module)
    install(updates)
    arrange_checks(guard.model)


def leave(guard: NullSpace, states: States, tasks: Tasks, phase: str, writes: list[Swap]) -> None:
    """Ordinary modules again, with these values in them."""
    fields = {"_protected": states, "_tasks": tasks, "_flags": [], "_phase": phase}
    updates = updates_of(guard)
    modules = [module for update in updates for module in update.layer.modules]
    carry_out(guard, writes, partial(_ordinary, guard, updates), fields, modules)


def _ordinary(guard: NullSpace, updates: list[Update]) -> None:
    uninstall(updates)
    for module in (*guard.model.modules(), *guard._found.norms.values()):
        strip(module)
    arrange_checks(guard.model)
    for parameter, flag in guard._flags:
        parameter.requires_grad_(flag)


def merge(guard: NullSpace) -> None:
    """See `NullSpace.merge`."""
    if guard._phase == "merged":
        return
    guard._require_constrained("merge()")
    refuse_sharded(guard.model, "merge", SHARDED)
    merged: dict[str, Tensor] = {}
    parts: dict[str, PrivatePart] = {}
    own = guard.private_basis == "per_task"
    for name, protected in guard._protected.items():
        if protected.constraint is not None and protected.constraint.update is not None:
            merged[name] = protected.running()
            part = protected.constraint.private_part(own)
            if part is not None:
                parts[name] = part
            numbers = [merged[name]] if part is None else [merged[name], part.coefficients]
            if not all(bool(torch.isfinite(values).all()) for values in numbers):
                raise NessError(
                    f"merge: the update of layer {name!r} holds NaN or Inf; training diverged. "
                    "The model is untouched: call discard(), lower the learning rate, and try again"
                )
    states = {name: protected.copy() for name, protected in guard._protected.items()}
    writes: list[Swap] = []
    for name, state in states.items():
        state.finish(merged.get(name), guard.rule, keep_directions=not own)
        writes += state.apply_private(parts.get(name))
    tasks = guard._tasks.copy()
    tasks.finish(read_norms(guard._found.norms) if guard.norm == "per_task" else {}, parts)
    leave(guard, states, tasks, "merged", writes)
    warn_of_rounding("merge", {states[name].layer: states[name].last.rounded for name in merged}, TWIN)


def discard(guard: NullSpace) -> None:
    """See `NullSpace.discard`."""
    guard._require_constrained("discard()")
    refuse_sharded(guard.model, "discard", SHARDED)
    tasks = guard._tasks.copy()
    tasks.abandon()
    states = {name: protected.copy() for name, protected in guard._protected.items()}
    for state in states.values():
        state.constraint = None
    leave(guard, states, tasks, "open", _in_use(guard, states, tasks))


def use(guard: NullSpace, task: str | None) -> None:
    """See `NullSpace.use`."""
    if guard.constrained:
        raise NessError("use: the model is constrained; call merge() or discard() first")
    refuse_observed(guard.model, "use")
    tasks = guard._tasks.copy()
    tasks.use(task)
    states = {name: protected.copy() for name, protected in guard._protected.items()}
    writes = _in_use(guard, states, tasks)
    carry_out(guard, writes, lambda: None, {"_protected": states, "_tasks": tasks})


def _in_use(guard: NullSpace, states: States, tasks: Tasks) -> list[Swap]:
    """What is to be written so that the task in use has its norms and its private part."""
    values, parts, writes = tasks.norms_in_use(), tasks.private_in_use(), list[Swap]()
    if values:
        writes += norm_swaps(guard._found.norms, values)
    for name, state in states.items():
        writes += state.apply_private(parts.get(name))
    return writes
