"""ACC against what a task keeps for itself: the course over k, and what stands apart from it."""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from ness.report.figures.canvas import MARKERS, empty
from ness.report.figures.labels import place
from ness.report.storage_cost import Keeping, Point

LEAST = 0.25  # percent, where the logarithmic axis begins; below it is linear, so that nothing at all has its place
TICKS = (0, *(LEAST * 2**n for n in range(12)))
STYLE: dict[str, Any] = {"color": "#1f4e79", "markersize": 6, "elinewidth": 0.9, "capsize": 3, "linewidth": 1.0}


def figure(found: Keeping) -> Figure:
    """Up and to the left is better: more accuracy for less that is kept."""
    drawn = empty(6.4, 3.8)
    axes = drawn.subplots()
    course = sorted((one for one in found.points if not one.apart), key=lambda one: one.percent)
    apart = [one for one in found.points if one.apart]
    _bars(axes, course, fmt=f"-{MARKERS[0]}", markerfacecolor="#7fb2e5", label="NESS+, k private directions a layer")
    for n, one in enumerate(apart, start=1):
        marker = MARKERS[n % len(MARKERS)]
        _bars(axes, [one], fmt=marker, markerfacecolor="white", label=f"{one.name}, {label(one)}")
    shares = [one.percent for one in found.points]
    axes.set_xscale("symlog", base=2, linthresh=LEAST)
    low, high = 0 if min(shares) < LEAST else LEAST, max(16.0, 1.5 * max(shares))
    axes.set_xticks([tick for tick in TICKS if low <= tick <= high])
    axes.set_xticks([], minor=True)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlim(low, high)
    axes.margins(y=0.2)
    axes.grid(axis="y", color="#e4e7eb", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_xlabel("what a task keeps for itself (% of the shared convolution and linear weights)", fontsize=8)
    axes.set_ylabel("ACC (%): mean over all tasks at the end", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    asked = max(one.asked for one in found.points)
    title = f"{found.title}\nmean and sample deviation over {asked} seed{'s' if asked > 1 else ''}"
    axes.set_title(title, fontsize=9, parse_math=False)
    for text in drawn.legend(loc="outside lower center", ncols=2, fontsize=8, frameon=False).get_texts():
        text.set_parse_math(False)
    drawn.draw_without_rendering()  # labels are placed on what is laid out
    drawn.set_layout_engine("none")
    labels = [(label(one), one.percent, one.acc) for one in course]  # the legend names those apart
    place(axes, labels, [*_bar_boxes(axes, found.points), *_line_boxes(axes, course)])
    return drawn


def label(one: Point) -> str:
    """'k = 8'; and which k is the default, and how many seeds there are where some are missing."""
    k = f"k = {one.directions}{' (default)' if one.default and not one.apart else ''}"
    return k if one.seeds == one.asked else f"{k}, {one.seeds} of {one.asked} seeds"


def _bars(axes: Any, points: Sequence[Point], **style: Any) -> None:
    if points:
        deviations = [math.nan if one.deviation is None else one.deviation for one in points]  # one seed has no bar
        places = [one.percent for one in points], [one.acc for one in points]
        axes.errorbar(*places, yerr=deviations, **STYLE, **style)


def _bar_boxes(axes: Any, points: Sequence[Point]) -> Iterator[Bbox]:
    """In pixels, what each mark and its error bar cover."""
    room = 5 * axes.figure.dpi / 72
    for one in points:
        ends = axes.transData.transform([(one.percent, one.acc + way * (one.deviation or 0.0)) for way in (-1, 1)])
        yield Bbox(ends).padded(room)


def _line_boxes(axes: Any, course: Sequence[Point]) -> Iterator[Bbox]:
    """In pixels, small boxes along the lines between points."""
    ends = [axes.transData.transform((one.percent, one.acc)) for one in course]
    for one, other in pairwise(ends):
        for part in np.linspace(0, 1, 40):
            x, y = (1 - part) * one + part * other
            yield Bbox.from_bounds(x - 1, y - 1, 2, 2)
