"""CIFAR-10 and CIFAR-100 in their python form: pickled batches in a folder or in the published archive."""

from pathlib import Path
from typing import Any

import numpy as np

from ness.errors import NessError
from ness.lab.datasets import pickles
from ness.lab.datasets.archive import Entry, entries
from ness.lab.datasets.arrays import Arrays, Images, Labelled, Labels, check_counts
from ness.lab.datasets.catalogue import DataSet
from ness.lab.datasets.reading import Hashing, check_md5, guarded

_LABELS = ("fine_labels", b"fine_labels", "labels", b"labels")


def read(path: Path, data_set: DataSet) -> Arrays:
    """The set from a folder or archive that holds its batches, in the batches' order."""
    wanted = list(data_set.contents)
    batches: dict[str, Labelled] = {}
    with guarded(path, data_set.name):
        for entry in entries(path, limit=4 * _bytes(data_set)):
            name = entry.parts[-1]
            if name in wanted and len(entry.parts) <= 2:
                if name in batches:
                    raise NessError(f"{path}: holds {name} twice (at {entry.name}); expected one of each batch")
                batches[name] = _batch(path, entry, data_set)
    missing = [name for name in wanted if name not in batches]
    if missing:
        raise NessError(f"{path}: {', '.join(missing)} of {data_set.title} missing; unpack or download it again")
    train = [batches.pop(name) for name in wanted if not name.startswith("test")]
    return Arrays(_joined(train, data_set.train, data_set), _joined(list(batches.values()), data_set.test, data_set))


def _bytes(data_set: DataSet) -> int:
    return (data_set.train + data_set.test) * int(np.prod(data_set.shape)) + (1 << 20)


def _batch(path: Path, entry: Entry, data_set: DataSet) -> Labelled:
    with entry.open() as file:
        reader = Hashing(file, entry.size)
        content = pickles.load(reader)
        check_md5(f"{path}, {entry.name}", reader.finish(), data_set.contents[entry.parts[-1]], data_set.name)
    if not isinstance(content, dict):
        raise NessError(
            f"{path}, {entry.name}: found a {type(content).__name__}, expected a dictionary of data and labels"
        )
    data = content.get("data", content.get(b"data"))
    labels = next((content[key] for key in _LABELS if key in content), None)
    return Labelled(_images(data, data_set, entry), _labels(labels, entry))


def _images(data: Any, data_set: DataSet, entry: Entry) -> Images:
    array = data.value if isinstance(data, pickles.Array) else None
    if array is None or array.dtype != np.uint8 or array.ndim != 2 or array.shape[1] != np.prod(data_set.shape):
        found = "no array" if array is None else f"{array.dtype} {array.shape}"
        raise NessError(f"{entry.name}: found data of {found}, expected uint8 (n, {np.prod(data_set.shape)})")
    return np.array(array, order="C").reshape(-1, *data_set.shape)


def _labels(labels: Any, entry: Entry) -> Labels:
    if isinstance(labels, pickles.Array) and labels.value is not None and labels.value.ndim == 1:
        return labels.value.astype(np.int64)
    if not isinstance(labels, list) or not all(type(label) is int and 0 <= label < 1 << 31 for label in labels):
        raise NessError(f"{entry.name}: found no list of labels, expected one of whole numbers")
    return np.array(labels, np.int64)


def _joined(batches: list[Labelled], expected: int, data_set: DataSet) -> Labelled:
    count = sum(len(batch.images) for batch in batches)
    labels = np.concatenate([batch.labels for batch in batches])
    check_counts("batches", data_set, (count, *data_set.shape), len(labels), expected)
    if len(batches) == 1:
        return batches[0]
    images = np.empty((count, *data_set.shape), np.uint8)
    at = 0
    while batches:  # each batch is let go as soon as it is copied
        batch = batches.pop(0)
        images[at : at + len(batch.images)] = batch.images
        at += len(batch.images)
    return Labelled(images, labels)
