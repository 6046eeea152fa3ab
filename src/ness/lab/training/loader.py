"""A task's samples on the device, and the batches made of them: uint8 until a batch is taken."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Generator, Tensor

from ness.lab.benchmarks.base import Split, Task
from ness.lab.training.seeds import derive

SplitName = Literal["train", "valid", "test"]
EVALUATION_BATCH = 64
LARGE_BATCH = 512  # where samples of a batch do not meet, as many as fill a GPU
SPLITS: tuple[SplitName, ...] = ("train", "valid", "test")


@dataclass(frozen=True)
class Clock:
    """Where in a task a step is, as tensors of one number, so that a captured step can read them."""

    epoch: Tensor  # counted from 0
    within: Tensor  # share of the epoch's samples seen before this step, in [0, 1)
    elapsed: Tensor  # share of the task's largest number of steps done before this step, in [0, 1)


@dataclass(frozen=True)
class Batch:
    """What a step sees: normalised images (n, c, h, w), labels (n,), and the task they are of.

    `tasks` (n,) says the task of each sample where several are trained together, and is None otherwise. With mix-up,
    image i is share·xᵢ + (1 - share)·xⱼ and `partner[i]` is the label of j. `clock` is None outside training.
    With `parts` above 1 it is so many batches of one size, one after another, to be passed under `nets.norms.in_parts`.
    """

    images: Tensor
    labels: Tensor
    task: int
    tasks: Tensor | None = None
    partner: Tensor | None = None
    share: Tensor | None = None
    clock: Clock | None = None
    rate: Tensor | None = None  # the step's learning rate, one number; None outside training
    parts: int = 1


@dataclass(frozen=True)
class Samples:
    """One split of one task, or of several trained together, on the device."""

    images: Tensor  # uint8 or float (n, c, h, w)
    labels: Tensor  # (n,)
    task: int  # the (first) task's index
    mean: Tensor  # (c, 1, 1), or (n_tasks, c, 1, 1) with `tasks`
    std: Tensor
    tasks: Tensor | None = None  # (n,) of int64 where several tasks are together
    counts: tuple[int, ...] = ()  # samples of each task where several are together
    channels_last: bool = False  # how the images of a batch lie

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, index: Tensor) -> Batch:
        """The batch of these samples, normalised: (x/255 - mean)/std for uint8 images, float ones as they are."""
        images = self.images.index_select(0, index)  # whole images at once, which plain indexing does not see
        tasks = None if self.tasks is None else self.tasks[index]
        if images.dtype == torch.uint8:
            mean, std = (self.mean, self.std) if tasks is None else (self.mean[tasks], self.std[tasks])
            layout = torch.channels_last if self.channels_last else torch.preserve_format
            images = (images.to(torch.float32, memory_format=layout) / 255 - mean) / std
        return Batch(images, self.labels[index], self.task, tasks)

    def stored_order(self) -> Tensor:
        """The order in which the samples are stored."""
        return torch.arange(len(self), device=self.labels.device)

    def batches(self, order: Tensor, size: int = EVALUATION_BATCH, at_once: int = 1) -> Iterator[Batch]:
        """The samples in this order, `size` at a time, a last shorter batch included; up to `at_once` of them as one.

        What is more than one batch has `parts`: see `Batch`.
        """
        cut = passes(len(order), size, at_once)
        for index, (_, parts) in zip(torch.split(order, [count for count, _ in cut]), cut, strict=True):
            yield replace(self.take(index), parts=parts)


def passes(count: int, size: int, at_once: int = 1) -> list[tuple[int, int]]:
    """How many samples each pass has, and in how many parts, if up to `at_once` whole batches of `size` pass as one.

    >>> passes(1000, 64, 8)
    [(512, 8), (448, 7), (40, 1)]
    """
    whole, rest = divmod(count, size)
    many, few = divmod(whole, at_once)
    cut = [(at_once * size, at_once)] * many + [(few * size, few), (rest, 1)]
    return [(samples, parts) for samples, parts in cut if samples]


def on_device(split: Split, task: Task, index: int, device: torch.device, channels_last: bool = False) -> Samples:
    """The samples of one split of a task, with its constants."""
    mean, std = (torch.tensor(value, device=device).view(-1, 1, 1) for value in (task.mean, task.std))
    images, labels = split.images.to(device), split.labels.to(device)
    return Samples(images, labels, index, mean, std, channels_last=channels_last)


def unlabelled(images: Tensor, device: torch.device) -> Samples:
    """Inputs of no task, as they enter the network."""
    none = torch.zeros(1, 1, 1, device=device)
    return Samples(images.to(device), torch.zeros(len(images), dtype=torch.int64, device=device), 0, none, none + 1)


def together(parts: Sequence[Samples]) -> Samples:
    """Several tasks' samples as one set that remembers which task each sample is of."""
    first = parts[0]
    if len(parts) == 1:
        return first
    shape = first.images.shape[1:]
    channels = shape[0]
    tasks = torch.cat([torch.full_like(part.labels, part.task) for part in parts])
    rows = max(part.task for part in parts) + 1
    mean, std = (torch.ones(rows, channels, 1, 1, device=first.images.device) for _ in range(2))
    for part in parts:
        mean[part.task], std[part.task] = part.mean, part.std  # one number for all channels spreads out
    images, labels = torch.cat([part.images for part in parts]), torch.cat([part.labels for part in parts])
    counts = tuple(len(part) for part in parts)
    return Samples(images, labels, first.task, mean, std, tasks, counts, first.channels_last)


def fixed_order(count: int, task: int, split: SplitName, device: torch.device) -> Tensor:
    """The one order in which a split is ever evaluated: random, the same for all seeds and methods."""
    generator = Generator().manual_seed(derive(20_000 + task, SPLITS.index(split)))
    return torch.randperm(count, generator=generator).to(device)


def epoch_order(samples: Samples, size: int, generator: Generator, *, mixed: bool, drop_last: bool) -> list[Tensor]:
    """An epoch's batches as index tensors on the device; with `mixed` off, each batch is of one task only."""
    counts = samples.counts if samples.counts and not mixed else (len(samples),)
    chunks: list[Tensor] = []
    start = 0
    for count in counts:
        order = torch.randperm(count, generator=generator) + start
        pieces = list(torch.split(order, size))
        if drop_last and len(pieces[-1]) < size and len(pieces) > 1:
            pieces.pop()
        chunks += pieces
        start += count
    if len(counts) > 1:
        chunks = [chunks[i] for i in torch.randperm(len(chunks), generator=generator).tolist()]
    whole = torch.cat(chunks).to(samples.labels.device)  # one transfer
    return list(torch.split(whole, [len(chunk) for chunk in chunks]))


def mixed_up(batch: Batch, share: Tensor, generator: Generator) -> Batch:
    """Mix-up: image i becomes share·xᵢ + (1 - share)·xⱼ for a random j; the loss mixes the labels alike."""
    partner = torch.rand(len(batch.labels), generator=generator, device=batch.labels.device).argsort()
    images = share * batch.images + (1 - share) * batch.images[partner]
    return replace(batch, images=images, partner=batch.labels[partner], share=share)
