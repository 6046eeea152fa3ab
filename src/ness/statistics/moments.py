"""Exact drift without old data: three additive moments per layer say how far its outputs have moved since each row.

A row x seen under the weights W_t drifts by (W − W_t) x. Summed over all rows, with D = W − W_a for one anchor W_a:

    Σ ‖(W − W_t) x‖² = tr(D S₀ Dᵀ) − 2 tr(D S₁ᵀ) + S₂
    S₀ = Σ C_t,   S₁ = Σ (W_t − W_a) C_t,   S₂ = Σ tr((W_t − W_a) C_t (W_t − W_a)ᵀ)

Moving the anchor to the current weights before new rows arrive keeps S₁ and S₂ as small as the drift itself, so that
nothing is lost to cancellation, and makes new rows enter S₀ alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ness.statistics.gram import Gram

# Sums of two Grams by their ids and the second one's weight, beside the two themselves, so that ids stay theirs.
GramSums = dict[tuple[int, int, float], tuple[Gram, Gram, Gram]]


@dataclass
class Moments:
    """The moments of one layer: Gram S₀, cross S₁, square S₂ (per group) and the outputs' own energy Σ‖y‖².

    Its methods take new tensors and write to none, so that a copy (`copy.copy`) can go its own way. Layers that have
    seen the same inputs may hold the same Gram.
    """

    gram: Gram  # S₀ and the number of rows
    cross: Tensor | None  # S₁, (groups, o, d); None: 0, as it is until the anchor moves for the first time
    square: Tensor  # S₂, (groups,)
    energy: Tensor  # Σ‖y‖² over all rows, ()
    calls: int = 0  # forward calls the rows came from: rows a call decide the cheapest form of an update

    @classmethod
    def zeros(cls, groups: int, outputs: int, width: int, device: torch.device | str = "cpu", **kept: Any) -> Moments:
        """The moments of no rows of a layer (groups, outputs, width); `kept` says how, as for `Gram.zeros`."""
        gram = Gram.zeros(groups, width, device, **kept)
        square = torch.zeros(groups, dtype=torch.float64, device=device)
        return cls(gram, None, square, torch.zeros((), dtype=torch.float64, device=device))

    def no_rows(self) -> Moments:
        """The moments of no rows, for the same layer."""
        return Moments(self.gram.like(), None, torch.zeros_like(self.square), torch.zeros_like(self.energy))

    def add_(self, other: Moments, weight: float = 1.0, known: GramSums | None = None) -> None:
        """Add the moments of other rows, taken against the same anchor, each row `weight` times.

        `known`: sums that other layers have taken already; who adds the same Grams gets the same sum.
        """
        known = {} if known is None else known
        key = id(self.gram), id(other.gram), weight
        if key not in known:
            plain = weight == 1 and self.gram.kept is None and self.gram.count == 0
            known[key] = self.gram, other.gram, other.gram if plain else self.gram.plus(other.gram, weight)
        self.gram = known[key][2]
        if other.cross is not None:
            added = other.cross * weight
            self.cross = added if self.cross is None else self.cross + added
        self.square = self.square.add(other.square, alpha=weight)
        self.energy = self.energy.add(other.energy, alpha=weight)
        self.calls += other.calls

    def drift(self, change: Tensor) -> Tensor:
        """Σ‖(W − W_t) x‖² of each group (groups,) for D = W − W_a (groups, o, d) in float64."""
        if not bool(change.any()):
            return self.square.clone()
        quadratic = ((change @ self.gram.matrix) * change).sum(dim=(-2, -1))
        linear = 0.0 if self.cross is None else (change * self.cross).sum(dim=(-2, -1))
        return (quadratic - 2 * linear + self.square).clamp(min=0)

    def move_anchor_(self, change: Tensor) -> None:
        """Take W_a + D as the new anchor."""
        if (self.gram.kept is None and self.cross is None) or not bool(change.any()):
            return
        self.square = self.drift(change)
        moved = change @ self.gram.matrix
        self.cross = -moved if self.cross is None else self.cross - moved
