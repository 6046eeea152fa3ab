"""Labels beside points, each where it hits nothing that is there already."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from matplotlib.text import Text
from matplotlib.transforms import Bbox

# Where a label is tried, the nearest places first: above, below, to the sides, and the corners between.
SIDES = ((0, 1), (0, -1), (1, 0), (-1, 0), (1, 1), (1, -1), (-1, 1), (-1, -1))
REACHES = (7, 16, 28, 42, 58, 76)  # points from the point
LEADER: dict[str, Any] = {"arrowstyle": "-", "color": "#888888", "linewidth": 0.5, "shrinkA": 1, "shrinkB": 4}


def place(axes: Any, labels: Sequence[tuple[str, float, float]], taken: Sequence[Bbox]) -> None:
    """Writes (text, x, y) beside (x, y), clear of one another and of `taken`, in pixels; a line leads to one far off.

    The figure must be laid out. Where no place is free the label stands where it covers least.
    """
    renderer = axes.figure.canvas.get_renderer()
    pixels = axes.figure.dpi / 72  # in a point
    full = [np.array(box.extents) for box in taken]
    for text, x, y in labels:
        note = axes.annotate(
            text, (x, y), (0, 0), textcoords="offset points", arrowprops=LEADER, fontsize=8, parse_math=False
        )
        note.set_in_layout(False)
        size = np.array(Text.get_window_extent(note, renderer).size)  # of the words, without their line
        at = axes.transData.transform((x, y))
        tried = list(_places(at, size, pixels))
        costs = [_covered(box, np.array(full), axes.bbox.extents) for box in tried]
        best = costs.index(min(costs))
        note.set_position(tuple((tried[best][:2] - at) / pixels))
        note.arrow_patch.set_visible(best >= len(SIDES))  # what is next to its point needs no line
        full.append(tried[best])


def _places(at: np.ndarray, size: np.ndarray, pixels: float) -> Iterator[np.ndarray]:
    """The boxes (left, bottom, right, top) of a label at every reach and side of a point."""
    for reach in REACHES:
        for side in np.array(SIDES):
            middle = at + side * (reach * pixels + size / 2)
            yield np.concatenate([middle - size / 2, middle + size / 2])


def _covered(box: np.ndarray, taken: np.ndarray, inside: np.ndarray) -> float:
    """The area of a box that lies on what is taken (n, 4), or outside."""
    outside = np.prod(box[2:] - box[:2]) - _common(box, inside[None])
    return float(round(outside + _common(box, taken), 3))


def _common(box: np.ndarray, others: np.ndarray) -> float:
    """The sum of the areas that a box has in common with others (n, 4)."""
    sides = np.minimum(box[2:], others[:, 2:]) - np.maximum(box[:2], others[:, :2])
    return float(np.prod(sides.clip(min=0), axis=1).sum())
