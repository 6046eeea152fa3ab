"""Anchor: later tasks are pulled to the weights the last one left, all weights alike.

A method of your own, complete: settings, the idea, what is kept between tasks, and the row it becomes.

    pip install ./examples/own_method
    ness run --method anchor --benchmark digits
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ness.errors import NessError
from ness.lab.methods.base import Context, Method, MethodSpec, TaskData, backbone
from ness.lab.networks.norms import hold_statistics
from ness.lab.runs.settings import setting
from ness.lab.training.loader import Batch


@dataclass(frozen=True)
class AnchorSettings:
    """Each field is a flag of `ness run`, `table` and `tune`; its type is checked, its help line shown."""

    pull: float = setting(0.1, "λ of λ/2·‖θ - θ*‖²")


def penalty(values: list[Tensor], anchor: list[Tensor], pull: float) -> Tensor:
    """λ/2·‖θ - θ*‖²: the mathematics as a pure function, which a test can call without a network.

    >>> float(penalty([torch.tensor([1.0, 3.0])], [torch.tensor([1.0, 1.0])], 0.5))
    1.0
    """
    distances = [(value - old).square().sum() for value, old in zip(values, anchor, strict=True)]
    return pull / 2 * torch.stack(distances).sum()


class Anchor(Method):
    """The hooks that the idea needs; all others stay plain fine-tuning."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.own: AnchorSettings = context.own
        self.anchor: list[Tensor] = []  # θ*, empty in the first task

    def train_mode(self, lesson: TaskData) -> None:
        """Stored BatchNorm statistics are no parameters, so no penalty holds them: keep the first task's."""
        self.model.train()
        if lesson.task > 0:
            hold_statistics(self.model)

    def loss(self, batch: Batch) -> Tensor:
        """Inside a step: tensors in, tensors out. `if self.anchor` asks a list, not a tensor's value."""
        loss = super().loss(batch)
        if self.anchor:
            loss = loss + penalty(list(backbone(self.model)), self.anchor, self.own.pull)
        return loss

    def after_task(self, lesson: TaskData) -> Mapping[str, Any]:
        """Between tasks anything goes; what is returned here stands in the run's record."""
        weights = [parameter.detach().clone() for parameter in backbone(self.model)]
        moved = [float((new - old).norm()) for new, old in zip(weights, self.anchor, strict=False)]
        self.anchor = weights
        return {"moved": sum(moved)} if moved else {}

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Whatever the object holds beside the network: a killed run goes on from here, bit for bit."""
        return {str(number): value for number, value in enumerate(self.anchor)}, {"count": len(self.anchor)}

    def load_state(self, tensors: dict[str, Tensor], manifest: dict[str, Any]) -> None:
        """The counterpart; tensors come from a file, so they go to the device."""
        self.anchor = [tensors[str(number)].to(self.context.device) for number in range(manifest["count"])]


def check(settings: Any) -> None:
    """Refuse what cannot work before anything is trained: what was found, what was expected."""
    if settings.pull < 0:
        raise NessError(f"pull is {settings.pull}, expected 0 or more")


METHOD = MethodSpec(
    name="anchor",
    title="A pull to the weights the last task left",
    build=Anchor,
    keeps="one number a parameter",
    settings=AnchorSettings,
    presets={"fixed": {"*": {"optimizer": "sgd", "weight_decay": 0.0}, "digits": {"lr": 0.05, "pull": 0.3}}},
    check=check,
)
