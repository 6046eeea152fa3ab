"""From a layer's spectrum and what a rule chose of it to the layer's constraint: basis, projector, update."""

from __future__ import annotations

import torch
from torch import Tensor

from ness.rules import Selection
from ness.statistics.spectrum import Spectrum, deflated_sigma, restricted_sigma, selected_sigma
from ness.updates.constraint import Constraint
from ness.updates.layer_state import LayerState
from ness.updates.low_rank import LowRankUpdate, cheapest_way_of_rank, start_of_rows
from ness.updates.private import columns_in_training
from ness.updates.update import Form, Projector, Update, cheapest_way


def prepare(
    state: LayerState,
    spectrum: Spectrum,
    selection: Selection,
    form: Form,
    bias: str,
    rank: int | None = None,
    generator: torch.Generator | None = None,
    new: Tensor | None = None,
) -> Constraint:
    """The constraint of one task: B = S [Q diag(s), K], and the cheapest update on it.

    Args:
        state: the layer and its statistics.
        spectrum: of the layer's inputs, beside K where the task has private directions.
        selection: what the rule frees of it.
        form: which optimizers the update is for.
        bias: "constrain" or "freeze".
        rank: the update's own rank r, at most the free directions there are; None: as wide as they are.
        generator: draws the start of a low-rank update.
        new: the Gram of the inputs it starts from, if any, in the weights' own coordinates.

    Returns:
        The constraint; its update is None where nothing is free.
    """
    layer, device = state.layer, state.layer.weight.device
    of_rank = rank is not None and selection.rank > 0
    if not of_rank:
        spectrum = spectrum.complete()
    s, q = selection.weights, spectrum.directions
    private = 0 if spectrum.private is None else spectrum.private.shape[-1]
    if selection.rank + private == 0:
        return Constraint(0, selection.threshold, torch.zeros_like(selection.threshold), q[..., :0], None)
    scale = state.scale(bias)
    k = _padded(q[..., :0] if spectrum.private is None else spectrum.private, layer.width)
    if state.relative is None:
        sigma = selected_sigma(spectrum, s)
    else:  # Q diagonalises R, not the Gram that the bound is about
        sigma = _sigma_beside(state.scaled(state.moments.gram.matrix, bias), spectrum, selection, layer.width)
    unscaled, held = q[..., :0], state.held_directions(bias)
    if rank is not None and of_rank:
        update: Update = _low_rank(state, spectrum, selection, k, rank, generator, new)
    else:
        dtype = torch.promote_types(layer.weight.dtype, torch.float32)
        chosen = chosen_columns(q * s.unsqueeze(-2), s > 0, layer.width)
        basis = torch.cat([chosen, k], dim=-1) * scale.unsqueeze(-1)
        way, projector = cheapest_way(form, layer, _rows_a_call(state), basis.shape[-1]), None
        if form == "sgd":
            inverse = torch.cat([chosen_columns(q / s.clamp(min=1e-300).unsqueeze(-2), s > 0, layer.width), k], dim=-1)
            unscaled = inverse / torch.where(scale > 0, scale, 1.0).unsqueeze(-1)
            outside = (1 - s.square()).clamp(min=0).sqrt()
            complement = chosen_columns(q * outside.unsqueeze(-2), s < 1, layer.width) * scale.unsqueeze(-1)
            b, n, diagonal = (part.to(device, dtype) for part in (basis, complement, scale))
            projector = Projector.of(b, n, diagonal)
        update = Update(layer, way, basis.to(device, dtype), projector, private)
    columns = columns_in_training(k, scale, held, own=held is not state.directions) if private else None
    return Constraint(selection.rank, selection.threshold, sigma, unscaled, update, columns)


def limit_drift(state: LayerState, update: Update, spectrum: Spectrum, selection: Selection, fraction: float) -> None:
    """Limit a new update: the layer's whole RMS drift, earlier tasks' included, stays under a fraction of its outputs.

    Under a relative rule T is kept under the fraction, and with it every single task's drift and their mean.
    """
    s, width = selection.weights, state.layer.width
    change = state.shared_weights().to(state.anchor.device, torch.float64) - state.anchor.to(torch.float64)
    floor = torch.maximum(spectrum.sigma, spectrum.noise.unsqueeze(-1))
    if isinstance(update, LowRankUpdate):
        sizes = chosen_columns(spectrum.directions * floor.unsqueeze(-2), s > 0, width)[..., : state.layer.fan_in, :]
    else:
        sizes = chosen_columns((floor * s).unsqueeze(-2), s > 0, width)[:, 0]
    if state.relative is None:
        room = fraction * float(state.moments.energy.sqrt()) - float(state.moments.drift(change).sum().sqrt())
    else:
        room = fraction - state.relative.total(change) ** 0.5
    update.limit_drift(sizes, max(0.0, room))


def _sigma_beside(gram: Tensor, spectrum: Spectrum, selection: Selection, width: int) -> Tensor:
    """√λ_max(M C M) (groups,) for the M = Q diag(s) Qᵀ of another Gram's spectrum."""
    s, q = selection.weights, spectrum.directions
    if spectrum.rest is None:
        return restricted_sigma(gram, chosen_columns(q * s.unsqueeze(-2), s > 0, width))
    known = spectrum.of_directions(s)
    held = chosen_columns(q * (1 - known).unsqueeze(-2), known < 1, width)
    return deflated_sigma(gram, chosen_columns(q, known < 1, width), held)


def _low_rank(
    state: LayerState,
    spectrum: Spectrum,
    selection: Selection,
    private: Tensor,
    rank: int,
    generator: torch.Generator | None,
    new: Tensor | None,
) -> LowRankUpdate:
    """The update A B M; its bias is frozen, so that rows end at d."""
    layer, device = state.layer, state.layer.weight.device
    dtype = torch.promote_types(layer.weight.dtype, torch.float32)
    s, q = selection.weights, spectrum.directions
    kept = private[..., : layer.fan_in, :]
    hard = bool(((s == 0) | (s == 1)).all())
    known = spectrum.of_directions(s)
    outside = chosen_columns(q * (1 - known).clamp(min=0).sqrt().unsqueeze(-2), known < 1, layer.fan_in)
    outside = torch.cat([outside, kept], dim=-1).to(device, dtype)
    ones = torch.ones(layer.fan_in, dtype=dtype, device=device)
    if spectrum.rest is None:
        inside = chosen_columns(q * s.sqrt().unsqueeze(-2), s > 0, layer.fan_in)
        free = Projector.of(inside.to(device, dtype), outside, ones, hard)
    else:  # the dominant part alone: free is whatever it does not hold
        free = Projector("complement", outside, ones, hard)
    rank = min(rank, free_directions(selection))
    seen = None if new is None else new[..., : layer.fan_in, : layer.fan_in]
    down = start_of_rows((layer.groups, rank, layer.fan_in), free, generator, seen)
    way = cheapest_way_of_rank(layer, _rows_a_call(state), rank + kept.shape[-1])
    return LowRankUpdate(layer, way, free, down, kept.to(device, dtype))


def free_directions(selection: Selection) -> int:
    """Directions that remain free in the group that has most of them: what the rank of an update can be."""
    return int((selection.weights > 0).sum(dim=-1).max()) if selection.weights.numel() else 0


def _rows_a_call(state: LayerState) -> float:
    return state.moments.gram.count / max(1, state.moments.calls)


def chosen_columns(directions: Tensor, chosen: Tensor, width: int) -> Tensor:
    """The chosen columns (groups, width, n) of each group's directions, padded with zeros to a common number."""
    most = int(chosen.sum(dim=-1).max()) if chosen.numel() else 0
    order = (~chosen).to(torch.int8).argsort(dim=-1, stable=True)[:, :most]
    index = order.unsqueeze(-2).expand(-1, directions.shape[-2], -1)
    columns = directions.gather(-1, index) * chosen.gather(-1, order).unsqueeze(-2)
    return _padded(columns, width)


def _padded(columns: Tensor, width: int) -> Tensor:
    """Columns (groups, width, n): a frozen bias gets a row of 0."""
    return torch.nn.functional.pad(columns, (0, 0, 0, width - columns.shape[-2]))
