"""The certificate: how much of each layer was free, and the drift that was measured against its bound."""

from collections.abc import Sequence
from typing import Any

from matplotlib import colormaps
from matplotlib.figure import Figure

from ness.report.certificates import Promise, layers, limit_name
from ness.report.figures.canvas import MARKERS, empty


def figure(found: Sequence[Promise], title: str) -> Figure:
    """Left the free share of each layer, right drift (filled) and bound (hollow) on a logarithmic axis."""
    drawn = empty(7.2, 3.2)
    free, drift = drawn.subplots(1, 2)
    names = layers(found)
    for n, layer in enumerate(names):
        mine = [one for one in found if one.layer == layer]
        tasks = [one.task for one in mine]
        style: dict[str, Any] = {"color": colormaps["viridis"](0.85 * n / max(1, len(names) - 1))}
        style |= {"marker": MARKERS[n % len(MARKERS)], "markersize": 4, "linewidth": 1.1}
        free.plot(tasks, [100 * one.rank / one.fan_in for one in mine], label=layer, **style)
        moved = [one for one in mine if one.drift > 0 and one.limit > 0]
        drift.plot([one.task for one in moved], [one.drift for one in moved], **style)
        drift.plot(
            [one.task for one in moved], [one.limit for one in moved], linestyle=":", markerfacecolor="none", **style
        )
    free.set_ylabel("free directions (% of fan-in)")
    free.set_ylim(0, 105)
    drift.set_ylabel(f"RMS drift —, {limit_name(found)} ⋯")
    if any(one.drift > 0 and one.limit > 0 for one in found):
        drift.set_yscale("log")
    else:
        drift.set_yticks([])
        drift.text(0.5, 0.5, "no drift at all", transform=drift.transAxes, ha="center", va="center", fontsize=9)
    for axes in (free, drift):
        axes.set_xlabel("after task")
        axes.set_xticks(sorted({one.task for one in found}))
        axes.spines[["top", "right"]].set_visible(False)
    handles, shown = free.get_legend_handles_labels()
    legend = drawn.legend(handles, shown, fontsize=7, loc="outside right center", frameon=False)
    for text in legend.get_texts():
        text.set_parse_math(False)
    drawn.suptitle(title, fontsize=9, parse_math=False)
    return drawn
