"""MiniImageNet: 100 classes of 600 images, from the lineage's pickles, the few-shot caches, or a tree of images."""

import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ness._files import open_regular
from ness.errors import NessError
from ness.lab.datasets import image, pickles
from ness.lab.datasets.archive import Entry, entries
from ness.lab.datasets.arrays import Arrays, Images, Labelled
from ness.lab.datasets.catalogue import DataSet
from ness.lab.datasets.reading import Hashing, guarded

SPLIT_PICKLES = ("train.pkl", "test.pkl")
CACHE_PICKLES = ("mini-imagenet-cache-train.pkl", "mini-imagenet-cache-val.pkl", "mini-imagenet-cache-test.pkl")
_SPLIT_SEED = 1234  # of the lineage's script that cut each class into training and test images
_PARTS = {"train": "train", "val": "train", "valid": "train", "test": "test"}


def read_split_pickles(folder: Path, data_set: DataSet) -> Arrays:
    """train.pkl and test.pkl: dictionaries of `images` (arrays h×w×3) and `labels` (0..99)."""
    train, test = (_split_pickle(folder / name, data_set) for name in SPLIT_PICKLES)
    return Arrays(train, test)


def read_caches(folder: Path, data_set: DataSet) -> Arrays:
    """The few-shot caches: `image_data` (n, h, w, 3) and `class_dict` (class → rows), classes by sorted name."""
    pictures: list[NDArray[np.uint8]] = []
    rows: dict[str, tuple[int, list[int]]] = {}
    for number, name in enumerate(CACHE_PICKLES):
        data, classes = _cache(folder / name, data_set)
        pictures.append(data)
        rows |= {title: (number, where) for title, where in classes.items()}
    per_class = (data_set.train + data_set.test) // data_set.classes
    if len(rows) != data_set.classes or any(len(where) != per_class for _, where in rows.values()):
        raise NessError(
            f"{folder}: the caches hold {len(rows)} classes, expected {data_set.classes} of {per_class} images each"
        )
    ordered = [[(number, row) for row in rows[title][1]] for title in sorted(rows) for number in (rows[title][0],)]
    train, test = cut(ordered, data_set.train // data_set.classes)
    return Arrays(
        _filled(data_set, train, lambda at: pictures[at[0]][at[1]].transpose(2, 0, 1)),
        _filled(data_set, test, lambda at: pictures[at[0]][at[1]].transpose(2, 0, 1)),
    )


def read_tree(folder: Path, data_set: DataSet) -> Arrays:
    """A folder (or archive) of class folders, also below train/, val/ and test/; images are resized to the set's size.

    Where a class has images both below train/ and below test/ that division is kept; otherwise its 600 are cut as the
    lineage does it.
    """
    with guarded(folder, data_set.name):
        limit = 1 << 36
        train, test = _divided(folder, [e for e in entries(folder, limit) if _is_picture(e)], data_set)
        places = {name: (part, row) for part, names in enumerate((train, test)) for row, (name, _) in enumerate(names)}
        images = [np.empty((len(names), *data_set.shape), np.uint8) for names in (train, test)]
        for entry in entries(folder, limit):
            if entry.name in places:
                part, row = places[entry.name]
                with entry.open() as file:
                    data = image.bytes_of(file, entry.size, f"{folder}, {entry.name}")
                images[part][row] = image.decode(data, f"{folder}, {entry.name}", channels=3, to=data_set.shape[1:])
    labels = [np.array([label for _, label in names], np.int64) for names in (train, test)]
    return Arrays(Labelled(images[0], labels[0]), Labelled(images[1], labels[1]))


def cut(classes: Sequence[Sequence[Any]], train: int) -> tuple[list[tuple[Any, int]], list[tuple[Any, int]]]:
    """Each class's items, shuffled by one generator for all classes, cut into `train` and the rest, with their labels.

    >>> train, test = cut([["a", "b", "c"], ["d", "e", "f"]], 2)
    >>> len(train), len(test), sorted(item for item, label in train + test if label == 1)
    (4, 2, ['d', 'e', 'f'])
    """
    generator = np.random.RandomState(_SPLIT_SEED)
    parts: tuple[list[tuple[Any, int]], list[tuple[Any, int]]] = ([], [])
    for label, items in enumerate(classes):
        order = np.arange(len(items))
        generator.shuffle(order)
        for place, at in enumerate(order.tolist()):
            parts[int(place >= train)].append((items[at], label))
    return parts


def _is_picture(entry: Entry) -> bool:
    name = entry.parts[-1].lower()
    return len(entry.parts) >= 2 and name.endswith(image.SUFFIXES) and not name.startswith("._")


def _divided(
    folder: Path, pictures: Iterable[Entry], data_set: DataSet
) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """Which file is a training image and which a test image, with its label, by class folder in sorted order."""
    classes: dict[str, dict[str, list[str]]] = {}
    for entry in pictures:
        part = _PARTS.get(entry.parts[-3], "train") if len(entry.parts) >= 3 else "train"
        classes.setdefault(entry.parts[-2], {"train": [], "test": []})[part].append(entry.name)
    if len(classes) != data_set.classes:
        raise NessError(f"{folder}: found {len(classes)} class folders, expected {data_set.classes}, one per class")
    found = [classes[title] for title in sorted(classes)]
    if all(names["train"] and names["test"] for names in found):
        parts = (
            [(n, label) for label, names in enumerate(found) for n in sorted(names[part])] for part in ("train", "test")
        )
        train, test = parts
        return train, test
    return cut([sorted(names["train"] + names["test"]) for names in found], data_set.train // data_set.classes)


def _loaded(path: Path, data_set: DataSet) -> dict[Any, Any]:
    with guarded(path, data_set.name), open_regular(path) as file:
        size, limit = os.fstat(file.fileno()).st_size, 4 * data_set.train * math.prod(data_set.shape) + (1 << 24)
        if size > limit:
            raise NessError(f"{path}: found {size} bytes, expected at most {limit}: not a file of {data_set.title}")
        content = pickles.load(Hashing(file, size))
        if not isinstance(content, dict):
            raise NessError(f"{path}: found a {type(content).__name__}, expected a dictionary")
    return content


def _split_pickle(path: Path, data_set: DataSet) -> Labelled:
    content = _loaded(path, data_set)
    images, labels = content.get("images"), content.get("labels")
    labels = labels.value.tolist() if isinstance(labels, pickles.Array) and labels.value is not None else labels
    if not isinstance(labels, list) or not all(
        type(label) is int and 0 <= label < data_set.classes for label in labels
    ):
        raise NessError(f"{path}: found no list `labels` of numbers from 0 to {data_set.classes - 1}")
    if isinstance(images, pickles.Array) and images.value is not None:
        images = [_held(row) for row in images.value]
    if not isinstance(images, list) or len(images) != len(labels):
        raise NessError(f"{path}: found no list `images` with one array for each of the {len(labels)} labels")
    rows = [(at, label) for at, label in enumerate(labels)]
    return _filled(data_set, rows, lambda at: _pixels(images[at], path, data_set).transpose(2, 0, 1))


def _held(value: NDArray[Any]) -> pickles.Array:
    array = pickles.Array()
    array.value = value
    return array


def _pixels(value: Any, path: Path, data_set: DataSet) -> NDArray[np.uint8]:
    channels, height, width = data_set.shape
    array = value.value if isinstance(value, pickles.Array) else None
    if array is None or array.dtype != np.uint8 or array.shape[-3:] != (height, width, channels):
        found = "no array" if array is None else f"{array.dtype} {array.shape}"
        raise NessError(f"{path}: found {found}, expected uint8 images of {height}×{width}×{channels}")
    return array


def _cache(path: Path, data_set: DataSet) -> tuple[NDArray[np.uint8], dict[str, list[int]]]:
    content = _loaded(path, data_set)
    pictures = _pixels(content.get("image_data"), path, data_set)
    classes = content.get("class_dict")
    if pictures.ndim != 4 or not isinstance(classes, dict):
        raise NessError(f"{path}: found no `image_data` (n, h, w, 3) with a `class_dict`")
    for title, where in classes.items():
        if not isinstance(title, str) or not isinstance(where, list):
            raise NessError(f"{path}: `class_dict` is not a dictionary of class name → list of rows")
        if not all(type(row) is int and 0 <= row < len(pictures) for row in where):
            raise NessError(f"{path}: class {title!r} points at rows that are not among the {len(pictures)} images")
    return pictures, classes


def _filled(data_set: DataSet, rows: list[tuple[Any, int]], picture: Any) -> Labelled:
    images: Images = np.empty((len(rows), *data_set.shape), np.uint8)
    for at, (where, _) in enumerate(rows):
        images[at] = picture(where)
    return Labelled(images, np.array([label for _, label in rows], np.int64))
