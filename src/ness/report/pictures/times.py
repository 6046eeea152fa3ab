"""Where the time went: one bar a setting, a piece a task."""

from collections.abc import Sequence
from dataclasses import dataclass

from ness.report.number_format import duration
from ness.report.pictures.scale import Scale

WIDTH, LINE, LEFT, RIGHT = 460, 24, 150, 76


@dataclass(frozen=True)
class Bar:
    """One setting: its name, the path of its odd and of its even pieces, and its sum."""

    y: int
    name: str
    odd: str
    even: str
    end: float
    total: str
    title: str


@dataclass(frozen=True)
class TimesPicture:
    """What the template draws."""

    bars: tuple[Bar, ...]
    label: str
    height: int
    width: int = WIDTH
    left: int = LEFT


def picture(seconds: Sequence[Sequence[float]], labels: Sequence[str]) -> TimesPicture | None:
    """None where no run recorded its times."""
    known = [(pieces, label) for pieces, label in zip(seconds, labels, strict=True) if pieces]
    longest = max((sum(pieces) for pieces, _ in known), default=0.0)
    if longest <= 0:
        return None
    x = Scale(0.0, longest, LEFT, WIDTH - RIGHT)
    bars = tuple(_bar(n, pieces, label, x) for n, (pieces, label) in enumerate(known))
    return TimesPicture(bars, f"seconds of a run; the longest takes {duration(longest)}", LINE * len(known) + 4)


def _bar(line: int, pieces: Sequence[float], label: str, x: Scale) -> Bar:
    y, start, paths = line * LINE + 4, 0.0, ["", ""]
    for task, piece in enumerate(pieces):
        left, right = x(start), x(start + piece)
        paths[task % 2] += f"M{left:g} {y}H{right:g}V{y + 16}H{left:g}z"
        start += piece
    name = label if len(label) <= 22 else label[:21] + "…"
    each = ", ".join(f"{piece:.1f}" for piece in pieces)
    return Bar(y, name, paths[0], paths[1], x(start) + 5, duration(start), f"{label}: {each} s")
