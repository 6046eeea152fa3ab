"""The certificate: per layer, how far old outputs can have moved (a bound) and how far they have (exactly)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any


class LargestDrift(float):
    """The largest relative drift of any layer: a plain number, which knows its layer and unpacks as (name, drift).

    >>> largest = LargestDrift("body.4", 0.106)
    >>> print(f"{largest}; {largest.percent:.1f}"), largest > 0.1
    10.6 % of its own outputs, in body.4; 10.6
    (None, True)
    """

    name: str

    def __new__(cls, name: str, drift: float) -> LargestDrift:
        """`drift` is relative: the layer's RMS drift over the RMS of its own outputs."""
        made = super().__new__(cls, drift)
        made.name = name
        return made

    def __getnewargs__(self) -> tuple[str, float]:  # type: ignore[override]  # float's own takes the number alone
        return self.name, float(self)

    @property
    def percent(self) -> float:
        """The drift in percent of the layer's own outputs."""
        return 100 * float(self)

    def __iter__(self) -> Iterator[str | float]:
        return iter((self.name, float(self)))

    def __str__(self) -> str:
        return f"{self.percent:.3g} % of its own outputs, in {self.name or '(model)'}"

    def __format__(self, spec: str) -> str:
        return format(float(self), spec) if spec else str(self)


WIDTH = 80  # columns of a terminal


@dataclass(frozen=True)
class CertificateRow:
    """One layer. Figures of grouped layers are the root-sum-square of their groups'.

    `bound` holds for the worst single row ever observed, and grows with the number of rows, since σ does; `rms_bound`
    and `rms_drift` are root-mean-squares over all rows. Bounds add up over merged tasks. All of them are of the shared
    weights: a task's private part moves no other task. `task_drift` is there where the rule keeps each task's own
    drift: no task's outputs have moved by more than this fraction of their size.
    """

    name: str
    fan_in: int  # d, the constant 1 of a bias not counted
    rank: int  # free directions, all groups together
    tau: float  # τ, the rule's threshold on σ
    update_norm: float  # ‖A‖₂ of the current (or last merged) update
    bound: float  # Σ over tasks of σ_sel ‖A‖₂ ≥ ‖ΔW x‖ of every observed row x
    rms_bound: float  # Σ over tasks of σ_sel ‖A‖_F / √n
    rms_drift: float  # √(Σ‖ΔW x‖² / n), exact
    relative_drift: float  # rms_drift over the RMS of the layer's own output when observed
    task_drift: float | None = None  # T = √(Σ_j rel_j²) ≥ every task's own relative RMS drift, exact
    shrunk: float = 1.0  # the share of the last merged update that the rule's limit left
    rounding: float = field(repr=False, default=0.0)  # RMS drift that rounding the weights alone can cause

    @property
    def holds(self) -> bool:
        """Whether the measured drift is within its bound, up to the rounding of the weights' dtype.

        This does not say that the drift is small: `relative_drift` does.
        """
        return self.rms_drift <= self.rms_bound * (1 + 1e-6) + self.rounding


@dataclass(frozen=True)
class Certificate:
    """What the model kept: one row a constrained layer, and what lies outside the promise.

    `holds` says that every layer stayed within its bound, `largest_drift` how far that is, `unprotected` what no bound
    covers because it trains freely.

    The promise is per layer, on the inputs as they were observed: drift of upstream layers comes on top, and
    `NullSpace.compare` measures it on whatever old data is still there.
    """

    rows: tuple[CertificateRow, ...]
    skipped: Mapping[str, str] = field(default_factory=dict)  # frozen layers, and why
    outside: tuple[str, ...] = ()  # norms that use batch statistics: their outputs depend on the batch
    kept: Mapping[str, int] = field(default_factory=dict)  # numbers a task keeps for itself: private part and norms
    shared_directions: int = 0  # numbers of the private directions that all tasks share, kept once
    protected_weights: int = 0  # numbers of the protected convolution and linear weights
    parameters: int = 0  # numbers of the model
    unprotected: Mapping[str, int] = field(default_factory=dict)  # trainable and in no protected layer: numbers of each

    @property
    def holds(self) -> bool:
        """Whether every layer's measured drift is within its bound; not that nothing has moved."""
        return all(row.holds for row in self.rows)

    @property
    def largest_drift(self) -> LargestDrift:
        """The largest `relative_drift` of any layer, and which layer it is; NaN, which no bound can judge, first."""
        worst = max(self.rows, key=lambda row: (math.isnan(row.relative_drift), row.relative_drift), default=None)
        return LargestDrift("", 0.0) if worst is None else LargestDrift(worst.name, worst.relative_drift)

    @property
    def verdict(self) -> str:
        """One line: whether every layer is within its bounds, and the worst layer with its drift in percent."""
        broken = [row.name or "(model)" for row in self.rows if not row.holds]
        if not self.rows:
            return "nothing was observed"
        within = (
            f"BROKEN: the measured drift exceeds its bound in {', '.join(broken)}" if broken else "within its bounds"
        )
        return f"{within}; largest drift: {self.largest_drift}"

    def to_dicts(self) -> list[dict[str, Any]]:
        """The rows as plain dictionaries, for JSON or a data frame."""
        heads = self._heads()
        return [{head: value for head, value in asdict(row).items() if head in heads} for row in self.rows]

    def _heads(self) -> list[str]:
        """The figures there are to show; those of relative rules where the rule is one."""
        relative = any(row.task_drift is not None for row in self.rows)
        hidden = {"rounding"} if relative else {"rounding", "task_drift", "shrunk"}
        return [f.name for f in fields(CertificateRow) if f.name not in hidden]

    def __iter__(self) -> Iterator[CertificateRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, name: str) -> CertificateRow:
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(f"no row {name!r}; rows: {', '.join(row.name for row in self.rows)}")

    def __str__(self) -> str:
        heads = self._heads()
        body = [[_cell(getattr(row, head)) for head in heads] for row in self.rows]
        lines = [*_within([[head.replace("_", " ") for head in heads], *body]), ""]
        lines.append(self.verdict)
        if not self.holds:
            lines.append(
                "(a weight was changed other than through the guard's updates, or, with form='sgd', a gradient"
            )
            lines.append("was changed entry by entry: clipped by value, say)")
        if self.unprotected:
            count = sum(self.unprotected.values())
            lines.append(f"trainable and unprotected: {count:,} of the model's {self.parameters:,} numbers")
            names = [[name, f"{numbers:,}"] for name, numbers in self.unprotected.items()]
            lines.extend(f"  {line}" for line in _aligned(names))
        if self.outside:
            lines.append(f"outside the promise (batch statistics): {', '.join(self.outside)}")
        lines.extend(f"frozen: {name or '(model)'}: {why}" for name, why in self.skipped.items())
        for task, count in self.kept.items():
            of_model, of_weights = (count / max(1, whole) for whole in (self.parameters, self.protected_weights))
            lines.append(
                f"task {task!r} keeps {count:,} numbers of its own "
                f"({of_model:.2%} of the model, {of_weights:.2%} of the protected weights)"
            )
        if self.kept:
            lines.append("(bounds and drift are of what all tasks share; what a task keeps for itself moves no other)")
        if self.shared_directions:
            lines.append(f"private directions that all tasks share: {self.shared_directions:,} numbers, kept once")
        return "\n".join(lines)


def _cell(value: str | int | float | None) -> str:
    if value is None:
        return "-"
    if isinstance(value, str):
        return value or "(model)"
    return str(value) if isinstance(value, int) else f"{value:.3g}"


def _within(table: list[list[str]]) -> list[str]:
    """Columns in WIDTH columns of text: closer together, then without those that are wanted least, which is said.

    A name that is too long has a line of its own.
    """
    if len(_aligned(table)[0]) <= WIDTH:
        return _aligned(table)
    left_out: list[str] = []
    gap, room = 1, _room(table, 1)
    for head in ("tau", "update norm", "bound", "rms bound"):
        if room >= len(table[0][0]):
            break
        place = table[0].index(head)
        table = [line[:place] + line[place + 1 :] for line in table]
        left_out.append(head)
        gap, room = 2, _room(table, 2)
    lines = _aligned([[line[0] if len(line[0]) <= room else "", *line[1:]] for line in table], gap)
    names = [[line[0]] if len(line[0]) > room else [] for line in table]
    told = [f"(left out here: {', '.join(left_out)}; `rows` has them)"] if left_out else []
    return [*(text for name, line in zip(names, lines, strict=True) for text in [*name, line]), *told]


def _room(table: list[list[str]], gap: int) -> int:
    """Columns of text that the figures leave to the names."""
    return WIDTH - sum(gap + max(len(line[i]) for line in table) for i in range(1, len(table[0])))


def _aligned(table: list[list[str]], gap: int = 2) -> list[str]:
    """Columns of equal width: the first to the left, figures to the right."""
    widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
    lines = []
    for first, *figures in table:
        cells = [figure.rjust(width) for figure, width in zip(figures, widths[1:], strict=True)]
        lines.append((" " * gap).join([first.ljust(widths[0]), *cells]))
    return lines
