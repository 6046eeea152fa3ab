"""What a stream of tasks is: plain tensors, uint8 until they are on the device, and how a benchmark makes them."""

import zlib
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from ness.errors import NessError
from ness.lab.benchmarks.dataset_cache import Shelf
from ness.lab.runs.checkpoint import raw_bytes

T = TypeVar("T")


@dataclass(frozen=True)
class Split:
    """Images (n, c, h, w) and their local labels (n,): `labels[i]` counts from 0 inside the task.

    >>> split = Split(torch.zeros(5, 1, 8, 8, dtype=torch.uint8), torch.tensor([0, 1, 2, 1, 0]))
    >>> len(split)
    5
    """

    images: Tensor  # uint8 (n, c, h, w) in 0..255, or float as it enters the network
    labels: Tensor  # int64 (n,)

    def __post_init__(self) -> None:
        if self.labels.dtype != torch.int64 or self.labels.ndim != 1 or len(self.labels) != len(self.images):
            raise NessError(
                f"a split needs int64 labels of shape (n,) for n images; found {self.labels.dtype} "
                f"{tuple(self.labels.shape)} for {len(self.images)} images"
            )

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Task:
    """One task: three splits, the number of classes and the pixel statistics its images are normalised with.

    uint8 images enter the network as (x / 255 - mean) / std, per channel, computed on the device; float images
    enter as they are.
    """

    name: str
    classes: int
    train: Split
    valid: Split
    test: Split
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        for kind in ("train", "valid", "test"):
            labels = getattr(self, kind).labels
            if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < self.classes:
                raise NessError(
                    f"task {self.name!r}, {kind}: labels run from {int(labels.min())} to {int(labels.max())}, "
                    f"expected 0 to {self.classes - 1}; number the classes of each task from 0"
                )


@dataclass(frozen=True)
class General:
    """Unlabelled inputs of what a pretrained network could do before the first task, none of them in two parts.

    `known` may be observed; `valid` and `held_out` are measured alone, the first where settings are chosen.
    """

    known: Tensor
    valid: Tensor
    held_out: Tensor


@dataclass(frozen=True)
class Stream:
    """A benchmark's tasks in the order in which they are learnt."""

    name: str
    tasks: tuple[Task, ...]
    notes: Mapping[str, str] = field(default_factory=dict)  # what a record should say about the data, e.g. its source
    general: General | None = None  # of pretrained networks

    def __len__(self) -> int:
        return len(self.tasks)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape (c, h, w) of one image."""
        return tuple(self.tasks[0].train.images.shape[1:])

    @cached_property
    def fingerprint(self) -> str:
        """Eight hexadecimal digits of all images and labels, so that a run is not continued on other data."""
        value = 0
        for task in self.tasks:
            for split in (task.train, task.valid, task.test):
                for tensor in (split.images, split.labels):
                    value = zlib.crc32(raw_bytes(tensor), value)
        if self.general is not None:
            for tensor in (self.general.known, self.general.held_out):
                value = zlib.crc32(raw_bytes(tensor), value)
        return f"{value:08x}"


@dataclass(frozen=True)
class Request:
    """What a benchmark is asked for: the run's seed, where to look for data, and the benchmark's own options.

    Where several runs ask, `shelf` keeps what does not depend on the seed; use it through `once`, or leave it.
    """

    seed: int
    data: Path | None = None
    options: Any = None  # an instance of the benchmark's `options` dataclass
    shelf: Shelf | None = None

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` gives; made once for all runs of a command that ask with this key and the same `data`."""
        return make() if self.shelf is None else self.shelf.get((key, self.data), make)


@dataclass(frozen=True)
class NoOptions:
    """A benchmark without options of its own."""


@dataclass(frozen=True)
class Benchmark:
    """A named stream: how to load it, which network it is for, and the training settings it comes with.

    `settings` maps a preset ("fixed", "reference", "paper") to overrides of the training settings (epochs, batch
    size, patience, …) that hold for every method on this benchmark; "fixed" is the base of the other two.
    The fields of the frozen dataclass `options` are the benchmark's own flags on the command line.
    """

    name: str
    title: str
    network: str
    tasks: int
    load: Callable[[Request], Stream]
    options: type = NoOptions
    check: Callable[[Any], None] | None = None  # refuses options out of their range, before any data is read
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    whole: "Benchmark | None" = None  # the benchmark of which this is the beginning, see `on_validation`
