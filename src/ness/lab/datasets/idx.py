"""MNIST's IDX files, plain or gzipped: big-endian header 00 00 08 ndim, the sizes, then the bytes."""

import gzip
import hashlib
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import IO, cast

import numpy as np
from numpy.typing import NDArray

from ness._files import open_regular
from ness.errors import NessError
from ness.lab.datasets.arrays import Arrays, Labelled
from ness.lab.datasets.catalogue import DataSet
from ness.lab.datasets.reading import Hashing, check_md5, guarded


def names(data_set: DataSet) -> tuple[str, ...]:
    """The four files: training images and labels, test images and labels."""
    return tuple(data_set.contents)


def read(files: Mapping[str, Path], data_set: DataSet) -> Arrays:
    """The set from its four files, given by their names without `.gz`."""
    shapes = [(count, *rest) for count in (data_set.train, data_set.test) for rest in (data_set.shape[1:], ())]
    parts = [
        _array(files[name], shape, data_set.contents[name], data_set.name)
        for name, shape in zip(names(data_set), shapes, strict=True)
    ]
    images = [part[:, None] for part in parts[::2]]
    labels = [part.astype(np.int64) for part in parts[1::2]]
    return Arrays(Labelled(images[0], labels[0]), Labelled(images[1], labels[1]))


def digest(array: NDArray[np.uint8]) -> str:
    """MD5 of the IDX file that would hold this array: tells whether an .npz has the published contents.

    >>> digest(np.zeros(0, np.uint8)) == hashlib.md5(bytes([0, 0, 8, 1, 0, 0, 0, 0])).hexdigest()
    True
    """
    md5 = hashlib.md5(header(array.shape), usedforsecurity=False)
    md5.update(np.ascontiguousarray(array).data)
    return md5.hexdigest()


def header(shape: tuple[int, ...]) -> bytes:
    """The header of an IDX file of unsigned bytes.

    >>> header((2, 3)).hex(" ")
    '00 00 08 02 00 00 00 02 00 00 00 03'
    """
    return bytes([0, 0, 8, len(shape)]) + struct.pack(f">{len(shape)}I", *shape)


def _array(path: Path, shape: tuple[int, ...], md5: str | None, name: str) -> NDArray[np.uint8]:
    expected = header(shape)
    with guarded(path, name), open_regular(path) as raw:
        file = cast(IO[bytes], gzip.GzipFile(fileobj=raw)) if path.suffix == ".gz" else raw
        reader = Hashing(file, len(expected) + math.prod(shape))
        found = reader.read(len(expected))
        if found != expected:
            raise NessError(
                f"{path}: begins with {found.hex(' ')}, expected {expected.hex(' ')}, the header of {shape} bytes; "
                f"this is not that file of {name}"
            )
        array = reader.read_array(math.prod(shape)).reshape(shape)
        if file.read(1):
            raise NessError(f"{path}: goes on after the {shape} bytes it announces; this is not that file of {name}")
        check_md5(str(path), reader.finish(), md5, name)
    return array
