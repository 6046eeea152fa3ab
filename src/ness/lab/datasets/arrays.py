"""A data set in memory: uint8 images with their labels, checked, and rearranged without a second copy."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ness.errors import NessError
from ness.lab.datasets.catalogue import DataSet

Images = NDArray[np.uint8]
Labels = NDArray[np.int64]

_BLOCK = 1 << 23  # bytes that rearranging may hold at a time


@dataclass(frozen=True)
class Labelled:
    """Images (n, c, h, w), uint8, and their labels (n,), int64."""

    images: Images
    labels: Labels

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Arrays:
    """A data set's training and test images."""

    train: Labelled
    test: Labelled


def copied(arrays: Arrays) -> Arrays:
    """The same images in memory of their own, free to be rearranged; labels are never changed."""
    train, test = (Labelled(part.images.copy(), part.labels) for part in (arrays.train, arrays.test))
    return Arrays(train, test)


def channels_first(images: Images) -> Images:
    """(n, h, w, c) becomes (n, c, h, w) in the same memory; `images` must not be used afterwards.

    >>> channels_first(np.arange(12, dtype=np.uint8).reshape(1, 2, 2, 3))[0, 0].tolist()
    [[0, 3], [6, 9]]
    """
    count, height, width, channels = images.shape
    result = images.reshape(count, channels, height, width)
    if channels > 1:
        step = max(1, _BLOCK // max(1, images[:1].nbytes))
        for start in range(0, count, step):
            block = slice(start, start + step)
            result[block] = images[block].transpose(0, 3, 1, 2).copy()
    return result


def reorder(images: Images, order: NDArray[np.intp]) -> None:
    """Put row `order[i]` at place i, in place; `order` is a permutation.

    >>> rows = np.array([[0, 0], [1, 1], [2, 2]], dtype=np.uint8)
    >>> reorder(rows, np.array([2, 0, 1]))
    >>> rows[:, 0].tolist()
    [2, 0, 1]
    """
    if not images.flags.c_contiguous:
        raise NessError("found images scattered in memory, expected one block: only that can be rearranged in place")
    rows = images.reshape(len(images), -1)
    step = max(1, _BLOCK // max(1, len(rows)))
    for start in range(0, rows.shape[1], step):
        columns = rows[:, start : start + step]
        columns[:] = columns[order]


def check_counts(name: str, data_set: DataSet, images: tuple[int, ...], labels: int, expected: int) -> None:
    """Refuse a part of a set whose shape (n, c, h, w) or number of labels is not the published one."""
    wanted = (expected, *data_set.shape)
    if images != wanted or labels != expected:
        raise NessError(
            f"{data_set.name}, {name}: found images of shape {images} and {labels} labels, "
            f"expected {wanted} and {expected}; this is not {data_set.title}, or not all of it"
        )


def check(arrays: Arrays, data_set: DataSet) -> Arrays:
    """The arrays themselves, once shapes, counts, labels and the mean pixel are those of the set."""
    for name, part, expected in (("train", arrays.train, data_set.train), ("test", arrays.test, data_set.test)):
        check_counts(name, data_set, part.images.shape, len(part.labels), expected)
        if expected:
            _check_labels(name, data_set, part.labels)
    if data_set.mean is not None:
        sample = arrays.train.images[:: max(1, data_set.train // 4000)]
        found = float(sample.mean(dtype=np.float64)) / 255
        if abs(found - data_set.mean) > 0.02:
            raise NessError(
                f"{data_set.name}: the mean pixel is {found:.3f}, expected about {data_set.mean:.3f}; the shapes fit, "
                f"but these are not the images of {data_set.title}. Put the right files in their place"
            )
    return arrays


def _check_labels(name: str, data_set: DataSet, labels: Labels) -> None:
    low, high, distinct = int(labels.min()), int(labels.max()), len(np.unique(labels))
    if (low, high, distinct) != (0, data_set.classes - 1, data_set.classes):
        raise NessError(
            f"{data_set.name}, {name}: found {distinct} different labels from {low} to {high}, "
            f"expected all {data_set.classes} from 0 to {data_set.classes - 1}; the label file is not the right one"
        )
