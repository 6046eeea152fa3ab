"""notMNIST's small set: a folder a letter of 28×28 PNG files, in a folder or in the published archive."""

from pathlib import Path

import numpy as np

from ness.errors import NessError
from ness.lab.datasets import image
from ness.lab.datasets.archive import entries
from ness.lab.datasets.arrays import Arrays, Labelled
from ness.lab.datasets.catalogue import DataSet
from ness.lab.datasets.reading import guarded

LETTERS = "ABCDEFGHIJ"
_FILE_LIMIT = 1 << 20


def read(path: Path, data_set: DataSet) -> Arrays:
    """All readable images, by letter and then by file name, as one pool; files without a byte are left out.

    Two files of the published archive are empty; every other file has to be a whole 28×28 picture.
    """
    found: dict[tuple[int, str], np.ndarray] = {}
    with guarded(path, data_set.name):
        for entry in entries(path, limit=1 << 30):
            if len(entry.parts) < 2 or entry.parts[-2] not in tuple(LETTERS) or not entry.name.endswith(".png"):
                continue
            if entry.parts[-1].startswith("._"):
                continue  # what macOS adds beside each file
            key = (LETTERS.index(entry.parts[-2]), entry.parts[-1])
            if key in found or entry.size > _FILE_LIMIT or len(found) > data_set.train:
                raise NessError(
                    f"{path}: {entry.name} is there twice, too large, or one too many; not the published set"
                )
            if entry.size:
                with entry.open() as file:
                    found[key] = _picture(file.read(entry.size), f"{path}, {entry.name}", data_set.shape)
    return _pool(found, data_set)


def _picture(data: bytes, name: str, shape: tuple[int, int, int]) -> np.ndarray:
    pixels = image.decode(data, name, channels=1)
    if pixels.shape != shape:
        raise NessError(f"{name}: found {pixels.shape[1:]} pixels, expected {shape[1:]}; not a picture of notMNIST")
    return pixels


def _pool(found: dict[tuple[int, str], np.ndarray], data_set: DataSet) -> Arrays:
    keys = sorted(found)
    images = np.stack([found[key] for key in keys]) if keys else np.empty((0, *data_set.shape), np.uint8)
    labels = np.array([letter for letter, _ in keys], np.int64)
    return Arrays(Labelled(images, labels), Labelled(images[:0], labels[:0]))
