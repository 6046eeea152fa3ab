"""`pause()`: a run that shares a GPU with others lets them go on while the device works; alone it does nothing.

Code that is to share a device calls `pause` whenever it has put enough on it. A `Coroutine` runs such code up to its
next pause, on a stack of its own (greenlet), so neither the training loop nor a method needs to know who drives it.

Nothing that belongs to the whole process (grad mode, a stream) may be held open across a pause: others run meanwhile.
A pause says what comes next, so that the device can be kept busy: "epoch" where it has an epoch of steps to do, "steps"
where steps come next, and None between two tasks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, Literal, Protocol, TypeVar

Result = TypeVar("Result")
Pause = Literal["epoch", "steps"] | None


class Clock(Protocol):
    """Measures a run's own time: stopped while others run."""

    def stop(self) -> None:
        """The run pauses."""

    def go_on(self, waited: float) -> None:
        """The run goes on; the host has waited for it for so many seconds meanwhile."""


class Coroutine(Generic[Result]):
    """Runs `work` from pause to pause, with a generator's `send` and `close`.

    >>> def work():
    ...     pause("steps")
    ...     return "done"
    >>> one = Coroutine(work)
    >>> one.send()
    'steps'
    >>> to_the_end(one)
    'done'
    """

    def __init__(self, work: Callable[[], Result]) -> None:
        from greenlet import greenlet

        self.clocks: list[Clock] = []
        self._work = work
        self._stack: Any = greenlet(self._run)
        self._stack.coroutine = self

    def _run(self, _: float | None) -> tuple[bool, Any]:
        return True, self._work()

    def send(self, waited: float | None = None) -> Pause:
        """Runs to the next pause and returns it; StopIteration carries the result.

        Args:
            waited: seconds the host has waited for this work since its last pause.
        """
        if self._stack.dead:
            raise StopIteration
        ended, value = self._stack.switch(waited)
        if ended:
            raise StopIteration(value)
        pause: Pause = value
        return pause

    def close(self) -> None:
        """Ends the work where it is: its `finally` blocks run."""
        if self._stack and not self._stack.dead:
            self._stack.throw()

    def __iter__(self) -> Iterator[Pause]:
        return self

    def __next__(self) -> Pause:
        return self.send()


def _current() -> Coroutine[Any] | None:
    """The coroutine that runs now, if any; greenlet is not imported for this."""
    library = sys.modules.get("greenlet")
    return None if library is None else getattr(library.getcurrent(), "coroutine", None)


def pause(at: Pause = None) -> None:
    """Lets other runs on the device go on; returns at once where nothing runs side by side.

    Args:
        at: what this run is about to do on the device: "epoch", "steps", or None between two tasks.
    """
    coroutine = _current()
    if coroutine is None:
        return
    clocks = list(coroutine.clocks)
    for clock in clocks:
        clock.stop()
    waited = coroutine._stack.parent.switch((False, at))
    for clock in clocks:
        clock.go_on(waited or 0.0)


@contextmanager
def own_time(clock: Clock) -> Iterator[None]:
    """Of pauses inside, `clock` counts only the seconds that the host waited for this very run."""
    coroutine = _current()
    if coroutine is None:
        yield
        return
    coroutine.clocks.append(clock)
    try:
        yield
    finally:
        coroutine.clocks.remove(clock)


def to_the_end(work: Coroutine[Result]) -> Result:
    """What the work returns, its pauses passed over."""
    while True:
        try:
            work.send()
        except StopIteration as end:
            result: Result = end.value
            return result
