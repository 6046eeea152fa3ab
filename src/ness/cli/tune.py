"""`ness tune`: a grid of settings on the validation data of the first tasks, its Pareto front, and the choice."""

import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ness._files import write_bytes
from ness.cli.arguments import Common, Request, parse
from ness.cli.display import CommandClock, display, records_of, stoppable, tell
from ness.cli.main import WrongUse
from ness.errors import NessError
from ness.lab import registry
from ness.lab.benchmarks.validation import on_validation
from ness.lab.runs.jobs import Job, resolve, settings_type
from ness.lab.runs.run import Listener, folder_of
from ness.lab.runs.settings import setting
from ness.lab.runs.sweep import Grid
from ness.lab.runs.tune import Trial, as_toml, choose, combinations, pareto, parse_over, trial
from ness.lab.training.loop import Event
from ness.report.formats import aligned, terminal_width
from ness.report.number_format import number

ABOUT = """Try a grid of settings and write the best to a TOML file, without looking at test data.

The continual protocol: settings are chosen on the validation data of the first tasks alone; neither test data nor
later tasks are touched. What is finished is not run again.

Examples: ness tune --benchmark digits --method ness --over eps=1e-3,2e-3,5e-3 lr=0.01,0.02 ·
ness tune --benchmark cifar100 --method ewc --over penalty=50,250,1000 --first-tasks 3 --seeds 1 2 --device cuda ·
ness run --config tuning/digits-ness.toml --seeds 1 2 3"""


@dataclass(frozen=True)
class TuneArguments(Common):
    """The command's own flags."""

    method: str = setting("ness", "see `ness list methods`")
    over: tuple[str, ...] = setting((), "values to try, e.g. eps=3e-4,6e-4,1e-3 lr=0.01,0.02; every combination is run")
    first_tasks: int = setting(3, "tasks to choose on, from the first; two at least")
    least_bwt: float | None = setting(None, "choose the highest ACC among settings with at least this BWT")
    write: Path | None = setting(None, "file of the choice; by default OUT/BENCHMARK-METHOD.toml")
    out: Path = setting(Path("tuning"), "folder of the run folders; apart from runs that are judged on test data")


def main(argv: list[str]) -> int:
    """Runs the grid; the table goes to standard output, everything else to standard error."""
    request = parse(argv, TuneArguments, None, ABOUT, "ness tune")
    own = request.own
    clock = CommandClock()
    try:
        jobs = trials_of(request)
    except NessError as error:
        raise WrongUse(str(error)) from error
    work = [(job, seed) for _, job in jobs for seed in own.seeds]
    path = own.write or own.out / f"{own.benchmark}-{own.method}.toml"
    if os.path.lexists(path) and not path.is_file():  # said now, not after hours of training
        raise WrongUse(f"--write {path}: found no ordinary file there; name another one")
    with stoppable(work, own.out), display(own.quiet, len(work)) as shown:
        grid = own.carry_out(work, lambda job, seed: naming(job, shown.listener(job, seed)), shown.say)
    clock.tell(grid, own.times, own.quiet)
    records_of(grid)  # damaged results go over to the failures
    tried = finished(jobs, grid, own.seeds, own.out)
    for complaint in grid.complaints():
        tell(f"ness: {complaint}")
    for values, _ in jobs:
        if values not in [one.values for one in tried]:
            tell(f"ness: left out, since not every seed came to its end: {shown_as(values)}")
    if grid.not_begun:
        return 1  # a choice among a part of the grid would look like one among all of it
    if not tried:
        raise NessError("no setting of the grid could be trained to its end; see above, and change --over")
    chosen = choose(tried, own.least_bwt)
    sys.stdout.write(table(tried, chosen))
    write(path, request, chosen)
    if not own.quiet:
        tell(f"the choice is in {path}; train with it: ness run --config {path}")
    return 0


def shown_as(values: Mapping[str, Any]) -> str:
    """A setting in one line."""
    return " ".join(f"{name}={value}" for name, value in values.items())


def naming(job: Job, hear: Listener) -> Listener:
    """Tells the ear of a run which setting it hears of."""

    def told(event: Event) -> None:
        if event.kind == "learnt":
            event = Event(event.kind, {**event.facts, "name": f"{event.facts['name']} ({job.label})"})
        hear(event)

    return told


def trials_of(request: Request) -> list[tuple[dict[str, Any], Job]]:
    """(what is tried, the job) for every combination; the job never sees test data."""
    own = request.own
    if own.least_bwt is not None and not -100 <= own.least_bwt <= 100:
        raise NessError(f"--least-bwt {own.least_bwt:g}: expected percent, from -100 to 100")
    spec = registry.find("method", own.method, registry.all_methods())
    benchmark = registry.find("benchmark", own.benchmark, registry.all_benchmarks())
    most = benchmark.tasks or own.first_tasks  # streams of the user's own are counted when they are loaded
    if not 2 <= own.first_tasks <= most:
        raise NessError(f"first_tasks is {own.first_tasks}, expected 2 to {most}, the tasks of {benchmark.name}")
    if spec.plan == "all at once":
        raise NessError(f"{spec.name} learns all tasks at once and has no BWT; tune a method that learns task by task")
    over = parse_over(own.over, settings_type(spec, benchmark))
    for name in over:
        if name in request.changes:
            raise NessError(f"{name} is set and in --over too; leave one out")
    held = on_validation(benchmark, own.first_tasks)
    return [
        (values, dataclasses.replace(job, benchmark=held))
        for values in combinations(over)
        for job in [resolve(spec, benchmark, own.preset, request.changes | values, own.fast)]
    ]


def finished(jobs: Sequence[tuple[Mapping[str, Any], Job]], grid: Grid, seeds: Sequence[int], out: Path) -> list[Trial]:
    """The trials of which every seed came to its end."""
    results = {outcome.folder: outcome.result for outcome in grid.outcomes}
    tried = []
    for values, job in jobs:
        folders = [folder_of(job, seed, out) for seed in seeds]
        if all(folder in results for folder in folders):
            tried.append(trial(values, [results[folder] for folder in folders]))
    return tried


def table(tried: Sequence[Trial], chosen: Trial) -> str:
    """Every trial by falling ACC, the Pareto front marked."""
    front = pareto(tried)
    names = list(tried[0].values)
    lines = [(*names, "valid ACC", "valid BWT", "")]
    for one in sorted(tried, key=lambda one: -one.acc):
        mark = "chosen" if one is chosen else "front" if one in front else ""
        acc, bwt = number((one.acc, one.acc_std)), number((one.bwt, one.bwt_std), signed=True)
        lines.append((*(str(one.values[name]) for name in names), acc, bwt, mark))
    return aligned(lines, terminal_width())


def write(path: Path, request: Request, chosen: Trial) -> None:
    """Writes the choice as a file for --config."""
    own = request.own
    values = {"benchmark": own.benchmark, "method": own.method, "preset": own.preset}
    seeds = " ".join(map(str, own.seeds))
    remarks = [
        f"chosen by `ness tune` on the validation data of the first {own.first_tasks} tasks, seeds {seeds}",
        f"validation ACC {chosen.acc:.2f}, BWT {chosen.bwt:+.2f}; tried: {' '.join(own.over)}",
    ]
    text = as_toml({**values, **request.changes, **chosen.values}, remarks)
    write_bytes(path, text.encode(), "choose another --write")
