"""`ness run`: one method on one benchmark, one run per seed."""

import sys
from dataclasses import dataclass

from ness.cli.arguments import Common, parse
from ness.cli.display import CommandClock, display, records_of, stoppable, tell
from ness.cli.main import WrongUse
from ness.errors import NessError
from ness.lab.runs.jobs import resolve
from ness.lab.runs.log import logged, named
from ness.lab.runs.settings import setting
from ness.report.formats import text
from ness.report.table import rows

ABOUT = """Train a method on a benchmark, task after task.

A finished run is not run again; one that was cut short goes on.

Examples: ness run --benchmark digits --method ness ·
ness run --method ness --seeds 1 2 3 --eps 1e-3 --lr 0.01 --optimizer sgdm ·
ness run --config settings.toml --device cuda"""


@dataclass(frozen=True)
class RunArguments(Common):
    """The command's own flags."""

    method: str = setting("ness", "see `ness list methods`")


def main(argv: list[str]) -> int:
    """Runs every seed; the table goes to standard output, everything else to standard error."""
    request = parse(argv, RunArguments, None, ABOUT, "ness run")
    own = request.own
    clock = CommandClock()
    try:
        job = resolve(own.method, own.benchmark, own.preset, request.changes, own.fast)
        loggers = named(own.log)
    except NessError as error:
        raise WrongUse(str(error)) from error
    work = [(job, seed) for seed in own.seeds]
    with (
        stoppable(work, own.out),
        display(own.quiet, len(work)) as shown,
        logged(loggers, own.out, shown.listener) as listener,
    ):
        grid = own.carry_out(work, listener, shown.say)
    done = records_of(grid)
    for outcome in grid.outcomes:
        said = {"run": "finished", "resumed": "finished", "there": "was finished before; --again repeats it"}[
            outcome.how
        ]
        if not own.quiet:
            tell(f"{outcome.folder}: {said}")
    for complaint in grid.complaints():
        tell(f"ness: {complaint}")
    clock.tell(grid, own.times, own.quiet)
    if done:
        sys.stdout.write(text(rows(done)))
    return 1 if grid.complaints() else 0
