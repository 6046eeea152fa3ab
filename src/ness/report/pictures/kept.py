"""ACC against what a task keeps for itself: the course over k, and what stands apart from it."""

import math
from collections.abc import Sequence
from itertools import pairwise

from ness.report.pictures.drawing import CIRCLE, SIGNS, Group, Mark, Picture, Shape, Words, legend, text_width, titled
from ness.report.pictures.scale import Scale, around
from ness.report.storage_cost import Keeping, Point

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 520, 330, 46, 16, 24, 44
LEAST = 0.25  # percent, where the logarithmic axis begins; left of it there is room for nothing at all
BESIDE = ((-9, -7), (9, 15), (9, -7), (-9, 15), (10, 4), (-10, 4), (0, -14), (0, 22), (24, -22), (-24, -22), (24, 30))
Box = tuple[float, float, float, float]


def picture(found: Keeping) -> Picture:
    """Up and to the left is better: more accuracy for less that is kept."""
    course = sorted((one for one in found.points if not one.apart), key=lambda one: one.percent)
    apart = [one for one in found.points if one.apart]
    x, least = _shares([one.percent for one in found.points])
    ends = [one.acc + way * (one.deviation or 0.0) for one in found.points for way in (-1, 1)]
    y = around(ends, HEIGHT - BOTTOM, TOP, 0.2, 2.0)

    def at(one: Point) -> tuple[float, float]:
        return (x(max(one.percent, least)), y(one.acc))

    marks: list[Mark] = [*_frame(x, y, least)]
    if len(course) > 1:
        marks.append(Shape("M" + "L".join(f"{a:g} {b:g}" for a, b in map(at, course)), "line-h0"))
    taken = [box for one in found.points for box in _boxes(*at(one), y, one)]
    taken += [box for one, other in pairwise(map(at, course)) for box in _along(one, other)]
    entries = [(CIRCLE, "dot-h0", "NESS+, k private directions per layer")]
    for one in course:
        marks.append(_point(one, at(one), y, "h0", CIRCLE, _name(at(one), label(one), taken)))
    for n, one in enumerate(apart, start=1):
        colour, sign = f"h{n % 10}", SIGNS[n % len(SIGNS)]
        marks.append(_point(one, at(one), y, colour, sign, ()))
        entries.append((sign, f"dot-{colour}", f"{one.name}, {label(one)}"))
    listed, room = legend(entries, WIDTH - LEFT, HEIGHT + 2)
    asked = max(one.asked for one in found.points)
    words = f"ACC against what a task keeps; mean and sample deviation over {asked} seed{'s' if asked > 1 else ''}"
    whole = Picture(WIDTH, HEIGHT + room + 4, words, (*marks, Group(listed, (LEFT - 10.0, 0.0))))
    return titled(whole, found.title)


def label(one: Point) -> str:
    """'k = 8'; and which k is the default, and how many seeds there are where some are missing."""
    k = f"k = {one.directions}{' (default)' if one.default and not one.apart else ''}"
    return k if one.seeds == one.asked else f"{k}, {one.seeds} of {one.asked} seeds"


def _shares(shares: Sequence[float]) -> tuple[Scale, float]:
    """A logarithmic axis of percents; what is below its beginning stands at its left end."""
    nothing = min(shares) < LEAST
    low, high = LEAST / 2 if nothing else LEAST, max(16.0, 1.5 * max(shares))
    return Scale(low, high, LEFT, WIDTH - RIGHT, log=True), low


def _frame(x: Scale, y: Scale, least: float) -> list[Mark]:
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    powers = [LEAST * 2**n for n in range(math.ceil(math.log2(x.high / LEAST)) + 1) if LEAST * 2**n <= x.high]
    axis: list[Mark] = [Words(LEFT - 6, y(value) + 3.5, f"{value:g}", "", "end") for value in y.ticks()]
    axis += [Words(x(value), bottom + 14, f"{value:g}", "", "middle") for value in powers]
    if least < LEAST:
        axis.append(Words(x(least), bottom + 14, "0", "", "middle"))
    name = "what a task keeps for itself (% of the shared convolution and linear weights)"
    axis.append(Words((LEFT + right) / 2, HEIGHT - 8, name, "", "middle"))
    axis.append(Words(11, (TOP + bottom) / 2, "ACC (%) at the end", "", "middle", turned=True))
    grid = "".join(f"M{LEFT} {y(value):g}H{right}" for value in y.ticks())
    return [Shape(grid, "grid"), Group(tuple(axis), style="axis")]


def _point(one: Point, at: tuple[float, float], y: Scale, colour: str, sign: str, named: tuple[Mark, ...]) -> Mark:
    a, _ = at
    bars = ""
    if one.deviation:
        low, high = y(one.acc - one.deviation), y(one.acc + one.deviation)
        bars = f"M{a:g} {low:g}V{high:g}M{a - 3:g} {low:g}h6M{a - 3:g} {high:g}h6"
    title = f"{one.name}: keeps {one.percent:.2f} %, ACC {one.acc:.2f}"
    return Group((Shape(bars, f"line-{colour}"), Group((Shape(sign, f"dot-{colour}"),), at), *named), title=title)


def _name(at: tuple[float, float], text: str, taken: list[Box]) -> tuple[Mark, ...]:
    """The label where it covers least of what is there; it is added to what is."""
    half = text_width(text) / 2
    boxes = []
    for dx, dy in BESIDE:
        shift = dx + (half if dx > 0 else -half if dx < 0 else 0)
        middle = min(max(at[0] + shift, LEFT + half), WIDTH - half)
        boxes.append((middle - half, at[1] + dy - 10, middle + half, at[1] + dy + 3))
    best = min(boxes, key=lambda box: sum(_common(box, other) for other in taken) + _outside(box))
    taken.append(best)
    return (Words((best[0] + best[2]) / 2, best[3] - 3, text, "name", "middle"),)


def _boxes(a: float, b: float, y: Scale, one: Point) -> list[Box]:
    reach = abs(y(one.acc + (one.deviation or 0.0)) - b)
    return [(a - 6, b - 6, a + 6, b + 6), (a - 3, b - reach, a + 3, b + reach)]


def _along(one: tuple[float, float], other: tuple[float, float]) -> list[Box]:
    """Small boxes along the line between two points."""
    steps = [(n / 30, 1 - n / 30) for n in range(31)]
    places = [(p * one[0] + q * other[0], p * one[1] + q * other[1]) for p, q in steps]
    return [(x - 1, y - 1, x + 1, y + 1) for x, y in places]


def _common(one: Box, other: Box) -> float:
    wide, high = min(one[2], other[2]) - max(one[0], other[0]), min(one[3], other[3]) - max(one[1], other[1])
    return max(wide, 0.0) * max(high, 0.0)


def _outside(box: Box) -> float:
    return 100.0 * (max(0.0, -box[1]) + max(0.0, box[3] - (HEIGHT - BOTTOM)))
