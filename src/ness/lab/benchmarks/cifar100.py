"""Split CIFAR-100: ten tasks of ten classes in their natural order, 4750 / 250 / 1000 images each."""

from dataclasses import dataclass, field

import numpy as np

from ness.lab.benchmarks.assemble import carve, fetched, hold_out, shuffled
from ness.lab.benchmarks.base import Benchmark, Request, Stream, Task
from ness.lab.datasets import CATALOGUE, Arrays

MEAN = (125.3 / 255, 123.0 / 255, 113.9 / 255)
STD = (63.0 / 255, 62.1 / 255, 66.7 / 255)
TASKS, CLASSES, VALID = 10, 10, 0.05


@dataclass(frozen=True)
class Options:
    """How CIFAR-100 is cut."""

    split_seed: int | None = field(
        default=None, metadata={"help": "draws the validation images; none: the run's seed (SGP's code: always 0)"}
    )


def tasks(arrays: Arrays, seed: int) -> tuple[Task, ...]:
    """Fine label n goes to task n // 10 with local label n % 10; one permutation cuts all tasks alike.

    The arrays' images are rearranged in place: the tasks are views of them.
    """
    train_rows, test_rows = (
        [np.flatnonzero(part.labels // CLASSES == task) for task in range(TASKS)]
        for part in (arrays.train, arrays.test)
    )
    cuts = [hold_out(rows, shuffled(len(rows), seed), VALID) for rows in train_rows]
    learning = carve(arrays.train, [piece for cut in cuts for piece in cut], arrays.train.labels % CLASSES)
    testing = carve(arrays.test, test_rows, arrays.test.labels % CLASSES)
    return tuple(
        Task(f"cifar100-{t}", CLASSES, learning[2 * t], learning[2 * t + 1], testing[t], MEAN, STD)
        for t in range(TASKS)
    )


def load_stream(request: Request) -> Stream:
    """The ten tasks, from wherever CIFAR-100 is found."""
    options = request.options or Options()
    loaded = fetched(request, CATALOGUE["cifar100"])
    seed = request.seed if options.split_seed is None else options.split_seed
    return Stream("cifar100", tasks(loaded.arrays, seed), {"cifar100": loaded.note, "split_seed": str(seed)})


_SETTINGS = {"epochs": 200, "patience": 6, "lr_factor": 2.0, "lr_min": 1e-5}

BENCHMARK = Benchmark(
    name="cifar100",
    title="Split CIFAR-100: 10 tasks of 10 classes",
    network="alexnet",
    tasks=TASKS,
    load=load_stream,
    options=Options,
    settings={"fixed": _SETTINGS, "reference": _SETTINGS, "paper": _SETTINGS},
)
