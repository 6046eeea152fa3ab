"""Gradients of a few samples' own logits over all shared weights, kept small; taking their span out of a gradient."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ness.lab.methods._pairs import Pairs, linear_layers
from ness.lab.methods._projection.factors import Factors, factors, products
from ness.lab.methods._projection.project import gradient_of, layer_parameters, put_gradient
from ness.lab.methods._projection.rows import Layers
from ness.lab.networks.base import Network
from ness.lab.training.loader import Batch
from ness.layers import Layer
from ness.statistics.gram import widened


@dataclass(frozen=True)
class Gradients:
    """V (m, p): the gradients of [W b] of all layers, those of linear layers as factors where that is smaller."""

    dense: Tensor  # (m, p'): every layer without factors, in order, as (o, width) numbers
    factored: Mapping[str, Factors]  # by layer

    def followed_by(self, more: "Gradients") -> "Gradients":
        """These and then those of one more task, with factors for the same layers."""
        joined = {name: each.followed_by(more.factored[name]) for name, each in self.factored.items()}
        return Gradients(torch.cat([self.dense, more.dense]), joined)

    def products(self, count: int) -> Tensor:
        """⟨vᵢ, vⱼ⟩ (m, n) in float64, of all gradients with the last n: those of the last task."""
        last = self.dense[-count:].double().mT
        found = torch.cat([part.double() @ last for part in torch.split(self.dense, count)])
        for each in self.factored.values():
            found += products(each, count)
        return found


Call = tuple[Tensor, GradientEdge]  # a linear layer's inputs, and where the gradient of its outputs passes


@contextmanager
def calls_of(layers: Layers) -> Iterator[dict[str, list[Call]]]:
    """Every call of the linear layers inside."""
    seen: dict[str, list[Call]] = {name: [] for name in linear_layers(layers)}

    def see(name: str, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        seen[name].append((inputs[0].detach(), get_gradient_edge(output)))

    handles = [layers[name].module.register_forward_hook(partial(see, name)) for name in seen]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def logit_gradients(model: Network, layers: Layers, batch: Batch, names: Collection[str] | None = None) -> Gradients:
    """∇_w f_y(x) of the true class's logit for every sample, from one forward pass (OGD-GTL).

    With batch statistics in BatchNorm a sample's logit depends on the batch it is in, and so does its gradient. The
    layers `names` get factors; None: those that are linear, see one row per sample, and are smaller that way.
    """
    with calls_of(layers) as seen:
        logits: Tensor = model(batch.images, batch.task)
    chosen = logits.gather(1, batch.labels.unsqueeze(1)).squeeze(1)
    single = {name: calls[0] for name, calls in seen.items() if [x.shape[:-1] for x, _ in calls] == [chosen.shape]}
    others = {name: layer for name, layer in layers.items() if name not in single}
    wanted: list[Any] = [*layer_parameters(others), *(edge for _, edge in single.values())]
    rows = [torch.autograd.grad(logit, wanted, retain_graph=True) for logit in chosen]
    columns = iter(zip(*rows, strict=True))  # each the n gradients of one tensor
    dense = {name: stacked(layer, columns) for name, layer in others.items()}
    factored = {}
    for name, (inputs, _) in single.items():
        layer = layers[name]
        wide = widened(inputs.unsqueeze(0), layer.fan_in, layer.width, inputs.dtype)[0]
        found = factors(wide, torch.stack(next(columns)))
        if found.size < len(chosen) * layer.outputs * layer.width if names is None else name in names:
            factored[name] = found
        else:
            dense[name] = found.dense().flatten(1)
    parts = [dense[name] for name in layers if name in dense]
    return Gradients(torch.cat([logits.new_zeros(len(chosen), 0), *parts], 1), factored)


def stacked(layer: Layer, columns: Iterator[tuple[Tensor, ...]]) -> Tensor:
    """A layer's gradients of [W b] (n, o · width) from the next n of its weight and, if it has one, of its bias."""
    weights = next(columns)
    biases = [None] * len(weights) if layer.bias is None else next(columns)
    return torch.stack([layer.joint(*pair).flatten() for pair in zip(weights, biases, strict=True)])


@torch.no_grad()
def project(layers: Layers, kept: Gradients, mixing: Tensor, pairs: Pairs) -> None:
    """g ← g - Vᵀ Rᵀ R V g with R (r, m) in float64; linear layers with factors by their rows where these are known."""
    others = [layer for name, layer in layers.items() if name not in kept.factored]
    matrices = [gradient_of(layer) for layer in others]
    flat = torch.cat([kept.dense.new_zeros(0), *(matrix.flatten() for matrix in matrices)])
    made = {name: pairs.of(name) or gradient_of(layers[name]) for name in kept.factored}
    along = (kept.dense @ flat).double()
    for name, each in kept.factored.items():
        along += each.along(moved(each.rows, made[name]))
    weights = mixing.mT @ (mixing @ along)
    left = flat - weights.to(flat.dtype) @ kept.dense
    for layer, part in zip(others, torch.split(left, [matrix.numel() for matrix in matrices]), strict=True):
        put_gradient(layer, part.view(layer.outputs, layer.width))
    for name, each in kept.factored.items():
        put_gradient(layers[name], without(made[name], each.combined(weights), each.rows))


Made = Tensor | tuple[Tensor, Tensor]  # a gradient G (o, width), or the rows x (n, width) and g (n, o) it is gᵀ x of


def moved(rows: Tensor, gradient: Made) -> Tensor:
    """A Gᵀ (m, o) for rows A (m, width)."""
    if isinstance(gradient, Tensor):
        return rows @ gradient.mT
    x, g = gradient
    return rows @ x.mT @ g


def without(gradient: Made, outer: Tensor, rows: Tensor) -> Tensor:
    """G - Eᵀ A (o, width) for E (m, o) and A (m, width)."""
    if isinstance(gradient, Tensor):
        return torch.addmm(gradient, outer.mT, rows, alpha=-1)
    x, g = gradient
    return torch.cat([g, -outer]).mT @ torch.cat([x, rows])
