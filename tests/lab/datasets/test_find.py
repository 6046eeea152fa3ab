"""Where data is looked for."""

from pathlib import Path

import pytest

import ness
from lab.datasets import making
from lab.datasets.making import MNIST, SVHN
from ness.lab.datasets import CATALOGUE, find, load, roots


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NESS_DATA", str(tmp_path / "env"))
    monkeypatch.setattr("platformdirs.user_cache_path", lambda name: tmp_path / "cache" / name)


def test_the_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert roots(tmp_path / "own") == (tmp_path / "own", tmp_path / "env", tmp_path / "cache" / "ness" / "data")
    monkeypatch.delenv("NESS_DATA")
    assert roots(None) == (tmp_path / "cache" / "ness" / "data",)


def test_the_first_place_that_has_it_wins(tmp_path: Path) -> None:
    assert find(SVHN, tmp_path / "own") is None
    for name in ("cache/ness/data", "env", "own"):
        making.put(tmp_path / name, {"svhn.npz": b""})
        found = find(SVHN, tmp_path / "own")
        assert found is not None
        assert found.path == tmp_path / name / "svhn.npz"


def test_half_of_a_set_is_not_found(tmp_path: Path) -> None:
    making.put(tmp_path, {"svhn/train_32x32.mat": b""})
    assert find(SVHN, tmp_path) is None


def test_mnist_is_never_taken_for_fashion(tmp_path: Path) -> None:
    files = making.idx_files(making.arrays(MNIST), MNIST)
    making.put(tmp_path / "mnist", files)
    making.put(tmp_path, files)
    assert find(CATALOGUE["fashion-mnist"], tmp_path) is None
    assert find(CATALOGUE["fashion-mnist"], tmp_path / "mnist") is None
    assert find(CATALOGUE["mnist"], tmp_path) is not None
    assert find(CATALOGUE["mnist"], tmp_path / "mnist") is not None


def test_torchvisions_folders_are_known(tmp_path: Path) -> None:
    making.put(tmp_path / "FashionMNIST" / "raw", making.gzipped(making.idx_files(making.arrays(MNIST), MNIST)))
    found = find(CATALOGUE["fashion-mnist"], tmp_path)
    assert found is not None
    assert found.path == tmp_path / "FashionMNIST" / "raw"


def test_a_folder_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(ness.NessError, match="found no folder of that name"):
        load(SVHN, tmp_path / "mistyped")
    assert not (tmp_path / "mistyped").exists()


def test_a_file_instead_of_a_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "cifar100.npz").write_bytes(b"")
    with pytest.raises(ness.NessError, match="expected the folder"):
        find(SVHN, tmp_path / "cifar100.npz")
