"""An axis: from values to places, and the round numbers to write along it."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

FAR = 3.0  # points are far off if an axis is so many times longer with them


@dataclass(frozen=True)
class Scale:
    """Maps [low, high] to [start, end], linearly or by the logarithm."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """The place of a value, to a tenth."""
        low, high, at = self.low, self.high, value
        if self.log:
            low, high, at = math.log10(low), math.log10(high), math.log10(value)
        share = (at - low) / (high - low)
        return round(self.start + share * (self.end - self.start), 1)

    def ticks(self, count: int = 5) -> list[float]:
        """Round numbers within the axis: powers of ten, or steps of 1, 2, 5."""
        if self.log:
            powers = range(math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9) + 1)
            every = max(1, len(powers) // count)
            return [10.0**power for power in powers][::every]
        step = round_step((self.high - self.low) / count)
        first = math.ceil(self.low / step - 1e-9)
        return [round(number * step, 10) for number in range(first, math.floor(self.high / step + 1e-9) + 1)]


@dataclass(frozen=True)
class Bent(Scale):
    """A linear axis whose lower part, below `bend`, is drawn smaller: for what lies far off."""

    bend: float = 0.0
    place: float = 0.0  # of the bend

    def __call__(self, value: float) -> float:
        """The place of a value, to a tenth."""
        upper = value >= self.bend
        part = (
            Scale(self.bend, self.high, self.place, self.end)
            if upper
            else Scale(self.low, self.bend, self.start, self.place)
        )
        return part(value)

    def ticks(self, count: int = 5) -> list[float]:
        """Round numbers of both parts."""
        upper = Scale(self.bend, self.high, self.place, self.end).ticks(count)
        lower = Scale(self.low, self.bend, self.start, self.place).ticks(2)
        return [value for value in lower if abs(self(value) - self.place) > 12] + upper


def round_step(least: float) -> float:
    """The smallest of 1, 2, 5 times a power of ten that is at least this.

    >>> round_step(0.3), round_step(7.0)
    (0.5, 10.0)
    """
    power = 10.0 ** math.floor(math.log10(least))
    return next((power * factor for factor in (1, 2, 5) if power * factor >= least * (1 - 1e-9)), power * 10)


def around(values: Iterable[float], start: float, end: float, margin: float = 0.08, least: float = 1.0) -> Scale:
    """A linear axis with some room around the values, and never narrower than `least`."""
    known = list(values)
    low, high = min(known), max(known)
    spread = max(high - low, least)
    middle = (low + high) / 2
    return Scale(middle - spread * (0.5 + margin), middle + spread * (0.5 + margin), start, end)


def powers_around(values: Iterable[float], start: float, end: float) -> Scale:
    """A logarithmic axis from a power of ten to a power of ten."""
    known = list(values)
    low, high = math.floor(math.log10(min(known))), math.ceil(math.log10(max(known)))
    return Scale(10.0**low, 10.0 ** max(high, low + 1), start, end, log=True)


def far_off(places: Sequence[tuple[float, float]]) -> set[int]:
    """The points, at most a third, without which an axis would be a third as long or shorter.

    >>> far_off([(-45.0, 40.0), (-1.0, 70.0), (0.0, 72.0), (0.5, 71.0)])
    {0}
    """
    out: set[int] = set()
    for axis in (0, 1):
        order = sorted((i for i in range(len(places)) if i not in out), key=lambda i: places[i][axis])
        span = places[order[-1]][axis] - places[order[0]][axis] if order else 0.0
        for count in range(1, len(places) // 3 - len(out) + 1):
            rest = places[order[-1]][axis] - places[order[count]][axis]
            if span >= FAR * max(rest, 1.0):
                out |= set(order[:count])
                break
    return out
