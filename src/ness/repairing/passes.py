"""Repair in k groups of layers, each observed behind what is already repaired, so that it can make up for losses there.

A layer of a later group sees new rows X' that its repaired predecessors give it, and is asked for the tuned model's own
outputs: W' = (W_t (X_nᵀX' + λI) + s W_b C_o)(C_X' + s C_o + λI)⁻¹ with mean Grams, the minimiser of
‖W' X'ᵀ − W_t X_nᵀ‖² + s ‖(W' − W_b) X_oᵀ‖² + λ ‖W' − W_t‖². Where X' = X_n this is the closed form of one go.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ness.errors import NessError
from ness.layers import Layer, Rows
from ness.repairing import grams
from ness.repairing.folders import Statistics
from ness.repairing.grams import Source, mean_gram, reshaper_of
from ness.repairing.plans import base_matrix, finite, output_rms, ratio, write_matrix
from ness.repairing.report import RepairRow
from ness.repairing.weights import Target, matrices
from ness.statistics.gram import Gram, row_blocks, widened
from ness.statistics.recorder import Recorder

if TYPE_CHECKING:
    from ness.repairing.work import Done, Values, Work


@dataclass
class Paired:
    """Sums over new rows of one layer: as the tuned model gives them (x) and as the repaired one does (x')."""

    tuned: Tensor  # Σ x xᵀ, (groups, width, width)
    cross: Tensor  # Σ x x'ᵀ
    repaired: Tensor  # Σ x' x'ᵀ
    count: int = 0
    held: list[Tensor] = field(default_factory=list)  # rows of the tuned pass under way, a call each


def in_passes(work: Work, limit: float | None) -> Done:
    """Repair group after group; the report's figures of new rows are of the rows each layer really sees."""
    from ness.repairing.work import Done

    _check(work)
    strength = work.options.strength
    if strength == 0:
        return work.in_one_go(limit)
    ordered = in_call_order(work)
    groups = split(ordered, work.options.passes)
    for group in groups:
        size = grams.bytes_of(group)
        if limit is not None and size > limit:
            raise NessError(
                f"repair(passes={work.options.passes}): a group of {len(group)} layers needs {size / 1e9:.3g} GB, and "
                f"memory= allows {limit / 1e9:.3g} GB; use more passes, or allow more"
            )
    values: Values = work.rest.values(work.weights, work.options.way)
    rows: list[RepairRow] = []
    for group in groups:
        work.shadow.put(work.weights.at(0.0))
        old = work.grams_of(group, work.old)
        paired = observe_pairs(work, group, values)
        grams.refuse_same_data(work.old, work.new)
        for target in group:
            rows.append(repair_layer(work, target, old.pop(target.name), paired.pop(target.name), values))
    work.shadow.put({})
    work.warn_of_few_rows(rows, [])
    order = {target.name: place for place, target in enumerate(work.targets)}
    rows.sort(key=lambda row: order[row.name])
    return Done(strength, values, rows)


def _check(work: Work) -> None:
    if work.weights.loras:
        raise NessError("repair(passes=...): an adapter is repaired in one go, or it would not keep its rank; passes=1")
    if work.new is None:
        raise NessError("repair(passes=...): later passes observe new inputs again; pass new=, or leave passes=1")
    for source in (work.old, work.new):
        if isinstance(source, Statistics) or (source is work.new and not isinstance(source, Source)):
            raise NessError(f"repair({source.what}=...): statistics are of one go; leave passes=1, or pass batches")
        if source.once:
            raise NessError(
                f"repair({source.what}=...): found an iterator, which is used up after one pass, and passes= needs "
                f"{work.options.passes}; pass a list or a loader"
            )


class CallOrder(Recorder):
    """Notes which layer is called first, and adds nothing up."""

    def __init__(self) -> None:
        super().__init__(lambda name: None)  # type: ignore[arg-type, return-value]  # no books are opened
        self.seen: dict[str, int] = {}

    def _record(self, layer: Layer, rows: Rows, outputs: Tensor) -> None:
        self.seen.setdefault(layer.name, len(self.seen))

    def check_rows(self) -> None:
        """Any batch does."""


def in_call_order(work: Work) -> list[Target]:
    """The targets in the order in which a first batch of new inputs reaches them; those it does not reach come last."""
    work.shadow.put({})
    assert isinstance(work.new, Source)
    first = next(iter(work.new.iterable), None)
    if first is None:
        raise NessError("repair(new=...): there was no batch; is a loader empty?")
    order = CallOrder()
    work.rows_of().watch(order, [target.layer for target in work.targets], [first])
    return sorted(work.targets, key=lambda target: order.seen.get(target.layer.name, len(order.seen)))


def split(targets: Sequence[Target], passes: int) -> list[list[Target]]:
    """So many groups of about equal length, in order; no more than there are layers."""
    count = min(passes, len(targets))
    cuts = [round(i * len(targets) / count) for i in range(count + 1)]
    return [list(targets[a:b]) for a, b in pairwise(cuts)]


class PairRecorder(Recorder):
    """Keeps a pass's rows as the tuned model gives them, then adds them up with those of the repaired one."""

    def __init__(self, group: Sequence[Target]) -> None:
        super().__init__(lambda name: None)  # type: ignore[arg-type, return-value]  # no books are opened
        self.names = {target.layer.name: target.name for target in group}
        self.sums: dict[str, Paired] = {}
        self.tuned = True

    def _record(self, layer: Layer, rows: Rows, outputs: Tensor) -> None:
        rows, _ = self._without_padding(layer, rows, outputs)
        parts = [widened(part.detach(), layer.fan_in, layer.width, torch.float64) for part in row_blocks(rows)]
        now, name = torch.cat(parts, dim=1), self.names[layer.name]
        self.rows += now.shape[1]
        pair = self.sums.get(name)
        if pair is None:
            zeros = now.new_zeros(now.shape[0], now.shape[2], now.shape[2])
            pair = self.sums[name] = Paired(zeros, zeros.clone(), zeros.clone())
        if self.tuned:
            pair.held.append(now)
            return
        if not pair.held or pair.held[0].shape != now.shape:
            raise NessError(
                f"layer {name!r}: the repaired model calls it other than the tuned one on the same batch (routing that "
                "depends on values?); repair in one go, passes=1"
            )
        then = pair.held.pop(0)
        if not bool(torch.isfinite(then).all() & torch.isfinite(now).all()):
            raise NessError(f"repair(new=...): layer {name!r}: NaN or Inf in its input; clean the data")
        pair.tuned.baddbmm_(then.mT, then)
        pair.cross.baddbmm_(then.mT, now)
        pair.repaired.baddbmm_(now.mT, now)
        pair.count += now.shape[1]


def observe_pairs(work: Work, group: Sequence[Target], values: Mapping[str, Tensor]) -> dict[str, Paired]:
    """New rows of the group's layers under the tuned weights and, beside each, under the repaired ones so far."""
    assert isinstance(work.new, Source)
    recorder = PairRecorder(group)
    rows = work.rows_of()
    layers = [target.layer for target in group]
    for batch in work.new:
        for recorder.tuned, some in ((True, {}), (False, values)):
            work.shadow.put(some)
            rows.watch(recorder, layers, [batch])
        for name, pair in recorder.sums.items():
            if pair.held:
                raise NessError(f"layer {name!r}: the repaired model does not call it where the tuned one does")
    for target in group:
        zeros = torch.zeros(target.layer.groups, target.layer.width, target.layer.width, dtype=torch.float64)
        recorder.sums.setdefault(target.name, Paired(zeros, zeros, zeros))
    return recorder.sums


def repair_layer(work: Work, target: Target, old: Gram, pair: Paired, values: Values) -> RepairRow:
    """Solve for one layer, write its weights among the values, and say what became of its change."""
    options, weights = work.options, work.weights
    device = old.device
    new = Gram(pair.repaired.to(device), pair.count)
    reshaper, scale = reshaper_of(target, old, new, options.ridge, options.dtype)
    width, count = target.width, max(1, pair.count)
    square = scale[:, None] * scale
    before, change = (part.to(device) for part in matrices(target, weights))
    base = base_matrix(target, weights).to(device)
    tuned_gram = Gram(pair.tuned.to(device), pair.count)
    cross = pair.cross.to(device)[..., :width, :width] / count * square
    behind = mean_gram(new)[..., :width, :width] * square
    wt, wb, d = (part / scale for part in (before + change, before, change))
    right = wt @ cross - wb @ behind + reshaper.ridge * reshaper.unit * d
    solved = reshaper.solve(right, options.strength) * options.share
    write_matrix(
        target,
        weights,
        finite(before + solved * scale, target.name).to(weights.pairs[target.weight].tuned.device),
        values,
    )
    stored = matrices(target, weights, values)[1].to(device) / scale
    # ‖W' x' − W_t x‖², with W' = W_b + D' as stored
    asked, wn = mean_gram(tuned_gram)[..., :width, :width] * square, wb + stored
    missed = float((wn @ behind * wn).sum() - 2 * (wt @ cross * wn).sum() + (wt @ asked * wt).sum())
    size = float((d @ asked * d).sum())
    old_output, new_output = output_rms(base, old), output_rms(base, tuned_gram)
    return RepairRow(
        name=target.name,
        fan_in=target.layer.fan_in,
        old_rows=old.count,
        new_rows=pair.count,
        old_before=ratio(reshaper.old_energy(d), old_output),
        old_after=ratio(reshaper.old_energy(stored), old_output),
        new_before=ratio(torch.tensor(size), new_output),
        new_after=ratio(reshaper.new_energy(stored), output_rms(base, new)),
        kept=1 - max(0.0, missed) / size if size > 0 else math.nan,
    )
