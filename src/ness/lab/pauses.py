"""Work that pauses: a generator that hands control back whenever it has put enough on the device.

Whoever drives it may send the seconds the host waited for the device in between. Nothing that is the process's own
(grad mode, a stream) may be held open across a pause: others run meanwhile. A pause says what the work is at, so that
who drives several can keep the device fed: "epoch" where the device has an epoch of steps to do, "steps" where the next
thing is steps, and nothing where it is between tasks.
"""

from collections.abc import Generator
from typing import Literal, TypeVar

Result = TypeVar("Result")
Pause = Literal["epoch", "steps"] | None
Pausing = Generator[Pause, float | None, Result]


def to_the_end(work: Pausing[Result]) -> Result:
    """What the work returns, its pauses passed over.

    >>> def two_steps():
    ...     yield
    ...     return "done"
    >>> to_the_end(two_steps())
    'done'
    """
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: Result = end.value
            return result


def carried_out(found: Result | Pausing[Result]) -> Pausing[Result]:
    """The result of a call that may or may not pause; with pauses if it does.

    >>> to_the_end(carried_out(3))
    3
    """
    if isinstance(found, Generator):
        return (yield from found)
    return found
