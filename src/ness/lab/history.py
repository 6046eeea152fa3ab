"""What a run's log says of its course so far, whatever was cut short, taken up or begun again on the way."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
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

    @property
    def learnt(self) -> int:
        """Lessons finished."""
        return len(self.accuracy)


def history(events: Iterable[Mapping[str, Any]]) -> History:
    """From the events of a log in their order; one that is not whole is passed over."""
    now = History()
    for event in events:
        try:
            now = _after(now, event)
        except (KeyError, TypeError, ValueError):
            continue
    return now


def _after(now: History, event: Mapping[str, Any]) -> History:
    kind = event["event"]
    if kind not in ("task", "epoch", "learnt"):
        return _resumed(now, event) if kind == "resumed" else now
    at = int(event["task"])
    kept = (now.accuracy[:at], now.epochs[:at], now.seconds[:at])  # a lesson that comes again is done again
    if kind == "task":
        return History(*kept, since=float(event["time"]))
    if kind == "epoch":
        return History(*kept, int(event["epoch"]), float(event["valid_accuracy"]), now.since)
    row = tuple(float(value) for value in event["accuracy"])
    return History((*kept[0], row), (*kept[1], int(event["epochs"])), (*kept[2], float(event["seconds"])))


def _resumed(now: History, event: Mapping[str, Any]) -> History:
    at = int(event["tasks"])
    kept = (now.accuracy[:at], now.epochs[:at], now.seconds[:at])
    return History(*kept, int(event["epoch"]), now.valid_accuracy, float(event["time"]))
