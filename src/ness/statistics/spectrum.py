"""The spectrum of a layer's inputs: C = Q diag(σ²) Qᵀ in float64, never NaN, and the bounds that follow from it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ness.errors import NessError
from ness.statistics.relative import BudgetInfo

FLOAT64_EPSILON = torch.finfo(torch.float64).eps


@dataclass(frozen=True)
class Spectrum:
    """Singular values and directions of a layer's inputs X, ascending, one set a group.

    `noise` is the size below which float64 cannot tell a singular value from 0; such values are stored as exactly 0,
    and a bound never claims to know better than it. Where a task has k private directions K, `sigma` and `directions`
    are of the other d − k; a rule's norms are still those of all of X: it reads them from `every_sigma`, which a
    relative rule does not have.
    """

    sigma: Tensor  # σ, (groups, d − k) ascending, float64
    directions: Tensor  # Q, (groups, d, d − k), columns belong to sigma
    noise: Tensor  # (groups,)
    outputs: int  # output units per group: parameters that one direction costs
    private: Tensor | None = None  # K, (groups, d, k), orthonormal and orthogonal to Q
    whole: Tensor | None = None  # σ of all of X, (groups, d) ascending, where it is not `sigma`
    budget: BudgetInfo | None = None  # for a relative rule: it is then the spectrum of Σ C_j / E_j
    rest: Tensor | None = None  # (groups,): no σ of a direction that Q leaves out is larger; None: it leaves none out

    @property
    def every_sigma(self) -> Tensor:
        """σ of all of X, those of private directions included, (groups, d)."""
        if self.whole is None and self.private is not None:
            raise NessError("the spectrum of a relative rule has no σ of private directions; take norms from its books")
        return self.sigma if self.whole is None else self.whole

    def complete(self) -> Spectrum:
        """The same with all d directions: those that were left out as any orthonormal basis of the complement.

        Their σ are then not theirs one by one: a rule must have freed all of them alike.
        """
        missing = self.sigma.shape[-1] - self.directions.shape[-1]
        if not missing:
            return self
        q = torch.linalg.qr(self.directions, mode="complete").Q
        others = q[..., self.directions.shape[-1] :]
        return replace(self, directions=torch.cat([others, self.directions], dim=-1))

    def of_directions(self, values: Tensor) -> Tensor:
        """Of values (groups, d − k) of every σ those that belong to the columns of Q."""
        return values[..., values.shape[-1] - self.directions.shape[-1] :]

    def tensors(self) -> list[Tensor]:
        """All tensors of it, in a fixed order."""
        every = (self.sigma, self.directions, self.noise, self.private, self.whole, self.rest)
        return [tensor for tensor in every if tensor is not None]


def decompose(gram: Tensor, outputs: int = 1, name: str = "layer") -> Spectrum:
    """Eigen-decomposition C = Q diag(λ) Qᵀ of Grams (groups, d, d), λ clamped at 0, σ = √λ.

    A rank-deficient Gram has eigenvalues that come out as ±1e-16 instead of 0. They are set to 0: a negative one
    must not become NaN and freeze the layer.

    >>> spectrum = decompose(torch.diag(torch.tensor([9.0, 16.0, 0.0], dtype=torch.float64)).unsqueeze(0))
    >>> spectrum.sigma
    tensor([[0., 3., 4.]], dtype=torch.float64)
    """
    if not bool(torch.isfinite(gram).all()):
        raise NessError(f"layer {name!r}: its Gram holds NaN or Inf; observe finite inputs and start again")
    eigenvalues, directions = symmetric_eigen(gram, name)
    floor = noise_floor(eigenvalues, gram.shape[-1])
    return Spectrum(above(eigenvalues, floor).sqrt(), directions, floor.sqrt(), outputs)


def noise_floor(eigenvalues: Tensor, width: int) -> Tensor:
    """The size (groups,) below which λ is rounding of a float64 Gram (d, d) and of its decomposition.

    It follows from the last of these ascending λ (groups, …), and d.
    """
    floor: Tensor = eigenvalues[..., -1].clamp(min=0) * (width * FLOAT64_EPSILON)
    return floor


def above(eigenvalues: Tensor, floor: Tensor) -> Tensor:
    """λ, exactly 0 where it is not above the floor (groups,)."""
    return torch.where(eigenvalues <= floor.unsqueeze(-1), torch.zeros_like(eigenvalues), eigenvalues)


def symmetric_eigen(gram: Tensor, name: str = "layer") -> tuple[Tensor, Tensor]:
    """Ascending eigenvalues and eigenvectors of symmetric (groups, d, d), by the first solver that succeeds."""
    for solver in (_eigh, _eigh_on_cpu, _eigh_of_numpy, _svd_on_cpu):
        try:
            eigenvalues, directions = solver(gram)
        except (RuntimeError, np.linalg.LinAlgError):  # torch's LinAlgError is a RuntimeError
            continue
        if bool(torch.isfinite(eigenvalues).all()) and bool(torch.isfinite(directions).all()):
            return eigenvalues.to(gram.device), directions.to(gram.device)
    raise NessError(
        f"layer {name!r}: no eigen-solver converged on its Gram {tuple(gram.shape)}; "
        "observe inputs of a more even scale, or leave the layer out with include=, so that it stays frozen"
    )


def symmetric_eigenvalues(gram: Tensor, name: str = "layer") -> Tensor:
    """Ascending eigenvalues alone, for less work than `symmetric_eigen`."""
    try:
        eigenvalues: Tensor = torch.linalg.eigvalsh(gram)
    except RuntimeError:
        eigenvalues, _ = symmetric_eigen(gram, name)
    return eigenvalues


def _eigh(gram: Tensor) -> tuple[Tensor, Tensor]:
    eigenvalues, directions = torch.linalg.eigh(gram)
    return eigenvalues, directions


def _eigh_on_cpu(gram: Tensor) -> tuple[Tensor, Tensor]:
    return _eigh(gram.cpu())


def _eigh_of_numpy(gram: Tensor) -> tuple[Tensor, Tensor]:
    eigenvalues, directions = np.linalg.eigh(gram.cpu().numpy())
    return torch.from_numpy(eigenvalues), torch.from_numpy(directions)


def _svd_on_cpu(gram: Tensor) -> tuple[Tensor, Tensor]:
    directions, values, _ = torch.linalg.svd(gram.cpu())  # positive semi-definite: singular values = eigenvalues
    return values.flip(-1), directions.flip(-1)


def selected_sigma(spectrum: Spectrum, weights: Tensor) -> Tensor:
    """σ_sel = max_i σ_i s_i of each group (groups,): what one unit of update can move a row by, at most.

    Never below the noise of the decomposition where anything is selected, and 0 where nothing is.

    >>> spectrum = decompose(torch.diag(torch.tensor([9.0, 16.0, 0.0], dtype=torch.float64)).unsqueeze(0))
    >>> selected_sigma(spectrum, torch.tensor([[1.0, 1.0, 0.0]], dtype=torch.float64))
    tensor([3.], dtype=torch.float64)
    """
    largest = (spectrum.sigma * weights).amax(dim=-1)
    if spectrum.rest is not None:  # what was left out is free
        largest = torch.maximum(largest, spectrum.rest)
    anything = (weights > 0).any(dim=-1)
    return torch.where(anything, torch.maximum(largest, spectrum.noise), torch.zeros_like(largest))


def restricted_sigma(gram: Tensor, basis: Tensor) -> Tensor:
    """σ_sel = √λ_max(Bᵀ C B) of each group (groups,), for a basis B (groups, d, r) with ‖B‖₂ ≤ 1.

    ‖A Bᵀ x‖ ≤ ‖A‖₂ √λ_max(Bᵀ C B) for every row x of C, also where B does not diagonalise C, as eigenvectors of
    another Gram do not. Never below what float64 can resolve of C.

    >>> gram = torch.diag(torch.tensor([9.0, 16.0, 0.0], dtype=torch.float64)).unsqueeze(0)
    >>> restricted_sigma(gram, torch.tensor([[[0.6], [0.8], [0.0]]], dtype=torch.float64))  # √(9 · .36 + 16 · .64)
    tensor([3.6715], dtype=torch.float64)
    """
    if basis.shape[-1] == 0:
        return gram.new_zeros(gram.shape[0])
    eigenvalues = symmetric_eigenvalues(basis.mT @ gram @ basis)
    floor = torch.linalg.matrix_norm(gram) * (gram.shape[-1] * FLOAT64_EPSILON)  # ‖C‖_F ≥ λ_max
    anything = (basis != 0).any(dim=-1).any(dim=-1)
    return torch.where(anything, torch.maximum(eigenvalues[..., -1], floor), 0.0).sqrt()


def deflated_sigma(gram: Tensor, directions: Tensor, held: Tensor) -> Tensor:
    """√λ_max(M C M) (groups,) for M = I − P Hᵀ of directions P and H = P diag(1 − s), both (groups, d, k).

    What `restricted_sigma` says of the same M, with products that k columns take.

    >>> gram = torch.diag(torch.tensor([9.0, 16.0, 4.0], dtype=torch.float64)).unsqueeze(0)
    >>> strongest = torch.tensor([[[0.0], [1.0], [0.0]]], dtype=torch.float64)
    >>> deflated_sigma(gram, strongest, strongest), deflated_sigma(gram, strongest, strongest * 0.1)
    (tensor([3.], dtype=torch.float64), tensor([3.6000], dtype=torch.float64))
    """
    moved = gram @ held  # C M = C − (C H) Pᵀ, and M (C M) = C M − H (Pᵀ C M)
    inside = gram - moved @ directions.mT
    inside = inside - held @ (directions.mT @ inside)
    eigenvalues = symmetric_eigenvalues((inside + inside.mT) / 2)
    floor = torch.linalg.matrix_norm(gram) * (gram.shape[-1] * FLOAT64_EPSILON)
    return torch.maximum(eigenvalues[..., -1], floor).sqrt()


def spectral_norm(matrix: Tensor) -> Tensor:
    """‖A‖₂ of each matrix (groups, o, r) as (groups,) in float64, by the smaller of A Aᵀ and Aᵀ A.

    >>> spectral_norm(torch.tensor([[[1.0, 5.0], [2.0, 6.0]]]))
    tensor([8.1090], dtype=torch.float64)
    """
    wide = matrix.to(torch.float64)
    if min(wide.shape[-2:]) == 0:
        return torch.zeros(wide.shape[0], dtype=torch.float64, device=wide.device)
    small = wide @ wide.mT if wide.shape[-2] <= wide.shape[-1] else wide.mT @ wide
    if not bool(torch.isfinite(small).all()):
        return torch.full((wide.shape[0],), torch.nan, dtype=torch.float64, device=wide.device)
    largest: Tensor = symmetric_eigenvalues(small)[..., -1].clamp(min=0)
    return largest.sqrt()
