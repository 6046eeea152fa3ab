"""What was asked for in a folder of runs, kept beside them, so that who watches knows what is left."""

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePath
from typing import Any, get_type_hints

from ness._files import append_line
from ness._sealed import seal_line
from ness.errors import NessError, printable
from ness.lab.runs.jobs import Job
from ness.lab.runs.run import folder_of
from ness.lab.runs.run_folder import lines

NAME = "asked.jsonl"  # append-only, a line a run


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
