"""The accuracy matrix as the paper's heat-map: diagonal blue, green where a task gained, red where it lost."""

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from ness.lab.metrics import Matrix
from ness.report.figures.canvas import empty
from ness.report.shade import LIGHT, shades

FIELD = 0.42  # inches


def figure(matrix: Matrix, title: str) -> Figure:
    """One matrix with every number in its field."""
    tasks, lessons = len(matrix[-1]), len(matrix)
    drawn = empty(FIELD * tasks + 1.1, FIELD * lessons + 1.1)
    draw(drawn.subplots(), matrix, title)
    return drawn


def side_by_side(matrices: Sequence[Matrix], titles: Sequence[str], columns: int = 2) -> Figure:
    """Small multiples to compare methods, two in a row as in the paper."""
    columns = min(columns, len(matrices))
    lines = -(-len(matrices) // columns)
    tasks = max(len(matrix[-1]) for matrix in matrices)
    drawn = empty(columns * (FIELD * tasks + 1.0), lines * (FIELD * tasks + 1.0))
    every = list(drawn.subplots(lines, columns, squeeze=False).flat)
    for axes, matrix, title in zip(every, matrices, titles, strict=False):
        draw(axes, matrix, title)
    for axes in every[len(matrices) :]:
        axes.set_axis_off()
    return drawn


def draw(axes: Any, matrix: Matrix, title: str) -> None:
    """Fields, numbers and axes of one matrix."""
    tasks, lessons = len(matrix[-1]), len(matrix)
    digits = 1 if tasks <= 12 else 0
    for t, (row, classes) in enumerate(zip(matrix, shades(matrix), strict=True)):
        for i, (value, shade) in enumerate(zip(row, classes, strict=True)):
            if value is None or not shade:
                continue
            field, letters = LIGHT[shade]
            axes.add_patch(Rectangle((i - 0.5, t - 0.5), 1, 1, facecolor=field, edgecolor="white", linewidth=0.8))
            weight = "bold" if shade == "d" else "normal"
            style = "italic" if shade.startswith("l") else "normal"  # a loss is seen without colour too
            axes.text(
                i, t, f"{value:.{digits}f}", ha="center", va="center", color=letters, fontsize=7.5,
                fontweight=weight, fontstyle=style,
            )  # fmt: skip
    first = tasks - lessons + 1  # tasks learnt at once have one row, the last
    axes.set(xlim=(-0.5, tasks - 0.5), ylim=(lessons - 0.5, -0.5), aspect="equal")
    axes.set_xticks(range(tasks), [str(task + 1) for task in range(tasks)], fontsize=8)
    axes.set_yticks(range(lessons), [str(first + lesson) for lesson in range(lessons)], fontsize=8)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_xlabel("accuracy (%) on task", fontsize=8)
    axes.set_ylabel("after task", fontsize=8)
    axes.set_title(title, fontsize=9, parse_math=False)
