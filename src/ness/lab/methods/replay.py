"""Replay: a share of every task's samples is kept, and some of them are in every later batch: the usual advice."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ness.lab.methods.base import Context, Method, MethodSpec, TaskData, backbone
from ness.lab.runs.settings import check_ranges, setting
from ness.lab.training.loader import Batch
from ness.lab.training.losses import cross_entropy_of_many


@dataclass(frozen=True)
class ReplaySettings:
    """What replay adds to plain training."""

    share: float = setting(0.1, "of each task's samples that are kept, and of a batch's size that is added to it")


class Replay(Method):
    """Each batch has some old samples beside it, each under its own task's head."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.images: Tensor | None = None  # as they enter the network, (n, ...)
        self.labels = self.tasks = torch.zeros(0, dtype=torch.int64, device=context.device)

    def parameters(self, lesson: TaskData) -> list[nn.Parameter]:
        """The shared layers and every head so far."""
        heads = [p for task in range(lesson.task + 1) for p in self.model.heads[task].parameters()]
        return backbone(self.model) + heads

    def loss(self, batch: Batch) -> Tensor:
        """The mean over the batch and the old samples beside it."""
        if self.images is None:
            return super().loss(batch)
        count = max(1, round(self.context.own.share * len(batch.labels)))
        random = self.context.random.step
        drawn = torch.randint(len(self.labels), (count,), generator=random, device=random.device)
        own = torch.full_like(batch.labels, batch.task)
        every = replace(
            batch,
            images=torch.cat([batch.images, self.images[drawn]]),
            labels=torch.cat([batch.labels, self.labels[drawn]]),
            tasks=torch.cat([own, self.tasks[drawn]]),
        )
        features = self.model.features(every.images)
        return cross_entropy_of_many([self.model.heads[task](features) for task in range(batch.task + 1)], every)

    def after_task(self, lesson: TaskData) -> Mapping[str, Any]:
        """Draws what is kept of the task."""
        count = max(1, round(self.context.own.share * len(lesson.train)))
        random = self.context.random.method
        order = torch.randperm(len(lesson.train), generator=random, device=random.device)[:count]
        kept = lesson.train.take(order.to(lesson.train.labels.device))
        self.images = kept.images if self.images is None else torch.cat([self.images, kept.images])
        self.labels = torch.cat([self.labels, kept.labels])
        self.tasks = torch.cat([self.tasks, torch.full_like(kept.labels, lesson.task)])
        return {}

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The samples that are kept."""
        if self.images is None:
            return {}, {}
        return {"images": self.images, "labels": self.labels, "tasks": self.tasks}, {}

    def load_state(self, tensors: dict[str, Tensor], manifest: dict[str, Any]) -> None:
        """Puts them back."""
        if tensors:
            device = self.context.device
            self.images, self.labels, self.tasks = (tensors[name].to(device) for name in ("images", "labels", "tasks"))


METHOD = MethodSpec(
    name="replay",
    title="A tenth of old samples beside every batch",
    build=Replay,
    keeps="a share of each task's samples",
    keeps_samples=True,
    settings=ReplaySettings,
    check=lambda settings: check_ranges(settings, ("share", 0 < settings.share <= 1, "a share above 0, at most 1")),
    refuses={"mixup": "a mixed image may be of two tasks with two heads"},
)
