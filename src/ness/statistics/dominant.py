"""The dominant part of a spectrum: the strongest eigenpairs of a Gram, and a proof that none was missed.

Rules that protect the strongest directions and free the rest need neither the weak directions nor their σ one by one:
Σσ² is the trace. A block Lanczos process with full reorthogonalisation finds the strongest pairs in float64. Each one
is used only if its residual ‖C v − λ v‖ is small, and μ I − (C − V Λ Vᵀ) must have a Cholesky factor, which it has only
if no eigenvalue above μ is left. Whatever fails is left to the full decomposition.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ness.errors import NessError
from ness.statistics.spectrum import Spectrum, above, noise_floor

NARROWEST = 512  # below it all eigenpairs take no longer
WIDEST = 0.25  # of d: the largest space that is searched; beyond, all eigenpairs take no longer
RESIDUAL = 1e-6  # ‖C v − λ v‖ ≤ this · λ, for every pair that is used
ABOVE = 1e-5  # μ is this much above the weakest λ that is used, relative to it

Accept = Callable[[Spectrum], bool]


def dominant(gram: Tensor, outputs: int, accept: Accept, name: str = "layer", seed: int = 0) -> Spectrum | None:
    """The strongest part of the spectrum of a Gram C (1, d, d): as much of it as `accept` asks for.

    The others' σ, whose squares are known in sum alone, are all given as their root mean square, and `directions` has
    the columns of the strongest alone (see `Spectrum.complete`).

    >>> gram = torch.diag(torch.cat([torch.full((508,), 0.01), torch.tensor([4.0, 9.0, 16.0, 25.0])]).double())
    >>> found = dominant(gram.unsqueeze(0), 1, accept=lambda spectrum: spectrum.directions.shape[-1] >= 3)
    >>> found.sigma[0, -3:].round(decimals=6).tolist(), found.sigma.shape
    ([3.0, 4.0, 5.0], torch.Size([1, 512]))

    Args:
        gram: C in float64.
        outputs: of the layer, a group.
        accept: whether a spectrum is enough to choose from. It is asked again with a longer one.
        name: of the layer, for errors.
        seed: of the vectors that the search starts from.

    Returns:
        The spectrum, or None where all of it should be computed: the Gram is narrow, in groups, or too flat.
    """
    width = gram.shape[-1]
    if gram.shape[0] != 1 or width < NARROWEST:
        return None
    if not bool(torch.isfinite(gram).all()):
        raise NessError(f"layer {name!r}: its Gram holds NaN or Inf; observe finite inputs and start again")
    matrix, trace = gram[0], float(gram[0].diagonal().sum())
    search = Krylov(matrix, max(16, width // 32), int(WIDEST * width), seed)
    size = search.block * 2
    while True:
        search.grow(size)
        values, vectors, good = search.pairs()
        found = _spectrum(values[good:], vectors[:, good:], width, trace, outputs)
        if found is not None and accept(found):
            values, vectors = values[good:], vectors[:, good:]
            bound = max(0.0, float(values[0])) * (1 + ABOVE) + 4 * float(noise_floor(values, width))
            if not nothing_above(matrix, values, vectors, bound):
                return None  # an eigenvalue of more directions than a block is wide
            return replace(found, rest=found.noise.new_full((1,), bound).sqrt())
        if 2 * size > WIDEST * width:
            return None
        if 4 * size > WIDEST * width:  # the last time: are there enough pairs at all, were they all good?
            hoped = _spectrum(values, vectors, width, trace, outputs)
            if hoped is None or not accept(hoped):
                return None
        size *= 2


class Krylov:
    """An orthonormal basis of the block Krylov space of C (d, d), grown a block at a time, and C times it."""

    def __init__(self, matrix: Tensor, block: int, most: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        start = torch.randn(matrix.shape[0], block, generator=generator, dtype=torch.float64).to(matrix.device)
        self.matrix, self.block, self.size = matrix, block, 0
        self.rows = start.new_empty(most + block, matrix.shape[0])  # Vᵀ (m, d), of which `size` are there
        self.images = torch.empty_like(self.rows)  # (C V)ᵀ
        self.next = torch.linalg.qr(start).Q

    def grow(self, size: int) -> None:
        """Until V has this many columns, or a few more."""
        while self.size < size:
            first, self.size = self.size, self.size + self.block
            image = self.matrix @ self.next
            self.rows[first : self.size], self.images[first : self.size] = self.next.mT, image.mT
            rows = self.rows[: self.size]
            for _ in range(2):  # what rounding leaves of V the second time takes away
                image = torch.linalg.qr(image - rows.mT @ (rows @ image)).Q
            self.next = image

    def pairs(self) -> tuple[Tensor, Tensor, int]:
        """Ritz values (m,), ascending, and vectors (d, m), and from which on all have a small residual.

        Residuals are measured, not estimated.
        """
        rows, images = self.rows[: self.size], self.images[: self.size]
        inner = rows @ images.mT
        values, mixing = torch.linalg.eigh((inner + inner.mT) / 2)
        vectors = rows.mT @ mixing
        residual = torch.linalg.vector_norm(images.mT @ mixing - vectors * values, dim=0)
        good = residual <= torch.maximum(RESIDUAL * values, noise_floor(values, vectors.shape[0]))
        return values, vectors, values.shape[0] - int(good.flip(0).to(torch.int64).cumprod(0).sum())


def nothing_above(matrix: Tensor, values: Tensor, vectors: Tensor, bound: float) -> bool:
    """Whether C − V Λ Vᵀ has no eigenvalue above the bound μ: then μ I − (C − V Λ Vᵀ) has a Cholesky factor."""
    shifted = torch.addmm(matrix, vectors * values, vectors.mT, beta=-1)
    shifted.diagonal().add_(bound)
    _, failed = torch.linalg.cholesky_ex(shifted)
    return int(failed) == 0


def _spectrum(values: Tensor, vectors: Tensor, width: int, trace: float, outputs: int) -> Spectrum | None:
    """What is known so far; None where nothing is, or where nothing is left besides."""
    count = values.shape[0]
    if count == 0 or count >= width or float(values[-1]) <= 0:
        return None
    floor = noise_floor(values, width)
    left = max(0.0, trace - float(values.sum())) / (width - count)
    sigma = values.new_empty(width)
    sigma[: width - count] = min(left, float(values[0].clamp(min=0)))
    sigma[width - count :] = values
    floor = floor.unsqueeze(0)
    sigma = above(sigma.unsqueeze(0), floor).sqrt()
    return Spectrum(sigma, vectors.contiguous().unsqueeze(0), floor.sqrt(), outputs)
