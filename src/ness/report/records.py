"""The record of one finished run, as it stands in its result.json."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ness.errors import NessError
from ness.lab.runs.metrics import Matrix, Scores, scores


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
    task_seconds: tuple[float, ...] = ()  # one a lesson
    epochs: tuple[int, ...] = ()  # one a lesson
    notes: tuple[Mapping[str, Any], ...] = ()  # what the method said about each lesson
    settings: Mapping[str, Any] = field(default_factory=dict)
    fast: bool = False  # run with --fast: another setting, whatever else is the same
    environment: Mapping[str, Any] = field(default_factory=dict)
    revision: int = 1  # of the method's rule under these settings


def from_result(result: Mapping[str, Any], where: str) -> Record:
    """The record in a result.json; one that lacks something or holds nonsense is an error that says what."""
    try:
        record = Record(
            **{name: _of(result[name], str, name) for name in ("benchmark", "method", "setting", "digest", "preset")},
            seed=_of(result["seed"], int, "seed"),
            tasks=tuple(_of(name, str, "a task's name") for name in result["tasks"]),
            accuracy=checked(result["accuracy"], len(result["tasks"])),
            scores=scores(result["accuracy"]),
            seconds=_number(result["total_seconds"], "total_seconds"),
            memory=None if result["peak_memory"] is None else _of(result["peak_memory"], int, "peak_memory"),
            version=_of(result["version"], str, "version"),
            task_seconds=tuple(_number(value, "seconds") for value in result.get("seconds", ())),
            epochs=tuple(_of(value, int, "epochs") for value in result.get("epochs", ())),
            notes=tuple(_of(note, dict, "a note") for note in result.get("notes", ())),
            fast=_flag(result.get("fast", False), "fast"),
            settings=_of(result.get("settings", {}), dict, "settings"),
            environment=_of(result.get("environment", {}), dict, "environment"),
            revision=_of(result.get("revision", 1), int, "revision"),
        )
    except KeyError as error:
        raise NessError(
            f"{where} is no result of a run ({error} is missing); repeat the run with --again, or remove the file"
        ) from error
    except (TypeError, ValueError, IndexError) as error:
        raise NessError(
            f"{where} is no result of a run ({error}); repeat the run with --again, or remove the file"
        ) from error
    return record


def checked(accuracy: Any, tasks: int) -> Matrix:
    """The accuracy matrix, if it is one: a row a task, measured up to the diagonal, or one row of all tasks."""
    if not isinstance(accuracy, list) or not all(isinstance(row, list) and len(row) == tasks for row in accuracy):
        raise ValueError(f"accuracy is no list of rows of {tasks} numbers")
    if len(accuracy) not in (1, tasks):
        raise ValueError(f"accuracy has {len(accuracy)} rows, expected {tasks}, or 1 for tasks learnt at once")
    for t, row in enumerate(accuracy):
        for i, value in enumerate(row):
            needed = i <= t or len(accuracy) == 1
            if (value is None and needed) or (value is not None and not 0 <= _number(value, "accuracy") <= 100):
                raise ValueError(f"accuracy of task {i + 1} after task {t + 1} is {value}")
    return [[None if value is None else float(value) for value in row] for row in accuracy]


def _of(value: Any, kind: type, name: str) -> Any:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f"{name} is {value!r:.60}, expected a {kind.__name__}")
    return value


def _flag(value: Any, name: str) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r:.60}, expected true or false")
    return value


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name} is {value!r:.60}, expected a number")
    return float(value)


def with_forward_transfer(records: Iterable[Record]) -> list[Record]:
    """The records with forward transfer where the same benchmark, preset and seed was run with `alone`, as fast."""
    records = list(records)
    alone: dict[tuple[str, str, int, int, bool], Sequence[Any]] = {
        (record.benchmark, record.preset, record.seed, len(record.tasks), record.fast): record.accuracy[-1]
        for record in records
        if record.method == "alone"
    }

    def scored(record: Record) -> Record:
        key = (record.benchmark, record.preset, record.seed, len(record.tasks), record.fast)
        return replace(record, scores=scores(record.accuracy, alone.get(key)))

    return [record if record.method == "alone" else scored(record) for record in records]
