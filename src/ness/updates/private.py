"""Private directions: what a task adds to a layer for itself, B Kᵀ, beside the update that all tasks share.

K (d, k) are directions that earlier inputs use most. The shared update stays in their complement, so the two never mix,
and B Kᵀ is in the weights only while its task is used: it cannot move any other task's outputs.

K is kept in the weights' own coordinates. The scale S of a bias column changes from task to task, and with it what is
orthonormal, but neither the span of K nor the meaning of an old B.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ness.errors import NessError
from ness.statistics.spectrum import Spectrum, above, decompose, noise_floor, symmetric_eigen, symmetric_eigenvalues


@dataclass(frozen=True)
class PrivatePart:
    """What one task adds to one layer: B Kᵀ, on the first k of the directions that all tasks share or on its own."""

    coefficients: Tensor  # B, (groups, o, k), float32 (float64 in a float64 model)
    directions: Tensor | None = None  # K, (groups, width, k), float64; None: the shared ones

    @property
    def width(self) -> int:
        """k."""
        return self.coefficients.shape[-1]

    @property
    def numbers(self) -> int:
        """How many numbers the task keeps."""
        return self.coefficients.numel() + (0 if self.directions is None else self.directions.numel())

    def delta(self, shared: Tensor | None, device: torch.device) -> Tensor:
        """B Kᵀ (groups, o, width) in float64.

        Copies of their own make it bit for bit the same every time: no product then depends on where in memory its
        factors happen to lie.
        """
        directions = shared if self.directions is None else self.directions
        assert directions is not None
        k = directions[..., : self.width].to(device).clone(memory_format=torch.contiguous_format)
        return self.coefficients.to(device, torch.float64, copy=True) @ k.mT


@dataclass(frozen=True)
class PrivateColumns:
    """The private columns of an update in training: how its B, on orthonormal columns, becomes the task's B on K."""

    directions: Tensor  # K, (groups, width, k), float64, in the weights' coordinates
    mixing: Tensor  # R⁻ᵀ, (groups, k, k), with S⁻¹ K = K̃ R and K̃ the orthonormal columns that are trained on
    own: bool = False  # K is this task's alone, since it cannot use those that tasks share

    def part(self, trained: Tensor, dtype: torch.dtype, own: bool) -> PrivatePart:
        """The part of a task from the B (groups, o, k) that was trained; with `own` it takes K along."""
        coefficients = trained.to(torch.float64) @ self.mixing.to(trained.device)
        return PrivatePart(coefficients.to(dtype), self.directions if own or self.own else None)


def capped(private: int, fan_in: int) -> int:
    """Private directions of a layer: at most a third of its fan-in d, the constant 1 of a bias not counted.

    Whoever needs this limit, the laboratory and its lists too, asks here.

    >>> capped(16, 27), capped(16, 576)
    (9, 16)
    """
    return min(private, fan_in // 3)


def check_private(private: int, task: str | None, fan_ins: dict[str, int]) -> None:
    """Refuse a number of private directions that no layer, or no task, could have."""
    if isinstance(private, bool) or not isinstance(private, int) or private < 0:
        raise NessError(f"constrain(private={private!r}): expected a whole number of directions per layer, 0 or more")
    if private and task is None:
        raise NessError(f"constrain(private={private}): a private part belongs to a task: constrain(task=NAME, ...)")
    widest = max(fan_ins, key=lambda name: fan_ins[name])
    if private > fan_ins[widest] or (private and not capped(private, fan_ins[widest])):
        raise NessError(
            f"constrain(private={private}): no layer is that wide: the widest, {widest!r}, has fan-in "
            f"{fan_ins[widest]}, and at most a third of it ({capped(private, fan_ins[widest])}) can be private"
        )


def orthonormal(columns: Tensor) -> tuple[Tensor, Tensor]:
    """K̃ (groups, d, k) with the span of the columns, one by one, and N (groups, d, d − k) of their complement.

    >>> k, n = orthonormal(torch.tensor([[[2.0], [0.0], [0.0]]]))
    >>> k.squeeze().abs(), n.shape
    (tensor([1., 0., 0.]), torch.Size([1, 3, 2]))
    """
    count = columns.shape[-1]
    q, r = torch.linalg.qr(columns, mode="complete")
    diagonal = r.diagonal(dim1=-2, dim2=-1)[..., :count]
    sign = torch.where(diagonal < 0, -1.0, 1.0).to(q)
    return q[..., :count] * sign.unsqueeze(-2), q[..., count:]


def decompose_beside(
    gram: Tensor, held: Tensor, private: int, outputs: int, name: str = "layer", norms: bool = True
) -> Spectrum:
    """The spectrum of C beside k private directions: K, and Q diag(σ²) Qᵀ of Nᵀ C N on its complement.

    The first columns of K span those of `held` (groups, d, ≤ k), so that K grows without forgetting; the others are
    the strongest directions of the rest. The projected matrix (I − K Kᵀ) C (I − K Kᵀ) would not do: its zero
    eigenvalues are K itself, and a rule would free them. Without `norms` no σ of all of C is computed where K is held
    already: a second eigenvalue problem, for rules that take no norm of X.

    >>> gram = torch.diag(torch.tensor([9.0, 16.0, 25.0], dtype=torch.float64)).unsqueeze(0)
    >>> spectrum = decompose_beside(gram, gram[..., :0], 1, outputs=1)
    >>> spectrum.sigma, spectrum.every_sigma
    (tensor([[3., 4.]], dtype=torch.float64), tensor([[3., 4., 5.]], dtype=torch.float64))
    """
    count, more = held.shape[-1], private - held.shape[-1]
    if count == 0:
        spectrum = decompose(gram, outputs, name)
        columns, whole = held, spectrum.sigma if norms else None
    else:
        if not bool(torch.isfinite(gram).all()):
            raise NessError(f"layer {name!r}: its Gram holds NaN or Inf; observe finite inputs and start again")
        columns, complement = orthonormal(held)
        every = symmetric_eigenvalues(gram, name) if norms else torch.linalg.matrix_norm(gram).unsqueeze(-1)
        floor = noise_floor(every, gram.shape[-1])  # of all of C: Nᵀ C N carries its rounding; ‖C‖_F ≥ λ_max
        rest = complement.mT @ gram @ complement
        eigenvalues, inner = symmetric_eigen((rest + rest.mT) / 2, name)
        spectrum = Spectrum(above(eigenvalues, floor).sqrt(), complement @ inner, floor.sqrt(), outputs)
        whole = above(every, floor).sqrt() if norms else None
    kept = spectrum.sigma.shape[-1] - more
    grown = torch.cat([columns, spectrum.directions[..., kept:].flip(-1)], dim=-1)
    return replace(
        spectrum,
        sigma=spectrum.sigma[..., :kept].clone(),
        directions=spectrum.directions[..., :kept].clone(),
        private=grown,
        whole=None if whole is None else whole.clone(),
    )


def columns_in_training(scaled: Tensor, scale: Tensor, held: Tensor | None, own: bool = False) -> PrivateColumns:
    """K in the weights' coordinates for orthonormal K̃ (groups, width, k) at scale S; what was held stays as it is."""
    grown = scaled * scale.unsqueeze(-1)
    if held is not None:
        kept = held[..., : scaled.shape[-1]].to(grown.device)
        grown = torch.cat([kept, grown[..., kept.shape[-1] :]], dim=-1)
    unit = torch.where(scale > 0, scale, 1.0).unsqueeze(-1)  # a frozen bias: K has zeros there
    triangle = scaled.mT @ (grown / unit)  # R
    return PrivateColumns(grown, torch.linalg.inv(triangle).mT.contiguous(), own)
