"""Every task's own drift, relative to its own outputs, without its data: moments in which each task weighs 1/E_j.

Task j has a Gram C_j of its own rows and the energy E_j = Σ‖y‖² of the layer's outputs on them. With D_j = W − W_j

    rel_j² = tr(D_j C_j D_jᵀ) / E_j        task j's own squared drift, relative to its own outputs
    T²     = Σ_j rel_j²                    from the moments of `ness.statistics.moments` with weights 1/E_j, exactly

and rel_j ≤ T for every j: a limit on T is a limit for each task, a small one as much as a large one. E_j is known
when the task is over, so the newest task's rows wait in `fresh` until the next `constrain` folds them in.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ness.statistics.moments import Moments

# Where rounding the merged weights to their dtype would exceed the limit, the share is lowered by these, in turn.
ROUNDING_STEPS = (0.0, 1e-6, 1e-4, 1e-2, 0.5, 1.0)


@dataclass(frozen=True)
class BudgetInfo:
    """What a layer tells a relative rule besides its spectrum, which is then that of Σ C_j / E_j."""

    task: int  # n: the task that begins is the n-th one constrained
    spent: float  # T² of all tasks before it
    column: float  # ‖W‖_F² / d, the mean squared length of W's columns
    travel: float | None  # ρ², how long an update's columns are to be expected, over W's; None: nothing merged yet


@dataclass
class Relative:
    """The relative moments of one layer."""

    folded: Moments  # of finished tasks, each divided by its own E_j; its energy is their number
    fresh: Moments | None = None  # of the newest task, undivided
    travel: float | None = None  # see BudgetInfo
    silent: bool = False  # some task's rows all gave 0: no fraction of nothing is a change, so the layer stays as it is

    def copy(self) -> Relative:
        """Another one that knows the same and can go its own way."""
        return replace(self, folded=copy.copy(self.folded), fresh=copy.copy(self.fresh))

    @property
    def gram(self) -> Tensor:
        """R = Σ C_j / E_j (groups, d, d) of the finished tasks."""
        return self.folded.gram.matrix

    def newest(self) -> Moments:
        """Where the newest task's rows go."""
        if self.fresh is None:
            self.fresh = self.folded.no_rows()
        return self.fresh

    def close_task(self) -> None:
        """The newest task is over: divide its moments by its energy, and add them to the others'."""
        if self.fresh is None:
            return
        weight = relative_weight(self.fresh)
        if weight is None:
            self.silent = True
        else:
            self.folded.add_(self.fresh, weight)
        self.fresh = None

    def move_anchor_(self, change: Tensor) -> None:
        """Take W_a + D as the new anchor."""
        for moments in (self.folded, self.fresh):
            if moments is not None:
                moments.move_anchor_(change)

    def total(self, change: Tensor) -> float:
        """T² = Σ_j rel_j², the newest task included, for D = W − W_a (groups, o, d)."""
        total = float(self.folded.drift(change).sum())
        if self.fresh is None:
            return total
        weight, newest = relative_weight(self.fresh), float(self.fresh.drift(change).sum())
        return total + (newest * weight if weight is not None else math.inf if newest > 0 else 0.0)


def relative_weight(task: Moments) -> float | None:
    """1/E_j; 0 where the rows are all zeros, too; None where no fraction describes: rows gave 0, or overflow."""
    energy, rows = float(task.energy), float(task.gram.diagonal().sum())
    if rows == 0:
        return 0.0
    fits = 0 < energy < math.inf and math.isfinite(rows / energy) and math.isfinite(1 / energy)
    return 1 / energy if fits else None


def spending_limit(drift: float, task: int) -> float:
    """T_n² = drift² · n/(n + 1): what all tasks together may have drifted by after the n-th constrained one.

    The n-th task may spend drift²/(n (n + 1)) and what those before it left, and the sum stays below drift² for ever.

    >>> [round(spending_limit(1.0, task), 3) for task in (1, 2, 3, 1000)]
    [0.5, 0.667, 0.75, 0.999]
    """
    return drift**2 * task / (task + 1)


def solve_threshold(energies: Tensor, target: float) -> float:
    """The τ with Σ_i min(σ_i², τ²) = target, for energies σ² of any shape; max σ where even that falls short.

    >>> solve_threshold(torch.tensor([0.0, 9.0, 16.0]), 22.0)  # 0 + 9 + 13
    3.605551275463989
    """
    ascending = energies.to(torch.float64).flatten().sort().values
    weaker = ascending.cumsum(0) - ascending  # Σ of the energies below each
    left = torch.arange(len(ascending), 0, -1, dtype=torch.float64, device=ascending.device)  # it and those above
    reached = (weaker + left * ascending).cummax(0).values  # the sum at τ = σ_k
    if target >= float(reached[-1]):
        return math.sqrt(float(ascending[-1]))
    at = int((reached < target).sum())
    return math.sqrt(max(0.0, (target - float(weaker[at])) / float(left[at])))


def largest_share(square: float, slope: float, start: float, limit: float) -> float:
    """The largest c in [0, 1] with square·c² + 2·slope·c + start ≤ limit; 0 where there is none.

    >>> largest_share(4.0, 0.0, 1.0, 2.0)
    0.5
    """
    if square + 2 * slope + start <= limit:
        return 1.0
    room = limit - start
    discriminant = slope**2 + square * room
    if discriminant < 0:
        return 0.0
    root = math.sqrt(discriminant)  # the larger zero, in the form that does not cancel
    over, under = (room, slope + root) if slope >= 0 else (root - slope, square)
    share = over / under if under > 0 else 0.0
    if room < 0 and share >= 1:  # the limit is met beyond 1 alone
        return 0.0
    return min(1.0, max(0.0, share))


def along(moments: Moments, base: Tensor, step: Tensor) -> tuple[float, float, float]:
    """(a, b, t) of Σ drift(base + c·step) = a c² + 2 b c + t, for D before the update and the update itself."""
    moved = step @ moments.gram.matrix
    square = float((moved * step).sum())
    slope = float((moved * base).sum()) - (0.0 if moments.cross is None else float((step * moments.cross).sum()))
    return max(0.0, square), slope, float(moments.drift(base).sum())


def shrink(moments: Moments, anchor: Tensor, stored: Tensor, wanted: Tensor, limit: float) -> tuple[Tensor, float]:
    """Weights from `stored` towards `wanted` (groups, o, d), as far as T² ≤ limit allows, and the share c ∈ [0, 1].

    What counts is what will be stored: weights rounded to `stored`'s dtype. The share 0 changes nothing, so it needs
    no rounding; the share 1 gives `wanted` itself.
    """
    before = stored.to(torch.float64)
    base, step = before - anchor.to(torch.float64), wanted - before
    share = largest_share(*along(moments, base, step), limit)
    for lowered in ROUNDING_STEPS:
        factor = share * (1 - lowered)
        weights = wanted if factor == 1 else before + factor * step
        change = weights.to(stored.dtype).to(torch.float64) - anchor.to(torch.float64)
        if factor == 0 or float(moments.drift(change).sum()) <= limit:
            return weights, factor
    raise AssertionError("the last step is the share 0")


def update_ratio(relative: Tensor, basis: Tensor, step: Tensor, column: float) -> float | None:
    """ρ² of an update ΔW on a basis B: tr(ΔW R ΔWᵀ) over what columns as long as W's mean one would have given.

    None where the update could not move any old output, so that nothing was measured.
    """
    spent = float(((step @ relative) * step).sum())
    unit = column * float((basis.mT @ relative @ basis).diagonal(dim1=-2, dim2=-1).sum())
    return spent / unit if unit > 0 and math.isfinite(spent / unit) else None
