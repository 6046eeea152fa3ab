"""`Within`: a budget on every task's own drift."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from ness.errors import NessError
from ness.rules.base import (
    Rule,
    Selection,
    at_most,
    check_fraction,
    soft_selection,
    strictest_share,
)
from ness.statistics.relative import solve_threshold, spending_limit
from ness.statistics.spectrum import Spectrum

DEFAULT_DRIFT = 0.1  # what `Within` allows every task's outputs to move by, as a fraction of their size
TRAVEL_CLAMP = 16.0  # a measured ρ² counts up to this factor above or below the one assumed at first


@dataclass(frozen=True)
class Within(Rule):
    """Layer by layer, every old task's outputs stay within the fraction `drift` of what they were, for ever.

    The fraction is a root-mean-square over that task's own rows, relative to the layer's own output on them when the
    task was observed; it holds for each task, however many follow and however they are trained. The threshold chooses
    itself: with s_i = min(1, τ/σ_i), τ is such that an update whose columns are ρ times as long as those of W spends
    what the budget has left. ρ is `strength` at first and follows what updates turn out to be, layer by layer, half-way
    each time. What training spends beyond the budget `merge` takes back: it shrinks the layer's update to fit (`shrunk`
    in the certificate). `constrain(max_drift=...)` holds the same figure at every step.

    >>> from dataclasses import replace
    >>> from ness.statistics.relative import BudgetInfo
    >>> from ness.statistics.spectrum import decompose
    >>> gram = torch.diag(torch.tensor([9.0, 16.0, 0.0], dtype=torch.float64)).unsqueeze(0)
    >>> spectrum = replace(decompose(gram), budget=BudgetInfo(task=1, spent=0.0, column=0.001, travel=None))
    >>> Within(0.2).select({"fc": spectrum})["fc"]  # 0.001 · (9 + 11) = 0.2² · 1/2
    Selection(weights=tensor([[1.0000, 1.0000, 0.8292]], ...), threshold=tensor([3.3166], ...))
    """

    drift: float = DEFAULT_DRIFT
    strength: float = 1.0
    name: ClassVar[str] = "within"
    relative: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_fraction("Within", "drift", self.drift)
        if (
            isinstance(self.strength, bool)
            or not isinstance(self.strength, (int, float))
            or not 0 < self.strength < 1e6
        ):
            raise NessError(f"Within(strength={self.strength!r}): expected a number above 0, such as 1.0")

    @property
    def strongest(self) -> bool:
        """Yes."""
        return True

    def limit(self, task: int) -> float:
        """drift² · n/(n + 1)."""
        return spending_limit(self.drift, task)

    def expect(self, known: float | None, measured: float | None) -> float:
        """√(known · measured), both ρ² from the first assumption on: half-way, since updates follow τ in their turn.

        A layer that could not move tells nothing, and drifts back to the assumption instead of staying frozen by it.
        """
        first = self.strength**2
        low, high = first / TRAVEL_CLAMP, first * TRAVEL_CLAMP
        then, now = (first if each is None else min(max(each, low), high) for each in (known, measured))
        return math.sqrt(then * now)

    def select(self, spectra: Mapping[str, Spectrum]) -> dict[str, Selection]:
        """One τ a layer, for all its groups, with ρ²‖W‖²/d · Σ min(σ_i², τ²) = what is left of the limit."""
        chosen = {}
        for layer, spectrum in spectra.items():
            sigma, info = spectrum.sigma, spectrum.budget
            if info is None:
                raise NessError(
                    f"Within: layer {layer!r} has a plain spectrum; expected one with info (NullSpace gives it)"
                )
            allowance = self.limit(info.task) - info.spent
            if allowance <= 0:
                chosen[layer] = Selection(torch.zeros_like(sigma), torch.zeros_like(sigma[:, 0]))
                continue
            unit = info.column * (self.strength**2 if info.travel is None else info.travel)
            target = allowance / unit if unit > 0 else float("inf")
            threshold = torch.full_like(sigma[:, 0], solve_threshold(sigma.square(), target))
            free = at_most(sigma, threshold)
            chosen[layer] = Selection(torch.where(free > 0, free, soft_selection(sigma, threshold)), threshold)
        return chosen

    def looser(self, frees: Callable[[Rule], bool]) -> Rule | None:
        """With a larger drift."""
        return strictest_share(lambda drift: replace(self, drift=drift), frees)
