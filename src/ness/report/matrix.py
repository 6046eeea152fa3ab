"""The accuracy matrix as a picture: a heat-map, task learnt downwards, task tested to the right, as in the paper."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ness.lab.metrics import Matrix

_UNDATED = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}  # the same runs give the same file


def mean_matrix(matrices: Sequence[Matrix]) -> "np.ndarray[tuple[int, int], np.dtype[np.float64]]":
    """The mean over seeds (lessons, tasks); not-a-number where nothing was measured."""
    stacked = [[[np.nan if value is None else value for value in row] for row in matrix] for matrix in matrices]
    mean: np.ndarray[tuple[int, int], np.dtype[np.float64]] = np.asarray(stacked, dtype=np.float64).mean(axis=0)
    return mean


def figure(matrices: Sequence[Matrix], title: str) -> Figure:
    """The heat-map with every number written in its field."""
    values = mean_matrix(matrices)
    lessons, tasks = values.shape
    size = max(3.2, 0.55 * tasks + 1.6)
    drawn = Figure(figsize=(size, max(1.8, size * lessons / tasks)), layout="constrained")
    FigureCanvasAgg(drawn)
    axes = drawn.subplots()
    image = axes.imshow(np.ma.masked_invalid(values), cmap="viridis", vmin=0, vmax=100)
    middle = 60  # dark letters on light fields
    for (row, column), value in np.ndenumerate(values):
        if not np.isnan(value):
            colour = "black" if value > middle else "white"
            axes.text(column, row, f"{value:.1f}", ha="center", va="center", color=colour, fontsize=7)
    first = tasks - lessons + 1  # tasks learnt at once have one row, the last
    axes.set_xticks(range(tasks), [str(task + 1) for task in range(tasks)])
    axes.set_yticks(range(lessons), [str(first + lesson) for lesson in range(lessons)])
    axes.set_xlabel("tested on task")
    axes.set_ylabel("after task")
    axes.set_title(title, fontsize=9)
    drawn.colorbar(image, ax=axes, label="accuracy (%)", fraction=0.046)
    return drawn


def save(drawn: Figure, stem: Path) -> list[Path]:
    """Writes the figure as PNG, SVG and PDF beside one another."""
    paths = [stem.with_name(f"{stem.name}.{kind}") for kind in ("png", "svg", "pdf")]
    for path in paths:
        temporary = path.with_name(f".{path.name}.tmp")
        drawn.savefig(temporary, format=path.suffix[1:], dpi=150, metadata=_UNDATED.get(path.suffix[1:]))
        temporary.replace(path)
    return paths
