"""5-datasets: CIFAR-10, MNIST, SVHN, Fashion-MNIST and notMNIST, one task each, all brought to 3×32×32."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from ness.errors import NessError
from ness.lab.benchmarks.assemble import carve, hold_out, shuffled
from ness.lab.benchmarks.base import Benchmark, Request, Stream, Task
from ness.lab.datasets import CATALOGUE, Arrays, Labelled, load
from ness.lab.datasets.image import resize

VALID, VALID_SEED = 0.05, 1  # the lineage's mains never pass their seed to this loader
NOTMNIST_FILES, NOTMNIST_SEED = 18_726, 42
Fashion = Literal["true", "mnist-copy"]

Statistics = tuple[tuple[float, ...], tuple[float, ...]]
STATISTICS: Mapping[str, Statistics] = {
    "cifar10": ((125.3 / 255, 123.0 / 255, 113.9 / 255), (63.0 / 255, 62.1 / 255, 66.7 / 255)),
    "mnist": ((0.1,) * 3, (0.2752,) * 3),
    "svhn": ((0.4377, 0.4438, 0.4728), (0.198, 0.201, 0.197)),
    "fashion-mnist": ((0.2190,) * 3, (0.3318,) * 3),
    "notmnist": ((0.4254,) * 3, (0.4501,) * 3),
}


@dataclass(frozen=True)
class Options:
    """Which images the fourth task has."""

    fashion: Fashion = field(
        default="true", metadata={"help": "the true Fashion-MNIST, or MNIST again, as the lineage's loader fetches it"}
    )


def padded(part: Labelled) -> Labelled:
    """28×28 grey becomes 3×32×32: two zeros on each side, the channel three times."""
    images = np.zeros((len(part), 3, 32, 32), np.uint8)
    images[:, :, 2:-2, 2:-2] = part.images
    return Labelled(images, part.labels)


def letters(arrays: Arrays, files: int = NOTMNIST_FILES) -> Arrays:
    """NotMNIST as the lineage has it: 32×32, unreadable files as zeros of label 0 at the end, a tenth for the test.

    The cut is sklearn's train_test_split(test_size=0.1, random_state=42): 16853 / 1873 of 18726.
    """
    pool = arrays.train
    images = np.zeros((files, 3, 32, 32), np.uint8)
    images[: len(pool)] = resize(pool.images, (32, 32), "lanczos")
    labels = np.zeros(files, np.int64)
    labels[: len(pool)] = pool.labels
    order = np.random.RandomState(NOTMNIST_SEED).permutation(files)
    test, train = np.split(order, [-(-files // 10)])
    return Arrays(Labelled(images[train], labels[train]), Labelled(images[test], labels[test]))


def task(name: str, arrays: Arrays, statistics: Statistics) -> Task:
    """One set as one task: 5 % of its training images, always the same, for validation."""
    rows = np.arange(len(arrays.train))
    cut = hold_out(rows, shuffled(len(rows), VALID_SEED), VALID)
    train, valid = carve(arrays.train, cut, arrays.train.labels)
    (test,) = carve(arrays.test, [np.arange(len(arrays.test))], arrays.test.labels)
    return Task(name, 10, train, valid, test, *statistics)


def _as_it_is(arrays: Arrays) -> Arrays:
    return arrays


def _padded(arrays: Arrays) -> Arrays:
    return Arrays(padded(arrays.train), padded(arrays.test))


_PREPARE: Mapping[str, Callable[[Arrays], Arrays]] = {
    "cifar10": _as_it_is,
    "mnist": _padded,
    "svhn": _as_it_is,
    "fashion-mnist": _padded,
    "notmnist": letters,
}


def load_stream(request: Request) -> Stream:
    """The five tasks; each set is let go of, but for its task, before the next is read."""
    options = request.options or Options()
    if options.fashion not in ("true", "mnist-copy"):
        raise NessError(f"five-datasets: found fashion={options.fashion!r}, expected 'true' or 'mnist-copy'")
    return request.once(("five-datasets", options.fashion), lambda: _made(options, request.data))  # no seed in it


def _made(options: Options, data: Path | None) -> Stream:
    made: list[Task] = []
    notes: dict[str, str] = {"fashion": options.fashion}
    for name, prepare in _PREPARE.items():
        source = "mnist" if name == "fashion-mnist" and options.fashion == "mnist-copy" else name
        loaded = load(CATALOGUE[source], data)
        made.append(task(name, prepare(loaded.arrays), STATISTICS[name]))
        notes[source] = loaded.note
    return Stream("five-datasets", tuple(made), notes)


_SETTINGS = {"epochs": 100, "patience": 5, "lr_factor": 3.0, "lr_min": 1e-3}

BENCHMARK = Benchmark(
    name="five-datasets",
    title="5-datasets: CIFAR-10, MNIST, SVHN, Fashion-MNIST, notMNIST",
    network="resnet18-32",
    tasks=len(_PREPARE),
    load=load_stream,
    options=Options,
    settings={
        "fixed": _SETTINGS,
        "reference": {**_SETTINGS, "epochs": 200, "fashion": "mnist-copy"},
        "paper": _SETTINGS,
    },
)
