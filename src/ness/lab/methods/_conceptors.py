"""Conceptors: soft projectors C = R (R + α⁻² I)⁻¹ with R = XᵀX/n, and their algebra of NOT, AND and OR."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ness.lab.methods._projection.basis import directions, span
from ness.statistics.spectrum import symmetric_eigen

FLOOR = 1e-8  # what a zero counts as, so that inverses exist; as in the reference


def conceptor(correlation: Tensor, aperture: float) -> Tensor:
    """C = R (R + α⁻² I)⁻¹ of a correlation (d, d).

    >>> conceptor(torch.ones(1, 1), 1.0), conceptor(torch.ones(1, 1), 2.0)
    (tensor([[0.5000]]), tensor([[0.8000]]))
    """
    eye = torch.eye(len(correlation), dtype=correlation.dtype, device=correlation.device)
    found: Tensor = torch.linalg.solve(correlation + eye / aperture**2, correlation)
    return found


def negation(c: Tensor) -> Tensor:
    """NOT C = I - C."""
    return torch.eye(len(c), dtype=c.dtype, device=c.device) - c


def conjunction(c: Tensor, b: Tensor) -> Tensor:
    """C AND B = (C⁻¹ + B⁻¹ - I)⁻¹: what both hold.

    >>> half = torch.full((1, 1), 0.5, dtype=torch.float64)
    >>> round(float(conjunction(half, half)), 6)
    0.333333
    """
    found: Tensor = torch.linalg.inv(_inverse(c) - negation(_inverse(b)))  # I - B⁻¹ is NOT B⁻¹
    return (found + found.mT) / 2


def disjunction(c: Tensor, b: Tensor) -> Tensor:
    """C OR B = NOT (NOT C AND NOT B): what one of them holds."""
    return negation(conjunction(negation(c), negation(b)))


def with_aperture(c: Tensor, factor: float) -> Tensor:
    """φ(C, γ) = C (C + γ⁻² (I - C))⁻¹: the same correlation seen with γ times the aperture."""
    found: Tensor = torch.linalg.solve(c + negation(c) / factor**2, c)
    return found


def _inverse(c: Tensor) -> Tensor:
    """C⁻¹ with the spectrum brought into [1e-8, 1]."""
    values, vectors = symmetric_eigen(c.unsqueeze(0))
    inverse: Tensor = (vectors[0] / values[0].clamp(FLOOR, 1)) @ vectors[0].mT
    return inverse


@dataclass(frozen=True)
class Conceptor:
    """C = V diag(c) Vᵀ, kept as the directions V (d, k) it holds and how much of each, c (k,) in [0, 1]."""

    vectors: Tensor
    values: Tensor

    @property
    def capacity(self) -> Tensor:
        """Mean singular value: the share of the space that is taken."""
        return self.values.sum() / self.vectors.shape[0]

    def cut(self, floor: float) -> "Conceptor":
        """Without the directions it holds less than `floor` of."""
        held = self.values >= floor
        return Conceptor(self.vectors[:, held], self.values[held])


def of_rows(rows: Tensor, aperture: float, recall: float) -> Conceptor:
    """The conceptor of rows X (n, d), its aperture raised by a tenth until rows keep `recall` of their length.

    The share that is kept is Σ‖C x‖ / Σ‖x‖: a ratio of sums, in which long rows count for more.
    """
    vectors, sigma = directions(rows)
    inside = rows @ vectors  # (n, k)
    length = float(torch.linalg.vector_norm(inside, dim=1).sum())
    spectrum = sigma.square() / len(rows)
    while True:
        values = spectrum / (spectrum + aperture**-2)
        kept = float(torch.linalg.vector_norm(inside * values, dim=1).sum())
        if kept >= recall * length:  # rows of zeros keep all they have
            return Conceptor(vectors, values)
        aperture *= 1.1


def within(operation: Callable[[Tensor, Tensor], Tensor], one: Conceptor, other: Conceptor) -> Conceptor:
    """AND or OR of two conceptors, worked out in the span of both, outside of which each is zero."""
    both = span(torch.cat([one.vectors, other.vectors], 1))
    dense = [
        (both.mT @ each.vectors * each.values) @ (each.vectors.mT @ both)  # (m, m)
        for each in (one, other)
    ]
    values, vectors = symmetric_eigen(operation(*dense).unsqueeze(0))
    return Conceptor(both @ vectors[0].flip(1), values[0].flip(0).clamp(0, 1))
