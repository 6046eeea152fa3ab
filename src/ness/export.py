"""One task's model as a plain state dict, taken without putting the task in use."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ness.errors import NessError
from ness.layers.norms import live_tensors
from ness.verbs.remainder import write_all

if TYPE_CHECKING:
    from ness.guard import NullSpace


def state_dict_of(guard: NullSpace, task: str) -> dict[str, Tensor]:
    """The state dict under `guard.use(task)`, all copies: the model's own keys in its own order."""
    if guard.constrained:
        raise NessError("export: the model is constrained; call merge() or discard() first")
    guard._tasks.check_known(task, "export")
    copies: dict[int, Tensor] = {}  # id of a tensor the task has of its own -> the task's values
    norms = guard._tasks.norms[task]
    if norms:
        copies |= {id(value): norms[name] for name, value in live_tensors(guard._found.norms).items()}
    parts = guard._tasks.private.get(task, {})
    for name, protected in guard._protected.items():
        if name in parts or protected.part is not None:
            layer = protected.layer
            weight, bias = layer.weight, layer.bias
            into = [copies.setdefault(id(p), p.detach().clone()) for p in (weight, bias) if p is not None]
            write_all(protected.swaps(protected.with_private(protected.shared_weights(), parts.get(name)), into))
    state = {}
    for key, value in guard.model.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor):
            raise NessError(f"export: {key!r} of the state dict is a {type(value).__name__}; expected tensors alone")
        state[key] = copies.get(id(value), value).detach().clone()
    return state
