"""Charts of lines over tasks: courses, mean accuracy so far, free directions, drift against its bound."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ness.lab.runs.metrics import Matrix
from ness.report.certificates import Promise, layers, limit_name
from ness.report.pictures.drawing import (
    Group,
    Mark,
    Picture,
    Shape,
    Words,
    footnotes,
    shortened,
    text_width,
)  # fmt: skip
from ness.report.pictures.scale import Bent, Scale, around, far_off, powers_around

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 340, 210, 40, 22, 10, 34
SHADES = 6  # classes k0 … k5 from the first line to the last
NAME = 30  # characters of a name beside a line
DOT = "M-2.6 0C-2.6-1.4-1.4-2.6 0-2.6C1.4-2.6 2.6-1.4 2.6 0C2.6 1.4 1.4 2.6 0 2.6C-1.4 2.6-2.6 1.4-2.6 0Z"


@dataclass(frozen=True)
class Line:
    """One line: its points, its colour, and what it is called at its end and when pointed at."""

    points: tuple[tuple[float, float], ...]
    colour: str
    title: str
    end: str = ""
    sign: str = DOT
    everywhere: bool = False  # a sign at every point, not at the first alone
    dashed: bool = False


def axis_of(matrices: Sequence[Matrix]) -> Scale:
    """One axis of accuracy for several charts, so that they can be compared."""
    known = [value for matrix in matrices for row in matrix for value in row if value is not None]
    return around(known, HEIGHT - BOTTOM, TOP, least=10.0)


def courses(matrix: Matrix, label: str, names: Sequence[str], y: Scale) -> Picture | None:
    """The accuracy of each task from when it was learnt to the end; None for tasks learnt at once."""
    if len(matrix) < 2:
        return None
    tasks = len(matrix)
    lines = []
    for i in range(tasks):
        course = [(t + 1.0, value) for t in range(i, tasks) if (value := matrix[t][i]) is not None]
        title = f"task {i + 1}, {names[i]}: {course[0][1]:.1f} → {course[-1][1]:.1f} %"
        lines.append(Line(tuple(course), _colour(i, tasks), title, str(i + 1)))
    return _chart(lines, (1, tasks), y, "after task", "accuracy (%)", label)


def averages(
    matrices: Sequence[Matrix],
    names: Sequence[str],
    looks: Sequence[tuple[str, str]],
    label: str,
    notes: Sequence[str] = (),
) -> Picture:
    """Mean accuracy over the tasks seen so far, a line for each method on one axis; its name at its end.

    Args:
        matrices: of methods that learn task after task, (tasks, tasks) in percent.
        names: of the methods, in the same order.
        looks: (colour, sign) of each.
        label: what it shows, in words.
        notes: lines below it.
    """
    lines = []
    for matrix, name, (colour, sign) in zip(matrices, names, looks, strict=True):
        means = [_mean(row[: t + 1]) for t, row in enumerate(matrix)]
        points = tuple((t + 1.0, value) for t, value in enumerate(means))
        title = f"{name}: {means[0]:.1f} % after the first task, {means[-1]:.1f} % at the end"
        lines.append(Line(points, colour, title, shortened(name, NAME), sign, everywhere=True))
    height = max(260.0, 14.0 * len(lines) + TOP + BOTTOM)
    y = _axis_of_lines(lines, height - BOTTOM)
    room = max(text_width(line.end) for line in lines) + 20
    tasks = max(len(matrix) for matrix in matrices)
    drawn = _chart(lines, (1, tasks), y, "after task", "mean accuracy over the tasks so far (%)", label, room, 12.5)
    bend: list[Mark] = []
    if isinstance(y, Bent):
        right = drawn.width - room
        bend = [Shape(f"M{LEFT} {y.place:g}H{right:g}", "frame")]
        bend.append(Words(LEFT + 4, y.place + 12, "below: drawn smaller", "axis"))
    told, more = footnotes(notes, drawn.width, drawn.height)
    return replace(drawn, height=drawn.height + more, marks=(*drawn.marks, *bend, Group(told, (4.0, 0.0))))


def _axis_of_lines(lines: Sequence[Line], bottom: float) -> Scale:
    """An axis of all values; where a few lines end far below the others, their part of it is a quarter."""
    values = [[value for _, value in line.points] for line in lines]
    low, high = min(map(min, values)), max(map(max, values))
    away = far_off([(0.0, course[-1]) for course in values])
    rest = [value for n, course in enumerate(values) for value in course if n not in away]
    if not away or high - low < 2 * (high - min(rest)):
        return around([low, high], bottom, TOP, least=4.0)
    margin = 0.06 * (high - min(rest))
    place = bottom - 0.25 * (bottom - TOP)
    return Bent(low - 2.0, high + margin, bottom, TOP, False, min(rest) - margin, place)


def free(found: Sequence[Promise], label: str, named: bool = False) -> Picture:
    """The share of each layer's directions that was free for a task; `named`: with the layers' names beside them."""
    y = Scale(0, 100, HEIGHT - BOTTOM, TOP)

    def title(one: Promise) -> str:
        return f"{one.layer}: rank {one.rank:.0f} of {one.fan_in} after task {one.task}"

    lines = _by_layer(found, found, lambda one: 100 * one.rank / one.fan_in, title, named=named)
    return _chart(lines, _ends(found), y, "task", "free directions (%)", label, _room(lines) if named else RIGHT)


def drift(found: Sequence[Promise], label: str, named: bool = False) -> Picture | None:
    """The measured drift of each layer, and dashed its bound; None where nothing moved."""
    moved = [one for one in found if one.drift > 0 and one.limit > 0]
    if not moved:
        return None
    y = powers_around([value for one in moved for value in (one.drift, one.limit)], HEIGHT - BOTTOM, TOP)
    bound = limit_name(found)

    def measured(one: Promise) -> str:
        return f"{one.layer}: drift {one.drift:.3g}, {100 * one.relative:.2g} % of its output, after task {one.task}"

    def promised(one: Promise) -> str:
        return f"{one.layer}: {bound} {one.limit:.3g} after task {one.task}"

    lines = _by_layer(moved, found, lambda one: one.drift, measured, named=named)
    limits = _by_layer(moved, found, lambda one: one.limit, promised, dashed=True)
    room = _room(lines) if named else RIGHT
    return _chart([*limits, *lines], _ends(found), y, "after task", f"drift; dashed: {bound}", label, room)


def _mean(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / len(known)


def _ends(found: Sequence[Promise]) -> tuple[int, int]:
    return found[0].task, found[-1].task


def _room(lines: Sequence[Line]) -> float:
    return max((text_width(line.end, 10.5) for line in lines), default=0.0) + 16


def _colour(number: int, count: int) -> str:
    return f"k{number * (SHADES - 1) // max(1, count - 1)}"


def _by_layer(
    moved: Sequence[Promise],
    found: Sequence[Promise],
    value: Callable[[Promise], float],
    title: Callable[[Promise], str],
    dashed: bool = False,
    named: bool = False,
) -> list[Line]:
    """One line for each layer; its number among all layers, or its name, stands at its end unless it is dashed."""
    order, lines = layers(found), []
    for name in layers(moved):
        mine = [one for one in moved if one.layer == name]
        at = order.index(name)
        end = "" if dashed else shortened(name, NAME) if named else str(at + 1)
        points = tuple((float(one.task), value(one)) for one in mine)
        lines.append(Line(points, _colour(at, len(order)), title(mine[-1]), end, dashed=dashed))
    return lines


def _chart(
    lines: Sequence[Line],
    tasks: tuple[int, int],
    y: Scale,
    x_label: str,
    y_label: str,
    label: str,
    room: float = RIGHT,
    apart: float = 10.0,
) -> Picture:
    """Axes, lines, and at the right, in `room` pixels, what they are called, `apart` from one another."""
    width, bottom = WIDTH - RIGHT + room, y.start
    right = width - room
    x = Scale(tasks[0], max(tasks[1], tasks[0] + 1), LEFT + 6, right - 6)
    grid = "".join(f"M{LEFT} {y(value):g}H{right:g}" for value in y.ticks())
    marks: list[Mark] = [Shape(grid, "grid")]
    axis: list[Mark] = [
        Words(LEFT - 5, y(value) + 3.5, power_of_ten(value) if y.log else f"{value:g}", "", "end")
        for value in y.ticks()
    ]
    every = 1 + (tasks[1] - tasks[0]) // 12
    axis += [Words(x(task), bottom + 14, str(task), "", "middle") for task in range(tasks[0], tasks[1] + 1, every)]
    axis.append(Words((LEFT + right) / 2, bottom + BOTTOM - 4, x_label, "", "middle"))
    axis.append(Words(10, (TOP + bottom) / 2, y_label, "", "middle", turned=True))
    marks.append(Group(tuple(axis), style="axis"))
    called = [line for line in lines if line.end]
    heights = spread([y(line.points[-1][1]) for line in called], apart, TOP, bottom)
    ends = {id(line): height for line, height in zip(called, heights, strict=True)}
    for line in lines:
        places = [(x(a), y(b)) for a, b in line.points]
        path = "M" + "L".join(f"{a:g} {b:g}" for a, b in places)
        inside: list[Mark] = [Shape(path, f"{'dashed' if line.dashed else 'line'}-{line.colour}")]
        dot = f"{'hollow' if line.dashed else 'dot'}-{line.colour}"
        inside += [Group((Shape(line.sign, dot),), place) for place in (places if line.everywhere else places[:1])]
        if line.end:
            a, b, height = *places[-1], ends[id(line)]
            if abs(height - b) > apart / 2:
                inside.append(Shape(f"M{a + 5:g} {b:g}L{right + 5:g} {height:g}", "leader"))
            inside.append(Words(max(a + 6, right + 7 if line.everywhere else 0), height + 3.5, line.end,
                                f"end-{line.colour}"))  # fmt: skip
        marks.append(Group(tuple(inside), title=line.title, name="series"))
    return Picture(width, bottom + BOTTOM, label, tuple(marks), "chart lines")


def spread(places: Sequence[float], apart: float, low: float, high: float) -> list[float]:
    """The places moved as little as needed to stand `apart` from one another, within low … high as far as they fit.

    >>> spread([50.0, 52.0, 90.0], 10.0, 0.0, 100.0)
    [50.0, 60.0, 90.0]
    """
    order = sorted(range(len(places)), key=lambda i: places[i])
    apart = min(apart, (high - low) / max(1, len(places) - 1))
    out = list(places)
    for before, i in zip([None, *order], order, strict=False):
        out[i] = out[i] if before is None else max(out[i], out[before] + apart)
    for after, i in zip([None, *reversed(order)], reversed(order), strict=False):
        out[i] = min(out[i], high if after is None else out[after] - apart)
    return [round(place, 1) for place in out]


def power_of_ten(value: float) -> str:
    """A power of ten as it is written.

    >>> power_of_ten(0.001), power_of_ten(1.0), power_of_ten(1000.0)
    ('10⁻³', '1', '10³')
    """
    exponent = round(math.log10(value))
    return (
        f"{value:g}"
        if 0 <= exponent <= 2
        else "10" + str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    )
