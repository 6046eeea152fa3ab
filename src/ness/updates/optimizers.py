"""Refusing optimizers under which `form="sgd"` would break its promise."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ness.errors import NessError
from ness.updates.update import Update


def refuse_other_optimizers(updates: list[Update]) -> RemovableHandle:
    """Raise on the first step of any optimizer but `torch.optim.SGD` that holds one of the increments.

    SGD, momentum, Nesterov and decay add multiples of projected gradients, which stay in the free space. Adam and its
    kin rescale every entry, which leaves it.
    """
    mine = {id(update.parameter): weakref.ref(update.parameter) for update in updates}

    def is_mine(parameter: torch.Tensor) -> bool:
        known = mine.get(id(parameter))
        return known is not None and known() is parameter

    def check(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if type(optimizer) is torch.optim.SGD:
            return
        if any(is_mine(parameter) for group in optimizer.param_groups for parameter in group["params"]):
            raise NessError(
                f"constrain(form='sgd') is exact for torch.optim.SGD alone; found {type(optimizer).__name__}, which "
                "would leave the free space. Use constrain(form='any')"
            )

    return register_optimizer_step_pre_hook(check)
