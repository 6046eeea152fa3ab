"""The table of runs as Markdown, CSV, LaTeX or aligned text."""

import csv
import io
from collections.abc import Callable, Mapping, Sequence

from ness.errors import printable
from ness.report.latex import table_one
from ness.report.number_format import number, printed
from ness.report.table import Measured, Row

HEADER = ("benchmark", "method", "setting", "seeds", "ACC", "BWT", "forgetting", "learning", "forward", "seconds")
NOT_RUN = "not run yet"
FORMULA = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20")  # wide ones too
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
        "" if row.seconds is None else f"{row.seconds[0]:.1f}",
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
    """Columns aligned with blanks, for a terminal."""
    return aligned(table(rows))


def aligned(lines: Sequence[tuple[str, ...]]) -> str:
    """A header and its lines, columns aligned with blanks, a rule under the header."""
    lines = [tuple(map(printable, line)) for line in lines]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    shown = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([shown[0], "  ".join("─" * width for width in widths), *shown[1:]]) + "\n"


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
