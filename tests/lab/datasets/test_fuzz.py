"""Whatever is done to a file: an error of ours, or the right data."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ness
from lab.datasets import making
from lab.datasets.making import CIFAR10, CIFAR100, MINI, MNIST, NOTMNIST, SVHN
from ness.lab.datasets import find, read
from ness.lab.datasets.arrays import Arrays
from ness.lab.datasets.catalogue import DataSet

Files = dict[str, bytes]


@dataclass(frozen=True)
class Case:
    """A set, its files, and what reading them must give.

    `exact` where checksums or CRCs guard every byte; `swaps` where a whole file may be another good one unnoticed.
    """

    data_set: DataSet
    files: Files
    expected: Arrays
    exact: bool = True
    swaps: bool = False


def cifar(data_set: DataSet, *, archive: bool, checksums: bool) -> Case:
    data = making.arrays(data_set)
    batches = making.cifar_batches(data, data_set)
    files = {f"{data_set.folders[0]}/{name}": raw for name, raw in batches.items()}
    if archive:
        files = {data_set.files[0].name: making.tar_gz(files)}
    used = making.verified(data_set, batches) if checksums else data_set
    return Case(used, files, data, exact=archive or checksums)


def idx(*, gz: bool) -> Case:
    data = making.arrays(MNIST)
    files = making.idx_files(data, MNIST)
    written = making.gzipped(files) if gz else files
    return Case(making.verified(MNIST, files), {f"mnist/{n}": raw for n, raw in written.items()}, data)


def svhn(*, checksums: bool) -> Case:
    data = making.arrays(SVHN)
    files = making.svhn_files(data, SVHN)
    return Case(making.verified(SVHN, files) if checksums else SVHN, files, data, exact=checksums)


def notmnist(*, archive: bool) -> Case:
    data = making.arrays(NOTMNIST)
    files = making.letter_files(data)
    written = {"notMNIST_small.tar.gz": making.tar_gz(files)} if archive else files
    return Case(NOTMNIST, written, making.pooled(data), swaps=not archive)


def npz() -> Case:
    data = making.arrays(CIFAR100)
    return Case(CIFAR100, {"cifar100.npz": making.npz_file(data)}, data)


def mini(kind: str) -> Case:
    import pickle

    data = making.arrays(MINI)
    files: Files = {}
    for name, part in (("train", data.train), ("test", data.test)):
        pictures = part.images.transpose(0, 2, 3, 1).copy()
        if kind == "pickles":
            files[f"mini-imagenet/{name}.pkl"] = pickle.dumps(
                {"images": list(pictures), "labels": part.labels.tolist()}
            )
        else:
            for at, (pixels, label) in enumerate(zip(part.images, part.labels, strict=True)):
                files[f"mini-imagenet/{name}/n{label}/{at:02}.png"] = making.png(pixels)
    return Case(MINI, files, data, exact=False)


CASES: dict[str, Callable[[], Case]] = {
    "cifar100 archive": lambda: cifar(CIFAR100, archive=True, checksums=False),
    "cifar100 folder": lambda: cifar(CIFAR100, archive=False, checksums=False),
    "cifar10 folder, checksums": lambda: cifar(CIFAR10, archive=False, checksums=True),
    "idx": lambda: idx(gz=False),
    "idx gz": lambda: idx(gz=True),
    "svhn": lambda: svhn(checksums=True),
    "svhn, no checksums": lambda: svhn(checksums=False),
    "notmnist archive": lambda: notmnist(archive=True),
    "notmnist folder": lambda: notmnist(archive=False),
    "npz": npz,
    "mini pickles": lambda: mini("pickles"),
    "mini tree": lambda: mini("tree"),
}


@st.composite
def changed(draw: st.DrawFn, raw: bytes, others: list[bytes]) -> bytes:
    """A file cut off, overwritten in places, prolonged, exchanged for another one, or replaced."""
    kind = draw(st.sampled_from(["cut", "flip", "flip", "insert", "longer", "swap", "random", "repeat"]))
    at = draw(st.integers(0, max(0, len(raw) - 1)))
    if kind == "cut":
        return raw[:at]
    if kind == "flip":
        places = {at, *draw(st.lists(st.integers(0, max(0, len(raw) - 1)), max_size=3))}
        return bytes(byte ^ draw(st.integers(1, 255)) if i in places else byte for i, byte in enumerate(raw))
    if kind == "insert":
        return raw[:at] + draw(st.binary(min_size=1, max_size=8)) + raw[at:]
    if kind == "longer":
        return raw + draw(st.binary(min_size=1, max_size=600))
    if kind == "swap":
        return draw(st.sampled_from(others))
    return raw * 2 if kind == "repeat" else draw(st.binary(max_size=200))


def plausible(found: Arrays, data_set: DataSet) -> bool:
    """Without checksums a changed pixel cannot be told from a right one; shapes and labels can."""
    return all(
        part.images.shape == (count, *data_set.shape)
        and part.images.dtype == np.uint8
        and set(part.labels.tolist()) == set(range(data_set.classes if count else 0))
        for part, count in ((found.train, data_set.train), (found.test, data_set.test))
    )


@pytest.mark.parametrize("name", CASES)
def test_an_error_of_ours_or_the_right_data(name: str) -> None:
    case = CASES[name]()
    foreign = [*case.files.values(), b"", making.zipped({"../x": b""}), making.png(np.zeros((1, 28, 28), np.uint8))]

    @settings(max_examples=150, deadline=None)
    @given(st.data())
    def fuzz(data: st.DataObject) -> None:
        target = data.draw(st.sampled_from(sorted(case.files)))
        raw = data.draw(changed(case.files[target], foreign))
        with tempfile.TemporaryDirectory() as folder:
            making.put(Path(folder), {**case.files, target: raw})
            found = find(case.data_set, Path(folder))
            assert found is not None
            try:
                arrays = read(found, case.data_set)
            except ness.NessError:
                return
            finally:
                assert (Path(folder) / target).read_bytes() == raw
            right = making.same(arrays, case.expected)
            unnoticeable = not case.exact or (case.swaps and raw in foreign)
            assert right or (unnoticeable and plausible(arrays, case.data_set))

    fuzz()


@pytest.mark.parametrize("name", CASES)
def test_unchanged_files_give_the_right_data(name: str, tmp_path: Path) -> None:
    case = CASES[name]()
    found = find(case.data_set, making.put(tmp_path, case.files))
    assert found is not None
    if name != "mini tree":  # sorted by class there
        assert making.same(read(found, case.data_set), case.expected)


def test_a_picture_of_too_many_pixels_is_refused_unread() -> None:
    import struct
    import zlib

    from ness.lab.datasets import image

    header = b"IHDR" + struct.pack(">IIBBBBB", 8_000, 8_000, 8, 0, 0, 0, 0)
    bomb = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))
    bomb += struct.pack(">I", 0) + b"IDAT" + struct.pack(">I", zlib.crc32(b"IDAT"))
    with pytest.raises(ness.NessError, match="8000×8000 pixels"):
        image.decode(bomb, "bomb.png", channels=1)
