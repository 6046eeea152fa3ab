"""The terminal: progress, times, outcomes."""

import os
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from ness.errors import NessError, NessWarning, printable
from ness.lab.runs.environment import process_age, table
from ness.lab.runs.jobs import Job
from ness.lab.runs.on_ray import ClusterLost
from ness.lab.runs.run import Listener, folder_of
from ness.lab.runs.run_folder import RunFolder
from ness.lab.runs.sweep import Grid
from ness.lab.training.loop import Event
from ness.report.formats import aligned
from ness.report.records import Record, from_result


def records_of(grid: Grid) -> list[Record]:
    """A record an outcome; one whose result.json is damaged goes over to the failures."""
    records, fine = [], []
    for outcome in grid.outcomes:
        try:
            records.append(from_result(outcome.result, str(outcome.folder / "result.json")))
            fine.append(outcome)
        except NessError as error:
            grid.failures[outcome.folder.name] = str(error)
    grid.outcomes = fine
    return records


class CommandClock:
    """Times a command from the beginning of its process, or from here where the system does not say when that was."""

    def __init__(self) -> None:
        self.began = time.perf_counter() - (process_age() or 0.0)

    def tell(self, grid: Grid, asked: bool, quiet: bool = False) -> None:
        """The table, if it was asked for or there was a GPU (and not `quiet`), and something was run."""
        runs = [outcome.times for outcome in grid.outcomes if outcome.how != "there"]
        if runs and (asked or (grid.on_gpu and not quiet)):
            sys.stderr.write(aligned(table(runs, time.perf_counter() - self.began)))


def tell(text: str) -> None:
    """One line on standard error."""
    sys.stderr.write(f"{printable(text)}\n")
    sys.stderr.flush()


@contextmanager
def stoppable(work: Sequence[tuple[Job, int]], out: Path) -> Iterator[None]:
    """Ctrl-C in here, or a cluster that is lost, says from where the same command goes on."""
    try:
        yield
    except ClusterLost as lost:
        raise NessError(f"{lost}; {goes_on(work, out)}") from lost
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt(goes_on(work, out)) from stop


def goes_on(work: Sequence[tuple[Job, int]], out: Path) -> str:
    """From where the runs that are not finished go on: 'the same command goes on with …'."""
    begun, waiting = [], 0
    for job, seed in work:
        folder = RunFolder(folder_of(job, seed, out))
        if os.path.lexists(folder.path / "result.json"):
            continue
        if not (folder.path / "config.json").exists():
            waiting += 1
            continue
        begun.append(f"{job.title} on {job.benchmark.name}, seed {seed}, {_resumption(folder)}")
    parts = begun[:3] + ([f"{len(begun) - 3} more that are begun"] if len(begun) > 3 else [])
    parts += [f"{waiting} that are not begun"] if waiting else []
    return f"the same command goes on with {'; '.join(parts)}" if parts else "every run is finished"


def _resumption(folder: RunFolder) -> str:
    try:
        found = folder.last_good()
        if found is None:
            return "from its beginning (no checkpoint was due yet: --save-every says how often)"
        path, _, manifest, _ = found
        learning = manifest["trainer"]["learning"]
        epochs = learning["epoch"] if learning else 0
        return f"after {manifest['trainer']['at']} tasks and {epochs} epochs ({path.name})"
    except (NessError, OSError, KeyError, TypeError) as error:
        return f"whose checkpoint is not readable ({error})"


class Display(Protocol):
    """Someone who is told what happens in each run."""

    def listener(self, job: Job, seed: int) -> Listener:
        """The ear for one run's events."""
        ...

    def say(self, text: str) -> None:
        """One line."""
        ...

    def warn(self, text: str) -> None:
        """One line that is also said where nothing else is."""
        ...


@contextmanager
def display(quiet: bool, runs: int) -> Iterator[Display]:
    """A bar where standard error is a terminal, else plain lines; warnings alone if `quiet`. Each is one line."""
    live = Console(stderr=True)
    shown: Lines | Bar | Quiet
    with warnings.catch_warnings():
        if quiet:
            shown = Quiet(sys.stderr)
            _redirect_warnings(shown)
            yield shown
        elif live.is_terminal:
            with Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=8),  # the whole line fits into 80 columns
                TextColumn("{task.fields[now]}", markup=False),
                TextColumn("{task.fields[left]}", markup=False),
                console=live,
                transient=True,
            ) as progress:
                shown = Bar(progress, runs)
                _redirect_warnings(shown)
                yield shown
        else:
            shown = Lines(sys.stderr, runs)
            _redirect_warnings(shown)
            yield shown


def _redirect_warnings(shown: Display) -> None:
    warnings.simplefilter("always", NessWarning)
    plain = warnings.showwarning

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if issubclass(category, NessWarning):
            shown.warn(f"warning: {message}")
        else:
            plain(message, category, filename, lineno, file, line)

    warnings.showwarning = show  # put back by catch_warnings


def learnt_line(facts: dict[str, Any], tasks: int) -> str:
    """One line for a finished task: epochs, accuracy on it, mean over all so far."""
    accuracy = facts["accuracy"]
    which = f"task {len(accuracy)}/{tasks} {facts['name']}"
    mean = sum(accuracy) / len(accuracy)
    return (
        f"{which}: {facts['epochs']} epochs, {facts['seconds']:.1f} s, {accuracy[-1]:.1f} %, mean so far {mean:.1f} %"
    )


class Lines:
    """Plain lines: one per task, flushed at once."""

    def __init__(self, out: TextIO, runs: int) -> None:
        self.out, self.runs, self.number = out, runs, 0

    def listener(self, job: Job, seed: int) -> Listener:
        """Writes the run's name before each of its lines."""
        self.number += 1
        head = f"[{self.number}/{self.runs}] {job.title} on {job.benchmark.name}, seed {seed}"
        tasks = job.benchmark.tasks

        def hear(event: Event) -> None:
            nonlocal tasks
            if event.kind == "begun":
                tasks = event.facts["tasks"]
            elif event.kind == "learnt":
                self.say(f"{head}: {learnt_line(event.facts, tasks)}")
            elif event.kind == "resumed":
                self.say(f"{head}: goes on after {event.facts['tasks']} tasks and {event.facts['epoch']} epochs")
            elif event.kind == "remark":
                self.warn(f"{head}: {event.facts['text']}")

        return hear

    def say(self, text: str) -> None:
        """Writes a line."""
        self.out.write(printable(text) + "\n")
        self.out.flush()

    warn = say


class Quiet:
    """Warnings alone: what a run remarks, and whom it has to wait for nobody hears."""

    def __init__(self, out: TextIO) -> None:
        self.out = out

    def listener(self, job: Job, seed: int) -> Listener:
        """Writes the run's remarks."""

        def hear(event: Event) -> None:
            if event.kind == "remark":
                self.warn(f"{job.title} on {job.benchmark.name}, seed {seed}: {event.facts['text']}")

        return hear

    def say(self, text: str) -> None:
        """Nothing."""

    def warn(self, text: str) -> None:
        """Writes a line."""
        self.out.write(printable(text) + "\n")
        self.out.flush()


class Bar:
    """A live bar for each run that goes on: the task, the epoch, loss and validation accuracy, and the time left."""

    def __init__(self, progress: Progress, runs: int) -> None:
        self.progress, self.runs, self.number = progress, runs, 0

    def listener(self, job: Job, seed: int) -> Listener:
        """A bar that comes with the run's first event and goes with its last."""
        self.number += 1
        head = printable(f"[{self.number}/{self.runs}] {job.title} seed {seed}")
        epochs, began, first = job.settings.epochs, 0.0, 0.0
        tasks = lessons = 1
        bar: TaskID | None = None

        def hear(event: Event) -> None:
            nonlocal tasks, lessons, first, began, bar
            facts = event.facts
            if event.kind == "remark":
                self.warn(facts["text"])
                return
            if bar is None:
                bar, began = self.progress.add_task(head, total=1.0, now="", left=""), time.monotonic()
            if event.kind == "begun":
                tasks, lessons = facts["tasks"], facts["lessons"]
            elif event.kind == "resumed":
                first = (facts["tasks"] + facts["epoch"] / epochs) / lessons
            elif event.kind == "epoch":
                done = (facts["task"] + facts["epoch"] / epochs) / lessons
                now = f"task {facts['task'] + 1}/{tasks} epoch {facts['epoch']}/{epochs}"
                now += f" loss {facts['loss']:.2f} acc {facts['valid_accuracy']:.1f} %"
                self._move(bar, done, now, time_left(time.monotonic() - began, done - first, 1 - done))
            elif event.kind == "learnt":
                done = (facts["task"] + 1) / lessons
                now = f"task {len(facts['accuracy'])}/{tasks} learnt: {facts['accuracy'][-1]:.1f} %"
                self._move(bar, done, now, "")
                if facts["task"] + 1 == lessons:
                    self.progress.remove_task(bar)

        return hear

    def _move(self, bar: TaskID, done: float, now: str, left: str) -> None:
        self.progress.update(bar, completed=min(1.0, done), now=now, left=left)

    def say(self, text: str) -> None:
        """Writes a line above the bar."""
        self.progress.console.print(printable(text), markup=False, highlight=False)

    warn = say


def time_left(seconds: float, done: float, remaining: float) -> str:
    """At most this long at the pace so far; tasks that stop early make it shorter.

    >>> time_left(60.0, 0.25, 0.75)
    '≤ 3:00 left'
    """
    if done <= 0:
        return ""
    left = round(seconds / done * remaining)
    return f"≤ {left // 60}:{left % 60:02d} left"
