"""Reads the results of finished runs; one record a seed."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ness.errors import NessError
from ness.lab.metrics import Matrix, Scores, scores


@dataclass(frozen=True)
class Record:
    """One finished run."""

    benchmark: str
    method: str
    setting: str
    digest: str
    preset: str
    seed: int
    tasks: tuple[str, ...]
    accuracy: Matrix
    scores: Scores
    seconds: float
    memory: int | None
    version: str


def from_result(result: Mapping[str, Any], where: str) -> Record:
    """The record in a result.json."""
    try:
        return Record(
            benchmark=result["benchmark"],
            method=result["method"],
            setting=result["setting"],
            digest=result["digest"],
            preset=result["preset"],
            seed=result["seed"],
            tasks=tuple(result["tasks"]),
            accuracy=result["accuracy"],
            scores=scores(result["accuracy"]),
            seconds=result["total_seconds"],
            memory=result["peak_memory"],
            version=result["version"],
        )
    except (KeyError, TypeError, IndexError) as error:
        raise NessError(f"{where} is no result of a run ({error!r}); remove it or run again") from error


def read(folder: Path) -> list[Record]:
    """Every result.json under a folder, in the order of the paths."""
    if not folder.is_dir():
        raise NessError(f"{folder} is no folder; expected one with finished runs: ness run writes them to runs/")
    found = []
    for path in sorted(folder.rglob("result.json")):
        try:
            result = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise NessError(f"{path} cannot be read ({error}); remove it or run again") from error
        found.append(from_result(result, str(path)))
    if not found:
        raise NessError(f"there is no finished run under {folder}; a run is finished when it has a result.json")
    return found


def with_forward_transfer(records: Iterable[Record]) -> list[Record]:
    """The records with forward transfer where the same benchmark, preset and seed was run with `alone`."""
    records = list(records)
    alone: dict[tuple[str, str, int], Sequence[Any]] = {
        (record.benchmark, record.preset, record.seed): record.accuracy[-1]
        for record in records
        if record.method == "alone"
    }
    return [
        replace(record, scores=scores(record.accuracy, alone.get((record.benchmark, record.preset, record.seed))))
        if record.method != "alone"
        else record
        for record in records
    ]
