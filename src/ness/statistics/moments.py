"""Exact drift without old data: three additive moments a layer say how far its outputs have moved since each row.

A row x seen under the weights W_t drifts by (W − W_t) x. Summed over all rows, with D = W − W_a for one anchor W_a:

    Σ ‖(W − W_t) x‖² = tr(D S₀ Dᵀ) − 2 tr(D S₁ᵀ) + S₂
    S₀ = Σ C_t,   S₁ = Σ (W_t − W_a) C_t,   S₂ = Σ tr((W_t − W_a) C_t (W_t − W_a)ᵀ)

Moving the anchor to the current weights before new rows arrive keeps S₁ and S₂ as small as the drift itself, so that
nothing is lost to cancellation, and makes new rows enter S₀ alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ness.statistics.gram import Gram


@dataclass
class Moments:
    """The moments of one layer: Gram S₀, cross S₁, square S₂ (per group) and the outputs' own energy Σ‖y‖².

    Its methods take new tensors and write to none, so that a copy (`copy.copy`) can go its own way. Rows are added in
    place, to moments that are `opened` for them.
    """

    gram: Gram  # S₀ and the number of rows
    cross: Tensor  # S₁, (groups, o, d)
    square: Tensor  # S₂, (groups,)
    energy: Tensor  # Σ‖y‖² over all rows, ()
    calls: int = 0  # forward calls the rows came from: rows a call decide the cheapest form of an update

    @classmethod
    def zeros(cls, groups: int, outputs: int, width: int, device: torch.device | str = "cpu") -> Moments:
        """The moments of no rows."""
        return cls(
            Gram.zeros(groups, width, device),
            torch.zeros(groups, outputs, width, dtype=torch.float64, device=device),
            torch.zeros(groups, dtype=torch.float64, device=device),
            torch.zeros((), dtype=torch.float64, device=device),
        )

    def no_rows(self) -> Moments:
        """The moments of no rows, for the same layer."""
        groups, outputs, width = self.cross.shape
        return Moments.zeros(groups, outputs, width, self.cross.device)

    def add_(self, other: Moments, weight: float = 1.0) -> None:
        """Add the moments of other rows, taken against the same anchor, each row `weight` times."""
        count = self.gram.count + other.gram.count
        self.gram = Gram(self.gram.matrix.add(other.gram.matrix, alpha=weight), count)
        self.cross = self.cross.add(other.cross, alpha=weight)
        self.square = self.square.add(other.square, alpha=weight)
        self.energy = self.energy.add(other.energy, alpha=weight)
        self.calls += other.calls

    def opened(self) -> Moments:
        """The same, with a Gram and an energy of its own that rows can be added to in place."""
        gram = Gram(self.gram.matrix.clone(), self.gram.count)
        return Moments(gram, self.cross, self.square, self.energy.clone(), self.calls)

    def drift(self, change: Tensor) -> Tensor:
        """Σ‖(W − W_t) x‖² of each group (groups,) for D = W − W_a (groups, o, d) in float64."""
        if not bool(change.any()):
            return self.square.clone()
        quadratic = ((change @ self.gram.matrix) * change).sum(dim=(-2, -1))
        linear = (change * self.cross).sum(dim=(-2, -1))
        return (quadratic - 2 * linear + self.square).clamp(min=0)

    def move_anchor_(self, change: Tensor) -> None:
        """Take W_a + D as the new anchor."""
        if not bool(change.any()):
            return
        self.square = self.drift(change)
        self.cross = self.cross - change @ self.gram.matrix
