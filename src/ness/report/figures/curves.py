"""The accuracy of each task over time, from when it was learnt to the end."""

from matplotlib import colormaps
from matplotlib.figure import Figure

from ness.lab.runs.metrics import Matrix
from ness.report.figures.canvas import MARKERS, empty


def figure(matrix: Matrix, title: str) -> Figure | None:
    """One line a task; None for tasks learnt at once, which have no course."""
    if len(matrix) < 2:
        return None
    tasks = len(matrix)
    drawn = empty(4.6, 3.2)
    axes = drawn.subplots()
    colours = colormaps["viridis"]
    for task in range(tasks):
        course = [value for row in matrix[task:] if (value := row[task]) is not None]
        colour = colours(0.85 * task / max(1, tasks - 1))
        axes.plot(
            range(task + 1, tasks + 1), course, color=colour, marker=MARKERS[task % len(MARKERS)], markersize=3.5,
            linewidth=1.1, label=str(task + 1),
        )  # fmt: skip
    axes.set_xlabel("after task")
    axes.set_ylabel("accuracy (%)")
    axes.set_xticks(range(1, tasks + 1))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(title="task", fontsize=7, title_fontsize=7, ncols=1 + tasks // 11, loc="center left",
                bbox_to_anchor=(1.0, 0.5), frameon=False)  # fmt: skip
    axes.set_title(title, fontsize=9, parse_math=False)
    return drawn
