"""Where the time went: one bar a setting, a piece a task."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from ness.report.figures.canvas import empty
from ness.report.number_format import duration


def figure(seconds: Sequence[Sequence[float]], labels: Sequence[str], title: str) -> Figure:
    """Seconds of each lesson, stacked, with the sum at the end."""
    drawn = empty(5.6, 0.34 * len(seconds) + 1.0)
    axes = drawn.subplots()
    for line, pieces in enumerate(seconds):
        start = 0.0
        for task, piece in enumerate(pieces):
            axes.barh(line, piece, left=start, color=("#1f4e79", "#7fb2e5")[task % 2], edgecolor="white", linewidth=0.4)
            start += piece
        axes.text(start, line, f"  {duration(start)}", va="center", fontsize=7)
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    for text in axes.get_yticklabels():
        text.set_parse_math(False)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_xlabel("seconds of a run, a piece a task")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(title, fontsize=9, parse_math=False)
    return drawn
