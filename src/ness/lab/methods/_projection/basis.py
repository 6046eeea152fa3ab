"""Bases of what a layer's inputs use: how many directions hold a share of the energy, and how a basis grows."""

import scipy.linalg
import torch
from torch import Tensor

from ness.statistics.gram import gram_of_rows
from ness.statistics.spectrum import decompose, symmetric_eigen


def left_singular(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Left singular vectors (d, k) of a matrix (d, n) and its singular values (k,), largest first.

    Divide and conquer, torch's way, can fail where many singular values are equal, as in the union of two bases;
    the slower QR iteration does not.

    >>> left_singular(torch.tensor([[0.0, 2.0], [1.0, 0.0]]))[1]
    tensor([2., 1.])
    """
    try:
        left, sigma, _ = torch.linalg.svd(matrix, full_matrices=False)
    except RuntimeError:  # LinAlgError is one
        found = scipy.linalg.svd(matrix.cpu().numpy(), full_matrices=False, lapack_driver="gesvd")
        left, sigma = (torch.from_numpy(part).to(matrix) for part in found[:2])
    return left, sigma


def directions(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Left singular vectors (d, k) of R = Xᵀ and singular values (k,), largest first, zeros left out.

    >>> vectors, sigma = directions(torch.tensor([[3.0, 0.0], [0.0, 4.0], [0.0, 0.0]], dtype=torch.float64))
    >>> sigma
    tensor([4., 3.], dtype=torch.float64)
    """
    if len(rows) < rows.shape[1]:
        left, sigma = left_singular(rows.mT)
        used = sigma > sigma.max() * 1e-12 if len(sigma) else sigma > 0
    else:
        spectrum = decompose(gram_of_rows(rows.unsqueeze(0)))
        left, sigma = spectrum.directions[0].flip(1), spectrum.sigma[0].flip(0)
        used = sigma > 0
    return left[:, used], sigma[used]


def residual(rows: Tensor, basis: Tensor) -> Tensor:
    """Rows without their part in a basis: X - X M Mᵀ, (n, d)."""
    return rows - rows @ basis @ basis.mT


def additions(energy: Tensor, total: float, threshold: float) -> int:
    """How many directions of these energies σ² (largest first) bring what is covered to `threshold` of the total.

    What `energy` does not hold of the total is covered already. The direction that crosses the threshold counts.

    >>> additions(torch.tensor([9.0, 4.0, 1.0]), 14.0, 0.9), additions(torch.tensor([0.1]), 14.0, 0.9)
    (2, 0)
    """
    covered = (total - float(energy.sum())) / total if total > 0 else 1.0
    if covered >= threshold:
        return 0
    reached = covered + energy.cumsum(0) / total
    return min(int((reached < threshold).sum()) + 1, len(energy))


def strictly_below(energy: Tensor, threshold: float) -> int:
    """The reference's count in a first task: cumulative shares strictly below the threshold, one fewer than the paper.

    >>> strictly_below(torch.tensor([9.0, 4.0, 1.0]), 0.9)
    1
    """
    return int((energy.cumsum(0) / energy.sum() < threshold).sum())


def new_directions(basis: Tensor, rows: Tensor, threshold: float, *, strict: bool) -> tuple[Tensor, Tensor]:
    """Directions (d, r) beside a basis that bring the covered energy of the rows to the threshold, and their σ (r,).

    R̂ = R - M MᵀR, U Σ Vᵀ = R̂, and the first r columns of U with ‖R_M‖² + Σ_{i≤r} σᵢ² ≥ ε‖R‖².
    `strict` is the reference's smaller count where there is no basis yet.
    """
    vectors, sigma = directions(residual(rows, basis))
    energy = sigma.square()
    if strict and basis.shape[1] == 0:
        count = strictly_below(energy, threshold)
    else:
        count = additions(energy, float(rows.square().sum()), threshold)
    count = min(count, rows.shape[1] - basis.shape[1])
    return vectors[:, :count], sigma[:count]


def joined(basis: Tensor, more: Tensor) -> Tensor:
    """[M, U] (d, r + s) made orthonormal column by column: a column that was orthogonal to all before stays itself."""
    together = torch.cat([basis, more], 1)
    if together.shape[1] == 0:
        return together
    q, r = torch.linalg.qr(together)
    signed: Tensor = q * torch.where(r.diagonal() < 0, -1.0, 1.0)
    return signed


def span(vectors: Tensor, tolerance: float = 1e-3) -> Tensor:
    """An orthonormal basis (d, r) of the span of unit columns, dependent ones dropped.

    Bases are kept in float32, so a direction that differs from the others by less than `tolerance` is rounding.
    """
    if vectors.shape[1] == 0:
        return vectors
    energies, found = symmetric_eigen((vectors @ vectors.mT).unsqueeze(0))  # σ², so that equal ones do no harm
    kept: Tensor = found[0][:, energies[0] > tolerance**2].flip(1)
    return kept
