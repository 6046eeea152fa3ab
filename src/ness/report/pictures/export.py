"""Writes a picture to files: SVG as it is on the page, PNG and PDF by matplotlib, shape by shape."""

import io
import re
from collections.abc import Mapping
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path as Outline

from ness._files import write_bytes
from ness.report.pictures.drawing import Group, Mark, Picture, Shape, Words, svg
from ness.report.pictures.palette import COLOURS, STYLES, Style

KINDS = ("png", "svg", "pdf")
_UNDATED: Mapping[str, str | None] = {"CreationDate": None}  # the same runs give the same file
_ALIGN = {"start": "left", "middle": "center", "end": "right"}
_TOKENS = re.compile(r"[MLHVCZmlhvz]|-?\d*\.?\d+(?:e-?\d+)?")
AGAIN = "choose another --out"
_POINT = 1.0  # pixels of the picture in a point


def save(picture: Picture, stem: Path) -> list[Path]:
    """The paths written; each appears whole or not at all."""
    paths = [stem.with_name(f"{stem.name}.{kind}") for kind in KINDS]
    drawn = figure(picture)
    for path, kind in zip(paths, KINDS, strict=True):
        if kind == "svg":
            write_bytes(path, str(svg(picture, file=True)).encode(), AGAIN)
            continue
        made = io.BytesIO()
        drawn.savefig(made, format=kind, dpi=144, metadata=dict(_UNDATED) if kind == "pdf" else None)
        write_bytes(path, made.getvalue(), AGAIN)
    return paths


def figure(picture: Picture) -> Figure:
    """The picture as a figure of matplotlib, a pixel a point, in its light colours."""
    drawn = Figure(figsize=(picture.width / 72, picture.height / 72), facecolor=COLOURS["back"][0])
    FigureCanvasAgg(drawn)
    axes = drawn.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set_xlim(0, picture.width)
    axes.set_ylim(picture.height, 0)
    axes.set_axis_off()
    with matplotlib.rc_context({"font.family": "DejaVu Sans"}):
        for mark in picture.marks:
            _draw(axes, mark, (0.0, 0.0), "", "start")
    return drawn


def _draw(axes: Axes, mark: Mark, at: tuple[float, float], around: str, side: str) -> None:
    match mark:
        case Group(marks, moved, _, style, _, anchor, _):
            for one in marks:
                _draw(axes, one, (at[0] + moved[0], at[1] + moved[1]), style or around, anchor or side)
        case Shape(path, style):
            if path:
                axes.add_patch(PathPatch(outline(path, at), clip_on=False, **_look(STYLES[style or around])))
        case Words(x, y, text, style, anchor, turned):
            look = STYLES[style or around]
            axes.text(
                at[0] + x, at[1] + y, text, color=COLOURS[look.fill][0], fontsize=look.size * _POINT,
                ha=_ALIGN[anchor or side], va="baseline",
                rotation=90 if turned else 0, rotation_mode="anchor", fontweight="bold" if look.bold else "normal",
                fontstyle="italic" if look.italic else "normal", parse_math=False, clip_on=False,
            )  # fmt: skip


def _look(style: Style) -> dict[str, object]:
    line = (0, style.dash) if style.dash else "solid"
    return {
        "facecolor": COLOURS[style.fill][0] if style.fill else "none",
        "edgecolor": COLOURS[style.stroke][0] if style.stroke else "none",
        "linewidth": style.width * _POINT if style.stroke else 0.0,
        "linestyle": line,
        "alpha": style.opacity if style.opacity < 1 else None,
    }


def outline(path: str, at: tuple[float, float] = (0.0, 0.0)) -> Outline:
    """An SVG path of M, L, H, V, C, Z and their small letters as matplotlib's.

    >>> outline("M1 2h3v-1Z").vertices.tolist()
    [[1.0, 2.0], [4.0, 2.0], [4.0, 1.0], [1.0, 2.0]]
    """
    tokens = _TOKENS.findall(path)
    vertices: list[tuple[float, float]] = []
    codes: list[int] = []
    x = y = 0.0
    start, command, k = (0.0, 0.0), "", 0
    while k < len(tokens):
        if tokens[k].isalpha():
            command, k = tokens[k], k + 1
        kind, from_here = command.upper(), command.islower()
        if kind == "Z":
            vertices.append(start)
            codes.append(int(Outline.CLOSEPOLY))
            x, y = start
            continue
        count = {"H": 1, "V": 1, "C": 6}.get(kind, 2)
        numbers = [float(token) for token in tokens[k : k + count]]
        k += count
        if kind == "C":
            points = list(zip(numbers[::2], numbers[1::2], strict=True))
            vertices += points
            codes += [int(Outline.CURVE4)] * 3
            x, y = points[-1]
            continue
        if kind == "H":
            x = numbers[0] + (x if from_here else 0.0)
        elif kind == "V":
            y = numbers[0] + (y if from_here else 0.0)
        else:
            x, y = numbers[0] + (x if from_here else 0.0), numbers[1] + (y if from_here else 0.0)
        if kind == "M":
            start = (x, y)
            command = "l" if from_here else "L"  # pairs that follow are lines
        vertices.append((x, y))
        codes.append(int(Outline.MOVETO if kind == "M" else Outline.LINETO))
    return Outline([(a + at[0], b + at[1]) for a, b in vertices], codes)
