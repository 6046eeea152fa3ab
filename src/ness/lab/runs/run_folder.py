"""One run in a folder: its lock, settings, events and what was measured so far."""

import contextlib
import json
import os
import platform
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ness.errors import NessError
from ness.lab.runs import checkpoint
from ness.lab.runs.checkpoint import write_json
from ness.lab.training.task_training import Tensors


@dataclass(frozen=True)
class History:
    """Where a run stands: lessons learnt with their accuracies, epochs and seconds, and the epoch it is in."""

    accuracy: tuple[tuple[float, ...], ...] = ()  # a row a lesson, the tasks seen so far
    epochs: tuple[int, ...] = ()  # of each lesson
    seconds: tuple[float, ...] = ()  # of each lesson
    epoch: int = 0  # in the current lesson
    valid_accuracy: float | None = None  # after that epoch
    since: float | None = None  # when the current lesson began or was taken up
    failed: str | None = None  # why it ended before its time, where nobody has gone on since

    @property
    def learnt(self) -> int:
        """Lessons finished."""
        return len(self.accuracy)

    def after(self, event: Mapping[str, Any]) -> "History":
        """The course with one more event; a lesson that comes again is done again."""
        kind = event["event"]
        if kind == "failed":
            return replace(self, failed=str(event["reason"]))
        if kind not in ("task", "epoch", "learnt", "resumed"):
            return self
        at = int(event["tasks" if kind == "resumed" else "task"])
        kept = (self.accuracy[:at], self.epochs[:at], self.seconds[:at])
        if kind == "task":
            return History(*kept, since=float(event["time"]))
        if kind == "resumed":
            return History(*kept, int(event["epoch"]), self.valid_accuracy, float(event["time"]))
        if kind == "epoch":
            return History(*kept, int(event["epoch"]), float(event["valid_accuracy"]), self.since)
        row = tuple(float(value) for value in event["accuracy"])
        return History((*kept[0], row), (*kept[1], int(event["epochs"])), (*kept[2], float(event["seconds"])))


def history(events: Iterable[Mapping[str, Any]]) -> History:
    """From the events of a log in their order; one that is not whole is passed over."""
    now = History()
    for event in events:
        try:
            now = now.after(event)
        except (KeyError, TypeError, ValueError):
            continue
    return now


class RunLocked(NessError):
    """Another process is at work in a run's folder."""

    def __init__(self, path: Path, holder: str) -> None:
        super().__init__(f"{path} is held by {holder}; wait for it, or choose another --out")
        self.holder = holder


class RunFolder:
    """`config.json`, `events.jsonl` (append-only), `checkpoint-*.safetensors`, `result.json`, `model.safetensors`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def result(self) -> dict[str, Any] | None:
        """The result of a finished run, or None."""
        path = self.path / "result.json"
        if not path.exists():
            return None
        try:
            value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise NessError(f"{path} cannot be read ({error}); repeat the run with --again") from error
        if not isinstance(value, dict):
            raise NessError(f"{path} holds a {type(value).__name__}, expected an object; repeat the run with --again")
        return value

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Holds the folder for this process alone; another one that tries is told who has it."""
        lock = FileLock(self.path / "lock")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock.acquire(timeout=0)
        except Timeout as error:
            raise RunLocked(self.path, self._holder()) from error
        except OSError as error:
            raise NessError(f"cannot write in {self.path} ({error.strerror}); choose another --out") from error
        try:
            write_json(self.path / "holder.json", _me())
            for left in self.path.glob(".*.tmp"):  # of a process that was killed while it wrote
                left.unlink()
            yield
        finally:
            with contextlib.suppress(OSError):
                (self.path / "holder.json").unlink()
            lock.release()

    def _holder(self) -> str:
        try:
            facts = json.loads((self.path / "holder.json").read_text(encoding="utf-8"))
            return f"process {facts['process']} on {facts['host']} since {facts['since']}"
        except (OSError, ValueError, KeyError):
            return "another process"

    def configure(self, config: Mapping[str, Any]) -> None:
        """Writes the config, or makes sure that the one that is there is the same."""
        path = self.path / "config.json"
        if path.exists():
            try:
                found = json.loads(path.read_text(encoding="utf-8"))
            except ValueError as error:
                raise NessError(f"{path} is damaged ({error}); repeat the run with --again") from error
            for key in ("method", "benchmark", "settings", "seed", "schema"):
                if found.get(key) != json.loads(json.dumps(config[key])):
                    raise NessError(
                        f"{path}: {key} is {found.get(key)!r}, expected {config[key]!r}; choose another --out"
                    )
            return
        write_json(path, config)

    def log(self, kind: str, facts: Mapping[str, Any]) -> None:
        """Appends one line to the log."""
        line = json.dumps({"event": kind, "time": round(time.time(), 3), **facts}) + "\n"
        path = self.path / "events.jsonl"
        try:
            with path.open("a+b") as file:
                if file.tell() and not _ends_with_newline(file):
                    file.write(b"\n")  # a line that a killed process left unfinished
                file.write(line.encode())
        except OSError as error:
            raise NessError(f"cannot write {path} ({error.strerror}); make room or rights and start again") from error

    def keep_traceback(self, error: BaseException) -> Path:
        """Writes where an error came from beside the run, for whoever wrote the method."""
        path = self.path / "traceback.txt"
        with contextlib.suppress(OSError):
            path.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
        return path

    def last_good(self) -> tuple[Tensors, dict[str, Any], list[str]] | None:
        """The newest checkpoint that can be read, and what was wrong with newer ones; None without any checkpoint."""
        wrong: list[str] = []
        for path in reversed(checkpoint.paths(self.path)):
            try:
                tensors, manifest = checkpoint.read(path)
            except NessError as error:
                wrong.append(str(error))
                continue
            return tensors, manifest, wrong
        if wrong:
            raise NessError(f"{wrong[0]}, and there is no older one; start over with --again")
        return None

    def clear(self) -> None:
        """Forgets an earlier run: its result is kept as result.old.json, the log goes on, the rest is removed."""
        result = self.path / "result.json"
        if result.exists():
            result.replace(self.path / "result.old.json")
        for path in [*checkpoint.paths(self.path), self.path / "config.json", self.path / "model.safetensors"]:
            path.unlink(missing_ok=True)


def _ends_with_newline(file: Any) -> bool:
    file.seek(-1, os.SEEK_END)
    ends = file.read(1) == b"\n"
    file.seek(0, os.SEEK_END)
    return bool(ends)


def _me() -> dict[str, Any]:
    return {"process": os.getpid(), "host": platform.node(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
