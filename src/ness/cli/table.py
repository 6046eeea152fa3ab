"""`ness table`: several methods on one benchmark, the rows of a plan, or the records of a folder, as one table."""

import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from ness.cli.arguments import Common, How, given, parse, parse_flags, peek, understood
from ness.cli.display import CommandClock, display, records_of, stoppable, tell
from ness.cli.main import WrongUse
from ness.errors import NessError
from ness.lab import registry
from ness.lab.runs.experiment import Experiment, read
from ness.lab.runs.jobs import Job
from ness.lab.runs.log import logged, named
from ness.lab.runs.settings import Training, setting
from ness.lab.runs.sweep import jobs
from ness.lab.training.seeds import checked
from ness.report.collect import Found, collect
from ness.report.experiment_rows import planned
from ness.report.formats import FORMATS
from ness.report.records import Record
from ness.report.table import Row, rows

Format = Literal["text", "markdown", "csv", "latex"]

ABOUT = """Train several methods on a benchmark and print their table; what is finished is not run again.

A setting that is left out is each method's own preset; one that is given reaches every method that has it.
With --plan FILE.toml the rows and their settings are those of the file; with --from FOLDER nothing is run.

Examples: ness table --benchmark digits --methods finetune frozen ness --seeds 1 2 3 4 5 ·
ness table --benchmark cifar100 --methods all --seeds 1 2 3 4 37 --device cuda ·
ness table --plan paper-cifar100 --device cuda ·
ness table --from results --format csv"""

NOT_WITH_A_PLAN = {"methods", "method", "benchmark", "preset", "config"}  # and every setting


@dataclass(frozen=True)
class TableArguments(Common):
    """The command's own flags."""

    methods: tuple[str, ...] = setting(("all",), "see `ness list methods`; all: every one of them")
    format: Format = setting("text", "how the table is printed")


@dataclass(frozen=True)
class PlanArguments(How):
    """The flags of a table whose rows stand in a file."""

    plan: Path = setting(Path(), "TOML file of rows, or a name of `ness list plans`: docs/reproduction.md")
    rows: tuple[str, ...] | None = setting(None, "only the file's rows of these names")
    seeds: tuple[int, ...] | None = setting(None, "one run each, instead of the file's")
    format: Format = setting("text", "how the table is printed")


@dataclass(frozen=True, kw_only=True)
class FromArguments:
    """The flags of a table of records: nothing is run."""

    source: Annotated[Path, tyro.conf.arg(name="from", help="folder of finished runs or records")]
    format: Annotated[Format, tyro.conf.arg(help="how the table is printed")] = "text"


@dataclass(frozen=True, kw_only=True)
class PlanFromArguments(FromArguments):
    """The flags of a plan's table of records."""

    plan: Annotated[Path, tyro.conf.arg(help="TOML file of rows, or a name of `ness list plans`")]
    rows: Annotated[tuple[str, ...] | None, tyro.conf.arg(help="only the file's rows of these names")] = None
    seeds: Annotated[tuple[int, ...] | None, tyro.conf.arg(help="instead of the file's")] = None
    fast: Annotated[bool, tyro.conf.arg(help="the rows as they are run with --fast")] = False


def main(argv: list[str]) -> int:
    """Prints the table on standard output, everything else on standard error."""
    flags = given(argv)
    if "plan" in flags:
        refuse_settings(argv)
        return of_plan_and_records(argv) if "from" in flags else of_plan(argv)
    return of_records(argv) if "from" in flags else of_methods(argv)


def of_methods(argv: list[str]) -> int:
    """Runs each method with each seed."""
    request = parse(argv, TableArguments, methods_in(argv), ABOUT, "ness table")
    own = request.own
    with wrong_use():
        found = jobs(own.methods, own.benchmark, own.preset, request.changes, own.fast)
    return carried_out([(job, seed) for job in found for seed in own.seeds], own, rows)


def of_plan(argv: list[str]) -> int:
    """Runs each row of the plan with each seed."""
    own = parse_flags(argv, PlanArguments, ABOUT, "ness table")
    asked = experiment_of(own.plan, own.rows, own.seeds, own.fast)
    if not own.quiet:
        tell(f"{asked.title or own.plan}: {len(asked.jobs)} rows, {len(asked.seeds)} seeds")

    def shown(done: Sequence[Record]) -> list[Row]:
        return [one.row for one in planned(asked, done) if one.runs]

    return carried_out(asked.work(), own, shown)


def of_records(argv: list[str]) -> int:
    """Whatever the folder holds."""
    own = understood(FromArguments, args=argv, prog="ness table", description=ABOUT)
    found = told(collect([own.source]))
    sys.stdout.write(FORMATS[own.format](rows(found.records)))
    return 0


def of_plan_and_records(argv: list[str]) -> int:
    """The plan's rows, those that are not run yet as well."""
    own = understood(PlanFromArguments, args=argv, prog="ness table", description=ABOUT)
    asked = experiment_of(own.plan, own.rows, own.seeds, own.fast)
    found = told(collect([own.source], none_is_fine=True))
    sys.stdout.write(FORMATS[own.format]([one.row for one in planned(asked, found.records)]))
    return 0


def carried_out(work: Sequence[tuple[Job, int]], own: Any, shown: Callable[[Sequence[Record]], list[Row]]) -> int:
    """Runs what is not finished, and prints the table that `shown` makes of all that is."""
    clock = CommandClock()
    with wrong_use():
        loggers = named(own.log)
    with (
        stoppable(work, own.out),
        display(own.quiet, len(work)) as screen,
        logged(loggers, own.out, screen.listener) as listener,
    ):
        grid = own.carry_out(work, listener, screen.say)
    done = records_of(grid)
    for complaint in grid.complaints():
        tell(f"ness: {complaint}")
    clock.tell(grid, own.times, own.quiet)
    if done:
        sys.stdout.write(FORMATS[own.format](shown(done)))
    return 1 if grid.complaints() else 0


def experiment_of(plan: Path, names: Sequence[str] | None, seeds: tuple[int, ...] | None, fast: bool) -> Experiment:
    """The plan's experiment, or these rows of it; the command line's seeds go before its own."""
    if names is not None and not names:
        raise WrongUse("--rows without a name; expected names of the plan's rows, in quotes where they hold spaces")
    with wrong_use():
        found = read(plan, fast)
        found = found if names is None else found.only(names)
        return found if seeds is None else dataclasses.replace(found, seeds=checked(seeds))


def refuse_settings(argv: Sequence[str]) -> None:
    """Refuses flags for what stands in the plan."""
    parts = [Training, *(spec.settings for spec in registry.all_methods().values())]
    parts += [bench.options for bench in registry.all_benchmarks().values()]
    settings = {item.name for part in parts for item in dataclasses.fields(part)} | NOT_WITH_A_PLAN
    if wrong := sorted(given(argv) & settings):
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in wrong)
        raise WrongUse(
            f"{flags} does not go with --plan: put it in {peek(argv, 'plan')}, where each row is a [[row]] table with "
            'its method and settings, e.g. method = "ness" and lr = 0.01'
        )


def told(found: Found) -> Found:
    """The same, after standard error has heard what is not counted."""
    for problem in found.problems:
        tell(f"ness: left out: {problem}")
    return found


@contextmanager
def wrong_use() -> Iterator[None]:
    """What is wrong in here is the user's mistake: exit code 2."""
    try:
        yield
    except NessError as error:
        raise WrongUse(str(error)) from error


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
