"""`ness report`: the page, the tables and the figures of finished runs."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from ness.cli.arguments import understood
from ness.errors import printable
from ness.report import write
from ness.report.collect import collect

ABOUT = """Write report.html, the tables (Markdown, CSV, LaTeX) and the figures (PNG, SVG, PDF) of finished runs.

The page is one file that needs no network. The paths written go to standard output.

Examples: ness report runs/ · ness report runs/ results/ --out paper · ness report runs/ --each-run"""


@dataclass(frozen=True)
class ReportArguments:
    """What to report on, and where to."""

    runs: Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(help="run folders, or folders of them")] = (
        Path("runs"),
    )
    out: Annotated[Path | None, tyro.conf.arg(help="folder of the report; by default report/ in the runs' folder")] = (
        None
    )
    each_run: Annotated[bool, tyro.conf.arg(help="the heat-map of every single run as well, as files")] = False


def main(argv: list[str]) -> int:
    """Writes the report; what was left out and where the page is go to standard error."""
    own = understood(ReportArguments, args=argv, prog="ness report", description=ABOUT)
    found = collect(own.runs)
    for problem in found.problems:
        sys.stderr.write(f"ness: left out: {problem}\n")  # printable already
    folder = own.out or (own.runs[0] / "report" if len(own.runs) == 1 else Path("report"))
    count = 0
    for path in write.write(found, folder, own.each_run):
        sys.stdout.write(f"{printable(str(path))}\n")
        sys.stdout.flush()
        count += 1
    shown = printable(str(folder))
    sys.stderr.write(f"the report is in {shown} ({count} files): open {shown}/report.html\n")
    return 0
