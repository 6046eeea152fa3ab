"""The accuracy matrix as the paper's heat-map: diagonal blue, green where a task gained, red where it lost."""

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path

from ness.lab.runs.metrics import Matrix
from ness.report.figures.canvas import empty
from ness.report.shade import LIGHT, STEPS, shades

FIELD, SMALL = 0.42, 0.28  # inches
MEANING = {
    **{f"g{step}": f"gained over {STEPS[step - 1]:g}" for step in range(len(STEPS), 0, -1)},
    "n": f"within {STEPS[0]:g}",
    **{f"l{step}": f"lost over {STEPS[step - 1]:g}" for step in range(1, len(STEPS) + 1)},
    "d": "just learnt",
}  # of a field's class, from the best to the worst


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


def in_a_row(matrices: Sequence[Matrix], titles: Sequence[str], title: str) -> Figure:
    """Matrices beside one another, small and with a legend: one picture that explains itself."""
    lessons, tasks = max(map(len, matrices)), max(len(matrix[-1]) for matrix in matrices)
    drawn = empty(len(matrices) * (SMALL * tasks + 0.2) + 1.9, SMALL * lessons + 1.5)
    row = drawn.subplots(1, len(matrices), squeeze=False)[0]
    for axes, matrix, name in zip(row, matrices, titles, strict=True):
        draw(axes, matrix, name, small=True)
        if axes is not row[0]:  # rows are the same in all
            axes.set(yticks=[], ylabel="")
    seen = {shade for matrix in matrices for row in shades(matrix) for shade in row}
    patches = [
        Patch(facecolor=LIGHT[shade][0], edgecolor="#888888", linewidth=0.5, label=label)
        for shade, label in MEANING.items()
        if shade in seen
    ]
    drawn.legend(
        handles=patches, title="points since the\ntask was learnt", loc="outside right center", fontsize=7,
        title_fontsize=7, frameon=False,
    )  # fmt: skip
    drawn.suptitle(title, fontsize=9, parse_math=False)
    return drawn


def draw(axes: Any, matrix: Matrix, title: str, *, small: bool = False) -> None:
    """Fields, numbers and axes of one matrix; if small, numbers where a task was learnt and at the end alone."""
    tasks, lessons = len(matrix[-1]), len(matrix)
    digits = 1 if tasks <= 12 else 0
    fields: dict[str, list[Path]] = {}
    for t, (row, classes) in enumerate(zip(matrix, shades(matrix), strict=True)):
        for i, (value, shade) in enumerate(zip(row, classes, strict=True)):
            if value is None or not shade:
                continue
            fields.setdefault(shade, []).append(_field(i, t))
            if small and shade != "d" and t < lessons - 1:
                continue
            weight = "bold" if shade == "d" else "normal"
            style = "italic" if shade.startswith("l") else "normal"  # a loss is seen without colour too
            axes.text(
                i, t, f"{value:.{digits}f}", ha="center", va="center", color=LIGHT[shade][1], fontweight=weight,
                fontstyle=style, fontsize=7 if small else 7.5,
            )  # fmt: skip
    for shade, paths in fields.items():  # one shape a colour: a third of the file
        every = Path.make_compound_path(*paths)
        axes.add_patch(PathPatch(every, facecolor=LIGHT[shade][0], edgecolor="white", linewidth=0.8))
    first = tasks - lessons + 1  # tasks learnt at once have one row, the last
    axes.set(xlim=(-0.5, tasks - 0.5), ylim=(lessons - 0.5, -0.5), aspect="equal")
    axes.set_xticks(range(tasks), [str(task + 1) for task in range(tasks)], fontsize=8)
    axes.set_yticks(range(lessons), [str(first + lesson) for lesson in range(lessons)], fontsize=8)
    axes.tick_params(left=False, bottom=False)
    axes.spines[:].set_visible(False)
    axes.set_xlabel("accuracy (%) on task", fontsize=8)
    axes.set_ylabel("after task", fontsize=8)
    axes.set_title(title, fontsize=9, parse_math=False)


def _field(task: int, lesson: int) -> Path:
    """The square of a task after a lesson."""
    steps = ((-0.5, -0.5), (0.5, -0.5), (0.5, 0.5), (-0.5, 0.5), (-0.5, -0.5))
    return Path([(task + x, lesson + y) for x, y in steps], closed=True)
