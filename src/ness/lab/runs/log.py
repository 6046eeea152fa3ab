"""Loggers: a class with three methods receives a run's numbers; `--log NAME` tells it of every epoch and task.

Another distribution offers one as an entry point of the group `ness.loggers`: a class, or any callable without
arguments, that returns a `Logger`; each run gets one of its own.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

from ness.lab import registry
from ness.lab.runs.jobs import Job
from ness.lab.runs.metrics import backward_transfer
from ness.lab.runs.run import Listener, folder_of
from ness.lab.runs.run_folder import History, history, lines
from ness.lab.training.loop import Event


class Logger(Protocol):
    """What a logger does."""

    def begin(self, folder: Path, settings: Mapping[str, Any], step: int) -> None:
        """A run begins in its folder after `step` epochs: 0, or where it was cut short; later steps come again."""
        ...

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers by name, after `step` epochs of the run."""
        ...

    def end(self) -> None:
        """Nothing more will come."""
        ...


MakeLogger = Callable[[], Logger]
ListenerOf = Callable[[Job, int], Listener]


def all_loggers() -> Mapping[str, MakeLogger]:
    """Ours, and every entry point of the group `ness.loggers`."""
    from ness.lab.runs.tensorboard import TensorBoard

    return {"tensorboard": TensorBoard, **registry.loggers()}


def named(names: Sequence[str]) -> list[MakeLogger]:
    """The loggers of these names; an unknown one is an error."""
    known = all_loggers() if names else {}
    return [registry.find("logger", name, known) for name in names]


@contextmanager
def logged(makers: Sequence[MakeLogger], out: Path, listener: ListenerOf) -> Iterator[ListenerOf]:
    """The listener, with loggers beside it; all of them are ended at the end, whatever happened."""
    with ExitStack() as open_logs:
        for make in makers:
            make()  # one that cannot work says so before anything is trained

        def listen(job: Job, seed: int) -> Listener:
            shown = listener(job, seed)
            ears = [Ear(make(), folder_of(job, seed, out), job.as_dict() | {"seed": seed}) for make in makers]
            for ear in ears:
                open_logs.callback(ear.close)

            def hear(event: Event) -> None:
                shown(event)
                for ear in ears:
                    ear.hear(event)

            return hear

        yield listen


class Ear:
    """Turns one run's events into steps and values for a logger."""

    def __init__(self, logger: Logger, folder: Path, settings: Mapping[str, Any]) -> None:
        self.logger, self.folder, self.settings = logger, folder, settings
        self.past = History()
        self.lessons = 0
        self.is_open = False

    def hear(self, event: Event) -> None:
        """Opens at the run's first work, closes after its last lesson."""
        if event.kind == "begun":
            self.lessons = event.facts["lessons"]
        if event.kind == "resumed":  # what came before stands in the log of the run
            self.past = history(lines(self.folder / "events.jsonl")[0])
        if event.kind in ("resumed", "task") and not self.is_open:
            self.logger.begin(self.folder, self.settings, sum(self.past.epochs) + self.past.epoch)
            self.is_open = True
        if event.kind in ("epoch", "learnt"):
            before = sum(self.past.epochs)
            self.past = history_after(self.past, event)
            step = sum(self.past.epochs) if event.kind == "learnt" else before + self.past.epoch
            self.logger.write(step, values(event, self.past))
        if event.kind == "learnt" and self.past.learnt == self.lessons:
            self.close()

    def close(self) -> None:
        """Ends the logger, once."""
        if self.is_open:
            self.is_open = False
            self.logger.end()


def history_after(past: History, event: Event) -> History:
    """The course of the run with one more event."""
    return past.after({"event": event.kind, "time": 0.0, **event.facts})


def values(event: Event, past: History) -> dict[str, float]:
    """What is logged of an epoch, or of a lesson that was learnt: `past` includes it."""
    facts = event.facts
    if event.kind == "epoch":
        names = {"loss": "train/loss", "valid_loss": "valid/loss", "valid_accuracy": "valid/accuracy", "lr": "train/lr"}
        return {shown: float(facts[name]) for name, shown in names.items()} | {"train/task": facts["task"] + 1.0}
    row = past.accuracy[-1]
    found = {f"test/task {task + 1:02d}": value for task, value in enumerate(row)}
    found |= {"test/mean of tasks so far": sum(row) / len(row), "train/seconds of task": float(facts["seconds"])}
    if past.learnt == len(row) > 1 and (bwt := backward_transfer([list(one) for one in past.accuracy])) is not None:
        found["test/BWT so far"] = bwt
    return found
