"""The page's main table: columns that say something, cells with what they sort by and how they stand out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ness.report.groups import CEILINGS
from ness.report.highlight import Mark, Marks, marks
from ness.report.number_format import duration, number, printed
from ness.report.table import Measured, Row

PLAIN = Mark()


@dataclass(frozen=True)
class Cell:
    """What is shown, what it sorts by, and its marks."""

    text: str
    value: float | str | None = None
    mark: Mark = PLAIN
    note: str = ""


@dataclass(frozen=True)
class Column:
    """A head, what it means, and the cell of a row."""

    name: str
    hint: str
    cell: Callable[[Row, Marks], Cell]
    numeric: bool = True
    wide: bool = False  # left out on a phone


@dataclass(frozen=True)
class Listing:
    """Columns and lines; the first cell of a line is its head."""

    columns: tuple[Column, ...]
    lines: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...]  # what to know about the paper's numbers


def listing(rows: Sequence[Row], labels: Sequence[str]) -> Listing:
    """The table of one benchmark; a column without any entry is left out, the best ACC stands first, ceilings last."""
    names = {id(row): label for row, label in zip(rows, labels, strict=True)}
    ordered = sorted(
        zip(rows, marks(rows), strict=True), key=lambda one: (one[0].method in CEILINGS, -_mean(one[0].acc))
    )
    notes = list(dict.fromkeys(row.paper.note for row in rows if row.paper and row.paper.note))
    columns = _columns(names, notes)
    lines = [[column.cell(row, mark) for column in columns] for row, mark in ordered]
    kept = [n for n in range(len(columns)) if any(line[n].text for line in lines)]
    return Listing(tuple(columns[n] for n in kept), tuple(tuple(line[n] for n in kept) for line in lines), tuple(notes))


def _columns(names: dict[int, str], notes: Sequence[str]) -> list[Column]:
    def paper(row: Row, mark: Marks) -> Cell:
        if row.paper is None:
            return Cell("")
        note = str(notes.index(row.paper.note) + 1) if row.paper.note else ""
        shown = f"{printed(row.paper.acc)} / {printed(row.paper.bwt, True)}".replace("-", "−")
        return Cell(shown, row.paper.acc[0], PLAIN, note)

    return [
        Column("Method", "", lambda row, mark: Cell(names[id(row)], names[id(row)].lower()), False),
        Column("Seeds", "runs that differ in the seed alone", lambda row, mark: _seeds(row), wide=True),
        Column("ACC %", "mean accuracy over all tasks at the end", lambda row, mark: _measured(row.acc, mark=mark.acc)),
        Column(
            "BWT %", "change of earlier tasks since they were learnt",
            lambda row, mark: _measured(row.bwt, True, mark.bwt),
        ),
        Column("paper: ACC / BWT", "as the paper prints them", paper, wide=True),
        Column("learnt %", "mean accuracy of tasks once learnt", lambda row, mark: _measured(row.learning), wide=True),
        Column("forgetting", "from the best a task ever was", lambda row, mark: _measured(row.forgetting), wide=True),
        Column(
            "forward", "learnt, less the accuracy of each task trained alone",
            lambda row, mark: _measured(row.forward, True), wide=True,
        ),
        Column("time", "of a run, and the device that it is of", lambda row, mark: _time(row), wide=True),
    ]  # fmt: skip


def _measured(value: Measured, signed: bool = False, mark: Mark = PLAIN) -> Cell:
    return Cell(number(value, signed).replace("-", "−"), None if value is None else value[0], mark)


def _seeds(row: Row) -> Cell:
    return Cell(str(len(row.seeds)), len(row.seeds))


def _time(row: Row) -> Cell:
    if row.seconds is None:
        return Cell("")
    where = f", {row.device}" if row.device else ""
    return Cell(f"{duration(row.seconds[0])}{where}", row.seconds[0])


def _mean(value: Measured) -> float:
    return float("-inf") if value is None else value[0]
