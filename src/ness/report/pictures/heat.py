"""The accuracy matrix as a heat-map: one path for all fields of a shade, so that a page can hold hundreds."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from ness.lab.runs.metrics import Matrix
from ness.report.pictures.drawing import Group, Mark, Picture, Shape, Words, beside, text_width, titled
from ness.report.pictures.palette import STEPS, shades

LEFT, TOP = 26, 18  # room for the numbers of tasks; the page's script knows them too
MEANING = {
    **{f"g{step}": f"gained over {STEPS[step - 1]:g}" for step in range(len(STEPS), 0, -1)},
    "n": f"within {STEPS[0]:g}",
    **{f"l{step}": f"lost over {STEPS[step - 1]:g}" for step in range(1, len(STEPS) + 1)},
    "d": "just learnt",
}  # of a field's class, from the best to the worst


def picture(matrix: Matrix, label: str, runs: Sequence[int] = (), values: bool = True) -> Picture:
    """The heat-map of a matrix; without `values` it is smaller: no numbers, neighbours of a shade drawn as one.

    Args:
        matrix: accuracy in percent after each task (rows) on each task (columns).
        label: what it shows, in words.
        runs: the numbers of the runs it is the mean of, for the page's script.
        values: whether each field says its number.
    """
    classes = shades(matrix)
    drawn = _map(matrix, classes if values else None, label, unit_of(len(matrix[-1])))
    if not runs:
        return drawn
    data = {"runs": ",".join(map(str, runs)), "unit": str(unit_of(len(matrix[-1])))}
    return replace(drawn, data=data, focusable=True)


def _map(matrix: Matrix, numbered: Sequence[Sequence[str]] | None, label: str, unit: int) -> Picture:
    """The fields of a matrix, and the numbers of those that have a class in `numbered`; None: no number at all."""
    tasks, lessons = len(matrix[-1]), len(matrix)
    classes = shades(matrix)
    first = tasks - lessons + 1  # tasks learnt at once have one row, the last
    columns = tuple(Words(LEFT + (i + 0.5) * unit, TOP - 6, str(i + 1)) for i in range(tasks))
    rows = tuple(Words(LEFT - 6, TOP + (t + 0.5) * unit + 4, str(first + t)) for t in range(lessons))
    marks: list[Mark] = [Group(columns, style="axis", anchor="middle"), Group(rows, style="axis", anchor="end")]
    marks += [Shape(path, f"f{shade}") for shade, path in fields(classes, unit, numbered is not None).items()]
    if numbered is not None:
        marks.append(Shape("".join(corners(classes, unit)), "corner"))
        marks += [
            Group(found, style=f"t{shade}", anchor="middle") for shade, found in letters(matrix, numbered, unit).items()
        ]
    elif lost := "".join(path for shade, path in fields(classes, unit, False).items() if shade[0] == "l"):
        marks.append(Shape(lost, "hatch"))
    return Picture(LEFT + tasks * unit, TOP + lessons * unit, label, tuple(marks), "heat")


def side_by_side(matrices: Sequence[Matrix], titles: Sequence[str], label: str) -> Picture:
    """Heat-maps to compare methods, two in a row as in the paper, each below its title."""
    return beside(
        [titled(picture(matrix, title), title) for matrix, title in zip(matrices, titles, strict=True)], label
    )


def in_a_row(matrices: Sequence[Matrix], titles: Sequence[tuple[str, str]], title: str) -> Picture:
    """Small heat-maps with a legend: numbers where a task was learnt and at the end alone.

    Args:
        matrices: one for each map.
        titles: two lines above each.
        title: of all of them.
    """
    unit, gap, above = 30, 14, 56
    marks: list[Mark] = []
    left, high = 0.0, 0.0
    for matrix, (first, second) in zip(matrices, titles, strict=True):
        small = _small(matrix, unit)
        middle = left + LEFT + (small.width - LEFT) / 2
        marks += [Words(middle, 36, first, "best", "middle"), Words(middle, 50, second, "axis", "middle")]
        marks.append(Group(small.marks, (left, above)))
        left, high = left + small.width + gap, max(high, small.height)
    seen = {shade for matrix in matrices for row in shades(matrix) for shade in row}
    marks.append(Words(left + 4, above + 14, "points since the", "axis"))
    marks.append(Words(left + 4, above + 28, "task was learnt", "axis"))
    for n, shade in enumerate(shade for shade in MEANING if shade in seen):
        y = above + 38 + n * 18
        marks += [Shape(f"M{left + 4:g} {y}h14v14h-14Z", f"f{shade}"), Words(left + 24, y + 11, MEANING[shade], "axis")]
    width = left + 24 + max(text_width(text, 10.5) for text in MEANING.values())
    head = Words(width / 2, 15, title, "title", "middle")
    foot = Words((left - gap) / 2, above + high + 16, "accuracy (%) on task; down: after task", "axis", "middle")
    return Picture(width, above + high + 24, title, (head, *marks, foot))


def _small(matrix: Matrix, unit: int) -> Picture:
    last = len(matrix) - 1
    ends = [[shade if shade == "d" or t == last else "" for shade in row] for t, row in enumerate(shades(matrix))]
    return _map(matrix, ends, "", unit)


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


def letters(matrix: Matrix, classes: Sequence[Sequence[str]], unit: int) -> dict[str, tuple[Words, ...]]:
    """The numbers in the fields, by shade."""
    found: dict[str, tuple[Words, ...]] = {}
    digits = 1 if unit > 26 else 0
    for t, (row, shaded) in enumerate(zip(matrix, classes, strict=True)):
        for i, (value, shade) in enumerate(zip(row, shaded, strict=True)):
            if value is not None and shade:
                x, y = LEFT + (i + 0.5) * unit - 0.5, TOP + (t + 0.5) * unit + 3.5
                found[shade] = (*found.get(shade, ()), Words(x, y, f"{value:.{digits}f}"))
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
