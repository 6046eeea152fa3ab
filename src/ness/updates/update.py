"""The trainable update ΔW of one layer, in its cheapest exact form.

Definition: ΔW = A Bᵀ with a trained A (groups, o, r) and a fixed B = Q diag(s) (groups, d, r) that earlier inputs
hardly reach, followed by the k private directions of the task where it has any. Four ways to run it, all the same
function, chosen by counted FLOPs:

- `factored`: y += (x B) Aᵀ; best while the rows of a batch are few.
- `weight`:   y = x (W + A Bᵀ)ᵀ; best for convolutions, whose rows are many.
- `rows` and `gradient`, for SGD alone: the parameter is the increment ΔW itself and its gradient G becomes G B Bᵀ, by
  projecting the rows x before gᵀ x, or gᵀ x afterwards. SGD on A is exactly this (momentum and decay included).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ness._precision import full_precision, product
from ness.distributed import gathered
from ness.layers import Layer, LinearLayer
from ness.updates.saving import PREFIX, Passing

Form = Literal["any", "sgd"]
Way = Literal["factored", "weight", "rows", "gradient"]
DRIFT_MARGIN = 1 - 1e-4  # max_drift is kept with this much room for float32 rounding


def cheapest_way(form: Form, layer: Layer, rows: float, rank: int) -> Way:
    """The way with the fewest FLOPs for a step on `rows` rows a call, forward and backward, at rank r."""
    d, o = layer.width, layer.outputs
    if form == "any":
        factored = 2 * rows * rank * (2 * d + 3 * o)  # x B, h Aᵀ, and the gradients of A, h and x
        weight = 2 * (2 * o * rank * d + rows * o * d)  # A Bᵀ, the gradients of A and of W + ΔW
        return "factored" if layer.apply is not None and factored < weight else "weight"
    few_rows = rows < o  # projecting costs 2 d min(2 m, 2 r, d) FLOPs a row of x, or the same a row of gᵀ x
    return "rows" if few_rows and isinstance(layer, LinearLayer) and layer.apply is not None else "gradient"


@dataclass
class Projector:
    """The map G → G B Bᵀ on rows (…, d), as B Bᵀ = S² − N Nᵀ, as B Bᵀ, or as one dense matrix: whatever is thinner."""

    how: Literal["complement", "basis", "dense"]
    matrix: Tensor  # N (groups, d, m), B (groups, d, r) or B Bᵀ (groups, d, d)
    squared_scale: Tensor  # diagonal of S², (d,): 1, and for the constant of a bias its squared scale
    cuts: bool = False  # B Bᵀ is I − N Nᵀ with orthonormal N: projecting twice is projecting once, only more exactly

    @classmethod
    def of(cls, basis: Tensor, complement: Tensor, scale: Tensor, hard: bool = False) -> Projector:
        """The cheapest form of B Bᵀ; `hard`: it is a projector that is applied to any rows, all s are 0 or 1."""
        passes = 3 if hard else 2  # I − N Nᵀ is then applied twice forward, and once to the gradient
        columns = {"complement": passes * complement.shape[-1], "basis": 2 * basis.shape[-1], "dense": basis.shape[-2]}
        how = min(columns, key=lambda form: columns[form])
        if how == "complement":
            return cls("complement", complement, scale.square(), hard)
        return cls("basis", basis, scale.square()) if how == "basis" else cls("dense", basis @ basis.mT, scale.square())

    def __call__(self, rows: Tensor) -> Tensor:
        """Project rows (groups, n, d)."""
        with full_precision(rows):
            inside = product(rows, self.matrix)
            if self.how == "dense":
                return inside
            if self.how == "basis":
                return product(inside, self.matrix.mT)
            return minus(rows * self.squared_scale, inside, self.matrix.mT)

    def rows(self, rows: Tensor) -> Tensor:
        """Project rows (groups, n, d) that need not be near the free directions, differentiably.

        I − N Nᵀ leaves behind what rounding makes of the part that it takes away; a second time takes that away too.
        """
        if self.how == "complement" and self.matrix.shape[-1] == 0:
            return rows
        once = self(rows)
        if self.how != "complement" or not self.cuts:
            return once
        with full_precision(rows):
            return minus(once, product(once.detach(), self.matrix), self.matrix.mT)

    def to(self, device: torch.device) -> Projector:
        """The same on another device."""
        return replace(self, matrix=self.matrix.to(device), squared_scale=self.squared_scale.to(device))


def minus(rows: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """rows − left right, of three tensors (groups, …)."""
    if torch.compiler.is_compiling():
        return rows - product(left, right)
    return torch.baddbmm(rows, left, right, alpha=-1)


class _ProjectGradient(torch.autograd.Function):
    """Identity forward; backward G → G B Bᵀ."""

    @staticmethod
    def forward(ctx: Any, increment: Tensor, projector: Projector) -> Tensor:
        ctx.projector = projector
        return increment.view_as(increment)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.projector(gradient), None


class _ProjectRows(torch.autograd.Function):
    """y = x (W + ΔW)ᵀ + b; the gradient of ΔW is gᵀ (x B Bᵀ), far cheaper than (gᵀ x) B Bᵀ for few rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, increment: Tensor, update: Update, module: nn.Module) -> Tensor:
        weight, bias = update.parameters_of(module, increment)
        ctx.save_for_backward(x, weight)
        ctx.update = update
        apply: Any = update.layer.apply
        result: Tensor = apply(module, x, weight, bias)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        layer, projector = ctx.update.layer, ctx.update.projector
        matrix = layer.to_matrix(weight)[0]  # W + ΔW, (o, d)
        for_x = (gradient.to(matrix.dtype) @ matrix).to(x.dtype) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return for_x, None, None, None
        dtype = ctx.update.basis.dtype
        rows = x.reshape(1, -1, layer.fan_in).to(dtype)
        if layer.bias is not None:
            rows = torch.cat([rows, rows.new_ones(1, rows.shape[1], 1)], dim=-1)
        outer = gradient.reshape(1, -1, layer.outputs).to(dtype)
        with full_precision(outer):  # autocast may be on around backward, and would round the product out of the space
            return for_x, outer.mT @ projector(rows), None, None


class Update:
    """The trainable part of one layer: `parameter` is A (any optimizer) or ΔW itself (SGD), zero at the start.

    It holds no reference to the guard, so a copy of the model carries a copy of it.
    """

    def __init__(
        self, layer: Layer, way: Way, basis: Tensor, projector: Projector | None = None, private: int = 0
    ) -> None:
        columns = basis.shape[-1] if projector is None else layer.width
        self.layer, self.way = layer, way
        self.basis = basis  # B = [Q diag(s), K], (groups, width, r + k)
        self.private = private  # k, the last columns: the task's own
        self.projector = projector
        self.made = {"": nn.Parameter(basis.new_zeros(layer.groups, layer.outputs, columns))}
        self.sizes: Tensor | None = None  # σ_i s_i, (groups, r): what a unit of A's column i moves all rows by
        self.limit: Tensor | None = None  # largest allowed ‖X ΔWᵀ‖_F, ()
        self.tried: Mapping[str, Tensor] | None = None
        self.passing = Passing()

    @property
    def shared(self) -> int:
        """r, the columns that all tasks will share."""
        return self.basis.shape[-1] - self.private

    @property
    def rank(self) -> int:
        """How many free directions it has, all groups together: columns that only pad a group are 0."""
        return int((self.basis[..., : self.shared] != 0).any(dim=-2).sum())

    def trained(self) -> dict[str, nn.Parameter]:
        """What is trained, by what its name in the module ends with.

        That is what the module holds: whoever shards a model (FSDP) puts parameters of his own in place of those made.
        """
        held, names = self.layer.module._parameters, {end: self.name_of(end) for end in self.made}
        found = {end: held.get(names[end]) for end in self.made}
        return {end: made if found[end] is None else found[end] for end, made in self.made.items()}  # type: ignore[misc]

    def name_of(self, end: str = "") -> str:
        """A trained parameter's name in its module: "ness_weight", for q of attention "ness_in_proj_weight_q"."""
        part = "" if self.layer.weight_part is None else f"_{self.layer.name[-1]}"
        return f"{PREFIX}{self.layer.weight_name}{part}{end}"

    def trying(self, values: Mapping[str, Tensor]) -> Update:
        """The same update with other values in place of those that are trained, by what their names end with."""
        trial = copy.copy(self)
        trial.tried = values
        return trial

    def live(self, end: str = "") -> Tensor:
        """A trained parameter as it is now; one that is sharded over ranks is brought together."""
        if self.tried is not None:
            return self.tried[end]
        held = self.layer.module._parameters.get(self.name_of(end))
        return gathered(self.made[end] if held is None else held)

    @property
    def parameter(self) -> Tensor:
        """A, or ΔW."""
        return self.live()

    def columns(self) -> Tensor:
        """B (groups, width, r + k): what ΔW's rows are made of."""
        return self.basis

    def bounding(self, shared: Tensor) -> Tensor:
        """A matrix whose norms bound the update's, from A (groups, o, r) of the shared columns: A itself."""
        return shared

    def directions(self) -> Tensor:
        """The shared B (groups, width, r) in float64: where the update can go."""
        return self.basis[..., : self.shared].to(torch.float64)

    def limit_drift(self, sizes: Tensor, limit: float) -> None:
        """Keep ‖X ΔWᵀ‖_F ≤ limit in every forward from now on; private columns move no old row and are left alone."""
        self.sizes = sizes.to(self.basis)
        self.limit = self.basis.new_tensor(limit * DRIFT_MARGIN)

    def coefficients(self) -> Tensor:
        """A as it acts, (groups, o, r + k): its shared columns shrunk onto the drift limit where there is one."""
        if self.sizes is None or self.limit is None:
            return self.parameter
        shared, private = self.parameter[..., : self.shared], self.parameter[..., self.shared :]
        drift = torch.linalg.vector_norm(shared * self.sizes.unsqueeze(1))  # ‖X ΔWᵀ‖_F = ‖A diag(σ s)‖_F
        floor = self.limit.clamp(min=torch.finfo(drift.dtype).tiny)
        shrunk = shared * (self.limit / torch.maximum(drift, floor))  # exactly 1 below the limit
        return torch.cat([shrunk, private], dim=-1) if self.private else shrunk

    def delta(self) -> Tensor:
        """[ΔW Δb] (groups, o, width), differentiable, in the update's own dtype whatever autocast says."""
        if self.projector is not None:
            projected: Tensor = _ProjectGradient.apply(self.parameter, self.projector)  # type: ignore[no-untyped-call]
            return projected
        with full_precision(self.basis):
            return product(self.coefficients(), self.basis.mT)

    def add(self, name: str, base: Tensor, delta: Tensor | None = None) -> Tensor:
        """A stored weight or bias, with this update's share added."""
        layer, delta = self.layer, self.delta() if delta is None else delta
        if name == layer.weight_name:
            part, share = layer.weight_part, layer.to_weight(delta[..., : layer.fan_in])
        else:
            part, share = layer.bias_part, delta[..., layer.fan_in].flatten()
        if part is None:
            return (base.to(share.dtype) + share).to(base.dtype)
        summed = (base[part].to(share.dtype) + share).to(base.dtype)
        return torch.cat([base[: part.start], summed, base[part.stop :]])

    def parameters_of(self, module: nn.Module, delta: Tensor) -> tuple[Tensor, Tensor | None]:
        """W + ΔW and b + Δb of one of the layer's modules."""
        weight, bias = module._parameters[self.layer.weight_name], self.layer.bias
        assert weight is not None
        whole = self.add(self.layer.weight_name, weight, delta)
        if bias is None or self.layer.bias_name is None:
            return whole, None
        return whole, self.add(self.layer.bias_name, bias, delta)

    def forward(self, module: nn.Module, x: Tensor) -> Tensor:
        """The layer's forward with the update, the chosen way."""
        apply: Callable[..., Tensor] | None = self.layer.apply
        assert apply is not None
        if self.way == "rows":
            result: Tensor = _ProjectRows.apply(x, self.parameter, self, module)  # type: ignore[no-untyped-call]
            return result
        if self.way != "factored":
            return apply(module, x, *self.parameters_of(module, self.delta()))
        weight = module._parameters[self.layer.weight_name]
        plain = apply(module, x, weight, self.layer.bias)
        if torch.compiler.is_compiling() and x.is_cuda and not isinstance(self.layer, LinearLayer):
            apart: Callable[..., Tensor] = torch.compiler.disable(self.factored)  # type: ignore[no-untyped-call]
            return apart(module, x, plain)  # cuDNN would take TF32, and compiled code cannot forbid it
        return self.factored(module, x, plain)

    def factored(self, module: nn.Module, x: Tensor, plain: Tensor) -> Tensor:
        """y + (x B) Aᵀ for the layer's own outputs y."""
        d = self.layer.fan_in
        constant = None if self.layer.bias is None else self.basis[:, d]
        with full_precision(self.basis):
            hidden = self.layer.through(module, x.to(self.basis.dtype), self.basis[:, :d], constant)
            return plain + self.layer.onto(hidden, self.coefficients()).to(plain.dtype)

    def running(self) -> Tensor:
        """[W b] as the model really runs it now, (groups, o, width) in float64, with every rounding it makes."""
        layer = self.layer
        with torch.no_grad():
            if self.way == "factored":
                return layer.stored().to(torch.float64) + self.delta().to(torch.float64)
            delta = self.delta()
            weight = self.add(layer.weight_name, gathered(layer.weight), delta)
            bias = None if layer.bias is None else gathered(layer.bias)
            if bias is not None and layer.bias_name is not None:
                return layer.joint(weight, self.add(layer.bias_name, bias, delta)).to(torch.float64)
            return layer.joint(weight, None).to(torch.float64)

    def to(self, device: torch.device) -> None:
        """Follow the model to another device; dtypes stay."""
        if self.basis.device == device:
            return
        for made in self.made.values():
            made.data = made.data.to(device)
        self.basis = self.basis.to(device)
        self.projector = None if self.projector is None else self.projector.to(device)
        self.sizes = None if self.sizes is None else self.sizes.to(device)
        self.limit = None if self.limit is None else self.limit.to(device)
