"""A reservoir of samples on the device: every sample offered so far is in it with the same chance; no host reads."""

from dataclasses import replace

import torch
from torch import Generator, Tensor

from ness.lab.training.loader import Batch

KEPT = ("images", "labels", "tasks", "seen")


def slots(seen: Tensor, count: int, size: int, draws: Tensor) -> Tensor:
    """Where `count` samples go that come after `seen` others: a place below `size`, or `size` for none (algorithm R).

    `draws` (count,) are uniform in [0, 1). Of two samples for one place the later one has it.

    >>> slots(torch.tensor(1), 3, 3, torch.tensor([0.0, 0.0, 0.3]))
    tensor([3, 2, 1])
    """
    number = torch.arange(count, device=draws.device)
    before = seen + number
    place = torch.where(before < size, before, (draws * (before + 1)).long()).clamp(max=size)
    last = torch.full((size + 1,), -1, device=draws.device).scatter_reduce(0, place, number, "amax")
    return torch.where(last[place] == number, place, size)


class Reservoir:
    """At most `size` samples: images as they enter the network, labels, and the task of each."""

    def __init__(self, size: int, shape: tuple[int, ...], device: torch.device) -> None:
        self.size = size
        self.images = torch.zeros(size + 1, *shape, device=device)  # the last row takes what is not kept
        self.labels, self.tasks = (torch.zeros(size + 1, dtype=torch.int64, device=device) for _ in range(2))
        self.seen = torch.zeros((), dtype=torch.int64, device=device)

    @property
    def filled(self) -> Tensor:
        """How many samples it holds."""
        return self.seen.clamp(max=self.size)

    def offer(self, batch: Batch, when: Tensor, generator: Generator) -> None:
        """Takes a batch in, each sample with its chance, where `when` (one number) is true."""
        count = len(batch.labels)
        draws = torch.rand(count, generator=generator, device=generator.device, dtype=torch.float64)
        place = torch.where(when, slots(self.seen, count, self.size, draws), self.size)
        self.images.index_copy_(0, place, batch.images)
        self.labels.index_copy_(0, place, batch.labels)
        self.tasks.index_copy_(0, place, torch.full_like(batch.labels, batch.task))
        self.seen += when * count

    def draw(self, count: int, generator: Generator) -> tuple[Tensor, Tensor]:
        """`count` different places at random, and which of them hold a sample yet."""
        keys = torch.rand(self.size, generator=generator, device=generator.device)
        empty = torch.arange(self.size, device=keys.device) >= self.filled
        index = torch.topk(keys + 2 * empty, count, largest=False).indices  # those that hold one first
        return index, index < self.filled

    def beside(self, batch: Batch, count: int, generator: Generator) -> tuple[Batch, Tensor]:
        """The batch and `count` samples from here, with the weight of each: 0 for places that hold none yet."""
        index, held = self.draw(count, generator)
        own = torch.arange(count, device=index.device) % len(batch.labels)  # what stands in, for BatchNorm's sake
        wide = held.view(-1, *[1] * (batch.images.ndim - 1))
        images = torch.where(wide, self.images[index], batch.images[own])
        labels = torch.where(held, self.labels[index], batch.labels[own])
        tasks = torch.where(held, self.tasks[index], batch.task)
        together = replace(
            batch,
            images=torch.cat([batch.images, images]),
            labels=torch.cat([batch.labels, labels]),
            tasks=torch.cat([torch.full_like(batch.labels, batch.task), tasks]),
        )
        return together, torch.cat([torch.ones(len(batch.labels), device=index.device), held.float()])

    def state(self) -> dict[str, Tensor]:
        """What it holds."""
        return {name: getattr(self, name) for name in KEPT}

    @torch.no_grad()
    def load(self, tensors: dict[str, Tensor]) -> None:
        """Puts it back."""
        for name in KEPT:
            getattr(self, name).copy_(tensors[name])
