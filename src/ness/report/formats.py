"""A table as Markdown, CSV, LaTeX or aligned text."""

import csv
import io
from collections.abc import Callable, Mapping, Sequence

from ness.report.table import Measured, Row

HEADER = ("benchmark", "method", "setting", "seeds", "ACC", "BWT", "forgetting", "learning", "forward", "seconds")


def number(value: Measured, signed: bool = False) -> str:
    """'72.46 ± 0.26'; without a deviation '72.46'; nothing for nothing.

    >>> number((72.456, 0.256)), number((0.034, None), signed=True), number(None)
    ('72.46 ± 0.26', '+0.03', '')
    """
    if value is None:
        return ""
    mean, deviation = value
    text = f"{mean:+.2f}" if signed else f"{mean:.2f}"
    return text if deviation is None else f"{text} ± {deviation:.2f}"


def cells(row: Row) -> tuple[str, ...]:
    """The row as it is shown to people."""
    return (
        row.benchmark,
        row.method,
        row.setting,
        " ".join(map(str, row.seeds)),
        number(row.acc),
        number(row.bwt, signed=True),
        number(row.forgetting, signed=True),
        number(row.learning),
        number(row.forward, signed=True),
        "" if row.seconds is None else f"{row.seconds[0]:.1f}",
    )


def text(rows: Sequence[Row]) -> str:
    """Columns aligned with blanks, for a terminal."""
    return aligned([HEADER, *(cells(row) for row in rows)])


def aligned(lines: Sequence[tuple[str, ...]]) -> str:
    """A header and its lines, columns aligned with blanks, a rule under the header."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    shown = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([shown[0], "  ".join("─" * width for width in widths), *shown[1:]]) + "\n"


def markdown(rows: Sequence[Row]) -> str:
    """A pipe table."""
    lines = [HEADER, ("---",) * 4 + ("---:",) * 6, *(cells(row) for row in rows)]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def comma_separated(rows: Sequence[Row]) -> str:
    """CSV with every number in full; empty where there is none."""
    names = ("acc", "bwt", "forgetting", "learning", "forward", "seconds")
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    header = ["benchmark", "method", "setting", "seeds"]
    writer.writerow([*header, *(column for name in names for column in (name, f"{name}_std")), "memory"])
    for row in rows:
        values: list[object] = [row.benchmark, row.method, row.setting, " ".join(map(str, row.seeds))]
        for name in names:
            measured: Measured = getattr(row, name)
            values += ["", ""] if measured is None else [measured[0], "" if measured[1] is None else measured[1]]
        writer.writerow([*values, "" if row.memory is None else row.memory])
    return out.getvalue()


def latex(rows: Sequence[Row]) -> str:
    """A booktabs table of ACC and BWT."""
    lines = [
        "% needs \\usepackage{booktabs}",
        "\\begin{tabular}{lllrr}",
        "\\toprule",
        "Benchmark & Method & Setting & ACC (\\%) & BWT (\\%) \\\\",
        "\\midrule",
    ]
    for row in rows:
        shown = [_escape(text) for text in (row.benchmark, row.method, row.setting)]
        shown += [_in_latex(row.acc, False), _in_latex(row.bwt, True)]
        lines.append(" & ".join(shown) + " \\\\")
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}"]) + "\n"


def _in_latex(value: Measured, signed: bool) -> str:
    shown = number(value, signed).replace(" ± ", " \\pm ")
    return f"${shown}$" if shown else "--"


def _escape(plain: str) -> str:
    special = {"&": "\\&", "%": "\\%", "#": "\\#", "_": "\\_", "$": "\\$", "{": "\\{", "}": "\\}"}
    special |= {"~": "\\textasciitilde{}", "^": "\\textasciicircum{}", "\\": "\\textbackslash{}"}
    return "".join(special.get(letter, letter) for letter in plain)


FORMATS: Mapping[str, Callable[[Sequence[Row]], str]] = {
    "text": text,
    "markdown": markdown,
    "csv": comma_separated,
    "latex": latex,
}
