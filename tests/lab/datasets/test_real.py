"""The real data sets, where $NESS_DATA holds them: counts, means, first labels."""

import os
from pathlib import Path

import numpy as np
import pytest

from lab.datasets import making
from ness.lab.datasets import CATALOGUE, check, load

pytestmark = pytest.mark.real

# Per-channel mean and standard deviation of the training images, as published; None where none is.
STATISTICS = {
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "mnist": ((0.1307,), (0.3081,)),
    "svhn": ((0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970)),
    "fashion-mnist": ((0.2860,), (0.3530,)),
    "notmnist": None,
    "mini-imagenet": None,
}
FIRST_LABELS = {"mnist": [5, 0, 4, 1, 9], "fashion-mnist": [9, 0, 0, 3, 0], "svhn": [1, 9, 2, 3, 2]}


@pytest.fixture
def data() -> Path:
    if not os.environ.get("NESS_DATA"):
        pytest.skip("NESS_DATA names no folder")
    return Path(os.environ["NESS_DATA"])


@pytest.mark.parametrize("name", CATALOGUE)
def test_counts_means_and_first_labels(name: str, data: Path) -> None:
    data_set = CATALOGUE[name]
    loaded = load(data_set, data).arrays
    assert loaded.train.images.shape == (data_set.train, *data_set.shape)
    assert loaded.test.images.shape == (data_set.test, *data_set.shape)
    images = loaded.train.images
    means = tuple(float(images[:, c].mean()) / 255 for c in range(images.shape[1]))
    stds = tuple(float(images[:, c].std(dtype=np.float32)) / 255 for c in range(images.shape[1]))
    if STATISTICS[name] is not None:
        assert means == pytest.approx(STATISTICS[name][0], abs=0.004)  # packed copies differ by up to 0.003
        assert stds == pytest.approx(STATISTICS[name][1], abs=0.004)
    if name in FIRST_LABELS:
        assert loaded.train.labels[:5].tolist() == FIRST_LABELS[name]


@pytest.mark.parametrize("name", ["cifar100", "cifar10", "mini-imagenet"])
def test_classes_are_balanced(name: str, data: Path) -> None:
    data_set = CATALOGUE[name]
    loaded = load(data_set, data).arrays
    for part, count in ((loaded.train, data_set.train), (loaded.test, data_set.test)):
        assert np.bincount(part.labels).tolist() == [count // data_set.classes] * data_set.classes


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_the_published_checksums_are_those_of_the_real_files(name: str, data: Path, tmp_path: Path) -> None:
    data_set = CATALOGUE[name]
    arrays = load(data_set, data).arrays
    making.put(tmp_path / name, making.idx_files(arrays, data_set))
    again = load(data_set, tmp_path)
    assert again.note == "idx, verified"
    assert making.same(again.arrays, arrays)


def test_notmnist_as_pictures_is_the_same_set(data: Path, tmp_path: Path) -> None:
    data_set = CATALOGUE["notmnist"]
    arrays = load(data_set, data).arrays
    making.put(tmp_path, {"notMNIST_small.tar.gz": making.tar_gz(making.letter_files(arrays))})
    again = load(data_set, tmp_path).arrays
    assert making.same(again, arrays)


@pytest.mark.parametrize("name", CATALOGUE)
def test_check_finds_nothing_wrong(name: str, data: Path) -> None:
    result = check(CATALOGUE[name], data)
    assert result.good
    assert result.state.startswith(("verified", "not verified: no published checksum"))
    if name in ("mnist", "fashion-mnist"):
        assert result.state == "verified"
