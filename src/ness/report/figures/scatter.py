"""ACC against BWT of every setting of a benchmark, with the Pareto front."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from ness.report.figures.canvas import MARKERS, empty
from ness.report.front import front
from ness.report.groups import CEILINGS
from ness.report.table import Row

LINE, HEIGHT = 13.0, 200.0  # points: a label's height, and about that of the axes


def spread(values: Sequence[float], gap: float) -> list[float]:
    """The places nearest to these values (in squares) that are at least `gap` apart and in the same order.

    >>> spread([1.0, 1.2, 5.0], 1.0)
    [0.6, 1.6, 5.0]
    """
    order = sorted(range(len(values)), key=lambda i: values[i])
    blocks: list[list[float]] = []  # values less their place in the row, pooled where they would not ascend
    for place, i in enumerate(order):
        blocks.append([values[i] - place * gap])
        while len(blocks) > 1 and sum(blocks[-2]) / len(blocks[-2]) > sum(blocks[-1]) / len(blocks[-1]):
            last = blocks.pop()
            blocks[-1] += last
    level = [sum(block) / len(block) for block in blocks for _ in block]
    placed = {i: level[place] + place * gap for place, i in enumerate(order)}
    return [round(placed[i], 9) for i in range(len(values))]


def figure(rows: Sequence[Row], labels: Sequence[str], title: str) -> Figure | None:
    """Up and to the right is better; bars are deviations over seeds. None where no setting has a BWT."""
    drawn = empty(4.6, 3.6)
    axes = drawn.subplots()
    shown = [
        (row.bwt, row.acc, label)
        for row, label in zip(rows, labels, strict=True)
        if row.bwt is not None and row.acc is not None and row.method not in CEILINGS
    ]
    if not shown:
        return None
    for n, (bwt, acc, _) in enumerate(shown):
        axes.errorbar(
            bwt[0], acc[0], xerr=bwt[1], yerr=acc[1], fmt=MARKERS[n % len(MARKERS)], color="#1f4e79",
            markerfacecolor="#7fb2e5", elinewidth=0.8, capsize=2, markersize=6,
        )  # fmt: skip
    best = [shown[i] for i in front([(bwt[0], acc[0]) for bwt, acc, _ in shown])]
    axes.plot([one[0][0] for one in best], [one[1][0] for one in best], color="#888888", linestyle=":", zorder=0)
    for row, label in zip(rows, labels, strict=True):
        if row.method == "joint" and row.acc is not None:
            axes.axhline(row.acc[0], color="#888888", linewidth=0.8, linestyle="--", zorder=0)
            axes.text(
                0.01, row.acc[0], f"{label}: all tasks at once", transform=axes.get_yaxis_transform(), fontsize=7,
                va="bottom", parse_math=False,
            )  # fmt: skip
    axes.margins(0.15)
    low, high = axes.get_ylim()
    heights = spread([acc[0] for _, acc, _ in shown], (high - low) * LINE / HEIGHT)
    for (bwt, acc, label), height in zip(shown, heights, strict=True):
        moved = (height - acc[0]) * HEIGHT / (high - low)  # points on the page
        line = (
            {"arrowstyle": "-", "relpos": (0, 0.5), "color": "#888888", "linewidth": 0.5}
            if abs(moved) > LINE / 2
            else None
        )
        axes.annotate(
            label, (bwt[0], acc[0]), xytext=(8, 4 + moved), textcoords="offset points", fontsize=8, arrowprops=line,
            parse_math=False,
        )  # fmt: skip
    axes.set_xlabel("BWT (%): change of old tasks since they were learnt")
    axes.set_ylabel("ACC (%) at the end")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(title, fontsize=9, parse_math=False)
    return drawn
