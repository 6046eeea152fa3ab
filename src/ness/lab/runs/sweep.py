"""A table of runs: every method with every seed, one after another; what is finished is not run again.

Processes that are given the same table share it: each takes runs that nobody has, and ends when all are done.
"""

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ness._files import reason
from ness.errors import NessError
from ness.lab import registry
from ness.lab.benchmarks.dataset_cache import Shelf
from ness.lab.gpu import amp, devices
from ness.lab.gpu.scheduler import Run, allow_many_streams, lanes_for, side_by_side
from ness.lab.runs import queue
from ness.lab.runs.environment import choose_device, repeatable
from ness.lab.runs.jobs import Job, resolve, settings_type
from ness.lab.runs.run import Listener, Options, Outcome, check_options, folder_of, run
from ness.lab.runs.run_folder import RunFolder, RunLocked
from ness.lab.runs.settings import nearest

End = Outcome | NessError | None  # of a run; None: it was not begun
LOOK_EVERY = 1.0  # seconds between two looks at runs that other processes have


@dataclass
class Grid:
    """What came of a table of runs: outcomes in order, what failed by name of the run, and what was not begun."""

    outcomes: list[Outcome] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    not_begun: list[str] = field(default_factory=list)
    on_gpu: bool = False

    @classmethod
    def of(cls, work: Sequence[tuple[Job, int]], ends: Sequence[End], on_gpu: bool) -> "Grid":
        """The grid of runs and their ends, in the order in which they were asked for."""
        grid = cls(on_gpu=on_gpu)
        for (job, seed), end in zip(work, ends, strict=True):
            if isinstance(end, Outcome):
                grid.outcomes.append(end)
            elif end is None:
                grid.not_begun.append(name_of(job, seed))
            else:
                grid.failures[name_of(job, seed)] = str(end)
        return grid

    def complaints(self) -> list[str]:
        """A line for each run that failed, and one for those that were not begun."""
        lines = [f"{name}: {reason}" for name, reason in self.failures.items()]
        if self.not_begun:
            lines.append(
                f"{len(self.not_begun)} {'run was' if len(self.not_begun) == 1 else 'runs were'} not begun, since the "
                f"time of --stop-after was over; the same command, without --again, goes on with {self.not_begun[0]}"
            )
        return lines


def name_of(job: Job, seed: int) -> str:
    """What people read of a run: 'ness on digits, seed 1'."""
    return f"{job.title} on {job.benchmark.name}, seed {seed}"


def jobs(
    methods: Sequence[str], benchmark: str, preset: str, changes: Mapping[str, Any], quick: bool = False
) -> list[Job]:
    """One job a method; a change reaches the methods that have the setting, and at least one must have it."""
    known = registry.all_methods()
    bench = registry.find("benchmark", benchmark, registry.all_benchmarks())
    names = sorted(known) if list(methods) == ["all"] else list(methods)
    fields = {
        name: {item.name for item in dataclasses.fields(settings_type(registry.find("method", name, known), bench))}
        for name in names
    }
    every = set().union(*fields.values())
    for change in changes:
        if change not in every:
            raise NessError(f"none of {', '.join(names)} has a setting {change!r}.{nearest(change, every)}")
    return [
        resolve(name, benchmark, preset, {key: value for key, value in changes.items() if key in fields[name]}, quick)
        for name in names
    ]


def run_all(
    work: Iterable[tuple[Job, int]],
    options: Options,
    listener: Callable[[Job, int], Listener],
    say: Callable[[str], None] = lambda line: None,
) -> Grid:
    """Runs each job with its seed, as many side by side as the device takes; one that fails is noted, others go on.

    `say` is told which device `auto` came to, and why. Runs whose turn comes after `options.stop_after` are not begun.
    Runs that another process has are waited for, and taken over should it be gone; with `again` they count as failed.
    """
    check_options(options)
    began, asked = time.monotonic(), list(work)
    allow_many_streams()
    need = devices.need_of([job.network for job, _ in asked])
    if options.device == "auto":
        choice = devices.choose(devices.gpus(), need, len(asked), options.lanes)
        say(choice.why)
        options = dataclasses.replace(options, device=choice.device, lanes=choice.lanes)
    device, quick = choose_device(options.device), any(job.fast for job, _ in asked)
    if quick:
        amp.check(device)
    queue.note(options.out, asked)
    shelf = Shelf() if len(asked) > 1 else None  # one run alone needs no second copy of its data
    runs = [
        partial(
            _in_time,
            began,
            partial(run, job, seed, options, listener(job, seed), shelf),
            folder_of(job, seed, options.out),
            options,
        )
        for job, seed in asked
    ]
    carried = partial(carry_out, device=device, quick=quick, lanes=options.lanes, need=need)
    ends = carried(runs)
    if not options.again:  # else a run that another process has just finished would be begun anew
        _wait_for_others(runs, ends, [name_of(job, seed) for job, seed in asked], carried, say)
    return Grid.of(asked, ends, device.type == "cuda")


def carry_out(
    runs: Sequence[Run[Outcome | None]], device: torch.device, quick: bool, lanes: int | None, need: int
) -> list[End]:
    """How the runs end on a device: one after another on a CPU, `lanes` side by side on a GPU."""
    here = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    with here, repeatable(device, not quick):
        return side_by_side(runs, device, lanes_for(device, lanes, need))


def _in_time(began: float, run: Run[Outcome], folder: Path, options: Options) -> Outcome | None:
    """The run; None if its turn comes too late, unless it is finished already and is to be left so."""
    late = options.stop_after is not None and time.monotonic() - began >= options.stop_after
    if late and (options.again or RunFolder(folder).result() is None):
        return None
    return attempt(run, folder)


def attempt(run: Run[Outcome], folder: Path) -> Outcome:
    """The run; whatever error of its method's it ends with becomes one of ours."""
    try:
        return run()
    except NessError:
        raise
    except Exception as error:  # a method's own, say: it ends this run and no other
        place = RunFolder(folder).keep_traceback(error)
        name = getattr(error, "filename", None) if isinstance(error, OSError) else type(error).__name__
        raise NessError(f"{f'{name}: ' if name else ''}{reason(error)} (where it came from: {place})") from error


def _wait_for_others(
    runs: Sequence[Run[Outcome | None]],
    ends: list[Outcome | NessError | None],
    names: Sequence[str],
    carry_out: Callable[[Sequence[Run[Outcome | None]]], list[Outcome | NessError | None]],
    say: Callable[[str], None],
) -> None:
    """Puts what comes of runs that other processes have in their places; says once whom it waits for."""
    said = False
    while held := {number: end for number, end in enumerate(ends) if isinstance(end, RunLocked)}:
        if not said:
            first, count = next(iter(held)), len(held)
            more = f" and {count - 1} more" if count > 1 else ""
            say(f"waiting for {names[first]}, which {held[first].holder} runs{more}; Ctrl-C leaves it to them")
            said = True
        time.sleep(LOOK_EVERY)
        for number, end in zip(held, carry_out([runs[number] for number in held]), strict=True):
            ends[number] = end
