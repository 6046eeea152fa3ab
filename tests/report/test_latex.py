import shutil
import subprocess
from pathlib import Path

import pytest

from ness.report import detail_tables
from ness.report.groups import settings
from ness.report.latex import escape, table_one
from ness.report.records import from_result
from ness.report.table import rows
from report.making import record, with_certificate

ODD = "a_b & 5% $x$ {y} \\z ~^ #1 <i> | − ε±"
RECORDS = [
    record(seed=1), record(seed=2), record("joint", 1, [[80.0, 90.0]], setting=ODD),
    from_result(with_certificate(), ""), from_result(with_certificate(2), ""),
    record(benchmark="other_one", accuracy=[[90.0, None], [89.5, 70.0]]),
]  # fmt: skip


def test_benchmarks_to_the_right_and_marks_as_in_the_paper() -> None:
    text = table_one(rows(RECORDS))
    assert "& \\multicolumn{2}{c}{digits} & \\multicolumn{2}{c}{other\\_one} \\\\" in text
    assert "\\cmidrule(lr){2-3} \\cmidrule(lr){4-5}" in text
    assert "finetune & $\\mathbf{74.25 \\pm 0.35}$ & $\\mathbf{-11.50 \\pm 0.71}$" in text
    assert "\\cellcolor{kept}$-0.50$" in text
    assert text.count("{") == text.count("}")
    assert "ness & $\\mathbf{" in text  # equal to finetune in these records
    assert "$85.00$ & -- & -- & --" in text


def test_escape() -> None:
    assert escape("a_b & 5%\n") == "a\\_b \\& 5\\% "


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="no pdflatex here: LaTeX output is not compiled")
def test_compiles(tmp_path: Path) -> None:
    found = settings(RECORDS)
    tables = [table_one(rows(RECORDS))]
    for setting in found:
        every = (
            detail_tables.matrix(setting, ODD, "s"),
            detail_tables.certificate(setting, ODD, "s"),
            detail_tables.times([setting], "s"),
        )
        tables += [sheet.latex() for sheet in every if sheet is not None]
    head = "\\documentclass{article}\\usepackage{booktabs}\\usepackage[table]{xcolor}\\begin{document}\n"
    (tmp_path / "all.tex").write_text(head + "\n\n".join(tables) + "\\end{document}\n")
    argv = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "all.tex"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:]
