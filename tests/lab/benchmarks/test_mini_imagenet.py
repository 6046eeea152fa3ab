"""Split MiniImageNet: classes by seed, both divisions, local labels by place."""

import numpy as np
import pytest

import ness
from lab.benchmarks.test_cifar100 import rows, whole
from ness.lab.benchmarks import mini_imagenet
from ness.lab.benchmarks.base import Request

# NumPy's legacy generator; seeds 1 and 37 also stand in the lineage's logs.
FIRST = {
    1: [[80, 84, 33, 81, 93], [17, 36, 82, 69, 65], [92, 39, 56, 52, 51]],
    2: [[83, 30, 56, 24, 16]],
    3: [[93, 67, 6, 64, 96]],
    4: [[20, 10, 96, 16, 63]],
    37: [[61, 49, 86, 78, 5], [91, 81, 82, 89, 18], [66, 32, 27, 38, 47]],
}


@pytest.mark.parametrize("seed", FIRST)
def test_classes_of_tasks(seed: int) -> None:
    found = mini_imagenet.classes_of_tasks(seed)
    assert found[: len(FIRST[seed])] == FIRST[seed]
    assert sorted(np.concatenate(found).tolist()) == list(range(100))


@pytest.mark.parametrize(("split", "train", "valid"), [("2450/50", 2450, 50), ("2375/125", 2375, 125)])
def test_counts_and_labels(split: str, train: int, valid: int) -> None:
    tasks = mini_imagenet.tasks(whole(), 1, mini_imagenet.VALID[split])
    classes = mini_imagenet.classes_of_tasks(1)
    labels = whole().train.labels
    assert len(tasks) == 20
    for task, members in zip(tasks, classes, strict=True):
        assert (len(task.train), len(task.valid), len(task.test), task.classes) == (train, valid, 500, 5)
        assert [members[label] for label in task.train.labels] == labels[rows(task.train)].tolist()
        everything = sorted(rows(task.train) + rows(task.valid))
        assert everything == np.flatnonzero(np.isin(labels, members)).tolist()
        assert (task.mean, task.std) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def test_validation_depends_on_the_seed_alone() -> None:
    np.random.seed(5)  # noqa: NPY002
    one = [rows(task.valid) for task in mini_imagenet.tasks(whole(), 3, 0.02)]
    np.random.seed(6)  # noqa: NPY002
    assert one == [rows(task.valid) for task in mini_imagenet.tasks(whole(), 3, 0.02)]


def test_settings_and_options() -> None:
    fixed = {"epochs": 100, "patience": 5, "lr_factor": 3.0, "lr_min": 1e-3}
    settings = mini_imagenet.BENCHMARK.settings
    assert settings["fixed"] == settings["reference"] == fixed
    assert settings["paper"] == {**fixed, "patience": 6, "lr_factor": 2.0, "split": "2375/125"}
    with pytest.raises(ness.NessError, match="expected one of 2450/50, 2375/125"):
        mini_imagenet.BENCHMARK.load(Request(1, None, mini_imagenet.Options(split="half")))  # type: ignore[arg-type]
