"""ACC against BWT with the Pareto front; the ceiling as a line, the paper's numbers hollow."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ness.report.groups import CEILINGS
from ness.report.number_format import number, printed
from ness.report.pictures.drawing import Group, Mark, Picture, Shape, Words, footnotes, legend, shortened, text_width
from ness.report.pictures.scale import Scale, around, far_off
from ness.report.table import Measured, Row

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 460, 330, 46, 16, 14, 42
SMALL, LOW = 150, 104  # the overview, where some are far off
NAMED = 25  # points up to which each can be reached with the keyboard
BESIDE = (  # places for a name, the nearest first
    (9, 4, "start"), (-9, 4, "end"), (9, -7, "start"), (9, 17, "start"), (-9, -7, "end"), (-9, 17, "end"),
    *((side * far, down, anchor) for far in (24, 44, 70) for down in (4, -14, 22, -32, 40, 58, 76)
      for side, anchor in ((-1, "end"), (1, "start"))),
)  # fmt: skip
Box = tuple[float, float, float, float]  # left, top, right, bottom
Place = tuple[float, float]  # (BWT, ACC)


@dataclass(frozen=True)
class _Axes:
    """Where BWT and ACC go in a panel."""

    x: Scale
    y: Scale

    def holds(self, place: Place) -> bool:
        """Whether the panel shows this place."""
        return self.x.low <= place[0] <= self.x.high and self.y.low <= place[1] <= self.y.high

    def at(self, place: Place) -> tuple[float, float]:
        return self.x(place[0]), self.y(place[1])


def front(points: Sequence[Place]) -> list[int]:
    """The Pareto front: the indices of (BWT, ACC) points that none other equals or beats in both, by rising BWT.

    >>> front([(-10.0, 60.0), (0.0, 70.0), (-1.0, 75.0), (-2.0, 74.0)])
    [2, 1]
    """
    order = sorted(range(len(points)), key=lambda i: (-points[i][0], -points[i][1]))
    best, kept = float("-inf"), list[int]()
    for i in order:
        same = kept and points[i] == points[kept[-1]]
        if points[i][1] > best or same:
            kept.append(i)
            best = points[i][1]
    return kept[::-1]


def picture(
    rows: Sequence[Row], labels: Sequence[str], looks: Sequence[tuple[str, str]], notes: Sequence[str] = ()
) -> Picture | None:
    """Up and to the right is better; None where no setting has a BWT.

    Args:
        rows: the settings of a benchmark.
        labels: what each is called.
        looks: (colour, sign) of each.
        notes: lines below it.
    """
    every = zip(rows, labels, looks, strict=True)
    learners = [(row, label, look, place) for row, label, look in every if (place := _place(row)) is not None]
    if not learners:
        return None
    places = [place for *_, place in learners]
    away = far_off(places)
    joint = [(row.acc[0], label) for row, label in zip(rows, labels, strict=True) if row.method == "joint" and row.acc]
    axes = _axes([(row, place) for n, (row, _, _, place) in enumerate(learners) if n not in away], joint)
    best = front(places)
    names = _names(axes, [one for n, one in enumerate(learners) if n not in away], [i for i in best if i not in away])
    marks: list[Mark] = [*_frame(axes), *_ceilings(axes, joint)]
    inside = [axes.at(places[i]) for i in best if axes.holds(places[i])]
    marks.append(Shape("M" + "L".join(f"{a:g} {b:g}" for a, b in inside) if len(inside) > 1 else "", "front"))
    for n, (row, label, look, place) in enumerate(learners):
        if axes.holds(place):
            named = names.get(label, ())
            marks.append(_point(row, label, look, axes, named, n in best, len(learners) <= NAMED))
    for row, label, look, _ in learners:
        if row.paper and axes.holds((row.paper.bwt[0], row.paper.acc[0])):
            marks.append(_paper(row, label, look, axes))
    below, height = _below(learners, names, away, places)
    told, more = footnotes(notes, WIDTH - LEFT, HEIGHT + height)
    label = "ACC against BWT; on the Pareto front: " + ", ".join(learners[i][1] for i in best)
    return Picture(
        WIDTH, HEIGHT + height + more, label, (*marks, *below, Group(told, (LEFT - 10.0, 0.0))), "chart scatter"
    )


def _place(row: Row) -> Place | None:
    if row.method in CEILINGS or row.bwt is None or row.acc is None:
        return None
    return row.bwt[0], row.acc[0]


def _axes(shown: Sequence[tuple[Row, Place]], joint: Sequence[tuple[float, str]]) -> _Axes:
    """Room for every point with its bars, the ceiling, and the paper's numbers that are not far off."""
    wide = [end for row, _ in shown for end in _reach(row.bwt)]
    high = [end for row, _ in shown for end in _reach(row.acc)]
    papers = [(row.paper.bwt[0], row.paper.acc[0]) for row, _ in shown if row.paper]
    near = far_off([*papers, *(place for _, place in shown)])
    papers = [paper for n, paper in enumerate(papers) if n not in near]
    x = around([*wide, *(a for a, _ in papers)], LEFT, WIDTH - RIGHT, 0.1, 2.0)
    y = around([*high, *(b for _, b in papers), *(acc for acc, _ in joint)], HEIGHT - BOTTOM, TOP, least=2.0)
    return _Axes(x, y)


def _reach(value: Measured) -> tuple[float, float]:
    """From where to where a bar of deviation goes."""
    assert value is not None
    return value[0] - (value[1] or 0.0), value[0] + (value[1] or 0.0)


def _frame(axes: _Axes) -> Iterator[Mark]:
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    lines = "".join(f"M{LEFT} {axes.y(value):g}H{right}" for value in axes.y.ticks())
    lines += "".join(f"M{axes.x(value):g} {TOP}V{bottom}" for value in axes.x.ticks(6))
    yield Shape(lines, "grid")
    ticks = [Words(LEFT - 6, axes.y(value) + 3.5, f"{value:g}", "", "end") for value in axes.y.ticks()]
    ticks += [
        Words(axes.x(value), bottom + 14, f"{value:g}".replace("-", "−"), "", "middle") for value in axes.x.ticks(6)
    ]
    ticks.append(Words((LEFT + right) / 2, HEIGHT - 6, "BWT (%): change of earlier tasks →", "", "middle"))
    ticks.append(Words(11, bottom / 2, "ACC (%) at the end →", "", "middle", turned=True))
    yield Group(tuple(ticks), style="axis")


def _ceilings(axes: _Axes, joint: Sequence[tuple[float, str]]) -> Iterator[Mark]:
    for acc, label in joint:
        y = axes.y(acc)
        yield Shape(f"M{LEFT} {y:g}H{WIDTH - RIGHT}", "ceiling")
        yield Words(LEFT + 4, y - 4, f"{label}: {acc:.1f} %", "axis")


def _point(
    row: Row, label: str, look: tuple[str, str], axes: _Axes, named: Sequence[Mark], best: bool, focusable: bool
) -> Mark:
    assert row.bwt is not None
    assert row.acc is not None
    colour, sign = look
    a, b = axes.at((row.bwt[0], row.acc[0]))
    bars = ""
    for axis, (mean, deviation) in ((axes.x, row.bwt), (axes.y, row.acc)):
        if deviation:
            low, high = axis(mean - deviation), axis(mean + deviation)
            bars += f"M{low:g} {b:g}H{high:g}" if axis is axes.x else f"M{a:g} {low:g}V{high:g}"
    title = f"{label}: ACC {number(row.acc)} %, BWT {number(row.bwt, signed=True)} %"
    marks = (Shape(bars, f"line-{colour}"), Group((Shape(sign, f"dot-{colour}"),), (a, b)), *named)
    return Group(marks, title=title, name="point best-point" if best else "point", focusable=focusable)


def _paper(row: Row, label: str, look: tuple[str, str], axes: _Axes) -> Mark:
    assert row.paper is not None
    title = f"{label} in the paper: ACC {printed(row.paper.acc)} %, BWT {printed(row.paper.bwt, signed=True)} %"
    place = axes.at((row.paper.bwt[0], row.paper.acc[0]))
    return Group((Group((Shape(look[1], f"hollow-{look[0]}"),), place),), title=title, name="point paper-point")


_Learner = tuple[Row, str, tuple[str, str], Place]


def _names(axes: _Axes, shown: Sequence[_Learner], best: Sequence[int]) -> dict[str, tuple[Mark, ...]]:
    """A name beside each point where there is room, by label; those on the front choose first."""
    boxes = [box for row, _, _, place in shown for box in _taken(row, axes, place)]
    papers = [axes.at((row.paper.bwt[0], row.paper.acc[0])) for row, *_ in shown if row.paper]
    boxes += [(a - 6, b - 6, a + 6, b + 6) for a, b in papers]
    on_front = {place for n, (*_, place) in enumerate(shown) if n in best}
    names: dict[str, tuple[Mark, ...]] = {}
    for n in sorted(range(len(shown)), key=lambda i: shown[i][3] not in on_front):
        _, label, _, place = shown[n]
        if len(shown) > NAMED and place not in on_front:
            continue
        style = "best" if place in on_front else "name"
        for found, box in _tries(*axes.at(place), shortened(label, 28), style):
            if _is_free(box, boxes):
                names[label] = found
                boxes.append(box)
                break
    return names


def _tries(a: float, b: float, text: str, style: str) -> Iterator[tuple[tuple[Mark, ...], Box]]:
    """Names beside the point (a, b) and the boxes they fill."""
    wide = text_width(text) + 2
    for dx, dy, anchor in BESIDE:
        x, y = round(a + dx, 1), round(b + dy, 1)
        left = x if anchor == "start" else x - wide
        leader = f"M{a:g} {b:g}L{x - (2 if dx > 0 else -2):g} {y - 4:g}" if abs(dx) > 9 else ""
        words = Words(x, y, text, style, anchor)
        yield (Shape(leader, "leader"), words) if leader else (words,), (left, y - 10, left + wide, y + 3)


def _is_free(box: Box, taken: Sequence[Box]) -> bool:
    inside = box[0] >= LEFT and box[2] <= WIDTH and box[1] >= 0 and box[3] <= HEIGHT - BOTTOM
    return inside and not any(_meet(box, other) for other in taken)


def _taken(row: Row, axes: _Axes, place: Place) -> list[Box]:
    """What a point covers: its sign and its two bars of deviation."""
    a, b = axes.at(place)
    left, right = (axes.x(end) for end in _reach(row.bwt))
    low, high = (axes.y(end) for end in _reach(row.acc))
    return [(a - 6, b - 6, a + 6, b + 6), (left, b - 2, right, b + 2), (a - 2, high, a + 2, low)]


def _meet(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _below(
    learners: Sequence[_Learner], names: dict[str, tuple[Mark, ...]], away: set[int], places: Sequence[Place]
) -> tuple[list[Mark], float]:
    """Who is who, unless all are named beside their points; and where some are far off, all points in small."""
    marks: list[Mark] = []
    height = 0.0
    if any(label not in names for _, label, *_ in learners):
        width = WIDTH - LEFT - (SMALL + 10 if away else 0)
        ranked = sorted(learners, key=lambda one: -one[3][1])  # the best ACC first
        entries = [(sign, f"dot-{colour}", label) for _, label, (colour, sign), _ in ranked]
        listed, height = legend(entries, width, HEIGHT + 6)
        marks.append(Group(listed, (LEFT - 10.0, 0.0)))
    if away:
        marks.append(Group(tuple(_overview(learners, away, places)), (WIDTH - SMALL - 4.0, HEIGHT + 8.0)))
        height = max(height, LOW + 26.0)
    return marks, height + 8 if height else 0.0


def _overview(learners: Sequence[_Learner], away: set[int], places: Sequence[Place]) -> Iterator[Mark]:
    """Every point in small, those that the large panel leaves out with their names, and a frame around the rest."""
    x = around([a for a, _ in places], 8, SMALL - 8, 0.06, 2.0)
    y = around([b for _, b in places], LOW - 8, 24, 0.06, 2.0)
    yield Words(0, 10, "all of them, in small", "axis")
    yield Shape(f"M0 16h{SMALL}v{LOW - 16}h-{SMALL}Z", "grid")
    rest = [(x(a), y(b)) for n, (a, b) in enumerate(places) if n not in away]
    left, right = min(a for a, _ in rest) - 6, max(a for a, _ in rest) + 6
    top, bottom = min(b for _, b in rest) - 6, max(b for _, b in rest) + 6
    yield Shape(f"M{left:g} {top:g}H{right:g}V{bottom:g}H{left:g}Z", "frame")
    named: list[float] = []
    for n in sorted(range(len(learners)), key=lambda i: places[i][1]):  # the farthest first
        row, label, (colour, sign), place = learners[n]
        a, b = x(place[0]), y(place[1])
        title = f"{label}: ACC {number(row.acc)} %, BWT {number(row.bwt, signed=True)} %"
        marks: list[Mark] = [Group((Shape(sign, f"dot-{colour}"),), (a, b))]
        if n in away and all(abs(b - other) > 12 for other in named):
            text = shortened(label, int((SMALL - 20) / (0.6 * 11.5)))
            left_half = a < SMALL / 2
            marks.append(Words(a + (8 if left_half else -8), b + 4, text, "name", "start" if left_half else "end"))
            named.append(b)
        yield Group(tuple(marks), title=title, name="point")
