"""What was asked for in a folder of runs, kept beside them, so that who watches knows what is left."""

import contextlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ness.lab.runs.jobs import Job
from ness.lab.runs.run import folder_of

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
    known = {one.folder for one in read(out)}
    new = [one for job, seed in work if (one := asked(job, seed)).folder not in known]
    if new:
        with contextlib.suppress(OSError):
            out.mkdir(parents=True, exist_ok=True)
            path = out / NAME
            whole = not path.exists() or path.read_bytes()[-1:] in (b"", b"\n")  # not cut short by a killed process
            text = "".join(json.dumps(asdict(one)) + "\n" for one in new)
            with path.open("a", encoding="utf-8") as file:
                file.write(text if whole else f"\n{text}")


def read(out: Path) -> list[RunRequest]:
    """Everything that was asked for, each once; lines that are damaged are passed over."""
    found: dict[str, RunRequest] = {}
    for line in lines(out / NAME):
        with contextlib.suppress(TypeError):
            one = RunRequest(**line)
            found[one.folder] = one
    return list(found.values())


def lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines; nothing where there is none."""
    found = []
    with contextlib.suppress(OSError):
        for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                if isinstance(value := json.loads(text), dict):
                    found.append(value)
    return found
