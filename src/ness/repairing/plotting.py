"""Pictures of a repair; matplotlib is imported when one is drawn."""

from __future__ import annotations

import html
import io
from pathlib import Path
from typing import Any

from ness._files import write_bytes
from ness.errors import NessError
from ness.repairing.report import Front, Repair

SUFFIXES = (".png", ".svg", ".pdf")


def plot_front(front: Front, path: Path) -> None:
    """Change on old inputs to the right, change kept on new inputs upwards."""
    figure, axes = _figure(path, SUFFIXES, 6.0, 4.0)
    if front.before is None:
        raise NessError("plot: statistics alone were given, so nothing was measured from end to end; pass batches")
    axes.plot([100 * front.before], [100.0], "s", color="black", label="as tuned")
    for interpolated, label, style in ((False, "repaired", "o-"), (True, "interpolated", "^--")):
        points = sorted(
            (100 * row.old, 100 * row.kept, row.strength if row.interpolated is None else row.interpolated)
            for row in front
            if (row.interpolated is not None) == interpolated and row.old is not None and row.kept is not None
        )
        if points:
            axes.plot([x for x, _, _ in points], [y for _, y, _ in points], style, label=label)
        for x, y, number in points:
            axes.annotate(f"{number:g}", (x, y), textcoords="offset points", xytext=(4, -10))
    axes.set_xlabel("change on old inputs, % of the outputs")
    axes.set_ylabel("change kept on new inputs, %")
    axes.legend()
    _write(figure, path)


def plot_repair(repair: Repair, path: Path) -> None:
    """Each layer's change on old rows before and after, and what is kept on new ones; .html: a page with the report."""
    figure, axes = _figure(path, (*SUFFIXES, ".html"), 8.0, max(2.5, 0.22 * len(repair.rows) + 1.5))
    places = range(len(repair.rows))
    axes.barh([-p for p in places], [100 * row.old_before for row in repair.rows], 0.8, color="#cccccc", label="before")
    axes.barh([-p for p in places], [100 * row.old_after for row in repair.rows], 0.5, color="#20639b", label="after")
    kept = [(100 * row.kept, -p) for p, row in enumerate(repair.rows) if row.kept is not None]
    if kept:
        axes.plot([x for x, _ in kept], [y for _, y in kept], "k|", label="kept on new rows")
    axes.set_yticks([-p for p in places], [row.name or "(model)" for row in repair.rows], fontsize=7)
    axes.set_xlabel("change of the layer's outputs on old rows, %")
    axes.legend(fontsize=7)
    if path.suffix == ".html":
        write_bytes(path, _page(repair, figure).encode())
    else:
        _write(figure, path)


def _page(repair: Repair, figure: Any) -> str:
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", bbox_inches="tight")
    svg = drawn.getvalue()
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Repair</title>'
        "<style>body{font:16px/1.5 sans-serif;max-width:60em;margin:2em auto;padding:0 1em}"
        "pre{overflow-x:auto}svg{max-width:100%;height:auto}</style>"
        f"<h1>Repair</h1>{svg[svg.index('<svg') :]}<pre>{html.escape(str(repair))}</pre></html>\n"
    )


def _figure(path: Path, suffixes: tuple[str, ...], width: float, height: float) -> tuple[Any, Any]:
    if path.suffix not in suffixes:
        raise NessError(f"plot: found {path.name!r}, expected a name that ends in {', '.join(suffixes)}")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise NessError("plot needs matplotlib, which is not installed: pip install matplotlib") from error
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


def _write(figure: Any, path: Path) -> None:
    drawn = io.BytesIO()
    figure.savefig(drawn, format=path.suffix[1:], dpi=150)
    write_bytes(path, drawn.getvalue())
