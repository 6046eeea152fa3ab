"""One protected layer: its statistics, its anchor, its current constraint, and the figures they give."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ness import distributed
from ness.certificate import CertificateRow
from ness.gram import Gram
from ness.layers import Layer
from ness.moments import Moments
from ness.observe import Staged
from ness.rules import Selection
from ness.spectrum import Spectrum, decompose, selected_sigma, spectral_norm
from ness.update import Form, Projector, Update, cheapest_way


@dataclass
class Constraint:
    """What holds in one layer while a task is trained."""

    rank: int
    tau: Tensor  # τ, (groups,)
    sigma: Tensor  # σ_sel, (groups,)
    unscaled: Tensor  # B⁺ᵀ: ΔW times this is A, (groups, width, r), float64; needed where ΔW is the parameter
    update: Update | None  # None: rank 0, the layer is frozen

    def coefficients(self) -> Tensor:
        """A (groups, o, r) in float64."""
        assert self.update is not None
        with torch.no_grad():
            if self.update.projector is None:
                return self.update.coefficients().detach().to(torch.float64)
            return self.update.parameter.detach().to(torch.float64) @ self.unscaled.to(self.update.parameter.device)


@dataclass
class Figures:
    """What the certificate says of one update: the current one, or the last merged."""

    rank: int = 0
    tau: float = 0.0
    update_norm: float = 0.0


class Protected:
    """A layer with the moments of everything it ever saw, and the bounds of all updates merged so far."""

    def __init__(self, layer: Layer, device: torch.device) -> None:
        self.layer = layer
        self.anchor = layer.stored().to(device)  # [W b] when last observed, (groups, o, width), the parameter's dtype
        self.moments = self._no_rows()
        self.pending: Moments | None = None  # observed by this rank, not yet summed over ranks
        self.spent = torch.zeros(2, layer.groups, dtype=torch.float64)  # Σ σ_sel‖A‖₂ and Σ σ_sel‖A‖_F of merged tasks
        self.merges = 0
        self.constraint: Constraint | None = None
        self.last = Figures()

    @property
    def gram(self) -> Gram:
        """All rows this rank knows of."""
        return self.moments.gram if self.pending is None else self.moments.gram + self.pending.gram

    # -- observing --------------------------------------------------------------------------------------------------

    def _no_rows(self) -> Moments:
        return Moments.zeros(self.layer.groups, self.layer.outputs, self.layer.width, self.anchor.device)

    def change(self) -> Tensor:
        """D = W − W_a (groups, o, width) in float64, of the weights as the model runs them now."""
        return self.running().to(self.anchor.device) - self.anchor.to(torch.float64)

    def settle(self) -> None:
        """Move the anchor to the weights as they are now, so that new rows drift from here."""
        change = self.change()
        for moments in (self.moments, self.pending):
            if moments is not None:
                moments.move_anchor_(change)
        self.anchor = self.layer.stored().to(self.anchor.device)

    def commit(self, staged: Staged) -> None:
        """Take a finished pass into the statistics."""
        target = self.moments
        if distributed.active():
            self.pending = target = self.pending or self._no_rows()
        target.gram.matrix += staged.gram.matrix
        target.gram.count += staged.gram.count
        target.energy += staged.energy
        target.calls += staged.calls

    def reduce(self) -> None:
        """Sum over all ranks what was not summed yet; a rank that saw nothing adds zeros.

        Moments add up against one anchor only, and a rank that did not observe has an older one: all take today's.
        """
        self.settle()
        pending = self.pending or self._no_rows()
        distributed.sum_([pending.gram.matrix, pending.cross, pending.square, pending.energy])
        pending.gram.count = distributed.total(pending.gram.count)
        pending.calls = distributed.total(pending.calls)
        self.moments.add_(pending)
        self.pending = None

    # -- constraining -----------------------------------------------------------------------------------------------

    def scale(self, bias: str) -> Tensor:
        """Diagonal of S (width,): 1 for inputs; for a bias the RMS of the inputs, or 0 where biases are frozen.

        With the constant column at the inputs' own size, ranks do not change when the inputs are scaled.
        """
        scale = torch.ones(self.layer.width, dtype=torch.float64, device=self.moments.gram.matrix.device)
        if self.layer.bias is not None:
            rms = self.input_rms() if bias == "constrain" else 0.0
            scale[-1] = 1.0 if bias == "constrain" and rms == 0 else rms
        return scale

    def input_rms(self) -> float:
        """Root-mean-square of all input entries."""
        energy = self.group_energy().sum()
        return float((energy / max(1, self.moments.gram.count * self.layer.fan_in * self.layer.groups)).sqrt())

    def group_energy(self) -> Tensor:
        """Σ‖x‖² of each group (groups,), the constant of a bias not counted."""
        return self.moments.gram.matrix.diagonal(dim1=-2, dim2=-1)[:, : self.layer.fan_in].sum(dim=-1)

    def spectrum(self, bias: str) -> Spectrum:
        """Eigen-decomposition of S C S; with frozen biases of the inputs' block alone."""
        scale, width = self.scale(bias), self._free_width(bias)
        gram = (self.moments.gram.matrix * scale * scale.unsqueeze(-1))[:, :width, :width]
        return decompose(gram, self.layer.outputs, self.layer.name)

    def no_spectrum(self, bias: str) -> Spectrum:
        """Room for a spectrum that rank 0 computes."""
        groups, width = self.layer.groups, self._free_width(bias)
        room = self.moments.gram.matrix.new_zeros(groups, width, width)
        return Spectrum(room[..., 0].clone(), room, room[:, 0, 0].clone(), self.layer.outputs)

    def _free_width(self, bias: str) -> int:
        return self.layer.width if bias == "constrain" else self.layer.fan_in

    def prepare(self, spectrum: Spectrum, selection: Selection, form: Form, bias: str) -> Constraint:
        """The constraint of one task: B = S Q diag(s), and the cheapest update on it."""
        layer, device = self.layer, self.layer.weight.device
        alive = (self.group_energy() > 0).to(selection.weights)  # a group that saw only zeros is not free
        selection = Selection(selection.weights * alive.unsqueeze(-1), selection.threshold)
        s, q = selection.weights, spectrum.directions
        sigma = selected_sigma(spectrum, s)
        if selection.rank == 0:
            return Constraint(0, selection.threshold, sigma, q[..., :0], None)
        scale = self.scale(bias)
        basis = self._columns(q * s.unsqueeze(-2), s > 0) * scale.unsqueeze(-1)
        dtype = torch.promote_types(layer.weight.dtype, torch.float32)
        rows = self.moments.gram.count / max(1, self.moments.calls)
        way = cheapest_way(form, layer, rows, basis.shape[-1])
        projector, unscaled = None, q[..., :0]
        if form == "sgd":
            inverse = self._columns(q / s.clamp(min=1e-300).unsqueeze(-2), s > 0)
            unscaled = inverse / torch.where(scale > 0, scale, 1.0).unsqueeze(-1)
            outside = (1 - s.square()).clamp(min=0).sqrt()
            complement = self._columns(q * outside.unsqueeze(-2), s < 1) * scale.unsqueeze(-1)
            projector = Projector.of(*(t.to(device, dtype) for t in (basis, complement, scale)))
        update = Update(layer, way, basis.to(device, dtype), projector)
        return Constraint(selection.rank, selection.threshold, sigma, unscaled, update)

    def _columns(self, directions: Tensor, chosen: Tensor) -> Tensor:
        """The chosen columns of each group, padded with zeros to a common number; a frozen bias gets a row of 0."""
        most = int(chosen.sum(dim=-1).max()) if chosen.numel() else 0
        order = (~chosen).to(torch.int8).argsort(dim=-1, stable=True)[:, :most]
        index = order.unsqueeze(-2).expand(-1, directions.shape[-2], -1)
        columns = directions.gather(-1, index) * chosen.gather(-1, order).unsqueeze(-2)
        missing = self.layer.width - columns.shape[-2]
        return torch.nn.functional.pad(columns, (0, 0, 0, missing))

    def limit_drift(self, spectrum: Spectrum, selection: Selection, fraction: float) -> None:
        """Keep the layer's whole RMS drift, earlier tasks' included, under a fraction of its outputs' RMS."""
        assert self.constraint is not None
        assert self.constraint.update is not None
        s = selection.weights
        floor = torch.maximum(spectrum.sigma, spectrum.noise.unsqueeze(-1))
        sizes = self._columns((floor * s).unsqueeze(-2), s > 0)[:, 0]
        spent = float(self.drift().sum().sqrt())
        room = fraction * float(self.moments.energy.sqrt()) - spent
        self.constraint.update.limit_drift(sizes, max(0.0, room))

    # -- certifying -------------------------------------------------------------------------------------------------

    def running(self) -> Tensor:
        """[W b] (groups, o, width) in float64 as the model runs it now."""
        constraint = self.constraint
        if constraint is None or constraint.update is None:
            return self.layer.stored().to(torch.float64)
        return constraint.update.running()

    def drift(self) -> Tensor:
        """Σ‖ΔW x‖² over every row ever observed, of each group (groups,)."""
        return self.moments.drift(self.change())

    def current(self) -> tuple[Figures, Tensor]:
        """Figures of the current update, and its bounds σ_sel‖A‖₂ and σ_sel‖A‖_F a group (2, groups)."""
        constraint = self.constraint
        if constraint is None:
            return self.last, torch.zeros(2, self.layer.groups, dtype=torch.float64)
        tau = float(constraint.tau.square().sum().sqrt())
        if constraint.update is None:
            return Figures(0, tau, 0.0), torch.zeros(2, self.layer.groups, dtype=torch.float64)
        a = constraint.coefficients()
        norms = torch.stack([spectral_norm(a), a.square().sum(dim=(-2, -1)).sqrt()]).cpu()
        figures = Figures(constraint.rank, tau, float(norms[0].square().sum().sqrt()))
        return figures, norms * constraint.sigma.cpu()

    def certify(self) -> CertificateRow:
        """The layer's row of the certificate."""
        figures, bounds = self.current()
        worst, frobenius = (self.spent + bounds).square().sum(dim=-1).sqrt().tolist()
        count = max(1, self.moments.gram.count)
        drift = float((self.drift().sum() / count).sqrt())
        output = float((self.moments.energy / count).sqrt())
        return CertificateRow(
            name=self.layer.name,
            fan_in=self.layer.fan_in,
            rank=figures.rank,
            tau=figures.tau,
            update_norm=figures.update_norm,
            bound=worst,
            rms_bound=frobenius / count**0.5,
            rms_drift=drift,
            relative_drift=drift / output if output > 0 else (0.0 if drift == 0 else float("inf")),
            rounding=self._rounding(count),
        )

    def _rounding(self, count: int) -> float:
        """RMS drift that the parameter's dtype alone can cause, once a merge.

        Storing W + ΔW moves it by ε‖W‖_F; storing B, or stepping ΔW, leaks up to about ε√d‖ΔW‖_F out of the free space.
        """
        epsilon = torch.finfo(self.layer.weight.dtype).eps
        weight = float(self.running().square().sum().sqrt())
        change = float((self.layer.width * self.change().square().sum()).sqrt())
        rows = float((self.moments.gram.matrix.diagonal(dim1=-2, dim2=-1).sum() / count).sqrt())
        return (self.merges + 1) * epsilon * (weight + change) * rows

    @torch.no_grad()
    def write(self, matrix: Tensor) -> None:
        """Store [W b] (groups, o, width) into the layer's parameters, rounded once."""
        layer = self.layer
        weight = layer.weight.data if layer.weight_part is None else layer.weight.data[layer.weight_part]
        weight.copy_(layer.to_weight(matrix[..., : layer.fan_in].to(weight.device)))
        if layer.bias is not None:
            bias = layer.bias.data if layer.bias_part is None else layer.bias.data[layer.bias_part]
            bias.copy_(matrix[..., layer.fan_in].flatten().to(bias.device))

    def finish(self) -> None:
        """Book the current update as merged: its bounds add to those before."""
        self.last, bounds = self.current()
        self.spent += bounds
        self.merges += 1
        self.constraint = None
