"""The accuracy matrix as a heat-map: one path for all fields of a shade, so that a page can hold hundreds."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from ness.lab.runs.metrics import Matrix
from ness.report.shade import shades

LEFT, TOP = 26, 18  # room for the numbers of tasks
Letter = tuple[float, float, str]


@dataclass(frozen=True)
class HeatPicture:
    """What the template draws."""

    width: int
    height: int
    unit: int
    columns: tuple[Letter, ...]
    rows: tuple[Letter, ...]
    fields: tuple[tuple[str, str], ...]  # (shade, path)
    marks: str  # a path of corners: seen without colour
    hatch: str  # where there are no corners: a path over all that was lost
    letters: tuple[tuple[str, tuple[Letter, ...]], ...]  # (shade, values)
    label: str
    runs: str  # the numbers of the runs it is the mean of, for the script


def picture(matrix: Matrix, label: str, runs: Sequence[int], values: bool = True) -> HeatPicture:
    """The heat-map of a matrix; without `values` it is smaller: no numbers, neighbours of a shade drawn as one."""
    tasks, lessons = len(matrix[-1]), len(matrix)
    unit = unit_of(tasks)
    classes = shades(matrix)
    first = tasks - lessons + 1
    return HeatPicture(
        width=LEFT + tasks * unit,
        height=TOP + lessons * unit,
        unit=unit,
        columns=tuple((LEFT + (i + 0.5) * unit, TOP - 6, str(i + 1)) for i in range(tasks)),
        rows=tuple((LEFT - 6, TOP + (t + 0.5) * unit + 4, str(first + t)) for t in range(lessons)),
        fields=tuple(fields(classes, unit, apart=values).items()),
        marks="".join(corners(classes, unit)) if values else "",
        hatch=""
        if values
        else "".join(path for shade, path in fields(classes, unit, False).items() if shade[0] == "l"),
        letters=tuple(letters(matrix, classes, unit).items()) if values else (),
        label=label,
        runs=",".join(map(str, runs)),
    )


def unit_of(tasks: int) -> int:
    """The side of a field: room for a digit behind the point while there are few tasks."""
    return 36 if tasks <= 12 else 22


def fields(classes: Sequence[Sequence[str]], unit: int, apart: bool) -> dict[str, str]:
    """A path for each shade: field by field with a gap, or whole runs of a row."""
    paths: dict[str, str] = {}
    for t, row in enumerate(classes):
        start = 0
        for shade, run in groupby(row):
            count = len(list(run))
            for i, wide in [(start + k, 1) for k in range(count)] if apart else [(start, count)]:
                if shade:
                    x, y, width = LEFT + i * unit, TOP + t * unit, wide * unit - 1
                    paths[shade] = paths.get(shade, "") + f"M{x} {y}h{width}v{unit - 1}h-{width}z"
            start += count
    return paths


def letters(matrix: Matrix, classes: Sequence[Sequence[str]], unit: int) -> dict[str, tuple[Letter, ...]]:
    """The numbers in the fields, by shade."""
    found: dict[str, tuple[Letter, ...]] = {}
    digits = 1 if unit > 30 else 0
    for t, (row, shaded) in enumerate(zip(matrix, classes, strict=True)):
        for i, (value, shade) in enumerate(zip(row, shaded, strict=True)):
            if value is not None and shade:
                place = (LEFT + (i + 0.5) * unit - 0.5, TOP + (t + 0.5) * unit + 3.5, f"{value:.{digits}f}")
                found[shade] = (*found.get(shade, ()), place)
    return found


def corners(classes: Sequence[Sequence[str]], unit: int) -> list[str]:
    """A corner at the lower right of what was lost, at the upper right of what was gained."""
    size = 7 if unit > 30 else 5
    found = []
    for t, row in enumerate(classes):
        for i, shade in enumerate(row):
            right, top = LEFT + (i + 1) * unit - 1, TOP + t * unit
            if shade.startswith("l"):
                found.append(f"M{right} {top + unit - 1}h-{size}l{size}-{size}z")
            elif shade.startswith("g"):
                found.append(f"M{right} {top}h-{size}l{size} {size}z")
    return found
