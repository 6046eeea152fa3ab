"""ACC against BWT of every setting of a benchmark, with the Pareto front."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from ness.report.figures.canvas import MARKERS, empty
from ness.report.front import front
from ness.report.groups import CEILINGS
from ness.report.table import Row


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
    for n, (bwt, acc, label) in enumerate(shown):
        axes.errorbar(
            bwt[0], acc[0], xerr=bwt[1], yerr=acc[1], fmt=MARKERS[n % len(MARKERS)], color="#1f4e79",
            markerfacecolor="#7fb2e5", elinewidth=0.8, capsize=2, markersize=6,
        )  # fmt: skip
        axes.annotate(label, (bwt[0], acc[0]), xytext=(6, 5), textcoords="offset points", fontsize=8, parse_math=False)
    best = [shown[i] for i in front([(bwt[0], acc[0]) for bwt, acc, _ in shown])]
    axes.plot([one[0][0] for one in best], [one[1][0] for one in best], color="#888888", linestyle=":", zorder=0)
    for row, label in zip(rows, labels, strict=True):
        if row.method == "joint" and row.acc is not None:
            axes.axhline(row.acc[0], color="#888888", linewidth=0.8, linestyle="--", zorder=0)
            axes.text(
                0.01, row.acc[0], f"{label}: all tasks at once", transform=axes.get_yaxis_transform(), fontsize=7,
                va="bottom", parse_math=False,
            )  # fmt: skip
    axes.set_xlabel("BWT (%): change of old tasks since they were learnt")
    axes.set_ylabel("ACC (%) at the end")
    axes.margins(0.15)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(title, fontsize=9, parse_math=False)
    return drawn
