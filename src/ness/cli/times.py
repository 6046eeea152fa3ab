"""Where a command's time went, said on standard error when it is done."""

import sys
import time

from ness.lab.runs.environment import process_age
from ness.lab.runs.stopwatch import table
from ness.lab.runs.sweep import Grid
from ness.report.formats import aligned


class CommandClock:
    """Times a command from the beginning of its process, or from here where the system does not say when that was."""

    def __init__(self) -> None:
        self.began = time.perf_counter() - (process_age() or 0.0)

    def tell(self, grid: Grid, asked: bool) -> None:
        """The table, if it was asked for or there was a card, and something was run."""
        runs = [outcome.times for outcome in grid.outcomes if outcome.how != "there"]
        if runs and (asked or grid.on_card):
            sys.stderr.write(aligned(table(runs, time.perf_counter() - self.began)))
