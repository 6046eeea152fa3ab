"""Where the runs of a folder stand, from waiting to done, and how long the rest may take."""

import os
import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from statistics import fmean
from typing import Any, Literal

from ness._sealed import read_json
from ness.errors import NessError, printable
from ness.lab.runs import queue
from ness.lab.runs.queue import RunRequest
from ness.lab.runs.run_folder import History, history, lines

State = Literal["done", "running", "stopped", "failed", "waiting", "damaged"]
NODES = "nodes.json"  # of the cluster that a command uses, while it does
SILENCE = 900.0  # seconds after which a run on another machine that says nothing counts as stopped


@dataclass(frozen=True)
class Standing:
    """One run now."""

    asked: RunRequest
    state: State
    history: History = field(default_factory=History)
    result: Mapping[str, Any] | None = None  # of a run that is done
    spent: float = 0.0  # seconds so far
    note: str = ""  # what is wrong with its files
    node: str = ""  # of a cluster, on which it runs

    @property
    def share(self) -> float:
        """How much is done, at least: tasks may end before their last epoch."""
        if self.state == "done":
            return 1.0
        lessons = self.asked.lessons
        inside = self.history.epoch / self.asked.epochs if self.asked.epochs else 0.0
        return min(1.0, (self.history.learnt + inside) / lessons) if lessons else 0.0


class StatusMonitor:
    """A folder of runs that is looked at again and again; what is done is read once."""

    def __init__(self, out: Path, is_result: Callable[[Mapping[str, Any]], bool] = lambda result: True) -> None:
        self.out, self.is_result = out, is_result
        self.done: dict[str, Standing] = {}

    def look(self, now: float | None = None) -> list[Standing]:
        """Every run that was asked for or is there, as it stands."""
        found = []
        for asked in self._asked():
            path = self.out / asked.folder
            mark = _changed(path / "result.json")
            key = f"{asked.folder} {mark}"
            if mark is not None and key not in self.done:
                self.done[key] = _finished(path, asked, self.is_result)
            found.append(self.done[key] if mark is not None else _unfinished(path, asked, now or time.time()))
        return found

    def _asked(self) -> list[RunRequest]:
        listed = {one.folder: one for one in queue.read(self.out)}
        for path in sorted(self.out.glob("*/config.json")):
            if path.parent.name not in listed and (one := _from_config(path)) is not None:
                listed[one.folder] = one
        return list(listed.values())


def time_left(found: Sequence[Standing]) -> float | None:
    """Seconds until all is done, at the pace of what is done and with as many side by side as run now; None if unknown.

    A run is taken to last as others of its setting did, else of its method, else of its benchmark, else as its own
    pace suggests.
    """
    open_runs = [one for one in found if one.state in ("running", "stopped", "waiting")]
    whole = [(one, total) for one in found if (total := _total(one)) is not None]
    rests = []
    for one in open_runs:
        total = next((mean for alike in queue.ALIKE if (mean := _mean(one, whole, alike)) is not None), _total(one))
        if total is None:
            return None
        rests.append(total * (1 - one.share))
    running = sum(one.state == "running" for one in open_runs)
    return max(sum(rests) / max(1, running), max(rests, default=0.0))


def _mean(
    one: Standing, whole: Iterable[tuple[Standing, float]], alike: Callable[[RunRequest], object]
) -> float | None:
    times = [total for other, total in whole if other is not one and alike(other.asked) == alike(one.asked)]
    return fmean(times) if times else None


def _total(one: Standing) -> float | None:
    """What a run took, or would take at its own pace."""
    if one.state == "done" and one.result is not None:
        return one.spent
    return one.spent / one.share if one.share > 0.02 and one.spent > 0 else None


def _finished(path: Path, asked: RunRequest, is_result: Callable[[Mapping[str, Any]], bool]) -> Standing:
    try:
        result = read_json(path / "result.json")
        if not is_result(result):
            return Standing(asked, "damaged")
        return Standing(asked, "done", result=result, spent=_amount(result["total_seconds"]))
    except (OSError, NessError, ValueError, KeyError, TypeError):
        return Standing(asked, "damaged")


def _amount(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e10:
        raise ValueError(f"{value!r:.40} is no amount")
    return float(value)


def _unfinished(path: Path, asked: RunRequest, now: float) -> Standing:
    if _changed(path / "config.json") is None:
        return Standing(asked, "waiting")
    log = path / "events.jsonl"
    try:
        events, damaged = lines(log)
    except NessError as error:
        return Standing(asked, "damaged", note=str(error))
    so_far = history(events)
    holder = _holder(path, _changed(log) or 0.0, now)
    alive = holder is not None and not holder.get("queued")
    inside = now - so_far.since if alive and so_far.since is not None else 0.0
    state: State = "running" if alive else "waiting" if holder is not None else "stopped"
    if holder is None and so_far.failed is not None:
        state = "failed"
    note = f"{log}: {damaged} damaged or unfinished lines are passed over" if damaged else ""
    node = printable(str(holder.get("node", "")))[:100] if alive and holder is not None else ""
    return Standing(asked, state, so_far, spent=sum(so_far.seconds) + max(0.0, inside), note=note, node=node)


@dataclass(frozen=True)
class Node:
    """A machine of the cluster that a command uses now."""

    name: str
    alive: bool
    cpus: float
    gpus: float
    runs: int


def nodes(out: Path, now: float | None = None) -> list[Node]:
    """The nodes of the cluster on which the runs of a folder are carried out now; none without one."""
    try:
        found = read_json(out / NODES)
        if not _lives(found, _changed(out / NODES) or 0.0, now or time.time()):
            return []
        return [_node(one) for one in found["nodes"]]
    except (OSError, NessError, KeyError, TypeError, ValueError):
        return []


def _node(one: Mapping[str, Any]) -> Node:
    cpus, gpus, runs = (_amount(one[name]) for name in ("cpus", "gpus", "runs"))
    return Node(printable(str(one["name"]))[:100], one["alive"] is True, cpus, gpus, int(runs))


def _holder(path: Path, heard: float, now: float) -> Mapping[str, Any] | None:
    """What the process says that works on it; None without any."""
    try:
        holder = read_json(path / "holder.json")
    except (OSError, NessError):
        return None
    return holder if _lives(holder, heard, now) else None


def _lives(holder: Mapping[str, Any], heard: float, now: float) -> bool:
    """Whether a process is there: on this machine by its number, on another one by how long it is silent."""
    process, host = holder.get("process"), holder.get("host")
    if type(process) is not int or not 0 < process < 1 << 31 or host is None:
        return False
    if host != platform.node() or os.name != "posix":  # elsewhere a process cannot be asked without harm
        return now - heard < SILENCE
    try:
        os.kill(process, 0)  # signal 0: is it there?
    except ProcessLookupError:
        return False
    except PermissionError:  # it is, and belongs to someone else
        return True
    return True


def _from_config(path: Path) -> RunRequest | None:
    """What a run folder that nobody noted asks for; None for a folder that is no run's."""
    try:
        config = read_json(path)
        folder, settings = path.parent.name, config["settings"]
        own = f"{config['benchmark']}-{config['method']}-{config['digest']}-seed{config['seed']}"
        if own != folder and own == PurePath(own).name and (path.parent.parent / own).exists():
            return None  # a copy of a run that is there itself
        names = {name: config[name] for name in ("benchmark", "method", "setting", "seed")}
        return queue.request_of({"folder": folder, **names, "lessons": 0, "epochs": settings["epochs"]})
    except (OSError, NessError, ValueError, KeyError, TypeError):
        return None


def _changed(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except (OSError, ValueError):
        return None
