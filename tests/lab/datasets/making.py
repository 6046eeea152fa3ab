"""Tiny data sets in every published format, for tests."""

import gzip
import hashlib
import io
import pickle
import struct
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image

from ness.lab.datasets import idx
from ness.lab.datasets.arrays import Arrays, Labelled
from ness.lab.datasets.catalogue import CATALOGUE, DataSet

CIFAR100 = replace(
    CATALOGUE["cifar100"],
    shape=(3, 4, 4),
    train=20,
    test=10,
    classes=5,
    mean=None,
    contents=dict.fromkeys(CATALOGUE["cifar100"].contents),
)
CIFAR10 = replace(CATALOGUE["cifar10"], shape=(3, 4, 4), train=20, test=10, classes=5, mean=None)
CIFAR10 = replace(CIFAR10, contents=dict.fromkeys(CIFAR10.contents))
MNIST = replace(CATALOGUE["mnist"], shape=(1, 6, 6), train=20, test=10, classes=5, mean=None)
MNIST = replace(MNIST, contents=dict.fromkeys(MNIST.contents))
SVHN = replace(CATALOGUE["svhn"], shape=(3, 4, 5), train=20, test=10, classes=10, mean=None)
SVHN = replace(SVHN, contents=dict.fromkeys(SVHN.contents))
NOTMNIST = replace(CATALOGUE["notmnist"], train=30, mean=None)
MINI = replace(CATALOGUE["mini-imagenet"], shape=(3, 6, 6), train=20, test=10, classes=5, mean=None)


def arrays(data_set: DataSet, seed: int = 0) -> Arrays:
    """Random images; labels that hold every class, in mixed order."""
    generator = np.random.default_rng(seed)

    def part(count: int) -> Labelled:
        labels = generator.permutation(np.arange(count) % data_set.classes)
        return Labelled(generator.integers(0, 256, (count, *data_set.shape), dtype=np.uint8), labels)

    return Arrays(part(data_set.train), part(data_set.test))


def same(one: Arrays, other: Arrays) -> bool:
    return all(
        np.array_equal(a.images, b.images) and np.array_equal(a.labels, b.labels)
        for a, b in ((one.train, other.train), (one.test, other.test))
    )


def python2_pickle(value: object) -> bytes:
    """The bytes Python 2 writes at protocol 2: strings without an encoding, NumPy under its old names."""
    return b"\x80\x02" + _python2(value) + b"."


def _python2(value: object) -> bytes:
    if isinstance(value, np.ndarray):
        dtype = b"cnumpy\ndtype\n" + _python2((value.dtype.str[1:], 0, 1)) + b"R"
        dtype += _python2((3, "|", None, None, None, -1, -1, 0)) + b"b"
        state = b"(K\x01" + _python2(value.shape) + dtype + b"\x89" + _python2(value.tobytes()) + b"t"
        blank = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n" + _python2((0,)) + _python2("b") + b"tR"
        return blank + state + b"b"
    if isinstance(value, dict):
        return b"}(" + b"".join(_python2(k) + _python2(v) for k, v in value.items()) + b"u"
    if isinstance(value, list):
        return b"](" + b"".join(map(_python2, value)) + b"e"
    if isinstance(value, tuple):
        return b"(" + b"".join(map(_python2, value)) + b"t"
    if isinstance(value, str | bytes):
        raw = value.encode() if isinstance(value, str) else value
        return (b"U" + bytes([len(raw)]) if len(raw) < 256 else b"T" + struct.pack("<i", len(raw))) + raw
    if value is None:
        return b"N"
    return b"J" + struct.pack("<i", value)


def cifar_batches(data: Arrays, data_set: DataSet, protocol: int = 2) -> dict[str, bytes]:
    """The batches of CIFAR by name; protocol 2 as Python 2 writes it."""
    key = "fine_labels" if "train" in data_set.contents else "labels"

    def batch(images: np.ndarray, labels: np.ndarray) -> bytes:
        value = {"data": images.reshape(len(images), -1).copy(), key: labels.tolist(), "filenames": ["a.png"]}
        return python2_pickle(value) if protocol == 2 else pickle.dumps(value, protocol)

    names = [name for name in data_set.contents if not name.startswith("test")]
    cuts = np.array_split(np.arange(data_set.train), len(names))
    batches = {
        name: batch(data.train.images[cut], data.train.labels[cut]) for name, cut in zip(names, cuts, strict=True)
    }
    last = next(name for name in data_set.contents if name.startswith("test"))
    return batches | {last: batch(data.test.images, data.test.labels)}


def tar_gz(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def zipped(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return buffer.getvalue()


def cifar_archive(data: Arrays, data_set: DataSet, protocol: int = 2) -> bytes:
    folder = data_set.folders[0]
    return tar_gz({f"{folder}/{name}": raw for name, raw in cifar_batches(data, data_set, protocol).items()})


def idx_files(data: Arrays, data_set: DataSet) -> dict[str, bytes]:
    """The four IDX files by name, not compressed."""
    parts = [data.train.images[:, 0], data.train.labels, data.test.images[:, 0], data.test.labels]
    return {
        name: idx.header(part.shape) + part.astype(np.uint8).tobytes()
        for name, part in zip(data_set.contents, parts, strict=True)
    }


def svhn_files(data: Arrays, data_set: DataSet) -> dict[str, bytes]:
    """The two .mat files by name; the digit 0 is written as 10."""
    import scipy.io

    files = {}
    for name, part in zip(data_set.contents, (data.train, data.test), strict=True):
        buffer = io.BytesIO()
        labels = np.where(part.labels == 0, 10, part.labels).astype(np.uint8)[:, None]
        scipy.io.savemat(buffer, {"X": part.images.transpose(2, 3, 1, 0), "y": labels}, do_compression=True)
        files[name] = buffer.getvalue()
    return files


def png(pixels: np.ndarray) -> bytes:
    """(1, h, w) or (3, h, w) as a PNG file."""
    buffer = io.BytesIO()
    Image.fromarray(pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0)).save(buffer, "PNG")
    return buffer.getvalue()


def letter_files(data: Arrays) -> dict[str, bytes]:
    """notMNIST's PNG files by path, and two empty ones."""
    files = {"notMNIST_small/A/empty.png": b"", "notMNIST_small/F/empty.png": b""}
    for at, (image, label) in enumerate(zip(data.train.images, data.train.labels, strict=True)):
        files[f"notMNIST_small/{'ABCDEFGHIJ'[label]}/{at:05}.png"] = png(image)
    return files


def pooled(data: Arrays) -> Arrays:
    """What reading those letters gives: all images, sorted by letter."""
    order = np.argsort(data.train.labels, kind="stable")
    return Arrays(Labelled(data.train.images[order], data.train.labels[order]), data.test)


def npz_file(data: Arrays) -> bytes:
    buffer = io.BytesIO()
    np.savez(
        buffer,
        x_train=data.train.images.transpose(0, 2, 3, 1).copy(),
        y_train=data.train.labels.astype(np.uint8),
        x_test=data.test.images.transpose(0, 2, 3, 1).copy(),
        y_test=data.test.labels.astype(np.uint8),
        class_names=np.array(["a", "b"]),
    )
    return buffer.getvalue()


def put(folder: Path, files: dict[str, bytes]) -> Path:
    """Write the files below a folder."""
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


def gzipped(files: dict[str, bytes]) -> dict[str, bytes]:
    return {f"{name}.gz": gzip.compress(data, mtime=0) for name, data in files.items()}


def verified(data_set: DataSet, files: dict[str, bytes]) -> DataSet:
    """The set with the checksums of these contents."""
    return replace(data_set, contents={name: hashlib.md5(data).hexdigest() for name, data in files.items()})
