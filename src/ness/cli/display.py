"""The terminal: progress, times, outcomes."""

import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from ness.errors import NessError, NessWarning
from ness.lab.runs.environment import process_age, table
from ness.lab.runs.jobs import Job
from ness.lab.runs.run import Listener
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

    def tell(self, grid: Grid, asked: bool) -> None:
        """The table, if it was asked for or there was a card, and something was run."""
        runs = [outcome.times for outcome in grid.outcomes if outcome.how != "there"]
        if runs and (asked or grid.on_card):
            sys.stderr.write(aligned(table(runs, time.perf_counter() - self.began)))


class Display(Protocol):
    """Someone who is told what happens in each run."""

    def listener(self, job: Job, seed: int) -> Listener:
        """The ear for one run's events."""
        ...

    def say(self, text: str) -> None:
        """One line."""
        ...


@contextmanager
def display(quiet: bool, runs: int) -> Iterator[Display]:
    """The bar where standard error is a terminal and `quiet` is off, plain lines otherwise; warnings are one line."""
    live = Console(stderr=True)
    shown: Lines | Bar
    with warnings.catch_warnings():
        if live.is_terminal and not quiet:
            with Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=8),  # the whole line fits into 80 columns
                TextColumn("{task.fields[now]}"),
                TextColumn("{task.fields[left]}"),
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
            shown.say(f"warning: {message}")
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
    """Plain lines: one a task, flushed at once."""

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
                self.say(f"{head}: {event.facts['text']}")

        return hear

    def say(self, text: str) -> None:
        """Writes a line."""
        self.out.write(text + "\n")
        self.out.flush()


class Bar:
    """A live bar for each run that goes on: the task, the epoch, loss and validation accuracy, and the time left."""

    def __init__(self, progress: Progress, runs: int) -> None:
        self.progress, self.runs, self.number = progress, runs, 0

    def listener(self, job: Job, seed: int) -> Listener:
        """A bar that comes with the run's first event and goes with its last."""
        self.number += 1
        head = f"[{self.number}/{self.runs}] {job.title} seed {seed}"
        epochs, began, first = job.settings.epochs, 0.0, 0.0
        tasks = lessons = 1
        bar: TaskID | None = None

        def hear(event: Event) -> None:
            nonlocal tasks, lessons, first, began, bar
            facts = event.facts
            if event.kind == "remark":
                self.say(facts["text"])
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
        self.progress.console.print(text, markup=False, highlight=False)


def time_left(seconds: float, done: float, remaining: float) -> str:
    """At most this long at the pace so far; tasks that stop early make it shorter.

    >>> time_left(60.0, 0.25, 0.75)
    '≤ 3:00 left'
    """
    if done <= 0:
        return ""
    left = round(seconds / done * remaining)
    return f"≤ {left // 60}:{left % 60:02d} left"
