"""What was asked for in a folder of runs, kept beside them, so that who watches knows what is left."""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePath
from statistics import fmean
from typing import Any, get_type_hints

from ness._files import append_line
from ness._sealed import seal_line
from ness.errors import NessError, printable
from ness.lab.runs.jobs import Job
from ness.lab.runs.run import folder_of
from ness.lab.runs.run_folder import lines

NAME = "asked.jsonl"  # append-only, a line per run


@dataclass(frozen=True)
class RunRequest:
    """A run that someone wants."""

    folder: str
    benchmark: str
    method: str
    setting: str
    seed: int
    lessons: int  # 0 where the data decide
    epochs: int  # a lesson, at most


def asked(job: Job, seed: int) -> RunRequest:
    """What a job and a seed ask for."""
    lessons = 1 if job.method.plan == "all at once" else job.benchmark.tasks or 0
    name = folder_of(job, seed, Path()).name
    return RunRequest(name, job.benchmark.name, job.method.name, job.label, seed, lessons, job.settings.epochs)


def note(out: Path, work: Iterable[tuple[Job, int]]) -> None:
    """Adds what is not noted yet; a folder that cannot be written is left to the run itself to complain about."""
    with contextlib.suppress(NessError):
        known = {one.folder for one in read(out)}
        path = out / NAME
        new = [one for job, seed in work if (one := asked(job, seed)).folder not in known]
        for at, one in enumerate(new, start=1):
            append_line(path, seal_line(asdict(one), str(path)), flush=at == len(new))


def read(out: Path) -> list[RunRequest]:
    """Everything that was asked for, each once; lines that are damaged are passed over."""
    found: dict[str, RunRequest] = {}
    for line in lines(out / NAME)[0]:
        if (one := request_of(line)) is not None:
            found[one.folder] = one
    return list(found.values())


def request_of(line: Mapping[str, Any]) -> RunRequest | None:
    """What a line asks for; None if it is none of ours: `folder` is a name below the folder of runs, and no path."""
    kinds = get_type_hints(RunRequest)
    if line.keys() != kinds.keys() or any(type(line[name]) is not kind for name, kind in kinds.items()):
        return None
    if (
        line["folder"] != PurePath(line["folder"]).name
        or "\0" in line["folder"]
        or min(line["lessons"], line["epochs"]) < 0
    ):
        return None
    texts = {name: printable(line[name])[:1000] for name in ("benchmark", "method", "setting")}
    return RunRequest(**{**line, **texts})


#: What runs that last alike have in common, from the most alike on.
ALIKE: tuple[Callable[[RunRequest], tuple[object, ...]], ...] = (
    lambda asked: ("setting", asked.benchmark, asked.method, asked.setting, asked.epochs),
    lambda asked: ("method", asked.benchmark, asked.method, asked.epochs),
    lambda asked: ("benchmark", asked.benchmark, asked.epochs),
)


class Lengths:
    """How long runs last, by what those like them took; where nothing is like them, by tasks times epochs.

    >>> lengths = Lengths()
    >>> one = RunRequest("digits-ness-0-seed1", "digits", "ness", "fixed", 1, 5, 15)
    >>> lengths.add(one, 5 * 15, 30.0)
    >>> lengths.expected(one, 5 * 15), lengths.expected(RunRequest("", "other", "ness", "fixed", 1, 10, 15), 10 * 15)
    (30.0, 60.0)
    """

    def __init__(self) -> None:
        self._taken: dict[tuple[object, ...], list[float]] = defaultdict(list)
        self._paces: list[float] = []  # seconds per unit

    def add(self, asked: RunRequest, units: float, seconds: float) -> None:
        """A run of so many units (tasks times epochs) took so long."""
        for alike in ALIKE:
            self._taken[alike(asked)].append(seconds)
        if units > 0:
            self._paces.append(seconds / units)

    def expected(self, asked: RunRequest, units: float) -> float:
        """Seconds to expect of a run; without any record its units, which still tell the longer from the shorter."""
        for alike in ALIKE:
            if found := self._taken.get(alike(asked)):
                return fmean(found)
        return units * (fmean(self._paces) if self._paces else 1.0)
