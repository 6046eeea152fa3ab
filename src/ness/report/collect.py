"""Finds runs below folders: the records of finished ones, and what is wrong with the others."""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ness._sealed import read_json
from ness.errors import NessError, printable
from ness.report.records import Record, from_result


@dataclass(frozen=True)
class Problem:
    """A run that is not counted, and why."""

    folder: Path
    state: Literal["damaged", "unfinished", "repeated"]
    reason: str

    def __str__(self) -> str:
        return printable(f"{self.folder}: {self.state}: {self.reason}")


@dataclass(frozen=True)
class Found:
    """What lies below some folders."""

    records: tuple[Record, ...]
    problems: tuple[Problem, ...] = ()


def collect(paths: Sequence[Path], *, none_is_fine: bool = False) -> Found:
    """Every run in or below the paths, in the order of their names; a damaged one does not stop the rest."""
    records: list[Record] = []
    problems: list[Problem] = []
    places: dict[tuple[str, str, str, tuple[str, ...], int], Path] = {}
    for folder in _run_folders(paths):
        found = _read(folder)
        if isinstance(found, Problem):
            problems.append(found)
            continue
        key = (found.benchmark, found.method, found.digest, found.tasks, found.seed)
        if key in places:
            problems.append(Problem(folder, "repeated", f"the same settings and seed as {places[key]}, counted once"))
            continue
        places[key] = folder
        records.append(found)
    if not records and not none_is_fine:
        shown = "; ".join([" and ".join(map(str, paths)), *map(str, problems[:3])])
        raise NessError(f"there is no finished run under {shown}. A run is finished when it has a good result.json")
    return Found(tuple(records), tuple(problems))


def _run_folders(paths: Iterable[Path]) -> Iterator[Path]:
    """Folders with a result.json or a config.json, each once."""
    seen: set[Path] = set()
    for path in paths:
        if not path.is_dir():
            raise NessError(f"{path} is no folder; expected one with finished runs: ness run writes them to runs/")
        wanted = {"result.json", "config.json"}
        below = {Path(place) for place, folders, files in os.walk(path) if wanted & {*folders, *files}}
        for folder in sorted(below):
            if folder.resolve() not in seen:
                seen.add(folder.resolve())
                if os.path.lexists(folder / "result.json") or is_begun(folder):
                    yield folder


def is_begun(folder: Path) -> bool:
    """Whether a folder without a result is a run's: its config names one, or it is damaged beside a log."""
    try:
        config = read_json(folder / "config.json")
    except (OSError, NessError):
        return (folder / "events.jsonl").exists()
    return {"benchmark", "method", "seed"} <= config.keys()


def _read(folder: Path) -> Record | Problem:
    path = folder / "result.json"
    try:
        result = read_json(path)
    except FileNotFoundError:
        if not path.is_symlink():
            return Problem(folder, "unfinished", "there is no result.json; the same command goes on with it")
        return Problem(folder, "damaged", "result.json is a link to nothing; remove it, or put the record there")
    except NessError as error:
        said = str(error).removeprefix(f"{path}: ")
        return Problem(folder, "damaged", f"result.json cannot be read ({said}); run it with --again")
    try:
        return from_result(result, "result.json")
    except NessError as error:
        return Problem(folder, "damaged", str(error))
