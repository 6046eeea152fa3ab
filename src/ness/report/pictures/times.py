"""Where the time went: one bar for each setting, a piece for each task; one picture for each device."""

from collections.abc import Sequence

from ness.report.number_format import duration
from ness.report.pictures.drawing import Group, Mark, Picture, Shape, Words, shortened, text_width
from ness.report.pictures.scale import Scale

WIDTH, LINE, RIGHT, NAME = 460, 24, 76, 26  # NAME: characters of a setting's name


def picture(seconds: Sequence[Sequence[float]], labels: Sequence[str], device: str = "") -> Picture | None:
    """The bars of settings that ran on one device; None where no run recorded its times.

    Args:
        seconds: of each task, for each setting.
        labels: what each setting is called.
        device: what they ran on: times of different devices do not belong in one picture.
    """
    known = [(pieces, label) for pieces, label in zip(seconds, labels, strict=True) if pieces]
    longest = max((sum(pieces) for pieces, _ in known), default=0.0)
    if longest <= 0:
        return None
    left = max(text_width(shortened(label, NAME)) for _, label in known) + 12
    x = Scale(0.0, longest, left, WIDTH - RIGHT)
    bars = tuple(_bar(n, pieces, label, x) for n, (pieces, label) in enumerate(known))
    where = f" on {device}" if device else ""
    label = f"seconds of a run{where}; the longest takes {duration(longest)}"
    return Picture(WIDTH, LINE * len(known) + 4, label, bars, "chart times")


def _bar(line: int, pieces: Sequence[float], label: str, x: Scale) -> Mark:
    y, start, paths = line * LINE + 4, 0.0, ["", ""]
    for task, piece in enumerate(pieces):
        left, right = x(start), x(start + piece)
        paths[task % 2] += f"M{left:g} {y}H{right:g}V{y + 16}H{left:g}Z"
        start += piece
    each = ", ".join(f"{piece:.1f}" for piece in pieces)
    marks = (
        Words(x.start - 8, y + 12, shortened(label, NAME), "name", "end"),
        Shape(paths[0], "odd"),
        Shape(paths[1], "even"),
        Words(x(start) + 5, y + 12, duration(start), "name"),
    )
    return Group(marks, title=f"{label}: {each} s")
