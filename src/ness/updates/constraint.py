"""What holds in one layer while a task is trained: the update, what its parts are, and what is said of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ness.statistics.spectrum import spectral_norm
from ness.updates.private import PrivateColumns, PrivatePart
from ness.updates.update import Update


@dataclass(frozen=True)
class Factors:
    """ΔW = left · right of one layer: what is left of an update for `export_lora` once it is merged."""

    left: Tensor  # (groups, o, r)
    right: Tensor  # (groups, r, width)

    @property
    def rank(self) -> int:
        """r."""
        return self.left.shape[-1]

    def change(self) -> Tensor:
        """ΔW (groups, o, width) in float64."""
        return self.left.to(torch.float64) @ self.right.to(torch.float64)

    def inputs(self, fan_in: int) -> Factors:
        """Without the column of a bias."""
        return Factors(self.left, self.right[..., :fan_in])

    def to(self, dtype: torch.dtype) -> Factors:
        """Of another dtype, on the CPU."""
        return Factors(self.left.to("cpu", dtype), self.right.to("cpu", dtype))


@dataclass
class Constraint:
    """What holds in one layer while a task is trained."""

    rank: int
    tau: Tensor  # τ, (groups,)
    sigma: Tensor  # σ_sel, (groups,)
    unscaled: Tensor  # B⁺ᵀ: ΔW times this is A, (groups, width, r + k), float64; needed where ΔW is the parameter
    update: Update | None  # None: rank 0, the layer is frozen
    columns: PrivateColumns | None = None  # of the update's last k columns, where the task has private directions

    def coefficients(self) -> tuple[Tensor, Tensor]:
        """A (groups, o, r) of the shared columns and B (groups, o, k) of the private ones, in float64."""
        assert self.update is not None
        with torch.no_grad():
            if self.update.projector is None:
                both = self.update.coefficients().detach().to(torch.float64)
            else:
                both = self.update.parameter.detach().to(torch.float64) @ self.unscaled.to(self.update.parameter.device)
        return both[..., : self.update.shared], both[..., self.update.shared :]

    def running(self) -> Tensor:
        """The shared [W b] with its update (groups, o, width) in float64.

        Beside a private part it is W + A Bᵀ from the shared columns alone: what rounding has put anywhere else belongs
        to neither part, and is dropped.
        """
        assert self.update is not None
        if self.columns is None:
            return self.update.running()
        return self.update.layer.stored().to(torch.float64) + self.change()

    def change(self) -> Tensor:
        """[ΔW Δb] of the shared columns (groups, o, width) in float64, not rounded to the dtype of the weights."""
        assert self.update is not None
        with torch.no_grad():
            if self.columns is None:
                return self.update.delta().to(torch.float64)
            basis = self.update.columns()[..., : self.update.shared].to(torch.float64)
            return self.coefficients()[0] @ basis.mT

    @torch.no_grad()
    def factors(self, share: float = 1.0) -> Factors | None:
        """The update, its private part included, as two factors: its own, or ΔW and the identity where that is less."""
        update = self.update
        if update is None:
            return None
        if update.projector is None:
            left, right = update.coefficients().detach() * share, update.columns().detach().mT
            if left.shape[-1] <= min(left.shape[-2], right.shape[-1]):
                return Factors(left, right)
        change = update.delta().detach() * share
        groups, outputs, width = change.shape
        identity = torch.eye(min(outputs, width), dtype=change.dtype, device=change.device).expand(groups, -1, -1)
        return Factors(identity, change) if outputs <= width else Factors(change, identity)

    def norms(self) -> Tensor:
        """‖A‖₂ and ‖A‖_F of the shared part (2, groups); of A B where both are trained."""
        assert self.update is not None
        matrix = self.update.bounding(self.coefficients()[0])
        return torch.stack([spectral_norm(matrix), matrix.square().sum(dim=(-2, -1)).sqrt()]).cpu()

    def private_part(self, own: bool) -> PrivatePart | None:
        """The private part as it is trained so far."""
        if self.columns is None or self.update is None:
            return None
        return self.columns.part(self.coefficients()[1], self.update.basis.dtype, own)


@dataclass
class Figures:
    """What the certificate says of one update: the current one, or the last merged."""

    rank: int = 0
    tau: float = 0.0
    update_norm: float = 0.0
    shrunk: float = 1.0  # the share of the update that was merged
    rounded: float = 0.0  # the share of that which rounding to half precision took away
