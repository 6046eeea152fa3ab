"""The steps between a plain model and a constrained one, and from one task's weights to another's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ness.errors import NessError, warn
from ness.layers.names import listed
from ness.layers.norms import affine_parameters, read_norms, write_norms
from ness.updates.install import freeze_norm, install, is_constrained, stored_statistics, unfreeze_norm, uninstall
from ness.updates.layer_state import LayerState
from ness.updates.optimizers import OptimizerWatch
from ness.updates.private import PrivatePart
from ness.updates.saving import arrange_checks
from ness.updates.update import Update

if TYPE_CHECKING:
    from ness.guard import NullSpace

ROUNDED = 0.05  # the share of an update that a half-precision merge may round away unsaid


def updates_of(guard: NullSpace) -> list[Update]:
    """The updates in training, in the model's order."""
    constraints = [p.constraint for p in guard._protected.values() if p.constraint is not None]
    return [constraint.update for constraint in constraints if constraint.update is not None]


def enter(guard: NullSpace) -> None:
    """Freeze everything that is not excluded, put the updates in place."""
    guard._flags = [(p, p.requires_grad) for p in guard.model.parameters()]
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
    updates = updates_of(guard)
    install(updates)
    arrange_checks(guard.model)
    guard._watch_optimizers = OptimizerWatch(guard.model, updates, guard._form)
    guard._phase = "constrained"


def leave(guard: NullSpace) -> None:
    """Ordinary modules again."""
    uninstall(updates_of(guard))
    arrange_checks(guard.model)
    for module in guard._found.norms.values():
        if is_constrained(module):
            unfreeze_norm(module)
    for parameter, flag in guard._flags:
        parameter.requires_grad_(flag)
    if guard._watch_optimizers is not None:
        guard._watch_optimizers.remove()
        guard._watch_optimizers = None
    guard._flags = []


def apply_private(guard: NullSpace, parts: Mapping[str, PrivatePart]) -> None:
    """Private parts into the weights, in place of those that are there."""
    for name, protected in guard._protected.items():
        protected.apply_private(parts.get(name))


def merge(guard: NullSpace) -> None:
    """See `NullSpace.merge`."""
    if guard._phase == "merged":
        return
    guard._require_constrained("merge()")
    merged: dict[str, Tensor] = {}
    parts, own = {}, guard.private_basis == "per_task"
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
    leave(guard)
    for name, protected in guard._protected.items():
        protected.finish(merged.get(name), guard.rule, keep_directions=not own)
    guard._tasks.finish(read_norms(guard._found.norms) if guard.norm == "per_task" else {}, parts)
    apply_private(guard, parts)
    guard._phase = "merged"
    _warn_of_rounding({name: guard._protected[name] for name in merged})


def _warn_of_rounding(states: Mapping[str, LayerState]) -> None:
    lost = {name: state for name, state in states.items() if state.last.rounded > ROUNDED}
    if lost:
        layers = listed([f"{state.last.rounded:.0%} of the update of {name!r}" for name, state in lost.items()])
        kind = str(next(iter(lost.values())).layer.weight.dtype).removeprefix("torch.")
        warn(
            f"merge: rounding to {kind} took away {layers}: what was trained is finer than what these weights can "
            "hold. They are merged like that. To keep all of an update call model.float() before merge(), or merge a "
            "float32 copy: twin, guard_of_twin = copy.deepcopy((model, guard)); or keep these layers in float32 and "
            "train under autocast"
        )


def discard(guard: NullSpace) -> None:
    """See `NullSpace.discard`."""
    guard._require_constrained("discard()")
    leave(guard)
    for protected in guard._protected.values():
        protected.constraint = None
    if guard.norm == "per_task":
        write_norms(guard._found.norms, guard._tasks.norms_in_use())
    guard._tasks.abandon()
    apply_private(guard, guard._tasks.private_in_use())
    guard._phase = "open"


def use(guard: NullSpace, task: str | None) -> None:
    """See `NullSpace.use`."""
    if guard.constrained:
        raise NessError("use: the model is constrained; call merge() or discard() first")
    guard._tasks.use(task)
    values = guard._tasks.norms_in_use()
    if values:
        write_norms(guard._found.norms, values)
    apply_private(guard, guard._tasks.private_in_use())
