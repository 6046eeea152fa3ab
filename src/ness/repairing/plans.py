"""From Grams to repaired weights: one `LayerPlan` for each layer, then all values for any strength."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ness.errors import NessError
from ness.repairing.algebra import Reshaper
from ness.repairing.grams import mean_gram
from ness.repairing.report import OtherRow, RepairRow
from ness.repairing.weights import Target, Weights, matrices
from ness.statistics.gram import Gram

SINGLY = 16  # so many other tensors are listed one by one; of more, those that differ in a number alone together


@dataclass(frozen=True)
class LayerPlan:
    """All that is kept of one layer's rows."""

    target: Target
    reshaper: Reshaper
    scale: Tensor  # (width,), of the columns: the constant 1 of a bias counts as large as inputs
    old_rows: int
    new_rows: int | None
    old_output: float  # RMS(W_b x) over old rows
    new_output: float | None

    @classmethod
    def of(
        cls, target: Target, weights: Weights, old: Gram, new: Gram | None, shaped: tuple[Reshaper, Tensor]
    ) -> LayerPlan:
        """From one layer's Grams and what `reshaper_of` made of them; the Grams are not needed any more afterwards."""
        reshaper, scale = shaped
        base = base_matrix(target, weights)
        outputs = [None if gram is None else output_rms(base, gram) for gram in (old, new)]
        assert outputs[0] is not None
        return cls(target, reshaper, scale, old.count, None if new is None else new.count, outputs[0], outputs[1])

    def reshape(self, change: Tensor, strength: float) -> Tensor:
        """D' (groups, o, width) for D, with the columns scaled meanwhile."""
        device = self.scale.device
        return (self.reshaper.reshape(change.to(device, torch.float64) / self.scale, strength) * self.scale).to(
            change.device
        )

    def write(self, weights: Weights, strength: float, share: float, values: dict[str, Tensor]) -> None:
        """Put the layer's repaired weight and bias, or LoRA factors, among the values by first name."""
        target = self.target
        if strength == 0 and share == 1:
            return
        for lora in target.loras:
            tuned = weights.pairs[lora.factor].tuned.detach()
            factor = self.reshape(tuned.reshape(1, len(tuned), -1), strength) * share
            values[lora.factor] = finite(factor.reshape(tuned.shape).to(tuned.dtype), target.name)
        if not target.loras:
            before, change = matrices(target, weights)
            matrix = finite(before + share * self.reshape(change, strength), target.name)
            write_matrix(target, weights, matrix, values)

    def row(self, weights: Weights, values: Mapping[str, Tensor]) -> RepairRow:
        """The layer's figures, of the weights as they are stored."""
        before, after = (effective_change(self.target, weights, some) for some in ({}, values))
        before, after = (change.to(self.scale.device) / self.scale for change in (before, after))
        kept: float | None = None
        moved: list[float | None] = [None, None]
        if self.new_output is not None:
            moved = [ratio(self.reshaper.new_energy(change), self.new_output) for change in (before, after)]
            size = float(self.reshaper.new_energy(before))
            kept = 1 - float(self.reshaper.new_energy(after - before)) / size if size else math.nan
        return RepairRow(
            name=self.target.name,
            fan_in=self.target.layer.fan_in,
            old_rows=self.old_rows,
            new_rows=self.new_rows or 0,
            old_before=ratio(self.reshaper.old_energy(before), self.old_output),
            old_after=ratio(self.reshaper.old_energy(after), self.old_output),
            new_before=moved[0],
            new_after=moved[1],
            kept=kept,
        )


def base_matrix(target: Target, weights: Weights) -> Tensor:
    """[W_b b_b] with its bias wherever the layer has one, (groups, o, d or d + 1) in float64."""
    layer, pair = target.layer, weights.pairs[target.weight]
    assert pair.base is not None
    device = pair.tuned.device
    bias = None
    if layer.bias is not None:
        found = next(p for p in weights.pairs.values() if p.tuned is layer.bias or p.names[0] == target.bias)
        assert found.base is not None
        bias = found.base.to(device, torch.float64)
    return layer.joint(pair.base.to(device, torch.float64), bias)


def effective_change(target: Target, weights: Weights, values: Mapping[str, Tensor]) -> Tensor:
    """D (groups, o, width) in float64: the dense one, or Σ s B A."""
    if not target.loras:
        return matrices(target, weights, values)[1]
    total: Tensor | int = 0
    for lora in target.loras:
        first = values.get(lora.factor, weights.pairs[lora.factor].tuned).detach().to(torch.float64)
        second = weights.pairs[lora.other].tuned.detach().to(torch.float64)
        total = total + lora.scaling * second.flatten(1) @ first.flatten(1)
    assert isinstance(total, Tensor)
    return total.unsqueeze(0)


def write_matrix(target: Target, weights: Weights, matrix: Tensor, values: dict[str, Tensor]) -> None:
    """[W b] (groups, o, width) into the stored parameters, or the part of them that is this layer's."""
    layer = target.layer
    parts = [(target.weight, layer.to_weight(matrix[..., : layer.fan_in]), layer.weight_part)]
    if target.bias is not None:
        parts.append((target.bias, matrix[..., layer.fan_in].reshape(-1), layer.bias_part))
    for name, value, part in parts:
        tuned = weights.pairs[name].tuned.detach()
        if name not in values:
            values[name] = tuned.clone()
        whole = values[name] if part is None else values[name][part]
        whole.copy_(value.reshape(whole.shape))


def output_rms(matrix: Tensor, gram: Gram) -> float:
    """√ of the mean of ‖W x‖² over a Gram's rows, groups added up."""
    mean = mean_gram(gram).to(matrix.device)
    return float(((matrix @ mean) * matrix).sum().clamp(min=0).sqrt())


def finite(values: Tensor, name: str) -> Tensor:
    """The values, or an error where a repaired weight came out as NaN or Inf."""
    if not bool(torch.isfinite(values).all()):
        raise NessError(
            f"layer {name!r}: its repaired weight does not fit into {values.dtype}; load both models in float32"
        )
    return values


def ratio(energy: Tensor, size: float) -> float:
    """√energy / size; infinite where what was all 0 has moved."""
    root = float(energy.clamp(min=0).sqrt())
    if size == 0:
        return math.inf if root else 0.0
    return root / size


# -- everything else ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Others:
    """What tuning changed and no layer plan speaks for."""

    groups: dict[str, list[str]]  # shown name -> first names
    reasons: dict[str, str]  # shown name -> why
    excluded: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, weights: Weights, targets: Sequence[Target], reasons: Mapping[str, str], kinds: Mapping[str, str]
    ) -> Others:
        """`reasons`: of layers that are no targets; `kinds`: the class of each tensor's module."""
        spoken = {name for target in targets for name in (target.weight, target.bias) if not target.loras}
        spoken |= {lora.factor for target in targets for lora in target.loras}
        spoken |= {lora.other for target in targets for lora in target.loras}
        rest = [name for name in weights.changed() if name not in spoken]
        excluded = tuple(n for n, p in weights.pairs.items() if p.excluded and (p.base is None or p.changed))
        groups: dict[str, list[str]] = {}
        why: dict[str, str] = {}
        for name in rest:
            shown = name if len(rest) <= SINGLY else re.sub(r"(?<![A-Za-z_])\d+(?![A-Za-z_])", "*", name)
            groups.setdefault(shown, []).append(name)
            why.setdefault(shown, reasons.get(name, f"{kinds[name]}: no layer that is repaired"))
        return cls(groups, why, excluded)

    def values(self, weights: Weights, way: float) -> dict[str, Tensor]:
        """Their values at `way` of the way from the base to the tuned ones."""
        if way == 1:
            return {}
        return {name: weights.pairs[name].at(way) for names in self.groups.values() for name in names}

    def rows(self, weights: Weights, way: float, moves: Mapping[str, float]) -> tuple[OtherRow, ...]:
        """How they are listed."""
        now = "kept" if way == 1 else "base" if way == 0 else f"{way:g} of the change left"
        rows = []
        for shown, names in self.groups.items():
            numbers = sum(weights.pairs[name].tuned.numel() for name in names)
            rows.append(OtherRow(shown, len(names), numbers, now, self.reasons[shown], moves.get(shown)))
        for name in self.excluded:
            rows.append(OtherRow(name, 1, weights.pairs[name].tuned.numel(), "kept", "excluded", moves.get(name)))
        return tuple(rows)
