"""The record of one finished run, as it stands in its result.json."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ness._files import reason
from ness.errors import NessError, printable
from ness.lab.runs.metrics import Matrix, Scores, scores

LONGEST = 2000  # characters of a name; a setting's lists all that was set by hand
LARGEST = 1e100  # what is measured is smaller, and its square is a number still


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
    general: Mapping[str, float] = field(default_factory=dict)  # what is left of a pretrained network's own ability


def from_result(result: Mapping[str, Any], where: str) -> Record:
    """The record in a result.json; one that lacks something or holds nonsense is an error that says what."""
    try:
        names = {
            name: _name(result[name], name)
            for name in ("benchmark", "method", "setting", "digest", "preset", "version")
        }
        tasks = tuple(_name(name, "a task's name") for name in _of(result["tasks"], list, "tasks"))
        accuracy = checked(result["accuracy"], len(tasks))
        memory = result["peak_memory"]
        for part in ("notes", "settings", "environment"):
            _check_inside(result.get(part), part)
        return Record(
            **names,
            seed=_of(result["seed"], int, "seed"),
            tasks=tasks,
            accuracy=accuracy,
            scores=scores(accuracy),
            seconds=_seconds(result["total_seconds"], "total_seconds"),
            memory=None if memory is None else _of(memory, int, "peak_memory"),
            task_seconds=tuple(_seconds(value, "seconds") for value in _of(result.get("seconds", []), list, "seconds")),
            epochs=tuple(_count(value, "epochs") for value in _of(result.get("epochs", []), list, "epochs")),
            notes=tuple(_note(note) for note in _of(result.get("notes", []), list, "notes")),
            fast=_flag(result.get("fast", False), "fast"),
            settings=_of(result.get("settings", {}), dict, "settings"),
            environment=_environment(_of(result.get("environment", {}), dict, "environment")),
            general={
                _name(name, "a measure"): float(_of(value, float, "general"))
                for name, value in _of(result.get("general", {}), dict, "general").items()
            },
            revision=_count(result.get("revision", 1), "revision"),
        )
    except KeyError as error:
        raise NessError(
            f"{where} is no result of a run ({error} is missing); repeat the run with --again, or remove the file"
        ) from error
    except (TypeError, ValueError, IndexError, ArithmeticError, AssertionError, RecursionError) as error:
        raise NessError(
            f"{where} is no result of a run ({reason(error)}); repeat the run with --again, or remove the file"
        ) from error


def checked(accuracy: Any, tasks: int) -> Matrix:
    """The accuracy matrix, if it is one: a row per task, measured up to the diagonal, or one row of all tasks."""
    if not isinstance(accuracy, list) or not all(isinstance(row, list) and len(row) == tasks for row in accuracy):
        raise ValueError(f"accuracy is no list of rows of {tasks} numbers")
    if not tasks:
        raise ValueError("there is no task")
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


def _name(value: Any, name: str) -> str:
    """A name as people may read it: in one line, without what a terminal would obey."""
    text: str = _of(value, str, name)
    if len(text) > LONGEST:
        raise ValueError(f"{name} has {len(text)} characters, expected at most {LONGEST}")
    return printable(text)


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not -LARGEST <= value <= LARGEST:
        raise ValueError(f"{name} is {value!r:.60}, expected a number")
    return float(value)


def _seconds(value: Any, name: str) -> float:
    if abs(found := _number(value, name)) > 1e10:
        raise ValueError(f"{name} is {value!r:.60}, expected a number of seconds")
    return found


def _count(value: Any, name: str, below: int = 1 << 31) -> int:
    count: int = _of(value, int, name)
    if not 0 <= count < below:
        raise ValueError(f"{name} is {value!r:.60}, expected 0 or more")
    return count


def _note(value: Any) -> dict[str, Any]:
    """What a method said about a lesson; what a report reads of it is what it should be."""
    note: dict[str, Any] = _of(value, dict, "a note")
    if "kept" in note:
        _count(note["kept"], "kept", 1 << 53)
    rows = note.get("certificate")
    if not isinstance(rows, list):
        return note
    checked_rows = []
    for row in rows:
        if isinstance(row, dict):  # else no certificate, which its readers see
            if type(row.get("fan_in")) is int:
                _count(row["fan_in"], "fan_in")
            for key in ("rank", "bound", "rms_bound", "rms_drift", "relative_drift"):
                if isinstance(row.get(key), int | float) and row[key] < 0:
                    raise ValueError(f"{key} is {row[key]!r:.60}, expected 0 or more")
            if isinstance(row.get("name"), str):
                row = {**row, "name": _name(row["name"], "layer")}
        checked_rows.append(row)
    return {**note, "certificate": checked_rows}


def _environment(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {
        _name(key, "environment"): _name(value, key) if isinstance(value, str) else value
        for key, value in facts.items()
    }


def _check_inside(value: Any, name: str) -> None:
    """Refuses numbers beyond any that is measured, at whatever depth."""
    waiting = [value]
    while waiting:
        found = waiting.pop()
        if isinstance(found, dict):
            waiting += found.values()
        elif isinstance(found, list):
            waiting += found
        elif isinstance(found, int | float) and not isinstance(found, bool):
            _number(found, f"a number in {name}")


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
