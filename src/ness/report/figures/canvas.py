"""An empty figure, and how one is written: PNG, SVG and PDF beside one another."""

import os
from pathlib import Path

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

KINDS = ("png", "svg", "pdf")
_UNDATED = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}  # the same runs give the same file
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
    with matplotlib.rc_context({"svg.hashsalt": "ness"}):
        for path, kind in zip(paths, KINDS, strict=True):
            temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
            drawn.savefig(temporary, format=kind, dpi=150, metadata=_UNDATED.get(kind))
            temporary.replace(path)
    return paths
