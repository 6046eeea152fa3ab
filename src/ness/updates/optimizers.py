"""Watches the steps of optimizers while a model is constrained: which of them train the updates, and which may."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ness.distributed import sharded
from ness.errors import NessError, warn
from ness.layers.names import listed
from ness.updates.saving import PREFIX
from ness.updates.update import Form, Update


class OptimizerWatch:
    """A hook that torch runs before every optimizer's step, from `start` until `remove` or the model's end.

    An optimizer that holds parameters of the model and none of the updates is warned of once: it was made before
    `constrain`, as that of a Trainer which is used for a second task, and trains heads at most.

    With `form="sgd"` any optimizer but `torch.optim.SGD` that holds an increment is refused at every step: SGD,
    momentum, Nesterov and decay add multiples of projected gradients, which stay in the free space; Adam and its kin
    rescale every entry, which leaves it.
    """

    def __init__(self, model: nn.Module, updates: Sequence[Update], form: Form) -> None:
        held = {id(p): (u.layer.name, weakref.ref(p)) for u in updates for p in u.trained().values()}
        self._updates, self._model, self._form = held, weakref.ref(model), form
        self._seen: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        self._handle: RemovableHandle | None = None

    def start(self) -> OptimizerWatch:
        """Put the hook into torch."""
        self._handle = register_optimizer_step_pre_hook(self._before_step)
        weakref.finalize(self._model(), self._handle.remove).atexit = False
        return self

    def remove(self) -> None:
        """Take the hook out of torch; a second time does nothing."""
        if self._handle is not None:
            self._handle.remove()

    def _trains(self, parameter: torch.Tensor) -> bool:
        known = self._updates.get(id(parameter))
        return known is not None and known[1]() is parameter

    def _trains_shards(self, parameters: list[torch.Tensor]) -> bool:
        """Whether these hold updates that somebody has sharded, which are other parameters than those made here."""
        model = self._model()
        ids = {id(parameter) for parameter in parameters if sharded(parameter)}
        if model is None or not ids:
            return False
        return any(
            id(p) in ids and f".{name}".rpartition(".")[2].startswith(PREFIX) for name, p in model.named_parameters()
        )

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        refused = self._form == "sgd" and type(optimizer) is not torch.optim.SGD
        held = sum(len(group["params"]) for group in optimizer.param_groups)
        if self._seen.get(optimizer) == held and not refused:
            return
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        trains = any(self._trains(parameter) for parameter in parameters) or self._trains_shards(parameters)
        if trains and refused:
            raise NessError(
                f"constrain(form='sgd') is exact for torch.optim.SGD alone; found {type(optimizer).__name__}, which "
                "would leave the free space. Use constrain(form='any')"
            )
        known = self._seen.get(optimizer) == held
        self._seen[optimizer] = held
        if not trains and not known:
            self._warn(optimizer, parameters)

    def _warn(self, optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor]) -> None:
        model = self._model()
        if model is None or not self._updates:
            return
        by_id = {id(value): name for name, value in model.named_parameters()}
        names = [by_id[id(parameter)] for parameter in parameters if id(parameter) in by_id]
        if names:
            layers = list(dict.fromkeys(layer for layer, _ in self._updates.values()))
            warn(
                f"this {type(optimizer).__name__} holds {listed(names)} of a model that is constrained, and none of "
                f"the guard's updates, so that it does not train {listed(layers)}. Make the optimizer "
                "after constrain(), of guard.parameters(); a Trainer keeps its old one: make a new Trainer"
            )
