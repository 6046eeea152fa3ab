"""One protected layer: its statistics, its anchor, its current constraint, and the figures they give."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from ness.certificate import CertificateRow
from ness.errors import NessError
from ness.layers import Layer
from ness.rules import Rule, Selection
from ness.statistics.dominant import dominant
from ness.statistics.gram import Gram
from ness.statistics.moments import Moments
from ness.statistics.on_disk import zeros_on_disk
from ness.statistics.relative import BudgetInfo, Relative, shrink, update_ratio
from ness.statistics.spectrum import Spectrum, decompose
from ness.updates.constraint import Constraint, Factors, Figures
from ness.updates.private import PrivatePart, decompose_beside

Swap = tuple[Tensor, Tensor]  # a tensor of the model, and the value it is to have


class LayerState:
    """A layer with the moments of everything it ever saw, and the bounds of all updates merged so far.

    Its methods write to no tensor, of its own or of the model: a verb works on a `copy`, which takes the place of the
    original in one step when all is done, and what is to be written to the model is handed back.
    """

    def __init__(
        self,
        layer: Layer,
        device: torch.device,
        relative: bool = False,
        dtype: torch.dtype = torch.float64,
        folder: Path | None = None,
    ) -> None:
        self.layer, self.dtype, self.folder = layer, dtype, folder  # the latter two: of the Grams
        self.anchor = self._kept(layer.stored().to(device))  # [W b] when last observed, (groups, o, width)
        self.moments = self.no_rows()
        self.relative = Relative(self.no_rows()) if relative else None  # each task's own drift, where a rule asks
        self.pending: Moments | None = None  # observed by this rank, not yet summed over ranks
        self.spent = torch.zeros(2, layer.groups, dtype=torch.float64)  # Σ σ_sel‖A‖₂ and Σ σ_sel‖A‖_F of merged tasks
        self.merges = 0
        self.constraint: Constraint | None = None
        self.last = Figures()
        self.factors: Factors | None = None  # of the last merged update
        self.directions: Tensor | None = None  # K (groups, width, k), float64: private directions that tasks share
        self.part: PrivatePart | None = None  # the private part that is in the weights
        self.shared: Tensor | None = None  # [W b] without it, in the parameter's dtype

    def copy(self) -> LayerState:
        """Another one that knows the same and can go its own way."""
        twin = copy.copy(self)
        twin.moments, twin.pending = copy.copy(self.moments), copy.copy(self.pending)
        twin.relative = None if self.relative is None else self.relative.copy()
        return twin

    @property
    def gram(self) -> Gram:
        """All rows this rank knows of."""
        return self.moments.gram if self.pending is None else self.moments.gram + self.pending.gram

    @property
    def silent(self) -> bool:
        """Whether some task's rows all gave 0 here, under a rule to which that means: do not move."""
        return self.relative is not None and self.relative.silent

    # -- observing --------------------------------------------------------------------------------------------------

    def no_rows(self) -> Moments:
        """The moments of no rows of this layer."""
        layer, kept = self.layer, {"dtype": self.dtype, "folder": self.folder}
        return Moments.zeros(layer.groups, layer.outputs, layer.width, self.anchor.device, **kept)

    def _kept(self, matrix: Tensor) -> Tensor:
        """Weights to be kept where the statistics are, in their own dtype."""
        if self.folder is None:
            return matrix
        return zeros_on_disk(self.folder, tuple(matrix.shape), matrix.dtype).copy_(matrix)

    def change(self) -> Tensor:
        """D = W − W_a (groups, o, width) in float64, of the shared weights as they are now."""
        return self.running().to(self.anchor.device) - self.anchor.to(torch.float64)

    def moved(self) -> Tensor:
        """Whether the weights are no longer those of the anchor: (), bool, on the device, for nobody to wait."""
        if self.part is not None:
            return (self.shared_weights().to(self.anchor.device) != self.anchor).any()
        return self.layer.differs(self.anchor)

    def rebase_anchor(self) -> None:
        """Move the anchor to the weights as they are now, so that new rows drift from here."""
        now = self.shared_weights().to(self.anchor.device)
        change = now.to(torch.float64) - self.anchor.to(torch.float64)
        for moments in (self.moments, self.pending):
            if moments is not None:
                moments.move_anchor_(change)
        if self.relative is not None:
            self.relative.move_anchor_(change)
        self.anchor = self._kept(now)

    # -- constraining -----------------------------------------------------------------------------------------------

    def begin_task(self) -> None:
        """The task observed last is over: its drift counts from now on relative to its own outputs."""
        if self.relative is None:
            raise NessError(
                f"constrain: layer {self.layer.name!r} was observed under another rule, which keeps no task's own "
                "drift; make a guard with this rule and observe again"
            )
        self.relative.close_task()

    def scale(self, bias: str) -> Tensor:
        """Diagonal of S (width,): 1 for inputs; for a bias the RMS of the inputs, or 0 where biases are frozen.

        With the constant column at the inputs' own size, ranks do not change when the inputs are scaled.
        """
        scale = torch.ones(self.layer.width, dtype=torch.float64, device=self.moments.gram.device)
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
        return self.moments.gram.diagonal()[:, : self.layer.fan_in].sum(dim=-1)

    def spectrum(self, bias: str, private: int = 0, rule: Rule | None = None) -> Spectrum:
        """Eigen-decomposition of S C S (relative: of S R S) beside k private directions.

        With frozen biases it is of the inputs' block alone. With a rule it may be of its dominant part alone, if that
        is all that the rule's choice depends on.
        """
        scale, width = self.scale(bias), self._free_width(bias)
        whole = self.moments.gram.matrix if self.relative is None else self.relative.gram
        gram = self.scaled(whole, bias)[:, :width, :width]
        if private:
            shared, held = self.held_directions(bias), gram[..., :0]
            if shared is not None:
                held = shared[..., :width, :private].to(gram) / scale[:width].unsqueeze(-1)
            about = self.layer.outputs, self.layer.name
            found = decompose_beside(gram, held, private, *about, norms=self.relative is None)
            return replace(found, budget=self.budget())
        budget, part = self.budget(), None
        if rule is not None and rule.strongest:
            name = self.layer.name

            def settled(spectrum: Spectrum) -> bool:
                spectrum = replace(spectrum, budget=budget)
                return rule.select({name: spectrum})[name].settled_by(spectrum)

            part = dominant(gram, self.layer.outputs, settled, name)
        found = decompose(gram, self.layer.outputs, self.layer.name) if part is None else part
        return replace(found, budget=budget)

    def held_directions(self, bias: str) -> Tensor | None:
        """The private directions that tasks share, where a task can use them: not where they move a frozen bias."""
        held = self.directions
        moves_bias = held is not None and self.layer.bias is not None and bool(held[..., self.layer.fan_in, :].any())
        return None if moves_bias and bias == "freeze" else held

    def scaled(self, gram: Tensor, bias: str) -> Tensor:
        """S C S."""
        scale = self.scale(bias)
        return gram * scale * scale.unsqueeze(-1)

    def no_spectrum(self, bias: str, private: int = 0, rule: Rule | None = None) -> Spectrum:
        """Room for a spectrum that rank 0 computes, all of it."""
        groups, width = self.layer.groups, self._free_width(bias)
        room = self.moments.square.new_zeros
        spectrum = Spectrum(room(groups, width - private), room(groups, width, width - private), room(groups), 0)
        if private:
            whole = room(groups, width) if self.relative is None else None
            spectrum = replace(spectrum, private=room(groups, width, private), whole=whole)
        return replace(spectrum, outputs=self.layer.outputs, budget=self.budget())

    def budget(self) -> BudgetInfo | None:
        """What a relative rule is told besides the spectrum."""
        if self.relative is None:
            return None
        spent = self.relative.total(self.change())
        return BudgetInfo(self.merges + 1, spent, self._mean_column(), self.relative.travel)

    def _mean_column(self) -> float:
        """‖W‖_F² / d over all groups, the bias not counted."""
        columns = self.shared_weights()[..., : self.layer.fan_in].to(torch.float64)
        return float(columns.square().sum()) / (self.layer.groups * self.layer.fan_in)

    def _free_width(self, bias: str) -> int:
        return self.layer.width if bias == "constrain" else self.layer.fan_in

    def drop_dead_groups(self, selection: Selection) -> Selection:
        """The selection without groups that saw only zeros: nothing is known of them, so nothing of them is free."""
        alive = (self.group_energy() > 0).to(selection.weights)
        return Selection(selection.weights * alive.unsqueeze(-1), selection.threshold)

    # -- certifying -------------------------------------------------------------------------------------------------

    def running(self) -> Tensor:
        """The shared [W b] (groups, o, width) in float64 as the model runs it now, its task's private part taken off.

        Whoever changes a weight past the guard changes the shared weights: all that is there beyond the part counts.
        """
        constraint = self.constraint
        if constraint is not None and constraint.update is not None:
            return constraint.running()
        stored = self.layer.stored().to(torch.float64)
        if self.part is None or self.shared is None:
            return stored
        expected = self.with_private(self.shared, self.part).to(torch.float64)
        return self.shared.to(stored) + (stored - expected)

    def shared_weights(self) -> Tensor:
        """The same as the model would store it: rounded once to the parameter's dtype."""
        return self.running().to(self.layer.weight.dtype)

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
        norms = constraint.norms()
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
            relative_drift=_fraction(drift, output),
            task_drift=None if self.relative is None else self.relative.total(self.change()) ** 0.5,
            shrunk=figures.shrunk,
            rounding=self._rounding(count),
        )

    def _rounding(self, count: int) -> float:
        """RMS drift that the parameter's dtype alone can cause, once a merge.

        Storing W + ΔW moves it by ε‖W‖_F; storing B, or stepping ΔW, leaks up to about ε√d‖ΔW‖_F out of the free space.
        """
        epsilon = torch.finfo(self.layer.weight.dtype).eps
        weight = float(self.running().square().sum().sqrt())
        change = float((self.layer.width * self.change().square().sum()).sqrt())
        rows = float((self.moments.gram.diagonal().sum() / count).sqrt())
        return (self.merges + 1) * epsilon * (weight + change) * rows

    def swaps(self, matrix: Tensor, into: Sequence[Tensor] | None = None) -> list[Swap]:
        """How [W b] (groups, o, width) is stored in the layer's parameters, or in copies of weight and bias.

        Written to its tensor, each value is rounded once.
        """
        return swaps_of(self.layer, matrix, into)

    # -- private parts ----------------------------------------------------------------------------------------------

    def with_private(self, matrix: Tensor, part: PrivatePart | None) -> Tensor:
        """fl(W + B Kᵀ) in the parameter's dtype, computed the same way every time."""
        weight = self.layer.weight
        if part is None:
            return matrix.to(weight.device, weight.dtype)
        wide = matrix.to(weight.device, torch.float64)
        return (wide + part.delta(self.directions, weight.device)).to(weight.dtype)

    def apply_private(self, part: PrivatePart | None) -> list[Swap]:
        """Put a private part into the weights in place of the one that is there; None: the shared weights.

        Returns:
            What is to be written for it.
        """
        fresh = self.shared if self.part is None else None  # shared weights that are not written yet: see `finish`
        if part is None and self.part is None and fresh is None:
            return []
        shared = self.shared_weights() if fresh is None else fresh
        self.part, self.shared = part, None if part is None else shared
        return self.swaps(self.with_private(shared, part))

    # -- ending -----------------------------------------------------------------------------------------------------

    def _keep_limit(self, weights: Tensor, rule: Rule) -> tuple[Tensor, float]:
        """Shared [W b] to be merged: as trained, or where T² would exceed the limit that share of it that fits."""
        if self.relative is None:
            return weights, 1.0
        assert self.constraint is not None
        assert self.constraint.update is not None
        device, stored = self.anchor.device, self.layer.stored().to(self.anchor.device)
        update = self.constraint.update
        weights, basis = weights.to(device), update.directions().to(device)
        measured = update_ratio(self.relative.gram, basis, weights - stored.to(torch.float64), self._mean_column())
        self.relative.travel = rule.expect(self.relative.travel, measured)
        return shrink(self.relative.folded, self.anchor, stored, weights, rule.limit(self.merges + 1))

    def _rounded_away(self, share: float) -> float:
        """See `rounded_away`, for that share of the update."""
        if self.constraint is None or self.layer.weight.dtype.itemsize >= 4:
            return 0.0
        return rounded_away(self.layer, self.constraint.change() * share)

    def finish(self, weights: Tensor | None, rule: Rule, keep_directions: bool) -> None:
        """Book the shared weights as trained, shrunk to a relative rule's limit: bounds add up.

        Without weights the layer was frozen. Directions that tasks share are held. `apply_private` writes the weights.
        """
        self.last, bounds = self.current()
        if weights is None and self.relative is not None:
            self.relative.travel = rule.expect(self.relative.travel, None)
        if weights is not None:
            weights, share = self._keep_limit(weights, rule)
            assert self.constraint is not None
            self.factors = self.constraint.factors(share)
            self.shared = weights.to(self.layer.weight.device, self.layer.weight.dtype)
            lost = self._rounded_away(share)
            self.last = replace(self.last, update_norm=self.last.update_norm * share, shrunk=share, rounded=lost)
            bounds = bounds * share
        self.spent = self.spent + bounds
        self.merges += 1
        columns = None if self.constraint is None else self.constraint.columns
        if keep_directions and columns is not None and not columns.own:
            held = 0 if self.directions is None else self.directions.shape[-1]
            self.directions = columns.directions if columns.directions.shape[-1] > held else self.directions
        self.constraint = None


def rounded_away(layer: Layer, change: Tensor) -> float:
    """‖fl(W + ΔW) − (W + ΔW)‖ / ‖ΔW‖ where weights are of half precision, else 0; ΔW in float64."""
    dtype = layer.weight.dtype
    if dtype.itemsize >= 4:
        return 0.0
    base, length = layer.stored().to(torch.float64), float(change.norm())
    return float(((base + change).to(dtype).to(torch.float64) - base - change).norm()) / length if length else 0.0


def swaps_of(layer: Layer, matrix: Tensor, into: Sequence[Tensor] | None = None) -> list[Swap]:
    """See `LayerState.swaps`."""
    targets = [p.data for p in (layer.weight, layer.bias) if p is not None] if into is None else into
    weight = targets[0] if layer.weight_part is None else targets[0][layer.weight_part]
    found = [(weight, layer.to_weight(matrix[..., : layer.fan_in].to(weight.device)))]
    if layer.bias is not None:
        bias = targets[1] if layer.bias_part is None else targets[1][layer.bias_part]
        found.append((bias, matrix[..., layer.fan_in].flatten().to(bias.device)))
    return found


def _fraction(drift: float, output: float) -> float:
    """Drift over output; infinite where nothing was put out, NaN where the outputs overflow."""
    if output == float("inf"):
        return float("nan")
    return drift / output if output > 0 else (0.0 if drift == 0 else float("inf"))
