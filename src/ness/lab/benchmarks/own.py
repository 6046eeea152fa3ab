"""A stream of your own from Python: tensors in, tasks out, and the benchmark the laboratory runs."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ness.errors import NessError
from ness.lab.benchmarks.base import Benchmark, Request, Split, Stream, Task

Pair = tuple[Tensor, Tensor]  # images (n, c, h, w), uint8 or float; labels (n,) from 0


def task_from_tensors(
    name: str,
    train: Pair,
    test: Pair,
    valid: Pair | None = None,
    *,
    valid_fraction: float = 0.05,
    seed: int = 0,
) -> Task:
    """One task; without `valid`, that fraction of the training images (one at least), drawn by `seed`, validates.

    uint8 images are normalised with the mean and standard deviation of the training images, channel by channel;
    float images enter the network as they are.

    >>> images, labels = torch.zeros(40, 1, 8, 8, dtype=torch.uint8), torch.arange(40) % 2
    >>> task = task_from_tensors("stripes", (images, labels), (images, labels))
    >>> len(task.train), len(task.valid), len(task.test), task.classes
    (38, 2, 40, 2)
    """
    given = [pair for pair in (train, valid, test) if pair is not None]
    for pair in given:
        _check(name, pair, train[0])
    if valid is None:
        train, valid = _held_out(name, train, valid_fraction, seed)
    classes = max(int(labels.max()) for _, labels in given) + 1
    mean, std = pixel_statistics(train[0])
    first, second, third = (Split(images, labels.long()) for images, labels in (train, valid, test))
    return Task(name, classes, first, second, third, mean, std)


def stream_from_tasks(name: str, tasks: Sequence[Task]) -> Stream:
    """A stream of at least one task, all with images of one shape and kind."""
    if not tasks:
        raise NessError(f"stream {name!r}: found no tasks, expected at least one")
    stream = Stream(name, tuple(tasks))
    for task in tasks:
        found = tuple(task.train.images.shape[1:]), task.train.images.dtype
        expected = stream.shape, tasks[0].train.images.dtype
        if found != expected:
            raise NessError(
                f"stream {name!r}: task {task.name!r} has images {found}, the first task {expected}; "
                "bring all tasks to one shape and dtype"
            )
    return stream


def benchmark_from_stream(stream: Stream, network: str | None = None) -> Benchmark:
    """A benchmark that is this stream, whatever the seed; the network follows from the size of the images."""

    def load(_: Request) -> Stream:
        return stream

    return Benchmark(
        name=stream.name,
        title=f"{stream.name}: {len(stream)} tasks of your own",
        network=network or network_for(stream.shape),
        tasks=len(stream),
        load=load,
        settings=dict.fromkeys(("fixed", "reference", "paper"), SETTINGS),
    )


SETTINGS = {"epochs": 100, "patience": 5, "lr_factor": 3.0, "lr_min": 1e-3}


def network_for(shape: tuple[int, ...]) -> str:
    """The reduced ResNet18 for images of up to 48 pixels, or its form for larger ones.

    >>> network_for((3, 32, 32)), network_for((1, 84, 84))
    ('resnet18-32', 'resnet18-84')
    """
    return "resnet18-32" if max(shape[1:]) <= 48 else "resnet18-84"


def pixel_statistics(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel of uint8 images, in 0..1; (0, 1) for floats.

    >>> pixel_statistics(torch.tensor([0, 255], dtype=torch.uint8).reshape(1, 1, 1, 2))
    ((0.5,), (0.5,))
    """
    channels = images.shape[1]
    if images.dtype != torch.uint8:
        return (0.0,) * channels, (1.0,) * channels
    counts = [torch.bincount(images[:, channel].flatten(), minlength=256).double() for channel in range(channels)]
    levels = torch.arange(256, dtype=torch.float64) / 255
    means = [float(count @ levels / count.sum()) for count in counts]
    variances = [float(count @ (levels - mean) ** 2 / count.sum()) for count, mean in zip(counts, means, strict=True)]
    return tuple(means), tuple(max(variance, 1e-12) ** 0.5 for variance in variances)


def _check(name: str, pair: Pair, like: Tensor) -> None:
    images, labels = pair
    good = images.ndim == 4 and images.shape[1:] == like.shape[1:] and images.dtype == like.dtype
    good = good and (images.dtype == torch.uint8 or images.is_floating_point())
    good = good and labels.ndim == 1 and len(labels) == len(images) > 0
    if not good or labels.is_floating_point() or int(labels.min()) < 0:
        raise NessError(
            f"task {name!r}: found images {images.dtype} {tuple(images.shape)} and labels {labels.dtype} "
            f"{tuple(labels.shape)}; expected uint8 or float images (n, c, h, w), alike in all splits, and n whole "
            "labels from 0"
        )


def _held_out(name: str, train: Pair, fraction: float, seed: int) -> tuple[Pair, Pair]:
    images, labels = train
    count = max(1, int(fraction * len(labels)))
    if not 0 < fraction < 1 or count >= len(labels):
        raise NessError(
            f"task {name!r}: cannot hold out {fraction} of {len(labels)} training images for validation; "
            "give a fraction between 0 and 1 and at least two images"
        )
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    valid, rest = order[:count], order[count:]
    return (images[rest], labels[rest]), (images[valid], labels[valid])
