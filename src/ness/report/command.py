"""`ness report`: tables and figures of finished runs."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from ness.report import records, write

ABOUT = """Write the tables (Markdown, CSV, LaTeX) and the accuracy matrices (PNG, SVG, PDF) of finished runs.

Examples: ness report runs/ · ness report runs/ --out paper/figures"""


@dataclass(frozen=True)
class ReportArguments:
    """What to report on, and where to."""

    runs: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(help="folder of finished runs")] = Path("runs")
    out: Annotated[Path | None, tyro.conf.arg(help="folder of the report; by default report/ beside the runs")] = None


def main(argv: list[str]) -> int:
    """Writes the report and says where it is."""
    own = tyro.cli(ReportArguments, args=argv, prog="ness report", description=ABOUT)
    folder = own.out or own.runs / "report"
    written = write.write(records.read(own.runs), folder)
    sys.stderr.write(f"the report is in {folder} ({len(written)} files)\n")
    return 0
