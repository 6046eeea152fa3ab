"""Tables ready for a paper: booktabs, and the layout of the paper's Table 1."""

from collections.abc import Sequence

from ness.errors import printable
from ness.report.highlight import Mark, Marks, marks
from ness.report.number_format import number
from ness.report.table import Measured, Row

NEEDS = "% needs \\usepackage{booktabs} and \\usepackage[table]{xcolor}"
SHADE = "\\providecolor{kept}{RGB}{253,236,150}"
UNICODE = {"−": "$-$", "±": "$\\pm$", "×": "$\\times$", "·": "$\\cdot$", "ε": "$\\varepsilon$", "…": "\\ldots{}"}
SPECIAL = {"&": "\\&", "%": "\\%", "#": "\\#", "_": "\\_", "$": "\\$", "{": "\\{", "}": "\\}"} | {
    "~": "\\textasciitilde{}", "^": "\\textasciicircum{}", "\\": "\\textbackslash{}", "|": "\\textbar{}",
    "<": "\\textless{}", ">": "\\textgreater{}", "\n": " ", "\r": " ", "\t": " ",
}  # fmt: skip


def escape(plain: str) -> str:
    """The text with everything that LaTeX would take for a command made harmless."""
    return "".join((SPECIAL | UNICODE).get(letter) or printable(letter) for letter in plain)


def booktabs(header: Sequence[str], lines: Sequence[Sequence[str]], columns: str) -> str:
    """A tabular of cells that are LaTeX already."""
    body = [" & ".join(line) + " \\\\" for line in lines]
    head = [f"\\begin{{tabular}}{{{columns}}}", "\\toprule", " & ".join(header) + " \\\\", "\\midrule"]
    return "\n".join(["% needs \\usepackage{booktabs}", *head, *body, "\\bottomrule", "\\end{tabular}"]) + "\n"


def table_one(rows: Sequence[Row]) -> str:
    """Methods downwards, ACC and BWT of each benchmark to the right.

    The best of a column is bold, the second underlined, and a BWT above -1 % shaded.
    """
    benchmarks = list(dict.fromkeys(row.benchmark for row in rows))
    pairs = [" & \\multicolumn{2}{c}{" + escape(name) + "}" for name in benchmarks]
    rules = " ".join(f"\\cmidrule(lr){{{2 * i + 2}-{2 * i + 3}}}" for i in range(len(benchmarks)))
    lines = [
        NEEDS,
        "% the best is bold, the second underlined, a BWT above -1 % shaded; mean and sample deviation over seeds",
        SHADE,
        "\\begin{tabular}{l" + "rr" * len(benchmarks) + "}",
        "\\toprule",
        "".join(pairs) + " \\\\",
        rules,
        "Method" + " & ACC (\\%) & BWT (\\%) $\\uparrow$" * len(benchmarks) + " \\\\",
        "\\midrule",
    ]
    for label, found in _lines(rows).items():
        shown = [_pair(*found[name]) if name in found else "-- & --" for name in benchmarks]
        lines.append(" & ".join([escape(label[0]), *shown]) + " \\\\")
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}"]) + "\n"


def _lines(rows: Sequence[Row]) -> dict[tuple[str, int], dict[str, tuple[Row, Marks]]]:
    """By label of the line, and by benchmark in it; settings that read alike get lines of their own."""
    out: dict[tuple[str, int], dict[str, tuple[Row, Marks]]] = {}
    for row, mark in zip(rows, marks(rows), strict=True):
        label = row.title if row.name or row.setting == "fixed" else f"{row.method} ({row.setting})"
        again = 0
        while row.benchmark in out.get((label, again), {}):
            again += 1
        out.setdefault((label, again), {})[row.benchmark] = (row, mark)
    return out


def _pair(row: Row, mark: Marks) -> str:
    return f"{_marked(row.acc, False, mark.acc)} & {_marked(row.bwt, True, mark.bwt)}"


def _marked(value: Measured, signed: bool, mark: Mark) -> str:
    shown = number(value, signed).replace(" ± ", " \\pm ")
    if not shown:
        return "--"
    body = f"$\\mathbf{{{shown}}}$" if mark.best else f"\\underline{{${shown}$}}" if mark.second else f"${shown}$"
    return f"\\cellcolor{{kept}}{body}" if mark.kept else body
