"""The table of runs as Markdown, CSV, LaTeX or aligned text."""

import csv
import io
import itertools
import shutil
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence

from ness.errors import printable
from ness.report.latex import table_one
from ness.report.number_format import number, printed
from ness.report.table import Measured, Row

HEADER = ("benchmark", "method", "setting", "seeds", "ACC", "BWT", "forgetting", "learning", "forward", "seconds")
NOT_RUN = "not run yet"
FORMULA = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20")  # wide ones too
Lines = list[tuple[str, ...]]
GAP, READABLE = 2, 18  # blanks between columns; letters that a folded column keeps if it can
LEAST_WANTED = (
    "forward",
    "forgetting",
    "learning",
    "seeds",
    "paper BWT",
    "paper ACC",
    "benchmark",
    "seconds",
    "setting",
)
PAPER = ("paper ACC", "paper BWT")


def cells(row: Row) -> tuple[str, ...]:
    """The row as it is shown to people."""
    return (
        row.benchmark,
        row.title,
        row.setting,
        " ".join(map(str, row.seeds)),
        number(row.acc) if row.seeds else NOT_RUN,
        number(row.bwt, signed=True),
        number(row.forgetting, signed=True),
        number(row.learning),
        number(row.forward, signed=True),
        "" if row.seconds is None else f"{row.seconds[0]:.1f}{f' ({row.device})' if row.device else ''}",
    )


def table(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Header and rows; with the paper's numbers where it has any of them."""
    if not any(row.paper for row in rows):
        return [HEADER, *(cells(row) for row in rows)]
    lines: list[tuple[str, ...]] = [HEADER + PAPER]
    for row in rows:
        beside = ("", "") if row.paper is None else (printed(row.paper.acc), printed(row.paper.bwt, signed=True))
        lines.append(cells(row) + beside)
    return lines


def text(rows: Sequence[Row]) -> str:
    """Columns aligned with blanks, as wide as the terminal is."""
    return aligned(table(rows), terminal_width(), LEAST_WANTED)


def terminal_width() -> int:
    """Columns of the terminal, or of COLUMNS; 80 where there is neither."""
    return shutil.get_terminal_size((80, 24)).columns


def aligned(lines: Sequence[Sequence[str]], width: int | None = None, droppable: Sequence[str] = ()) -> str:
    """A header and its lines, columns aligned with blanks, a rule under the header.

    A table that is wider than `width` loses the columns that say nothing, then, in this order, those of `droppable`,
    and the rest are folded at blanks; what was left out is said below it. No word is split.

    Args:
        lines: the header, and a line for each row.
        width: columns of the terminal; None for as wide as it comes.
        droppable: heads of columns that may be left out.
    """
    cells: Lines = [tuple(map(printable, line)) for line in lines]
    left_out: list[str] = []
    if width is not None:
        cells, left_out = _narrowed(cells, width, droppable)
    widths = _widths(cells, width)
    shown = [line for row in cells for line in _folded(row, widths)]
    heads = len(_folded(cells[0], widths))
    rule = "  ".join("─" * width for width in widths)
    told = f"left out, for the terminal is narrow: {', '.join(left_out)}\n" if left_out else ""
    folded = "\n".join(textwrap.wrap(told, width)) + "\n" if told and width is not None else ""
    return "\n".join([*shown[:heads], rule, *shown[heads:]]) + "\n" + folded


def _narrowed(lines: Lines, width: int, droppable: Sequence[str]) -> tuple[Lines, list[str]]:
    """The lines without the columns that there is no room for, and the heads of those that said something."""
    kept, left_out = list(range(len(lines[0]))), list[str]()

    def fits() -> bool:
        return sum(_least(line[n] for line in lines) for n in kept) + GAP * (len(kept) - 1) <= width

    empty = [n for n in kept if not any(line[n] for line in lines[1:])]
    for n in [*empty, *(lines[0].index(head) for head in droppable if head in lines[0])]:
        if not fits() and n in kept and len(kept) > 1:
            kept.remove(n)
            left_out += [] if n in empty else [lines[0][n]]
    return [tuple(line[n] for n in kept) for line in lines], left_out


def _least(cells: Iterable[str]) -> int:
    """The narrowest that a column can be without splitting a word or a number, and not so narrow that none reads it."""
    return max(
        (len(cell) if _is_number(cell) else max(map(len, [*cell.split(), cell[:READABLE].rstrip()])) for cell in cells),
        default=0,
    )


def _is_number(cell: str) -> bool:
    return cell[:1] in "+-−≤≥.0123456789" and len(cell) < 24


def _widths(lines: Lines, width: int | None) -> list[int]:
    """The width of each column: as its cells are, the widest ones folded until all fit."""
    columns = list(zip(*lines, strict=True))
    widths = [max(map(len, column)) for column in columns]
    if width is None:
        return widths
    words = [max((len(word) for cell in column for word in _pieces(cell)), default=0) for column in columns]
    for least in ([_least(column) for column in columns], words):
        while sum(widths) + GAP * (len(widths) - 1) > width:
            wide = [n for n in range(len(widths)) if widths[n] > least[n]]
            if not wide:
                break
            widths[max(wide, key=lambda n: widths[n])] -= 1
    return widths


def _pieces(cell: str) -> list[str]:
    """What a cell may be folded between."""
    return [cell] if _is_number(cell) else cell.split()


def _folded(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    """The lines of a row whose cells are folded at blanks."""
    cells = [
        [cell]
        if len(cell) <= width or _is_number(cell)
        else textwrap.wrap(cell, width, break_long_words=False, break_on_hyphens=False)
        for cell, width in zip(row, widths, strict=True)
    ]
    return [
        (" " * GAP).join(part.ljust(width) for part, width in zip(parts, widths, strict=True)).rstrip()
        for parts in itertools.zip_longest(*cells, fillvalue="")
    ]


def markdown(rows: Sequence[Row]) -> str:
    """A pipe table."""
    header, *lines = table(rows)
    return pipes([header, ("---",) * 4 + ("---:",) * (len(header) - 4), *lines])


def pipes(lines: Sequence[Sequence[str]]) -> str:
    """Lines of a Markdown table; what would end a cell or begin a tag is escaped."""

    def cell(text: str) -> str:
        plain = printable(" ".join(text.split()))
        return plain.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")

    return "".join("| " + " | ".join(map(cell, line)) + " |\n" for line in lines)


def comma_separated(rows: Sequence[Row]) -> str:
    """CSV with every number in full; empty where there is none. The names of a plan's rows stand last."""
    names = ("acc", "bwt", "forgetting", "learning", "forward", "seconds")
    header = ["benchmark", "method", "setting", "seeds"]
    header += [*(column for name in names for column in (name, f"{name}_std")), "memory"]
    header += ["paper_acc", "paper_acc_std", "paper_bwt", "paper_bwt_std"]
    named = any(row.name for row in rows)
    lines: list[Sequence[object]] = [[*header, *(["name"] if named else [])]]
    for row in rows:
        values: list[object] = [row.benchmark, row.method, row.setting, " ".join(map(str, row.seeds))]
        for name in names:
            measured: Measured = getattr(row, name)
            values += ["", ""] if measured is None else [measured[0], "" if measured[1] is None else measured[1]]
        values.append("" if row.memory is None else row.memory)
        values += ("",) * 4 if row.paper is None else (*row.paper.acc, *row.paper.bwt)
        lines.append([*values, *([row.name] if named else [])])
    return commas(lines)


def commas(lines: Sequence[Sequence[object]]) -> str:
    r"""Lines of a CSV file; text that a spreadsheet would take for a formula begins with an apostrophe.

    >>> commas([["=1+1", "-5", -5.0]])
    "'=1+1,'-5,-5.0\n"
    """
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([_harmless(cell) for cell in line] for line in lines)
    return out.getvalue()


def _harmless(cell: object) -> object:
    if not isinstance(cell, str):
        return cell
    text = printable(cell)
    return f"'{text}" if text.lstrip().startswith(FORMULA) else text


FORMATS: Mapping[str, Callable[[Sequence[Row]], str]] = {
    "text": text,
    "markdown": markdown,
    "csv": comma_separated,
    "latex": table_one,
}
