"""What a run's log says of its course so far, whatever was cut short, taken up or begun again on the way."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any


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
