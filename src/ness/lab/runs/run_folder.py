"""One run in a folder: its lock, settings, events and what was measured so far."""

import contextlib
import os
import platform
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ness._files import append_line, make_folder, read_bytes, reason, sync_folder, write_bytes
from ness._sealed import read_json, seal_line, unseal_lines, write_json
from ness.errors import NessError
from ness.lab.runs import checkpoint
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
            return replace(self, failed=str(event["reason"])[:1000])
        if kind not in ("task", "epoch", "learnt", "resumed"):
            return self
        at = _count(event["tasks" if kind == "resumed" else "task"])
        kept = (self.accuracy[:at], self.epochs[:at], self.seconds[:at])
        if kind == "task":
            return History(*kept, since=_measure(event["time"]))
        if kind == "resumed":
            return History(*kept, _count(event["epoch"]), self.valid_accuracy, _measure(event["time"]))
        if kind == "epoch":
            return History(*kept, _count(event["epoch"]), _measure(event["valid_accuracy"]), self.since)
        row = tuple(_measure(value) for value in event["accuracy"])
        if not row:
            raise ValueError("a lesson without any accuracy")
        return History((*kept[0], row), (*kept[1], _count(event["epochs"])), (*kept[2], _measure(event["seconds"])))


def _count(value: Any) -> int:
    """A count of tasks or epochs; a ValueError for anything else."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 31:
        raise ValueError(f"found {value!r:.40}, expected a count")
    return value


def _measure(value: Any) -> float:
    """Seconds or percent; a ValueError for what no clock and no test gives."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e12:
        raise ValueError(f"found {value!r:.40}, expected a number")
    return float(value)


def lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The objects of a file of JSON lines, and how many lines are damaged; nothing where there is none.

    Raises:
        NessError: it is no ordinary file, or unreadable.
    """
    try:
        return unseal_lines(read_bytes(path), str(path))
    except FileNotFoundError:
        return [], 0


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
        self.path, self.holder = path, holder


class RunFolder:
    """`config.json`, `events.jsonl` (append-only), `checkpoint-*.safetensors`, `result.json`, `model.safetensors`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def result(self) -> dict[str, Any] | None:
        """The result of a finished run, or None.

        Raises:
            NessError: there is one, and it is damaged.
        """
        path = self.path / "result.json"
        try:
            return read_json(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except NessError as error:
            if isinstance(error.__cause__, NotADirectoryError):
                return None
            unreachable = isinstance(error.__cause__, OSError)
            then = "choose another --out" if unreachable else "it cannot be read: repeat the run with --again"
            raise NessError(f"{error}; {then}") from error

    @contextlib.contextmanager
    def held(self, queued: bool = False) -> Iterator[None]:
        """Holds the folder for this process alone; another one that tries is told who has it.

        Args:
            queued: the run itself is not begun yet: it waits for a place on a cluster.
        """
        lock = FileLock(self.path / "lock")
        try:
            make_folder(self.path)
            lock.acquire(timeout=0)
        except Timeout as error:
            raise RunLocked(self.path, self._holder()) from error
        except (OSError, ValueError, NotImplementedError) as error:
            raise NessError(f"cannot write in {self.path} ({reason(error)}); choose another --out") from error
        try:
            write_json(self.path / "holder.json", me() | {"queued": queued}, "make room or rights and start again")
            for left in self.path.glob(".*.tmp"):  # of a process that was killed while it wrote
                with contextlib.suppress(OSError):
                    left.unlink()
            yield
        finally:
            with contextlib.suppress(OSError):
                (self.path / "holder.json").unlink()
            with contextlib.suppress(OSError):
                lock.release()

    def say_holder(self, node: str) -> None:
        """Says for whoever watches on which node of a cluster the run is, whose folder this process holds."""
        with contextlib.suppress(NessError):
            write_json(self.path / "holder.json", me() | {"queued": False, "node": node})

    def _holder(self) -> str:
        try:
            facts = read_json(self.path / "holder.json")
            return f"process {facts['process']} on {facts['host']} since {facts['since']}"
        except (OSError, NessError, KeyError):
            return "another process"

    def configure(self, config: Mapping[str, Any]) -> str | None:
        """Writes the config, or makes sure that the one that is there is the same.

        Returns:
            What was wrong with the one that was there, if it was damaged: the command says all that it held.
        """
        path, wrong = self.path / "config.json", None
        try:
            found = read_json(path)
        except FileNotFoundError:
            found = None
        except NessError as error:
            found, wrong = None, f"{error}; written anew from the command"
        if found is None:
            write_json(path, config, "make room or rights and start again")
            return wrong
        expected = unseal_lines(seal_line(config, str(path)), str(path))[0][0]
        for key in ("method", "benchmark", "settings", "seed", "schema"):
            if found.get(key) != expected[key]:
                raise NessError(
                    f"{path}: {key} is {found.get(key)!r:.300}, expected {config[key]!r}; choose another --out"
                )
        return None

    def log(self, kind: str, facts: Mapping[str, Any]) -> None:
        """Appends one line to the log; all but an epoch's is flushed to the disk."""
        path = self.path / "events.jsonl"
        line = seal_line({"event": kind, "time": round(time.time(), 3), **facts}, str(path))
        append_line(path, line, flush=kind != "epoch")

    def keep_traceback(self, error: BaseException) -> Path:
        """Writes where an error came from beside the run, for whoever wrote the method."""
        path = self.path / "traceback.txt"
        with contextlib.suppress(NessError):
            write_bytes(path, "".join(traceback.format_exception(error)).encode(errors="backslashreplace"))
        return path

    def last_good(self) -> tuple[Path, Tensors, dict[str, Any], list[str]] | None:
        """The newest checkpoint that can be read, and what was wrong with newer ones; None without any checkpoint."""
        wrong: list[str] = []
        for path in reversed(checkpoint.paths(self.path)):
            try:
                tensors, manifest = checkpoint.read(path)
            except NessError as error:
                wrong.append(str(error))
                continue
            return path, tensors, manifest, wrong
        if wrong:
            raise NessError(f"{wrong[0]}, and there is no older one; start over with --again")
        return None

    def tidy(self) -> None:
        """Removes what a process left that was killed after it had written its result."""
        with contextlib.suppress(NessError):  # whoever holds the folder tidies it; one that cannot be written stays
            if checkpoint.paths(self.path) or (self.path / "holder.json").exists():
                with self.held():
                    self.drop_checkpoints()

    def drop_checkpoints(self) -> None:
        """Removes the checkpoints of a run that is finished."""
        for path in checkpoint.paths(self.path):
            with contextlib.suppress(OSError):  # nobody needs it: the next look tries again
                path.unlink()

    def clear(self) -> None:
        """Forgets an earlier run: its result is kept as result.old.json, the log goes on, the rest is removed."""
        try:
            with contextlib.suppress(FileNotFoundError):
                os.replace(self.path / "result.json", self.path / "result.old.json")  # noqa: PTH105
            for path in [*checkpoint.paths(self.path), self.path / "config.json", self.path / "model.safetensors"]:
                path.unlink(missing_ok=True)
            sync_folder(self.path)
        except OSError as error:
            raise NessError(f"{self.path}: cannot be cleared for --again ({reason(error)})") from error


def me() -> dict[str, Any]:
    """What is said of this process to others."""
    return {"process": os.getpid(), "host": platform.node(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
