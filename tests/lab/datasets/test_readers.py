"""Each published format gives the same arrays."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import ness
from lab.datasets import making
from lab.datasets.making import CIFAR10, CIFAR100, MINI, MNIST, NOTMNIST, SVHN
from ness.lab.datasets import find, load, read
from ness.lab.datasets.arrays import Arrays
from ness.lab.datasets.catalogue import DataSet

Files = dict[str, bytes]


def cifar_folder(data: Arrays, data_set: DataSet) -> Files:
    return {f"{data_set.folders[0]}/{n}": raw for n, raw in making.cifar_batches(data, data_set, 4).items()}


CASES: dict[str, tuple[DataSet, Callable[[Arrays], Files]]] = {
    "cifar100 archive": (CIFAR100, lambda a: {"cifar-100-python.tar.gz": making.cifar_archive(a, CIFAR100)}),
    "cifar100 archive, home": (
        CIFAR100,
        lambda a: {"cifar100/cifar-100-python.tar.gz": making.cifar_archive(a, CIFAR100)},
    ),
    "cifar100 folder": (CIFAR100, lambda a: cifar_folder(a, CIFAR100)),
    "cifar10 archive": (CIFAR10, lambda a: {"cifar-10-python.tar.gz": making.cifar_archive(a, CIFAR10)}),
    "cifar10 folder": (CIFAR10, lambda a: cifar_folder(a, CIFAR10)),
    "mnist": (MNIST, lambda a: {f"mnist/{n}": raw for n, raw in making.idx_files(a, MNIST).items()}),
    "mnist gz": (MNIST, lambda a: {f"MNIST/raw/{n}": r for n, r in making.gzipped(making.idx_files(a, MNIST)).items()}),
    "svhn": (SVHN, lambda a: {f"svhn/{n}": raw for n, raw in making.svhn_files(a, SVHN).items()}),
    "svhn flat": (SVHN, lambda a: making.svhn_files(a, SVHN)),
    "notmnist folder": (NOTMNIST, making.letter_files),
    "notmnist archive": (
        NOTMNIST,
        lambda a: {"notmnist/notMNIST_small.tar.gz": making.tar_gz(making.letter_files(a))},
    ),
    "npz": (CIFAR100, lambda a: {"cifar100.npz": making.npz_file(a)}),
    "npz grey": (MNIST, lambda a: {"mnist.npz": making.npz_file(a)}),
}


@pytest.mark.parametrize("case", CASES)
def test_reads(case: str, tmp_path: Path) -> None:
    data_set, write = CASES[case]
    data = making.arrays(data_set)
    making.put(tmp_path, write(data))
    expected = making.pooled(data) if data_set.pooled else data
    assert making.same(load(data_set, tmp_path).arrays, expected)


@pytest.mark.parametrize("case", CASES)
def test_counts_are_checked(case: str, tmp_path: Path) -> None:
    data_set, write = CASES[case]
    making.put(tmp_path, write(making.arrays(data_set)))
    with pytest.raises(ness.NessError, match=r"expected|one too many"):
        load(replace(data_set, train=data_set.train - 1), tmp_path)


def test_pooled_npz_is_sorted_by_class(tmp_path: Path) -> None:
    data = making.arrays(replace(NOTMNIST, train=20, test=10))
    making.put(tmp_path, {"notmnist.npz": making.npz_file(data)})
    found = load(NOTMNIST, tmp_path).arrays
    assert found.train.labels.tolist() == sorted([*data.train.labels, *data.test.labels])
    assert len(found.test) == 0


def test_repacked_contents_count_as_verified(tmp_path: Path) -> None:
    files = making.idx_files(making.arrays(MNIST), MNIST)
    data_set = making.verified(MNIST, files)
    making.put(tmp_path / "mnist", making.gzipped(files))
    assert load(data_set, tmp_path).note == "idx, verified"


def test_wrong_checksum_changes_nothing_and_says_what_to_do(tmp_path: Path) -> None:
    data = making.arrays(CIFAR100)
    data_set = making.verified(CIFAR100, making.cifar_batches(data, CIFAR100))
    making.put(tmp_path, {"cifar-100-python.tar.gz": making.cifar_archive(making.arrays(CIFAR100, 1), CIFAR100)})
    before = (tmp_path / "cifar-100-python.tar.gz").read_bytes()
    with pytest.raises(ness.NessError, match=r"found MD5 .*expected .*ness data get cifar100"):
        load(data_set, tmp_path)
    assert (tmp_path / "cifar-100-python.tar.gz").read_bytes() == before


def test_mnist_in_fashions_place_is_noticed(tmp_path: Path) -> None:
    data = making.arrays(MNIST)
    data.train.images[:] = 33  # 0.13 of white
    making.put(tmp_path / "mnist", making.idx_files(data, MNIST))
    load(replace(MNIST, mean=0.1307), tmp_path)
    with pytest.raises(ness.NessError, match=r"mean pixel is 0\.129, expected about 0\.286"):
        load(replace(MNIST, mean=0.2860), tmp_path)


def test_a_hostile_batch_is_refused_unrun(tmp_path: Path) -> None:
    witness = tmp_path / "ran"
    batches = making.cifar_batches(making.arrays(CIFAR100), CIFAR100)
    batches["train"] = b"cbuiltins\nexec\n(S'open(%a, \"w\")'\ntR." % str(witness)
    making.put(tmp_path / "cifar-100-python", batches)
    with pytest.raises(ness.NessError, match=r"names builtins\.exec.*refused without running"):
        load(CIFAR100, tmp_path)
    assert not witness.exists()


def test_labels_of_another_set_are_noticed(tmp_path: Path) -> None:
    data = making.arrays(MNIST)
    data.train.labels[:] = 0
    making.put(tmp_path / "mnist", making.idx_files(data, MNIST))
    with pytest.raises(ness.NessError, match="1 different labels from 0 to 0, expected all 5"):
        load(MNIST, tmp_path)


# MiniImageNet


def by_class(data: Arrays) -> dict[int, set[bytes]]:
    return {
        label: {image.tobytes() for part in (data.train, data.test) for image in part.images[part.labels == label]}
        for label in range(MINI.classes)
    }


@pytest.mark.parametrize("as_list", [True, False])
def test_mini_split_pickles(as_list: bool, tmp_path: Path) -> None:
    import pickle

    data = making.arrays(MINI)
    for name, part in (("train.pkl", data.train), ("test.pkl", data.test)):
        images = part.images.transpose(0, 2, 3, 1).copy()
        value = {
            "images": list(images) if as_list else images,
            "labels": part.labels.tolist() if as_list else part.labels,
        }
        making.put(tmp_path / "MiniImageNet", {name: pickle.dumps(value)})
    assert making.same(load(MINI, tmp_path).arrays, data)


def test_mini_caches(tmp_path: Path) -> None:
    import pickle

    data = making.arrays(MINI)
    pictures = by_class(data)
    names = ["n3", "n1", "n2", "n5", "n4"]
    for cache, titles in (("train", names[:3]), ("val", names[3:4]), ("test", names[4:])):
        images = [np.frombuffer(raw, np.uint8).reshape(MINI.shape) for t in titles for raw in pictures[int(t[1]) - 1]]
        rows = {t: list(range(6 * at, 6 * at + 6)) for at, t in enumerate(titles)}
        value = {"image_data": np.stack(images).transpose(0, 2, 3, 1).copy(), "class_dict": rows}
        making.put(tmp_path / "mini-imagenet", {f"mini-imagenet-cache-{cache}.pkl": pickle.dumps(value)})
    found = load(MINI, tmp_path).arrays
    assert by_class(found) == pictures
    assert np.bincount(found.train.labels).tolist() == [4] * 5


@pytest.mark.parametrize("parts", [("",), ("images/",), ("train/", "val/", "test/")])
def test_mini_tree_is_cut_like_the_lineage(parts: tuple[str, ...], tmp_path: Path) -> None:
    pictures = by_class(making.arrays(MINI))
    for label, images in pictures.items():
        for at, raw in enumerate(images):
            pixels = np.frombuffer(raw, np.uint8).reshape(MINI.shape)
            making.put(
                tmp_path / "mini-imagenet", {f"{parts[label % len(parts)]}n{label}/{at}.png": making.png(pixels)}
            )
    found = load(MINI, tmp_path).arrays
    assert by_class(found) == pictures
    assert np.bincount(found.test.labels).tolist() == [2] * 5


def test_mini_tree_keeps_its_own_division(tmp_path: Path) -> None:
    data = making.arrays(MINI)
    for name, part in (("train", data.train), ("test", data.test)):
        for at, (pixels, label) in enumerate(zip(part.images, part.labels, strict=True)):
            making.put(tmp_path / "mini-imagenet", {f"{name}/n{label}/{at:02}.png": making.png(pixels)})
    found = load(MINI, tmp_path).arrays
    order = np.argsort(data.test.labels, kind="stable")
    assert np.array_equal(found.test.images, data.test.images[order])


def test_mini_tree_resizes(tmp_path: Path) -> None:
    for label in range(5):
        for at in range(6):
            making.put(tmp_path / "mini-imagenet", {f"n{label}/{at}.png": making.png(np.full((3, 9, 7), 40, np.uint8))})
    found = load(MINI, tmp_path).arrays
    assert found.train.images.shape == (20, 3, 6, 6)
    assert (found.train.images == 40).all()


def test_mini_cannot_be_downloaded_and_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NESS_DATA", raising=False)
    monkeypatch.setattr("platformdirs.user_cache_path", lambda name: tmp_path / "cache")
    with pytest.raises(ness.NessError, match=r"train\.pkl and test\.pkl.*mini-imagenet\.npz") as error:
        load(MINI, tmp_path)
    assert str(tmp_path / "mini-imagenet") in str(error.value)


def test_found_in_a_zip_or_tar_or_folder_is_the_same(tmp_path: Path) -> None:
    from ness.lab.datasets import notmnist

    data = making.arrays(NOTMNIST)
    files = making.letter_files(data)
    making.put(tmp_path, {"a.zip": making.zipped(files), "a.tar.gz": making.tar_gz(files)})
    making.put(tmp_path / "folder", files)
    for name in ("a.zip", "a.tar.gz", "folder"):
        assert making.same(notmnist.read(tmp_path / name, NOTMNIST), making.pooled(data))


def test_read_and_find_are_public(tmp_path: Path) -> None:
    data = making.arrays(SVHN)
    making.put(tmp_path, making.svhn_files(data, SVHN))
    found = find(SVHN, tmp_path)
    assert found is not None
    assert making.same(read(found, SVHN), data)
