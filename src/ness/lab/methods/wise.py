"""WiSE: plain training, then the weights lie between those before and after the task, where validation allows."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ness.errors import NessError
from ness.lab.methods.base import Context, Method, MethodSpec, TaskData, backbone
from ness.lab.runs.settings import check_ranges, setting
from ness.lab.training.loader import LARGE_BATCH


@dataclass(frozen=True)
class WiseSettings:
    """What interpolation adds to plain training."""

    shares: tuple[float, ...] = setting((0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9), "α that are tried, besides 1")
    give: float = setting(1.0, "points of the task's validation accuracy that may be given up for a smaller α")


class Wise(Method):
    """W ← W_b + α (W_t - W_b) with the smallest α that costs the task at most so much validation accuracy."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.base: dict[str, Tensor] = {}  # the backbone as the task found it
        self._remember()

    def _remember(self) -> None:
        shared = {id(parameter) for parameter in backbone(self.model)}
        self.base = {n: p.detach().clone() for n, p in self.model.named_parameters() if id(p) in shared}

    def before_task(self, lesson: TaskData) -> None:
        """Keeps the weights that are to be interpolated with."""
        self._remember()

    @torch.no_grad()
    def after_task(self, lesson: TaskData) -> Mapping[str, Any]:
        """Interpolates, except after the first task of a network that could do nothing before."""
        if (lesson.task == 0 and self.context.general is None) or lesson.valid is None:
            return {}
        tuned = {name: self.model.get_parameter(name).detach().clone() for name in self.base}
        found = {}
        for share in sorted({*self.context.own.shares, 1.0}):
            self._between(tuned, share)
            found[share] = self._accuracy(lesson)
        chosen = min(share for share, right in found.items() if right >= max(found.values()) - self.context.own.give)
        self._between(tuned, chosen)
        return {"share": chosen, "validation": found[chosen]}

    def _between(self, tuned: Mapping[str, Tensor], share: float) -> None:
        for name, base in self.base.items():
            self.model.get_parameter(name).copy_(torch.lerp(base, tuned[name], share))

    def _accuracy(self, lesson: TaskData) -> float:
        assert lesson.valid is not None
        valid = lesson.valid
        right = 0
        for batch in valid.batches(valid.stored_order(), LARGE_BATCH):
            right += int((self.logits(batch).argmax(1) == batch.labels).sum())
        return 100 * right / len(valid)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Nothing but the model, which is as it was when the task began where one is taken up."""
        return {}, {}

    def load_state(self, tensors: dict[str, Tensor], manifest: dict[str, Any]) -> None:
        """Keeps the model as it was when the task began."""
        self._remember()


def check(settings: Any) -> None:
    """Refuses shares that are none."""
    if not all(0 <= share <= 1 for share in settings.shares):
        raise NessError(f"shares is {settings.shares}, expected numbers from 0 to 1")
    check_ranges(settings, ("give", settings.give >= 0, "0 or more"))


METHOD = MethodSpec(
    name="wise",
    title="Plain training, then interpolation with the weights before, chosen on validation",
    build=Wise,
    keeps="nothing; the model while a task trains",
    kept_at_most=lambda sizes, own: 0,
    paper="Wortsman et al., Robust fine-tuning of zero-shot models",
    year=2022,
    settings=WiseSettings,
    check=check,
)
