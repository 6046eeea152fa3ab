"""The closed form: D' = D (C_n + λI)(C_n + s C_o + λI)⁻¹, for one layer and any strength s.

D' minimises ‖(D' − D) X_nᵀ‖²/n_n + s ‖D' X_oᵀ‖²/n_o + λ ‖D' − D‖²: it does to new rows what the change D does, and
little to old ones. λ is tiny; it decides only where neither kind of row says anything, and there the change is kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ness._precision import full_precision
from ness.errors import NessError
from ness.statistics.spectrum import above, noise_floor, symmetric_eigen

TOLERANCE = 1e-9  # of a solution's residual, relative to the sizes of the terms it is the difference of
FLOAT32_EPSILON = 2.0**-23


def repaired_change(
    change: Tensor, new: Tensor | None, old: Tensor, strength: float, ridge: float = 1e-6, name: str = "layer"
) -> Tensor:
    """D' = D (C_n + λI)(C_n + s C_o + λI)⁻¹ of one layer, in float64.

    Args:
        change: D, (groups, o, d), or the factor A of an update B A, (groups, r, d): the rank of B A stays.
        new: C_n, the mean Gram of new rows (groups, d, d); None: (tr C_o / d) I, new rows in every direction alike.
        old: C_o, the mean Gram of old rows (groups, d, d).
        strength: s, at least 0; 0 gives D itself.
        ridge: λ as a fraction of the mean diagonal of (C_n + C_o) / 2.
        name: what errors call the layer.

    Returns:
        D', (groups, o, d), float64.

    Raises:
        NessError: a Gram holds NaN or Inf, or no solver reached the accuracy of float64.

    >>> old = torch.diag(torch.tensor([1.0, 0.0], dtype=torch.float64)).unsqueeze(0)      # old rows use axis 0 alone
    >>> new = torch.eye(2, dtype=torch.float64).unsqueeze(0)
    >>> repaired_change(torch.ones(1, 1, 2), new, old, strength=1.0).round(decimals=6)
    tensor([[[0.5000, 1.0000]]], dtype=torch.float64)
    """
    return Reshaper.of(new, old, ridge, name).reshape(change.to(torch.float64), strength)


@dataclass(frozen=True)
class Reshaper:
    """What one layer's Grams say of any change of it: one decomposition, then a Cholesky solve for each strength.

    Everything is in the eigenvectors Q of C_o and in units of the mean diagonal, so that neither the scale of the
    inputs nor a very large strength costs accuracy: where C_o is 0 but for rounding it is exactly 0.
    """

    basis: Tensor  # Q, (groups, d, d), eigenvectors of C_o
    old: Tensor  # eigenvalues of C_o over the unit, (groups, d)
    new: Tensor  # Qᵀ C_n Q over the unit, (groups, d, d)
    ridge: Tensor  # λ over the unit, ()
    unit: Tensor  # the mean diagonal of (C_n + C_o) / 2, (groups, 1, 1)
    name: str

    @classmethod
    def of(
        cls, new: Tensor | None, old: Tensor, ridge: float, name: str, dtype: torch.dtype = torch.float64
    ) -> Reshaper:
        """From mean Grams C_n (or None) and C_o (groups, d, d); `dtype`: what their products were computed in."""
        for gram in (old,) if new is None else (old, new):
            if not bool(torch.isfinite(gram).all()):
                raise NessError(f"layer {name!r}: its Gram holds NaN or Inf; give finite inputs")
        width = old.shape[-1]
        mean_old = _mean_diagonal(old)
        if new is None:
            new = mean_old * torch.eye(width, dtype=torch.float64, device=old.device)
        unit = (_mean_diagonal(new) + mean_old) / 2
        unit = torch.where(unit > 0, unit, torch.ones_like(unit))  # nobody reached the group: the change is kept
        eigenvalues, basis = symmetric_eigen(old / unit, name)
        floor = noise_floor(eigenvalues, width)
        if dtype == torch.float32:
            floor = floor.maximum(eigenvalues[..., -1].clamp(min=0) * FLOAT32_EPSILON)
        rotated = basis.mT @ (new / unit) @ basis
        return cls(basis, above(eigenvalues, floor), (rotated + rotated.mT) / 2, unit.new_full((), ridge), unit, name)

    def reshape(self, change: Tensor, strength: float) -> Tensor:
        """D' (groups, o, d) for the change D in float64; D itself for strength 0."""
        if strength == 0:
            return change
        with full_precision(change):
            return self._solve_rotated((change @ self.basis) @ self._kept(), strength)

    def solve(self, right: Tensor, strength: float) -> Tensor:
        """Z (groups, o, d) with Z (C_n + s C_o + λI) = R, in float64."""
        with full_precision(right):
            return self._solve_rotated((right / self.unit) @ self.basis, strength)

    def _kept(self) -> Tensor:
        """Qᵀ (C_n + λI) Q over the unit."""
        return self.new + self.ridge * torch.eye(self.new.shape[-1], dtype=self.new.dtype, device=self.new.device)

    def _solve_rotated(self, right: Tensor, strength: float) -> Tensor:
        system = self._kept() + torch.diag_embed(strength * self.old)
        scale = system.diagonal(dim1=-2, dim2=-1).rsqrt().unsqueeze(-2)  # (groups, 1, d): a unit diagonal
        solution = self._solve(system * scale * scale.mT, right * scale)
        return (solution * scale) @ self.basis.mT

    def _solve(self, system: Tensor, right: Tensor) -> Tensor:
        """Z with Z A = R, A symmetric and positive definite with a unit diagonal; refined once, and checked."""
        factor, failed = torch.linalg.cholesky_ex(system)
        if bool(failed.any()):
            return self._by_eigenvectors(system, right)
        solution = torch.cholesky_solve(right.mT, factor).mT
        solution = solution + torch.cholesky_solve((right - solution @ system).mT, factor).mT
        if self._residual(system, right, solution) > TOLERANCE:
            return self._by_eigenvectors(system, right)
        return solution

    def _by_eigenvectors(self, system: Tensor, right: Tensor) -> Tensor:
        eigenvalues, vectors = symmetric_eigen(system, self.name)
        least = eigenvalues[..., -1:] * (system.shape[-1] * torch.finfo(torch.float64).eps)
        solution = (right @ vectors / eigenvalues.maximum(least).unsqueeze(-2)) @ vectors.mT
        residual = self._residual(system, right, solution)
        if not residual <= 1e3 * TOLERANCE:
            raise NessError(
                f"layer {self.name!r}: no solver reached the accuracy of float64 (residual {residual:.1e}); "
                "exclude the layer, or raise ridge="
            )
        return solution

    @staticmethod
    def _residual(system: Tensor, right: Tensor, solution: Tensor) -> float:
        size = torch.linalg.matrix_norm(solution) * torch.linalg.matrix_norm(system) + torch.linalg.matrix_norm(right)
        left = torch.linalg.matrix_norm(solution @ system - right)
        return float((left / size.clamp(min=torch.finfo(torch.float64).tiny)).max())

    # -- what a change does to rows ---------------------------------------------------------------------------------

    def old_energy(self, change: Tensor) -> Tensor:
        """The mean of ‖D x‖² over old rows, () in float64, groups added up."""
        turned = change @ self.basis
        return (turned.square().sum(-2) * self.old * self.unit.squeeze(-1)).sum()

    def new_energy(self, change: Tensor) -> Tensor:
        """The mean of ‖D x‖² over new rows, () in float64, groups added up."""
        turned = change @ self.basis
        return (((turned @ self.new) * turned).sum((-2, -1)) * self.unit.flatten()).sum().clamp(min=0)


def _mean_diagonal(gram: Tensor) -> Tensor:
    """(groups, 1, 1)."""
    return gram.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
