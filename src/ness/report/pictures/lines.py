"""A chart of lines over tasks: the course of accuracies, free directions, drift against its bound."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ness.lab.runs.metrics import Matrix
from ness.report.certificates import Promise, layers, limit_name
from ness.report.pictures.scale import Scale, around, powers_around

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 340, 210, 40, 22, 10, 34
SHADES = 6  # classes k0 … k5 from the first line to the last
Tick = tuple[float, str]


@dataclass(frozen=True)
class Line:
    """One line: its points as SVG wants them, its colour, and what it is called at its end and when pointed at."""

    points: str
    colour: str
    title: str
    end: tuple[float, float, str] | None
    dots: tuple[tuple[float, float], ...] = ()
    dashed: bool = False


@dataclass(frozen=True)
class LinesPicture:
    """What the template draws."""

    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    lines: tuple[Line, ...]
    x_label: str
    y_label: str
    label: str
    width: int = WIDTH
    height: int = HEIGHT
    left: int = LEFT
    right: int = WIDTH - RIGHT
    bottom: int = HEIGHT - BOTTOM


def axis_of(matrices: Sequence[Matrix]) -> Scale:
    """One axis of accuracy for several charts, so that they can be compared."""
    known = [value for matrix in matrices for row in matrix for value in row if value is not None]
    return around(known, HEIGHT - BOTTOM, TOP, least=10.0)


def courses(matrix: Matrix, label: str, names: Sequence[str], y: Scale) -> LinesPicture | None:
    """The accuracy of each task from when it was learnt to the end; None for tasks learnt at once."""
    if len(matrix) < 2:
        return None
    tasks = len(matrix)
    x = _tasks(1, tasks)
    every = [[(t + 1, value) for t in range(i, tasks) if (value := matrix[t][i]) is not None] for i in range(tasks)]
    ends = spread([y(course[-1][1]) for course in every], 10.0, TOP, HEIGHT - BOTTOM)
    lines = []
    for i, course in enumerate(every):
        change = f"{course[0][1]:.1f} → {course[-1][1]:.1f} %"
        lines.append(_line(course, x, y, i, tasks, f"task {i + 1}, {names[i]}: {change}", (ends[i], str(i + 1))))
    return LinesPicture(_x_ticks(x, 1, tasks), _y_ticks(y), tuple(lines), "after task", "accuracy (%)", label)


def free(found: Sequence[Promise], label: str) -> LinesPicture:
    """The share of each layer's directions that was free for a task."""
    y = Scale(0, 100, HEIGHT - BOTTOM, TOP)

    def title(one: Promise) -> str:
        return f"{one.layer}: rank {one.rank:.0f} of {one.fan_in} after task {one.task}"

    lines = _by_layer(found, y, lambda one: 100 * one.rank / one.fan_in, title, 9.0)
    first, last = found[0].task, found[-1].task
    ticks = _x_ticks(_tasks(first, last), first, last)
    return LinesPicture(ticks, _y_ticks(y), lines, "task", "free directions (%)", label)


def drift(found: Sequence[Promise], label: str) -> LinesPicture | None:
    """The measured drift of each layer, and dashed its bound; None where nothing moved."""
    moved = [one for one in found if one.drift > 0 and one.limit > 0]
    if not moved:
        return None
    y = powers_around([value for one in moved for value in (one.drift, one.limit)], HEIGHT - BOTTOM, TOP)
    bound = limit_name(found)
    first, last = found[0].task, found[-1].task

    def measured(one: Promise) -> str:
        return f"{one.layer}: drift {one.drift:.3g}, {100 * one.relative:.2g} % of its output, after task {one.task}"

    def promised(one: Promise) -> str:
        return f"{one.layer}: {bound} {one.limit:.3g} after task {one.task}"

    lines = _by_layer(moved, y, lambda one: one.drift, measured, 9.0, (first, last), layers(found))
    limits = _by_layer(moved, y, lambda one: one.limit, promised, None, (first, last), layers(found))
    return LinesPicture(
        _x_ticks(_tasks(first, last), first, last), _y_ticks(y), (*limits, *lines), "after task",
        "drift; dashed: bound", label,
    )  # fmt: skip


def _by_layer(
    found: Sequence[Promise],
    y: Scale,
    value: Callable[[Promise], float],
    title: Callable[[Promise], str],
    apart: float | None,
    ends_of: tuple[int, int] | None = None,
    order: Sequence[str] = (),
) -> tuple[Line, ...]:
    """One line a layer; without `apart` dashed and without a name at its end."""
    names = layers(found)
    order = order or names
    first, last = ends_of or (found[0].task, found[-1].task)
    x = _tasks(first, last)
    every = [[one for one in found if one.layer == name] for name in names]
    ends = spread([y(value(mine[-1])) for mine in every], apart or 0.0, TOP, HEIGHT - BOTTOM)
    lines = []
    for n, mine in enumerate(every):
        course = [(one.task, value(one)) for one in mine]
        at = order.index(names[n])
        end = None if apart is None else (ends[n], str(at + 1))
        lines.append(_line(course, x, y, at, len(order), title(mine[-1]), end, dashed=apart is None))
    return tuple(lines)


def _line(
    course: Sequence[tuple[int, float]],
    x: Scale,
    y: Scale,
    number: int,
    count: int,
    title: str,
    end: tuple[float, str] | None,
    dashed: bool = False,
) -> Line:
    places = [(x(task), y(value)) for task, value in course]
    colour = f"k{number * (SHADES - 1) // max(1, count - 1)}"
    shown = None if end is None else (places[-1][0] + 6, end[0] + 3, end[1])
    return Line(" ".join(f"{a:g},{b:g}" for a, b in places), colour, title, shown, (places[0],), dashed)


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


def _tasks(first: int, last: int) -> Scale:
    return Scale(first, max(last, first + 1), LEFT + 6, WIDTH - RIGHT - 6)


def _x_ticks(x: Scale, first: int, last: int) -> tuple[Tick, ...]:
    every = 1 + (last - first) // 12
    return tuple((x(task), str(task)) for task in range(first, last + 1, every))


def _y_ticks(y: Scale) -> tuple[Tick, ...]:
    return tuple((y(value), power_of_ten(value) if y.log else f"{value:g}") for value in y.ticks())


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
