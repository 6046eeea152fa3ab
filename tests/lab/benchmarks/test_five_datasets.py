"""5-datasets: five sets brought to 3×32×32, the same validation images for every seed, both fourth tasks."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import ness
from lab.benchmarks.test_cifar100 import rows, whole
from lab.datasets import making
from ness.lab.benchmarks import five_datasets
from ness.lab.benchmarks.base import Request
from ness.lab.datasets.arrays import Arrays, Labelled
from ness.lab.datasets.catalogue import CATALOGUE

COUNTS = {
    "cifar10": (50_000, 47_500, 2_500),
    "mnist": (60_000, 57_000, 3_000),
    "svhn": (73_257, 69_595, 3_662),
    "fashion-mnist": (60_000, 57_000, 3_000),
    "notmnist": (16_853, 16_011, 842),
}


@pytest.mark.parametrize("name", COUNTS)
def test_counts_and_split(name: str) -> None:
    total, train, valid = COUNTS[name]
    task = five_datasets.task(name, whole(total, 100, 10), five_datasets.STATISTICS[name])
    assert (len(task.train), len(task.valid), len(task.test)) == (train, valid, 100)
    order = np.arange(total)
    np.random.RandomState(1).shuffle(order)
    assert rows(task.valid) == order[:valid].tolist()
    assert rows(task.train) == order[valid:].tolist()


def test_padding_is_zero_before_normalising() -> None:
    images = np.random.default_rng(0).integers(1, 256, (5, 1, 28, 28), dtype=np.uint8)
    padded = five_datasets.padded(Labelled(images, np.arange(5))).images
    assert padded.shape == (5, 3, 32, 32)
    assert all(np.array_equal(padded[:, c, 2:30, 2:30], images[:, 0]) for c in range(3))
    padded[:, :, 2:30, 2:30] = 0
    assert not padded.any()


def test_letters_are_split_as_sklearn_splits_them() -> None:
    from sklearn.model_selection import train_test_split

    labels = np.sort(np.arange(18_724) % 10)
    images = np.repeat(labels.astype(np.uint8) * 20 + 10, 784).reshape(-1, 1, 28, 28)
    made = five_datasets.letters(Arrays(Labelled(images, labels), Labelled(images[:0], labels[:0])))
    all_labels = np.concatenate([labels, [0, 0]])
    train, test = train_test_split(all_labels, test_size=0.1, random_state=42)
    assert (len(made.train), len(made.test)) == (16_853, 1_873)
    assert made.train.labels.tolist() == train.tolist()
    assert made.test.labels.tolist() == test.tolist()
    both = np.concatenate([made.train.images, made.test.images])
    assert both.shape[1:] == (3, 32, 32)
    empty = ~both.any((1, 2, 3))
    assert empty.sum() == 2
    assert (np.concatenate([made.train.labels, made.test.labels])[empty] == 0).all()


def test_letters_are_resized_as_pillow_does_it() -> None:
    from PIL import Image

    images = np.random.default_rng(0).integers(0, 256, (1, 1, 28, 28), dtype=np.uint8)
    made = five_datasets.letters(Arrays(Labelled(images, np.zeros(1, int)), Labelled(images[:0], np.zeros(0, int))), 3)
    expected = np.asarray(Image.fromarray(images[0, 0]).resize((32, 32), Image.Resampling.LANCZOS))
    both = np.concatenate([made.train.images, made.test.images])
    assert any(np.array_equal(image, np.stack([expected] * 3)) for image in both)


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The five sets, forty images each, as .npz files."""
    small = {
        name: replace(data_set, train=40, test=0 if data_set.pooled else 20, mean=None)
        for name, data_set in CATALOGUE.items()
        if name in COUNTS
    }
    for seed, (name, data_set) in enumerate(small.items()):
        written = replace(data_set, train=20, test=20) if data_set.pooled else data_set
        making.put(tmp_path, {f"{name}.npz": making.npz_file(making.arrays(written, seed))})
    monkeypatch.setattr(five_datasets, "CATALOGUE", small)
    return tmp_path


def test_order_shapes_and_constants(tiny: Path) -> None:
    stream = five_datasets.BENCHMARK.load(Request(3, tiny))
    assert [task.name for task in stream.tasks] == ["cifar10", "mnist", "svhn", "fashion-mnist", "notmnist"]
    for task in stream.tasks:
        assert task.train.images.shape[1:] == (3, 32, 32)
        assert task.train.images.dtype == torch.uint8
        assert task.classes == 10
        assert (task.mean, task.std) == five_datasets.STATISTICS[task.name]
    assert stream.tasks[1].mean == (0.1, 0.1, 0.1)
    assert stream.tasks[4].std == (0.4501, 0.4501, 0.4501)
    assert stream.notes["fashion"] == "true"


def test_both_fourth_tasks(tiny: Path) -> None:
    true = five_datasets.BENCHMARK.load(Request(1, tiny)).tasks
    copy = five_datasets.BENCHMARK.load(Request(1, tiny, five_datasets.Options(fashion="mnist-copy"))).tasks
    assert torch.equal(copy[3].train.images, copy[1].train.images)
    assert not torch.equal(true[3].train.images, true[1].train.images)
    assert copy[3].mean == true[3].mean == (0.219, 0.219, 0.219)
    with pytest.raises(ness.NessError, match="'true' or 'mnist-copy'"):
        five_datasets.BENCHMARK.load(Request(1, tiny, five_datasets.Options(fashion="other")))  # type: ignore[arg-type]


def test_the_seed_changes_nothing(tiny: Path) -> None:
    one, two = (five_datasets.BENCHMARK.load(Request(seed, tiny)).tasks for seed in (1, 2))
    assert all(torch.equal(a.train.images, b.train.images) for a, b in zip(one, two, strict=True))


def test_settings() -> None:
    fixed = {"epochs": 100, "patience": 5, "lr_factor": 3.0, "lr_min": 1e-3}
    assert five_datasets.BENCHMARK.settings["fixed"] == fixed
    assert five_datasets.BENCHMARK.settings["reference"] == {**fixed, "epochs": 200, "fashion": "mnist-copy"}
