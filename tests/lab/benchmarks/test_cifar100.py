"""Split CIFAR-100 to the letter: which row goes to which task, split and place."""

from pathlib import Path

import numpy as np
import pytest

from lab.datasets import making
from ness.lab.benchmarks import cifar100
from ness.lab.benchmarks.base import Request, Split
from ness.lab.datasets.arrays import Arrays, Labelled


def numbered(count: int, labels: np.ndarray) -> Labelled:
    """Images of one pixel whose three bytes are their row."""
    rows = np.arange(count)
    return Labelled(np.stack([rows & 255, rows >> 8 & 255, rows >> 16], 1).astype(np.uint8)[..., None, None], labels)


def rows(split: Split) -> list[int]:
    return (split.images[:, :, 0, 0].numpy() @ np.array([1, 256, 65536])).tolist()


def whole(train: int = 50_000, test: int = 10_000, classes: int = 100) -> Arrays:
    generator = np.random.default_rng(0)
    labels = [generator.permutation(np.arange(count) % classes) for count in (train, test)]
    return Arrays(numbered(train, labels[0]), numbered(test, labels[1]))


@pytest.mark.parametrize("seed", [0, 1, 37])
def test_counts_order_and_split(seed: int) -> None:
    labels = whole().train.labels
    tasks = cifar100.tasks(whole(), seed)
    assert len(tasks) == 10
    order = np.arange(5000)
    np.random.RandomState(seed).shuffle(order)
    for number, task in enumerate(tasks):
        assert (len(task.train), len(task.valid), len(task.test), task.classes) == (4750, 250, 1000, 10)
        own = np.flatnonzero(labels // 10 == number)
        assert rows(task.valid) == own[order[:250]].tolist()
        assert rows(task.train) == own[order[250:]].tolist()
        assert task.train.labels.tolist() == (labels[own[order[250:]]] % 10).tolist()
        assert rows(task.test) == np.flatnonzero(whole().test.labels // 10 == number).tolist()


def test_the_same_permutation_as_sklearn() -> None:
    from sklearn.utils import shuffle

    from ness.lab.benchmarks.assemble import shuffled

    for seed in (0, 1, 2, 3, 4, 37):
        assert shuffled(5000, seed).tolist() == shuffle(np.arange(5000), random_state=seed).tolist()


def test_constants_and_settings() -> None:
    task = cifar100.tasks(whole(), 1)[0]
    assert task.mean == pytest.approx((125.3 / 255, 123.0 / 255, 113.9 / 255))
    assert task.std == pytest.approx((63.0 / 255, 62.1 / 255, 66.7 / 255))
    benchmark = cifar100.BENCHMARK
    assert (benchmark.name, benchmark.network, benchmark.tasks) == ("cifar100", "alexnet", 10)
    assert benchmark.settings["fixed"] == {"epochs": 200, "patience": 6, "lr_factor": 2.0, "lr_min": 1e-5}


def test_images_stay_uint8_and_are_not_copied() -> None:
    arrays = whole()
    tasks = cifar100.tasks(arrays, 1)
    assert tasks[3].train.images.is_contiguous()
    assert np.shares_memory(tasks[3].train.images.numpy(), arrays.train.images)


def test_split_seed_is_the_runs_unless_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = making.CIFAR100
    made: list[int] = []
    monkeypatch.setattr(cifar100, "CATALOGUE", {"cifar100": tiny})
    monkeypatch.setattr(cifar100, "tasks", lambda arrays, seed: made.append(seed) or ())
    making.put(tmp_path, {"cifar100.npz": making.npz_file(making.arrays(tiny))})
    for options in (None, cifar100.Options(), cifar100.Options(split_seed=0)):
        stream = cifar100.BENCHMARK.load(Request(37, tmp_path, options))
        assert stream.notes["cifar100"].startswith("npz, not verified")
    assert made == [37, 37, 0]
