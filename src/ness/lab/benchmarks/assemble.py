"""Cutting a data set into splits: which rows go where, and the rows rearranged in place so that splits are views."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from ness.lab.benchmarks.base import Request, Split
from ness.lab.datasets import DataSet, Loaded, load
from ness.lab.datasets.arrays import Images, Labelled, Labels, copied, reorder

Rows = NDArray[np.intp]


def fetched(request: Request, data_set: DataSet) -> Loaded:
    """The set, its images the caller's own: read, or copied from what was read for all runs of a command."""
    loaded = request.once(data_set.name, lambda: load(data_set, request.data))
    return loaded if request.shelf is None else Loaded(copied(loaded.arrays), loaded.note)


def shuffled(count: int, seed: int) -> Rows:
    """0 … count-1 in the order of NumPy's legacy generator, as `sklearn.utils.shuffle` gives it.

    >>> shuffled(5, 1).tolist()
    [2, 1, 4, 0, 3]
    """
    rows = np.arange(count)
    np.random.RandomState(seed).shuffle(rows)
    return rows


def hold_out(rows: Rows, order: Rows, fraction: float) -> tuple[Rows, Rows]:
    """Training and validation rows: the first int(fraction · n) of the order are for validation.

    >>> hold_out(np.arange(10, 14), np.array([3, 0, 2, 1]), 0.25)
    (array([10, 12, 11]), array([13]))
    """
    count = int(fraction * len(rows))
    return rows[order[count:]], rows[order[:count]]


def carve(part: Labelled, pieces: Sequence[Rows], labels: Labels) -> list[Split]:
    """One split a piece, each a view of the images, which are rearranged in place; `labels` are the local ones by row.

    The pieces together must name every row once. `part` must not be used afterwards.
    """
    order = np.concatenate(pieces)
    reorder(part.images, order)
    ends = np.cumsum([len(piece) for piece in pieces])
    return [
        split(part.images[end - len(piece) : end], labels[piece])
        for end, piece in zip(ends.tolist(), pieces, strict=True)
    ]


def split(images: Images, labels: Labels) -> Split:
    """A split over the arrays' own memory."""
    return Split(torch.from_numpy(images), torch.from_numpy(np.ascontiguousarray(labels)))
