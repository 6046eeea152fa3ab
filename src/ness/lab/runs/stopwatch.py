"""Where a run's time went: every second of the host that it had for itself belongs to one phase."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal, get_args

Phase = Literal[
    "start",  # data, network, and a checkpoint taken up
    "capture",  # of a step or an evaluation as a graph
    "steps",  # training steps, and waiting for the device to do them
    "evaluation",  # validation and test
    "observing",  # what must not change: forward passes and Grams
    "decomposition",  # eigen-solvers, choosing directions
    "statistics",  # whatever else a method does before and after a task
    "checkpoints",  # and the final weights
    "other",
]
PHASES: tuple[Phase, ...] = get_args(Phase)


class Stopwatch:
    """Seconds by phase. Phases nest: inside another the inner one counts, and the outer one goes on after it.

    >>> now = iter([0.0, 1.0, 3.0, 6.0, 10.0, 10.0])
    >>> watch = Stopwatch(lambda: next(now))
    >>> with watch.phase("statistics"):     # from 1 to 10
    ...     with watch.phase("observing"):  # from 3 to 6
    ...         pass
    >>> found = watch.times()
    >>> found["statistics"], found["observing"], found["other"]
    (6.0, 3.0, 1.0)
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._since = clock, clock()
        self._phases: list[Phase] = ["other"]
        self._seconds: dict[Phase, float] = dict.fromkeys(PHASES, 0.0)

    @contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        """What happens inside belongs to this phase."""
        self._book()
        self._phases.append(name)
        try:
            yield
        finally:
            self._book()
            self._phases.pop()

    def stop(self) -> None:
        """The run pauses: what follows belongs to others (see `ness.lab.gpu.coroutines.own_time`)."""
        self._book()

    def go_on(self, waited: float) -> None:
        """The run goes on; seconds the host has waited for it count to the phase it paused in."""
        self._since = self._clock() - waited

    def times(self) -> dict[str, float]:
        """Seconds by phase, up to now."""
        self._book()
        return {name: round(seconds, 3) for name, seconds in self._seconds.items()}

    def _book(self) -> None:
        now = self._clock()
        self._seconds[self._phases[-1]] += now - self._since
        self._since = now


def together(*parts: Mapping[str, float]) -> dict[str, float]:
    """Seconds by phase of several stretches or runs.

    >>> together({"steps": 1.0}, {"steps": 2.0, "start": 0.5})["steps"]
    3.0
    """
    return {name: round(sum(part.get(name, 0.0) for part in parts), 3) for name in PHASES}


def table(runs: Sequence[Mapping[str, float]], wall: float) -> list[tuple[str, str, str]]:
    """Lines of a small table: seconds by phase over all runs, and the whole command's beside them.

    >>> table([{"start": 1.0, "steps": 6.0}, {"steps": 2.0}], 12.0)[-2:]
    [('outside the runs', '    3.0', ' 25 %'), ('whole command', '   12.0', '100 %')]
    """
    found = together(*runs)
    found["outside the runs"] = max(0.0, wall - sum(found.values()))  # imports, the table, waiting for any of several
    found["whole command"] = wall
    shares = {name: f"{100 * seconds / max(wall, 1e-9):3.0f} %" for name, seconds in found.items()}
    lines = [(name, f"{seconds:7.1f}", shares[name]) for name, seconds in found.items()]
    return [("time in", "seconds", "share"), *lines]
