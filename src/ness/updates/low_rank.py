"""The low-rank update ΔW = A B M of one layer: as small as a LoRA adapter, and still confined to the free directions.

A (o, r) and B (r, d) are trained; M (d, d) is fixed: the projector on the free directions, I − P Pᵀ where a rule cuts
(P are the protected directions) and Q diag(s) Qᵀ where it weighs them. M stands between B and the inputs, so the update
is confined whatever the optimizer does to B. B M (r, d) is made once in every forward; beside the model lie P or the
free directions alone, whichever are fewer.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ness._precision import full_precision, product
from ness.layers import Layer
from ness.updates.update import DRIFT_MARGIN, Projector, Update, Way

ITERATIONS = 8  # of the search for the directions that new inputs use most; a start need not be exact
DOWN = "_down"  # B is registered in its module under the name of A and this


def cheapest_way_of_rank(layer: Layer, rows: float, rank: int) -> Way:
    """The way with the fewest FLOPs for a step on `rows` rows a call, forward and backward, at rank r.

    >>> linear = nn.Linear(64, 64)
    >>> from ness.layers import layers_of
    >>> (layer,) = layers_of("fc", linear)
    >>> cheapest_way_of_rank(layer, rows=512, rank=4)
    'factored'
    """
    d, o = layer.fan_in, layer.outputs
    factored = 2 * rows * rank * 3 * (d + o)  # x (B M)ᵀ, h Aᵀ, and the gradients of both factors, of h and of x
    weight = 2 * (3 * o * rank * d + rows * o * d)  # A (B M), its gradients, and that of W + ΔW
    return "factored" if layer.apply is not None and factored < weight else "weight"


def start_of_rows(
    shape: tuple[int, int, int], free: Projector, generator: torch.Generator | None, new: Tensor | None = None
) -> Tensor:
    """B (groups, r, d) as LoRA draws it, uniform within ±1/√d, projected on the free directions.

    Each row keeps the length it was drawn with, so that a layer with few free directions starts no slower. With the
    Gram (groups, d, d) of new inputs rows are of that length too, along the free directions that those inputs use most.
    """
    groups, rank, width = shape
    device = torch.device("cpu") if generator is None else generator.device
    drawn = torch.rand(groups, rank, width, generator=generator, device=device) * 2 - 1
    drawn = (drawn / math.sqrt(width)).to(free.matrix)
    inside = free.rows(drawn) if new is None else _used_most(drawn, free, new.to(drawn))
    length = torch.linalg.vector_norm(inside, dim=-1, keepdim=True)
    longer = torch.linalg.vector_norm(drawn, dim=-1, keepdim=True) / length
    return inside * torch.where(length > 0, longer, 0.0)


def _used_most(drawn: Tensor, free: Projector, new: Tensor) -> Tensor:
    """Rows (groups, r, d): the strongest eigenvectors of M C M, by subspace iteration from what was drawn."""
    found = free.rows(drawn)
    for _ in range(ITERATIONS):
        found = torch.linalg.qr(free.rows(free.rows(found) @ new).mT).Q.mT
    inside = free.rows(found)
    _, mixing = torch.linalg.eigh(inside @ new @ inside.mT)
    strongest: Tensor = mixing.flip(-1).mT @ inside
    return strongest


class LowRankUpdate(Update):
    """ΔW = A B M: `parameter` is A (groups, o, r + k), zero at the start, and `down` is B (groups, r, d).

    The last k columns of A belong to the task's private directions K, which are fixed. Biases stay as they are.
    """

    def __init__(self, layer: Layer, way: Way, free: Projector, down: Tensor, kept: Tensor) -> None:
        super().__init__(layer, way, kept, private=kept.shape[-1])  # `basis` is K alone, (groups, d, k)
        self.free = free  # M
        columns = down.shape[-2] + self.private
        self.made = {"": nn.Parameter(kept.new_zeros(layer.groups, layer.outputs, columns)), DOWN: nn.Parameter(down)}
        self.sized: Tensor | None = None  # Q diag(σ) of the free directions, (groups, d, n), where drift is limited

    @property
    def shared(self) -> int:
        """r, the columns that all tasks will share."""
        return self.made[DOWN].shape[-2]

    @property
    def rank(self) -> int:
        """r."""
        return self.shared

    @property
    def down(self) -> Tensor:
        """B."""
        return self.live(DOWN)

    def limit_drift(self, sizes: Tensor, limit: float) -> None:
        """Keep ‖X ΔWᵀ‖_F ≤ limit in every forward; `sizes` is Q diag(σ) (groups, d, n) of the free directions."""
        self.sized = sizes.to(self.basis)
        self.limit = self.basis.new_tensor(limit * DRIFT_MARGIN)

    def rows(self) -> Tensor:
        """[B M; Kᵀ] (groups, r + k, d), differentiable: what A multiplies."""
        shared = self.free.rows(self.down)
        return torch.cat([shared, self.basis.mT], dim=-2) if self.private else shared

    def columns(self) -> Tensor:
        """The same as columns (groups, width, r + k), a frozen bias with a row of 0."""
        return F.pad(self.rows().mT, (0, 0, 0, self.layer.width - self.layer.fan_in))

    def coefficients(self, rows: Tensor | None = None) -> Tensor:
        """A as it acts, (groups, o, r + k): its shared columns shrunk onto the drift limit where there is one."""
        if self.sized is None or self.limit is None:
            return self.parameter
        shared, private = self.parameter[..., : self.shared], self.parameter[..., self.shared :]
        rows = self.rows() if rows is None else rows
        with full_precision(rows):
            inside = product(rows[..., : self.shared, :], self.sized)
            drift = torch.linalg.vector_norm(product(shared, inside))  # ‖A B M Q diag(σ)‖_F
        floor = self.limit.clamp(min=torch.finfo(drift.dtype).tiny)
        shrunk = shared * (self.limit / torch.maximum(drift, floor))
        return torch.cat([shrunk, private], dim=-1) if self.private else shrunk

    def delta(self) -> Tensor:
        """[ΔW 0] (groups, o, width), differentiable, in the update's own dtype whatever autocast says."""
        rows = self.rows()
        with full_precision(rows):
            change = product(self.coefficients(rows), rows)
        return F.pad(change, (0, self.layer.width - self.layer.fan_in))

    def bounding(self, shared: Tensor) -> Tensor:
        """A Rᵀ (groups, o, ≤ r) with the singular values of A B, for A in float64 and Bᵀ = Q R."""
        triangle: Tensor = torch.linalg.qr(self.down.detach().to(shared).mT, mode="r").R
        return shared @ triangle.mT

    def directions(self) -> Tensor:
        """M (groups, width, width) in float64, a frozen bias with a row and a column of 0."""
        identity = torch.eye(self.layer.fan_in, dtype=self.free.matrix.dtype, device=self.free.matrix.device)
        more = self.layer.width - self.layer.fan_in
        whole = self.free.rows(identity.expand(self.layer.groups, -1, -1)).to(torch.float64)
        return F.pad(whole, (0, more, 0, more))

    def parameters_of(self, module: nn.Module, delta: Tensor) -> tuple[Tensor, Tensor | None]:
        """W + ΔW of one of the layer's modules, and its bias as it is."""
        weight = module._parameters[self.layer.weight_name]
        assert weight is not None
        return self.add(self.layer.weight_name, weight, delta), self.layer.bias

    def add(self, name: str, base: Tensor, delta: Tensor | None = None) -> Tensor:
        """A stored weight with this update added; a bias is returned as it is."""
        return base if name == self.layer.bias_name else super().add(name, base, delta)

    def factored(self, module: nn.Module, x: Tensor, plain: Tensor) -> Tensor:
        """y + (x (B M)ᵀ) Aᵀ."""
        rows = self.rows()
        with full_precision(rows):
            hidden = self.layer.through(module, x.to(rows.dtype), rows.mT, None)
            return plain + self.layer.onto(hidden, self.coefficients(rows)).to(plain.dtype)

    def running(self) -> Tensor:
        """[W b] as the model really runs it now, (groups, o, width) in float64."""
        if self.way != "factored":
            return super().running()
        with torch.no_grad():
            rows = self.rows()
            change = self.coefficients(rows).to(torch.float64) @ rows.to(torch.float64)
            return self.layer.stored().to(torch.float64) + F.pad(change, (0, self.layer.width - self.layer.fan_in))

    def to(self, device: torch.device) -> None:
        """Follow the model to another device; dtypes stay."""
        super().to(device)
        self.free = self.free.to(device)
        self.sized = None if self.sized is None else self.sized.to(device)
