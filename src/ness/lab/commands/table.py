"""`ness table`: several methods on one benchmark, or the records of a folder, as one table."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from ness.cli import WrongUse
from ness.errors import NessError
from ness.lab import registry
from ness.lab.commands.arguments import Common, given, parse
from ness.lab.commands.display import display
from ness.lab.commands.times import CommandClock
from ness.lab.grid import jobs, run_all
from ness.lab.logs import logged, named
from ness.lab.settings import setting
from ness.report import records
from ness.report.collect import collect
from ness.report.formats import FORMATS
from ness.report.table import rows

Format = Literal["text", "markdown", "csv", "latex"]

ABOUT = """Train several methods on a benchmark and print their table; what is finished is not run again.

A setting that is left out is each method's own preset; one that is given reaches every method that has it.

Examples: ness table --benchmark digits --methods finetune frozen ness --seeds 1 2 3 4 5 ·
ness table --benchmark cifar100 --methods all --seeds 1 2 3 4 37 --device cuda ·
ness table --from results --format csv"""


@dataclass(frozen=True)
class TableArguments(Common):
    """The command's own flags."""

    methods: tuple[str, ...] = setting(("all",), "see `ness list methods`; all: every one of them")
    format: Format = setting("text", "how the table is printed")


@dataclass(frozen=True)
class FromArguments:
    """The flags of a table of records: nothing is run."""

    source: Annotated[Path, tyro.conf.arg(name="from", help="folder of finished runs or records")]
    format: Annotated[Format, tyro.conf.arg(help="how the table is printed")] = "text"


def main(argv: list[str]) -> int:
    """Prints the table on standard output, everything else on standard error."""
    if "from" in given(argv):
        found = tyro.cli(FromArguments, args=argv, prog="ness table", description=ABOUT)
        runs = collect([found.source])
        for problem in runs.problems:
            sys.stderr.write(f"ness: left out: {problem}\n")
        sys.stdout.write(FORMATS[found.format](rows(runs.records)))
        return 0
    methods = methods_in(argv)
    request = parse(argv, TableArguments, methods, ABOUT, "ness table")
    own = request.own
    clock = CommandClock()
    try:
        work = [
            (job, seed)
            for job in jobs(own.methods, own.benchmark, own.preset, request.changes, own.fast)
            for seed in own.seeds
        ]
        loggers = named(own.log)
    except NessError as error:
        raise WrongUse(str(error)) from error
    with display(own.quiet, len(work)) as shown, logged(loggers, own.out, shown.listener) as listener:
        grid = run_all(work, request.options(), listener, shown.say)
    for name, reason in grid.failures.items():
        sys.stderr.write(f"ness: {name}: {reason}\n")
    clock.tell(grid, own.times)
    done = [records.from_result(outcome.result, str(outcome.folder)) for outcome in grid.outcomes]
    if done:
        sys.stdout.write(FORMATS[own.format](rows(done)))
    return 1 if grid.failures else 0


def methods_in(argv: Sequence[str]) -> list[str]:
    """The methods after --methods, before the whole line can be understood; all of them by default.

    >>> methods_in(["--methods", "finetune", "frozen", "--lr", "0.1"])
    ['finetune', 'frozen']
    """
    named: list[str] = []
    if "--methods" in argv:
        for word in argv[list(argv).index("--methods") + 1 :]:
            if word.startswith("-"):
                break
            named.append(word)
    return named if named and named != ["all"] else sorted(registry.all_methods())
