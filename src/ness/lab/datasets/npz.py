"""NAME.npz: x_train, y_train, x_test, y_test as plain NumPy arrays, images (n, h, w, c) or (n, h, w), no pickles."""

import io
import math
import zipfile
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from ness._files import open_regular
from ness.errors import NessError
from ness.lab.datasets.arrays import Arrays, Images, Labelled, channels_first
from ness.lab.datasets.catalogue import DataSet
from ness.lab.datasets.reading import Hashing, guarded

_HEADER = 10_000


def read(path: Path, data_set: DataSet) -> Arrays:
    """The set as NAME.npz holds it; a pooled set's two parts are joined and sorted by class."""
    with guarded(path, data_set.name), open_regular(path) as file, zipfile.ZipFile(file) as archive:
        budget = data_set.train + data_set.test
        train, test = (_part(archive, path, data_set, part, budget) for part in ("train", "test"))
    return _joined(train, test) if data_set.pooled else Arrays(train, test)


def _part(archive: zipfile.ZipFile, path: Path, data_set: DataSet, part: str, budget: int) -> Labelled:
    images = _array(archive, path, f"x_{part}", ("u1",), budget * math.prod(data_set.shape))
    labels = _array(archive, path, f"y_{part}", ("u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8"), budget * 8)
    if images.ndim == 3:
        images = images[..., None]
    if images.ndim != 4 or labels.ndim != 1:
        raise NessError(
            f"{path}: found x_{part} of shape {images.shape} and y_{part} of shape {labels.shape}, "
            "expected images (n, h, w, c) and labels (n,)"
        )
    return Labelled(channels_first(cast(Images, images)), labels.astype(np.int64))


def _array(archive: zipfile.ZipFile, path: Path, name: str, types: tuple[str, ...], limit: int) -> NDArray[Any]:
    """One .npy member, checked by its header before any memory is taken."""
    if f"{name}.npy" not in archive.namelist():
        raise NessError(f"{path}: holds {', '.join(archive.namelist()[:8])}, expected {name} among them")
    info = archive.getinfo(f"{name}.npy")
    with archive.open(info) as file:
        shape, fortran, dtype = _header(file)
        size = math.prod(shape) * dtype.itemsize
        if dtype.str[1:] not in types or fortran or size > limit:
            raise NessError(
                f"{path}: {name} is {dtype} {shape}{' in Fortran order' if fortran else ''}, expected "
                f"{'uint8 images' if types == ('u1',) else 'integer labels'} of at most {limit} bytes in C order"
            )
        data = Hashing(file, size).read_array(size)
        if file.read(1):
            raise NessError(f"{path}: {name} goes on after its {size} bytes; the file is not what it says it is")
    return data.view(dtype).reshape(shape)


def _header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, whether in Fortran order, and dtype, from a header that is no longer than one that NumPy writes."""
    head = file.read(10)
    version = npy.read_magic(io.BytesIO(head))
    size = 2 if version == (1, 0) else 4
    head += file.read(size - 2)
    length = int.from_bytes(head[8:], "little")
    if length > _HEADER:
        raise ValueError(f"a header of {length} bytes, expected at most {_HEADER}")
    whole = io.BytesIO(head + file.read(length))
    npy.read_magic(whole)
    return (npy.read_array_header_1_0 if size == 2 else npy.read_array_header_2_0)(whole)


def _joined(train: Labelled, test: Labelled) -> Arrays:
    images = np.concatenate([train.images, test.images])
    labels = np.concatenate([train.labels, test.labels])
    order = np.argsort(labels, kind="stable")
    return Arrays(Labelled(images[order], labels[order]), Labelled(images[:0], labels[:0]))
