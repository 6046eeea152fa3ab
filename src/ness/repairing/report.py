"""What a repair says: per layer and from end to end, on new rows and on old ones, before and after."""

from __future__ import annotations

import html
import io
import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from ness._files import write_bytes
from ness.certificate import _aligned
from ness.errors import NessError
from ness.repairing.measuring import Movement

WIDTH = 80  # columns of a printed table
SUFFIXES = (".png", ".svg", ".pdf")


@dataclass(frozen=True)
class RepairRow:
    """One repaired layer: how far its outputs are from the base's, as fractions of their own size (RMS over rows).

    Exact, from the Grams and from the weights as they are stored; inputs are those that were observed. Figures of new
    rows are None where no new inputs were given.
    """

    name: str
    fan_in: int  # d, the constant 1 of a bias not counted
    old_rows: int
    new_rows: int
    old_before: float  # RMS(D x) / RMS(W_b x) over old rows
    old_after: float  # RMS(D' x) / RMS(W_b x)
    new_before: float | None  # the same over new rows
    new_after: float | None
    kept: float | None  # 1 − MS((D' − D) x) / MS(D x) over new rows


@dataclass(frozen=True)
class OtherRow:
    """What is no repaired layer and was changed by tuning: an embedding, a norm, a tied head, a bare parameter."""

    name: str  # layers of a stack that differ in a number alone are one row: layers.*.norm.weight
    tensors: int
    numbers: int
    now: str  # "kept", "base", or the share of the change that is left
    why: str  # why it is not repaired
    moves: float | None  # RMS change of the model's outputs on old inputs if it alone were tuned; None: not measured


@dataclass(frozen=True)
class FrontRow:
    """One strength: what is left of the change on old and on new inputs."""

    strength: float
    old: float | None  # RMS(repaired − base) / RMS(base) on old inputs, end to end; None: statistics alone were given
    kept: float | None  # the share of the tuned change that is left on new inputs, end to end
    interpolated: float | None = None  # not repaired but interpolated: base + this · (tuned − base)


@dataclass(frozen=True)
class Front:
    """The trade-off between old and new, a row for each strength, from Grams taken once."""

    rows: tuple[FrontRow, ...]
    before: float | None  # the tuned model's own change on old inputs

    def __iter__(self) -> Iterator[FrontRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def to_dicts(self) -> list[dict[str, Any]]:
        """The rows as plain dictionaries."""
        return [asdict(row) for row in self.rows]

    def __str__(self) -> str:
        head = ["", "change on old inputs", "change kept on new inputs"]
        body = [["as tuned", percent(self.before), percent(1.0)]]
        for row in self.rows:
            what = f"strength {row.strength:g}" if row.interpolated is None else f"interpolated {row.interpolated:g}"
            body.append([what, percent(row.old), percent(row.kept)])
        return "\n".join(_aligned([head, *body]))

    def plot(self, path: str | Path) -> None:
        """Draw it: change on old inputs to the right, change kept on new inputs upwards (PNG, SVG or PDF)."""
        plot_front(self, Path(path))


class OtherStrengths(Protocol):
    """What a finished repair keeps to be tried at other strengths."""

    def __call__(self, strengths: Sequence[float], interpolated: Sequence[float], /) -> Front:
        """The trade-off at these strengths, and at these shares of plain interpolation."""

    def model(self, strength: float, /) -> nn.Module:
        """A repaired copy."""


@dataclass(frozen=True)
class Repair:
    """The repaired model and what became of the change.

    `rows` are the layers, `others` what else was changed. `on_old` and `on_new` are of the whole model, from end to
    end, on the first batches of each kind.
    """

    model: nn.Module = field(repr=False)
    strength: float
    ridge: float
    passes: int
    rows: tuple[RepairRow, ...]
    others: tuple[OtherRow, ...]
    on_old: Movement | None
    on_new: Movement | None
    share: float = 1.0  # what is left of the reshaped change: interpolation on top
    notes: tuple[str, ...] = ()
    _front: OtherStrengths | None = field(default=None, repr=False, compare=False)

    def front(
        self, strengths: Sequence[float] = (0.1, 0.3, 1.0, 3.0, 10.0), interpolated: Sequence[float] = ()
    ) -> Front:
        """The trade-off at other strengths, from the Grams that were taken; the model stays as it is.

        Args:
            strengths: each at least 0.
            interpolated: shares of plain interpolation (WiSE-FT) to show beside, each from 0 to 1.

        Returns:
            A `Front`: a row for each, in this order; prints as a table, and `.plot(path)` draws it.
        """
        if self._front is None:
            raise NessError(
                "front: the Grams were not kept (passes= and memory= work through the layers a few at a time); repair "
                "in one go, or call repair once for each strength"
            )
        return self._front(strengths, interpolated)

    def at(self, strength: float) -> nn.Module:
        """A copy of the tuned model, repaired at another strength from the Grams that were taken.

        Args:
            strength: at least 0.

        Returns:
            What `repair` would have made at this strength; `.model` stays as it is.
        """
        if self._front is None:
            raise NessError(
                "at: the Grams were not kept (passes= and memory= work through the layers a few at a time); call "
                "repair with this strength"
            )
        return self._front.model(strength)

    def to_dicts(self) -> list[dict[str, Any]]:
        """The rows as plain dictionaries, for JSON or a data frame."""
        return [asdict(row) for row in self.rows]

    def to_dict(self) -> dict[str, Any]:
        """The whole report as plain JSON values."""
        return {
            "strength": self.strength,
            "ridge": self.ridge,
            "passes": self.passes,
            "share": self.share,
            "rows": self.to_dicts(),
            "others": [asdict(row) for row in self.others],
            "on_old": None if self.on_old is None else _finite(asdict(self.on_old)),
            "on_new": None if self.on_new is None else _finite(asdict(self.on_new)),
            "notes": list(self.notes),
        }

    def plot(self, path: str | Path) -> None:
        """Draw the report: PNG, SVG or PDF, or a page if the name ends in .html."""
        plot_repair(self, Path(path))

    def __iter__(self) -> Iterator[RepairRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, name: str) -> RepairRow:
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(f"no row {name!r}; rows: {', '.join(row.name for row in self.rows)}")

    def __str__(self) -> str:
        new = any(row.new_before is not None for row in self.rows)
        head = ["change of outputs", "old before", "old after"] + (["new before", "new kept"] if new else [])
        body = []
        for row in self.rows:
            cells = [row.name or "(model)", percent(row.old_before), percent(row.old_after)]
            body.append(cells + ([percent(row.new_before), percent(row.kept)] if new else []))
        lines = _within([head, *body], WIDTH)
        lines += ["", *self.verdict()]
        for other in self.others:
            moves = "" if other.moves is None else f", alone moves old outputs by {percent(other.moves)}"
            lines += _wrapped(f"{other.now}: {other.name} ({other.why}{moves})")
        for note in self.notes:
            lines += _wrapped(note)
        return "\n".join(lines)

    def verdict(self) -> list[str]:
        """The figures from end to end, in words."""
        how = f"repaired with strength {self.strength:g}"
        how += f", {self.share:g} of the change left" if self.share != 1 else ""
        how += f", {self.passes} passes" if self.passes > 1 else ""
        lines = [how]
        if self.on_old is not None:
            lines.append(
                f"old inputs, end to end: outputs are {percent(self.on_old.after)} from the base's; "
                f"{percent(self.on_old.before)} before"
            )
        if self.on_new is not None:
            lines.append(
                f"new inputs, end to end: {percent(self.on_new.kept)} of the tuned change is kept "
                f"(outputs {percent(self.on_new.after)} from the base's, {percent(self.on_new.before)} before)"
            )
        return [part for line in lines for part in _wrapped(line)]


def percent(value: float | None) -> str:
    """A share in percent, three figures.

    >>> percent(0.12345), percent(0.000012), percent(None), percent(1.0)
    ('12.3 %', '0.0012 %', '-', '100 %')
    """
    if value is None or math.isnan(value):
        return "-"
    return f"{100 * value:.3g} %" if abs(value) < 10 or math.isinf(value) else f"{100 * value:,.0f} %"


def _finite(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value if math.isfinite(value) else None for key, value in values.items()}


def _within(table: list[list[str]], width: int) -> list[str]:
    """Aligned columns in so many columns of text: long names lose their middle."""
    figures = sum(2 + max(len(line[i]) for line in table) for i in range(1, len(table[0])))
    room = max(12, width - figures)
    return _aligned([[_short(line[0], room), *line[1:]] for line in table])


def _short(name: str, room: int) -> str:
    """The name, without its middle where it is too long."""
    return name if len(name) <= room else f"{name[: (room - 1) // 2]}…{name[-(room - 1 - (room - 1) // 2) :]}"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


# -- pictures: matplotlib is imported when one is drawn ----------------------------------------------------------------


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
