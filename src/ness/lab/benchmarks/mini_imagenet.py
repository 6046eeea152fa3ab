"""Split MiniImageNet: twenty tasks of five classes, drawn by the run's seed; 84×84 colour images."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from ness.errors import NessError
from ness.lab.benchmarks.assemble import Rows, carve, fetched, hold_out
from ness.lab.benchmarks.base import Benchmark, Request, Stream, Task
from ness.lab.datasets import CATALOGUE, Arrays
from ness.lab.datasets.arrays import Labels

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
TASKS, CLASSES = 20, 5
Division = Literal["2450/50", "2375/125"]
VALID: Mapping[str, float] = {"2450/50": 0.02, "2375/125": 0.05}


@dataclass(frozen=True)
class Options:
    """How many of a task's 2500 images train and how many validate."""

    split: Division = field(default="2450/50", metadata={"help": "as the lineage's code, or 2375/125 as the paper"})


def classes_of_tasks(seed: int) -> list[list[int]]:
    """The classes of each task, in the order of their local labels.

    >>> classes_of_tasks(1)[0], classes_of_tasks(37)[2]
    ([80, 84, 33, 81, 93], [66, 32, 27, 38, 47])
    """
    order: list[int] = np.random.RandomState(seed).permutation(TASKS * CLASSES).tolist()
    return [order[start : start + CLASSES] for start in range(0, len(order), CLASSES)]


def tasks(arrays: Arrays, seed: int, valid: float) -> tuple[Task, ...]:
    """The twenty tasks; validation images come from a generator of (seed, task) and nothing else.

    The arrays' images are rearranged in place: the tasks are views of them.
    """
    classes = classes_of_tasks(seed)
    local = np.empty(TASKS * CLASSES, np.int64)  # class → its place inside its task
    local[np.concatenate(classes)] = np.tile(np.arange(CLASSES), TASKS)
    cuts = [
        hold_out(rows, np.random.default_rng((seed, task)).permutation(len(rows)), valid)
        for task, rows in enumerate(_rows(arrays.train.labels, classes))
    ]
    learning = carve(arrays.train, [piece for cut in cuts for piece in cut], local[arrays.train.labels])
    testing = carve(arrays.test, _rows(arrays.test.labels, classes), local[arrays.test.labels])
    return tuple(
        Task(f"mini-imagenet-{t}", CLASSES, learning[2 * t], learning[2 * t + 1], testing[t], MEAN, STD)
        for t in range(TASKS)
    )


def _rows(labels: Labels, classes: list[list[int]]) -> list[Rows]:
    return [np.flatnonzero(np.isin(labels, members)) for members in classes]


def load_stream(request: Request) -> Stream:
    """The twenty tasks of the run's seed, from wherever MiniImageNet is found."""
    options = request.options or Options()
    if options.split not in VALID:
        raise NessError(f"mini-imagenet: found split={options.split!r}, expected one of {', '.join(VALID)}")
    loaded = fetched(request, CATALOGUE["mini-imagenet"])
    made = tasks(loaded.arrays, request.seed, VALID[options.split])
    return Stream("mini-imagenet", made, {"mini-imagenet": loaded.note, "split": options.split})


_SETTINGS = {"epochs": 100, "patience": 5, "lr_factor": 3.0, "lr_min": 1e-3}

BENCHMARK = Benchmark(
    name="mini-imagenet",
    title="Split MiniImageNet: 20 tasks of 5 classes",
    network="resnet18-84",
    tasks=TASKS,
    load=load_stream,
    options=Options,
    settings={
        "fixed": _SETTINGS,
        "reference": _SETTINGS,
        "paper": {**_SETTINGS, "patience": 6, "lr_factor": 2.0, "split": "2375/125"},  # the paper states no lr_min
    },
)
