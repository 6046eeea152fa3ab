"""ACC against BWT with the Pareto front; the ceiling as a line, the paper's numbers hollow."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ness.report.front import front
from ness.report.groups import CEILINGS
from ness.report.number_format import number, printed
from ness.report.pictures.scale import Scale, around
from ness.report.table import Measured, Row

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 460, 330, 46, 16, 14, 42
NAMED = 25  # points up to which all have a name; above it only those on the front
BESIDE = (  # places for a name, the nearest first
    (9, 4, "start"), (-9, 4, "end"), (9, -7, "start"), (9, 17, "start"), (-9, -7, "end"), (-9, 17, "end"),
    *((side * far, down, anchor) for far in (24, 44, 70) for down in (4, -14, 22, -32, 40, 58, 76)
      for side, anchor in ((-1, "end"), (1, "start"))),
)  # fmt: skip
Box = tuple[float, float, float, float]  # left, top, right, bottom
SIGNS = (  # paths around (0, 0), told apart without colour
    "M-5 0a5 5 0 1 0 10 0a5 5 0 1 0-10 0z", "M-4.5-4.5h9v9h-9z", "M0-6l5.5 10h-11z", "M0-6.5l6 6.5l-6 6.5l-6-6.5z",
    "M0 6l5.5-10h-11z", "M-2-6h4v4h4v4h-4v4h-4v-4h-4v-4h4z", "M-6 0l10-5.5v11z", "M6 0l-10-5.5v11z",
)  # fmt: skip


@dataclass(frozen=True)
class Name:
    """What stands beside a point, and where there was no room, the path of a line to it."""

    x: float
    y: float
    anchor: str
    text: str
    leader: str = ""


@dataclass(frozen=True)
class Point:
    """A setting, or the paper's number for it."""

    x: float
    y: float
    sign: str
    title: str
    name: Name | None
    bars: str = ""  # a path of the deviations
    is_paper: bool = False
    on_front: bool = False


@dataclass(frozen=True)
class ScatterPicture:
    """What the template draws."""

    points: tuple[Point, ...]
    front: str
    ceilings: tuple[tuple[float, str], ...]
    x_ticks: tuple[tuple[float, str], ...]
    y_ticks: tuple[tuple[float, str], ...]
    label: str
    focusable: bool
    width: int = WIDTH
    height: int = HEIGHT
    left: int = LEFT
    right: int = WIDTH - RIGHT
    top: int = TOP
    bottom: int = HEIGHT - BOTTOM


def picture(rows: Sequence[Row], labels: Sequence[str]) -> ScatterPicture | None:
    """None where no setting has a BWT."""
    learners = [(row, label) for row, label in zip(rows, labels, strict=True) if _places(row) is not None]
    places = [place for row, _ in learners if (place := _places(row)) is not None]
    if not places:
        return None
    joint = [(row.acc[0], label) for row, label in zip(rows, labels, strict=True) if row.method == "joint" and row.acc]
    papers = [(row.paper.bwt[0], row.paper.acc[0]) for row, _ in learners if row.paper]
    reach = [_reach(row.bwt) + _reach(row.acc) for row, _ in learners]
    x = around([*(a for a, _ in papers), *(a for r in reach for a in r[:2])], LEFT, WIDTH - RIGHT, 0.1, 2.0)
    heights = [*(b for _, b in papers), *(acc for acc, _ in joint), *(b for r in reach for b in r[2:])]
    y = around(heights, HEIGHT - BOTTOM, TOP, least=2.0)
    best = front(places)
    shown = [(x(a), y(b)) for a, b in places]
    bars = [(x(a), y(d), x(b), y(c)) for a, b, c, d in reach]
    taken = [box for point, bar in zip(shown, bars, strict=True) for box in _taken(point, bar)]
    taken += [(x(a) - 6, y(b) - 6, x(a) + 6, y(b) + 6) for a, b in papers]
    names = _names(shown, [label for _, label in learners], best, taken)
    signs = {method: SIGNS[n % len(SIGNS)] for n, method in enumerate(dict.fromkeys(row.method for row, _ in learners))}
    points = [
        _point(row, label, x, y, signs[row.method], names[n], n in best) for n, (row, label) in enumerate(learners)
    ]
    points += [_paper(row, label, x, y, signs[row.method]) for row, label in learners if row.paper]
    return ScatterPicture(
        tuple(points),
        " ".join(f"{x(places[i][0]):g},{y(places[i][1]):g}" for i in best),
        tuple((y(acc), f"{label}: {acc:.1f} %") for acc, label in joint),
        tuple((x(value), f"{value:g}".replace("-", "−")) for value in x.ticks(6)),
        tuple((y(value), f"{value:g}") for value in y.ticks()),
        "ACC against BWT; on the Pareto front: " + ", ".join(learners[i][1] for i in best),
        len(learners) <= NAMED,
    )


def _places(row: Row) -> tuple[float, float] | None:
    if row.method in CEILINGS or row.bwt is None or row.acc is None:
        return None
    return row.bwt[0], row.acc[0]


def _reach(value: Measured) -> tuple[float, float]:
    """From where to where a bar of deviation goes."""
    assert value is not None
    return value[0] - (value[1] or 0.0), value[0] + (value[1] or 0.0)


def _point(row: Row, label: str, x: Scale, y: Scale, sign: str, name: Name | None, on_front: bool) -> Point:
    assert row.bwt is not None
    assert row.acc is not None
    a, b = x(row.bwt[0]), y(row.acc[0])
    bars = ""
    for axis, (mean, deviation) in ((x, row.bwt), (y, row.acc)):
        if deviation:
            low, high = axis(mean - deviation), axis(mean + deviation)
            bars += f"M{low:g} {b:g}H{high:g}" if axis is x else f"M{a:g} {low:g}V{high:g}"
    title = f"{label}: ACC {number(row.acc)} %, BWT {number(row.bwt, signed=True)} %"
    return Point(a, b, sign, title, name, bars, on_front=on_front)


def _paper(row: Row, label: str, x: Scale, y: Scale, sign: str) -> Point:
    assert row.paper is not None
    title = f"{label} in the paper: ACC {printed(row.paper.acc)} %, BWT {printed(row.paper.bwt, signed=True)} %"
    return Point(x(row.paper.bwt[0]), y(row.paper.acc[0]), sign, title, None, is_paper=True)


def _names(
    places: Sequence[tuple[float, float]], labels: Sequence[str], best: Sequence[int], taken: Sequence[Box]
) -> list[Name | None]:
    """A name beside each point where there is room; those on the front choose first."""
    names: list[Name | None] = [None] * len(places)
    boxes = list(taken)
    wanted = list(best) if len(places) > NAMED else [*best, *(i for i in range(len(places)) if i not in best)]
    for i in wanted:
        text = labels[i] if len(labels[i]) <= 28 else labels[i][:27] + "…"
        found = next((one for one in _tries(*places[i], text) if _is_free(one[1], boxes)), None)
        if found is not None:
            names[i] = found[0]
            boxes.append(found[1])
    return names


def _tries(a: float, b: float, text: str) -> Iterator[tuple[Name, Box]]:
    """Names beside the point (a, b) and the boxes they fill."""
    wide = 7.6 * len(text)
    for dx, dy, anchor in BESIDE:
        x, y = round(a + dx, 1), round(b + dy, 1)
        left = x if anchor == "start" else x - wide
        leader = f"M{a:g} {b:g}L{x - (2 if dx > 0 else -2):g} {y - 4:g}" if abs(dx) > 9 else ""
        yield Name(x, y, anchor, text, leader), (left, y - 10, left + wide, y + 3)


def _is_free(box: Box, taken: Sequence[Box]) -> bool:
    inside = box[0] >= LEFT and box[2] <= WIDTH and box[1] >= 0 and box[3] <= HEIGHT - BOTTOM
    return inside and not any(_meet(box, other) for other in taken)


def _taken(point: tuple[float, float], bars: Box) -> list[Box]:
    """What a point covers: its sign and its two bars of deviation."""
    a, b = point
    return [(a - 6, b - 6, a + 6, b + 6), (bars[0], b - 2, bars[2], b + 2), (a - 2, bars[1], a + 2, bars[3])]


def _meet(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
