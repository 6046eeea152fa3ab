"""An empty figure, and how one is written: PNG, SVG and PDF beside one another."""

import io
from collections.abc import Mapping
from pathlib import Path

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ness._files import write_bytes

KINDS = ("png", "svg", "pdf")
_UNDATED: Mapping[str, Mapping[str, str | None]] = {
    "svg": {"Date": None},
    "pdf": {"CreationDate": None},
}  # the same runs give the same file
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">")  # told apart without colour


def empty(width: float, height: float) -> Figure:
    """A figure of so many inches, without any window."""
    drawn = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(drawn)
    return drawn


def save(drawn: Figure, stem: Path) -> list[Path]:
    """The paths written; each appears whole or not at all."""
    paths = [stem.with_name(f"{stem.name}.{kind}") for kind in KINDS]
    drawn.draw_without_rendering()
    drawn.set_layout_engine("none")  # laid out once, not once a format
    for path, kind in zip(paths, KINDS, strict=True):
        _write(drawn, path, kind, _UNDATED.get(kind))
    return paths


def save_svg(drawn: Figure, path: Path, description: str) -> None:
    """One SVG whose words are text, hence small, with a description in its metadata."""
    for _ in range(2):  # squares beside a legend find their place in the second
        drawn.draw_without_rendering()
    drawn.set_layout_engine("none")
    alike = ["DejaVu Sans", "Verdana"]  # in width, and one of them is everywhere
    with matplotlib.rc_context({"svg.fonttype": "none", "font.sans-serif": alike}):
        _write(drawn, path, "svg", {**_UNDATED["svg"], "Creator": None, "Description": description})


def _write(drawn: Figure, path: Path, kind: str, metadata: Mapping[str, str | None] | None) -> None:
    made = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "ness"}):
        drawn.savefig(made, format=kind, dpi=150, metadata=metadata)
    write_bytes(path, made.getvalue(), "choose another --out")
