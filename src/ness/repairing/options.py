"""What a repair was asked for, checked."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import torch

from ness.errors import NessError
from ness.repairing.grams import Place
from ness.verbs.checks import place_of_statistics

RIDGE = {torch.float64: 1e-6, torch.float32: 1e-5}  # λ over the mean diagonal, by what Grams are computed in
UNITS = {"": 1, "B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True)
class Options:
    """Checked numbers."""

    strength: float
    way: float
    passes: int
    at_most: float | None
    share: float
    new_under: float
    ridge: float
    dtype: torch.dtype
    place: Place  # of Grams

    @classmethod
    def of(
        cls,
        strength: Any,
        others: Any,
        passes: Any,
        probe: Any,
        at_most: Any,
        share: Any,
        new_under: Any,
        ridge: Any,
        dtype: Any,
        device: Any,
    ) -> Options:
        """Refuse what cannot be worked with."""
        number("strength", strength, 0, math.inf)
        number("share", share, 0, 1)
        number("new_under", new_under, 0, 1)
        if dtype not in RIDGE:
            raise NessError(f"repair(statistics_dtype={dtype}): expected torch.float64 or torch.float32")
        if ridge is not None:
            number("ridge", ridge, 0, 1)
        if ridge is not None and ridge < 1e-14:
            raise NessError(f"repair(ridge={ridge!r}): expected at least 1e-14, what float64 can resolve")
        if isinstance(passes, bool) or not isinstance(passes, int) or passes < 1:
            raise NessError(f"repair(passes={passes!r}): expected a whole number, at least 1")
        if (probe is None) != (at_most is None):
            raise NessError(
                "repair: probe= and at_most= belong together: batches, and the change that is allowed on them"
            )
        if at_most is not None:
            number("at_most", at_most, 0, math.inf)
            if strength != 1.0:
                raise NessError("repair: give strength=, or probe= and at_most= to have it chosen, not both")
            if passes > 1:
                raise NessError("repair: a budget on a probe is looked for in one go; leave passes=1")
        chosen = RIDGE[dtype] if ridge is None else float(ridge)
        try:
            place = place_of_statistics(device)
        except NessError as error:
            raise NessError(str(error).replace("NullSpace(", "repair(")) from error
        way = way_of(others)
        return cls(float(strength), way, passes, at_most, float(share), float(new_under), chosen, dtype, place)


def number(name: str, value: Any, low: float, high: float) -> None:
    """Refuse what is no finite number from low to high."""
    right = isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high
    if not right or math.isinf(value):
        upper = "" if math.isinf(high) else f" and at most {high:g}"
        raise NessError(f"repair({name}={value!r}): expected a number, at least {low:g}{upper}")


def way_of(others: str | float) -> float:
    """The share of the change that is left of other tensors: 1 for "keep", 0 for "base"."""
    if others == "keep":
        return 1.0
    if others == "base":
        return 0.0
    if isinstance(others, (int, float)) and not isinstance(others, bool) and 0 <= others <= 1:
        return float(others)
    raise NessError(f"repair(others={others!r}): expected 'keep', 'base' or a number from 0 to 1")


def parse_memory(memory: str | float | None) -> float | None:
    """Bytes of "4GB", "512MiB" or a number.

    >>> parse_memory("4GB"), parse_memory("1.5 MiB")
    (4000000000.0, 1572864.0)
    """
    if memory is None:
        return None
    if isinstance(memory, str):
        found = re.fullmatch(r"\s*([0-9.]+)\s*([a-zA-Z]*)\s*", memory)
        try:
            size = float(found[1]) * UNITS[found[2].upper()] if found else -1.0
        except (KeyError, ValueError):
            size = -1.0
    else:
        size = float(memory) if isinstance(memory, (int, float)) and not isinstance(memory, bool) else -1.0
    if not 0 < size < float("inf"):
        raise NessError(f"repair(memory={memory!r}): expected a size such as '4GB', or a number of bytes")
    return size
