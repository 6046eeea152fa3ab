"""Files made to harm: refused at once, in one line, without much memory."""

import gzip
import io
import os
import pickle
import struct
import sys
import tarfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import ness
from lab.datasets import making
from lab.datasets.making import CIFAR100, MNIST, NOTMNIST, SVHN
from ness.lab.benchmarks import folder
from ness.lab.benchmarks.base import Request
from ness.lab.datasets import find, read
from ness.lab.datasets.catalogue import DataSet

if sys.platform != "win32":
    import resource

MEMORY = 48 << 20  # bytes more than before


@contextmanager
def soon_and_small() -> Iterator[None]:
    """An error of ours in one line, in seconds, without much memory."""
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ness.NessError) as caught:
        yield
    assert "\n" not in str(caught.value)
    assert time.monotonic() - began < 20
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < MEMORY


def refused(data_set: DataSet, folder: Path) -> None:
    found = find(data_set, folder)
    assert found is not None
    with soon_and_small():
        read(found, data_set)


PICKLES: dict[str, bytes] = {
    "nested tuples as a key": b"\x80\x02}(" + b")" + b"\x85" * 1_500_000 + b"K\x01u.",
    "a key of doubled tuples": b"\x80\x02}(" + b")" + b"2\x86" * 60 + b"K\x01u.",
    "a key set alone": b"\x80\x02})K\x01s.",
    "a key in a new dictionary": b"\x80\x02()K\x01d.",
    "nested lists": b"\x80\x02" + b"]" * 5000 + b"a" * 4999 + b".",
    "a list inside itself": b"\x80\x02]q\x00h\x00a.",
    "a chain that grows downwards": b"\x80\x02]q\x00" + b"]q\x01h\x00h\x01a0h\x01q\x000" * 50 + b"h\x00.",
    "a memo of four thousand million": b"\x80\x02K\x01r\xff\xff\xff\xff.",
    "a frame beyond the end": b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7fK\x01.",
    "bytes beyond the end": b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.",
    "a number of many bits": b"\x80\x02\x8b\x00\x00\x10\x00" + b"\x7f" * (1 << 20) + b".",
    "a number of many digits": b"I" + b"9" * 100_000 + b"\n.",
    "a state for one of our functions": b"\x80\x02cnumpy\ndtype\n}U\x01aK\x01sb.",
    "a state for what a name stands for": b"\x80\x02cnumpy\nndarray\n}U\x01aK\x01sb.",
    "a name of two lines": b"\x80\x04\x8c\x08numpy.\nc\x8c\x01x\x93.",
    "something persistent": b"\x80\x02K\x01Q.",
    "an extension": b"\x80\x02\x82\x01.",
    "a large array of no bytes": b"\x80\x02cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(J\xff\xff\xff\x7ftU\x01btR(K\x01(J\xff\xff\xff\x7ftcnumpy\ndtype\nU\x02u1K\x00K\x01\x87R\x89U\x00tb.",  # noqa: E501
}


@pytest.mark.parametrize("name", PICKLES)
def test_pickles(name: str, tmp_path: Path) -> None:
    batches = making.cifar_batches(making.arrays(CIFAR100), CIFAR100)
    batches["train"] = PICKLES[name]
    making.put(tmp_path / "cifar-100-python", batches)
    refused(CIFAR100, tmp_path)


def test_names_that_a_pickle_puts_together_are_checked_too(tmp_path: Path) -> None:
    batches = making.cifar_batches(making.arrays(CIFAR100), CIFAR100)
    batches["train"] = b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x04true\x85R."
    making.put(tmp_path / "cifar-100-python", batches)
    with pytest.raises(ness.NessError, match=r"names os\.system.*refused"):
        read(find(CIFAR100, tmp_path), CIFAR100)  # type: ignore[arg-type]


@pytest.mark.parametrize("protocol", range(6))
def test_bytes_as_keys_are_none_of_this(protocol: int, tmp_path: Path) -> None:
    data = making.arrays(CIFAR100)
    parts = {"train": data.train, "test": data.test}
    batches = {
        name: pickle.dumps({b"data": p.images.reshape(len(p), -1), b"fine_labels": p.labels.tolist()}, protocol)
        for name, p in parts.items()
    }
    making.put(tmp_path / "cifar-100-python", batches)
    assert making.same(read(find(CIFAR100, tmp_path), CIFAR100), data)  # type: ignore[arg-type]


def odd(kind: str, path: Path) -> None:
    make: dict[str, Callable[[], object]] = {
        "pipe": lambda: os.mkfifo(path),
        "device": lambda: path.symlink_to("/dev/zero"),
        "nothing": lambda: path.symlink_to("missing"),
        "folder": path.mkdir,
        "itself": lambda: path.symlink_to(path),
    }
    make[kind]()


@pytest.mark.parametrize("kind", ["pipe", "device", "nothing", "folder", "itself"])
def test_what_is_no_file_in_a_folder_of_images(kind: str, tmp_path: Path) -> None:
    for task in ("a", "b"):
        for label in ("x", "y"):
            for at in range(4):
                picture = making.png(np.full((1, 20, 20), 9 * at, np.uint8))
                making.put(tmp_path, {f"{task}/{label}/{at}.png": picture})
    odd(kind, tmp_path / "a" / "x" / "odd.png")
    with soon_and_small():
        folder.load_stream(Request(1, tmp_path))


@pytest.mark.parametrize("kind", ["pipe", "device", "nothing"])
def test_what_is_no_file_in_a_data_set(kind: str, tmp_path: Path) -> None:
    files = making.letter_files(making.arrays(NOTMNIST))
    making.put(tmp_path, files)
    odd(kind, tmp_path / "notMNIST_small" / "A" / "odd.png")
    refused(NOTMNIST, tmp_path)


def tar_of(*members: tuple[bytes, int, bytes]) -> bytes:
    """A gzipped tar of (type, announced size, data)."""
    out = io.BytesIO()
    with gzip.open(out, "wb", compresslevel=1) as packed:
        for kind, size, data in members:
            info = tarfile.TarInfo("x")
            info.type, info.size = kind, size
            packed.write(info.tobuf(tarfile.GNU_FORMAT))
            packed.write(data)
        packed.write(bytes(1024))
    return out.getvalue()


@pytest.mark.parametrize("kind", [tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_SPARSE])
def test_a_tar_whose_headers_would_fill_the_memory(kind: bytes, tmp_path: Path) -> None:
    size = 64 << 20
    making.put(tmp_path / "notmnist", {"notMNIST_small.tar.gz": tar_of((kind, size, bytes(size)))})
    refused(NOTMNIST, tmp_path)


def test_a_sparse_member_by_extended_attributes(tmp_path: Path) -> None:
    attributes = b"22 GNU.sparse.major=1\n22 GNU.sparse.minor=0\n"
    members = [(tarfile.XHDTYPE, len(attributes), attributes.ljust(512, b"\0")), (tarfile.REGTYPE, 512, b"9" * 512)]
    making.put(tmp_path / "notmnist", {"notMNIST_small.tar.gz": tar_of(*members)})
    with pytest.raises(ness.NessError, match="sparse"):
        read(find(NOTMNIST, tmp_path), NOTMNIST)  # type: ignore[arg-type]


def test_a_tar_of_folders_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ness.lab.datasets.archive._FILES", 500)
    making.put(tmp_path / "notmnist", {"notMNIST_small.tar.gz": tar_of(*[(tarfile.DIRTYPE, 0, b"")] * 600)})
    with pytest.raises(ness.NessError, match="more than 500 members"):
        read(find(NOTMNIST, tmp_path), NOTMNIST)  # type: ignore[arg-type]


def npz(member: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x_train.npy", member)
    return out.getvalue()


MEMBERS = {
    "a header without end": b"\x93NUMPY\x02\x00" + struct.pack("<I", 64 << 20) + bytes(64 << 20),
    "a header of brackets": b"\x93NUMPY\x01\x00" + struct.pack("<H", 9000) + b"(" * 9000,
    "a header of signs": b"\x93NUMPY\x01\x00" + struct.pack("<H", 9000) + b"-" * 9000,
    "objects": b"\x93NUMPY\x01\x00"
    + struct.pack("<H", 60)
    + b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }".ljust(60),
    "more than there is": b"\x93NUMPY\x01\x00"
    + struct.pack("<H", 80)
    + b"{'descr': '|u1', 'fortran_order': False, 'shape': (9999999999, 9999999), }".ljust(80),
    "less than nothing": b"\x93NUMPY\x01\x00"
    + struct.pack("<H", 80)
    + b"{'descr': '|u1', 'fortran_order': False, 'shape': (-1, 4), }".ljust(80),
}  # fmt: skip


@pytest.mark.parametrize("name", MEMBERS)
def test_npz(name: str, tmp_path: Path) -> None:
    making.put(tmp_path, {"mnist.npz": npz(MEMBERS[name])})
    refused(MNIST, tmp_path)


def mat(*elements: tuple[int, bytes]) -> bytes:
    head = b"MATLAB 5.0 MAT-file".ljust(124) + b"\x00\x01IM"
    return head + b"".join(struct.pack("<II", kind, len(data)) + data for kind, data in elements)


def matrix(shape: tuple[int, ...], size: int, data: bytes = b"", flags: int = 9) -> bytes:
    dims = struct.pack("<II", 5, 4 * len(shape)) + struct.pack(f"<{len(shape)}i", *shape)
    dims = dims.ljust(-(-len(dims) // 8) * 8, b"\0")
    name = struct.pack("<HH4s", 1, 1, b"X")
    return struct.pack("<IIII", 6, 8, flags, 0) + dims + name + struct.pack("<II", 2, size) + data


def endless() -> bytes:
    inside = struct.pack("<II", 14, 1 << 31) + matrix(SHAPE, 1 << 31, bytes(64 << 20))
    return mat((15, zlib.compress(inside, 1)))


SHAPE = (4, 5, 3, 20)
FLAGS = struct.pack("<IIII", 6, 8, 9, 0)
MATS = {
    "compressed without end": endless(),
    "a name without end": mat((14, FLAGS + struct.pack("<IIII", 5, 8, 1, 1) + struct.pack("<II", 1, 1 << 31))),
    "another shape": mat((14, matrix((2**31 - 1,) * 4, 8))),
    "elements without end": mat(*[(1, b"")] * 5000),
    "version 4": struct.pack("<5i", 0, 2**31 - 1, 2**31 - 1, 0, 2) + b"X\0" + bytes(300),
    "version 7.3": b"MATLAB 7.3 MAT-file".ljust(124) + b"\x00\x02IM" + b"\x89HDF\r\n\x1a\n",
    "complex": mat((14, matrix(SHAPE, 1200, bytes(1200), 9 | 0x0800))),
    "letters": mat((14, matrix(SHAPE, 1200, bytes(1200), 4))),
    "a broken stream": mat((15, b"\x78\x9c" + b"\xff" * 100)),
}


@pytest.mark.parametrize("name", MATS)
def test_mat(name: str, tmp_path: Path) -> None:
    files = making.svhn_files(making.arrays(SVHN), SVHN)
    making.put(tmp_path, {**files, "train_32x32.mat": MATS[name]})
    refused(SVHN, tmp_path)


@pytest.mark.parametrize("compressed", [True, False])
@pytest.mark.parametrize("kind", [np.uint8, np.float64, np.int16])
def test_mat_files_as_they_are_written(kind: type, compressed: bool, tmp_path: Path) -> None:
    import scipy.io

    data = making.arrays(SVHN)
    for name, part in zip(SVHN.contents, (data.train, data.test), strict=True):
        labels = np.where(part.labels == 0, 10, part.labels).astype(kind)[:, None]
        value = {"other": np.arange(9.0), "y": labels, "X": part.images.transpose(2, 3, 1, 0)}
        scipy.io.savemat(tmp_path / name, value, do_compression=compressed)
    assert making.same(read(find(SVHN, tmp_path), SVHN), data)  # type: ignore[arg-type]
