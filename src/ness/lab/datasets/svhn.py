"""SVHN's cropped digits: train_32x32.mat and test_32x32.mat, label 10 standing for the digit 0."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ness._files import open_regular
from ness.errors import NessError
from ness.lab.datasets import mat
from ness.lab.datasets.arrays import Arrays, Images, Labelled
from ness.lab.datasets.catalogue import DataSet
from ness.lab.datasets.reading import check_md5, file_md5, guarded


def read(files: Mapping[str, Path], data_set: DataSet) -> Arrays:
    """The set from its two files."""
    counts = (data_set.train, data_set.test)
    train, test = (_part(files[name], data_set, count) for name, count in zip(data_set.contents, counts, strict=True))
    return Arrays(train, test)


def _part(path: Path, data_set: DataSet, count: int) -> Labelled:
    channels, height, width = data_set.shape
    wanted = {"X": (height, width, channels, count), "y": (count, 1)}
    with guarded(path, data_set.name):
        check_md5(str(path), file_md5(path), data_set.contents[path.name], data_set.name)
        try:
            with open_regular(path) as file:
                content = mat.read(file, wanted)
        except NessError as error:
            raise NessError(f"{path}: {error}; this is not that file of {data_set.title}") from error
        images, numbers = content["X"], content["y"][:, 0].astype(np.float64)
        if images.dtype != np.uint8 or not np.isin(numbers, range(1, 11)).all():
            labels = f"labels {numbers.min()} to {numbers.max()}"
            raise NessError(f"{path}: found {images.dtype} images, {labels}; expected uint8, 1 to 10")
    return Labelled(_upright(images), numbers.astype(np.int64) % 10)


def _upright(images: Images) -> Images:
    """(h, w, c, n) in Fortran order becomes (n, c, h, w) in C order, block by block."""
    result = np.empty(images.shape[:1:-1] + images.shape[:2], np.uint8)
    for start in range(0, len(result), 1024):
        block = slice(start, start + 1024)
        result[block] = images[..., block].transpose(3, 2, 0, 1)
    return result
