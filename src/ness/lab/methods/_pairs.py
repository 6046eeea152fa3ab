"""What a linear layer's gradient is made of: G = Σ gᵀ x, with few rows x and g where batches are small.

A projection then costs a fraction: gᵀ (x - x Π) needs n d (2 r + o) multiplications for n rows and Π of rank r, G - G Π
needs 2 o d r. With n = 64, o = d = 2048 and r = 300 that is a seventh, and where Π is one dense matrix a sixteenth.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from ness.lab.methods._projection.rows import Layers
from ness.layers import LinearLayer


def linear_layers(layers: Layers) -> dict[str, LinearLayer]:
    """Those of the layers whose module's calls are all there is to their gradient: of tied weights one sees a part."""
    return {name: layer for name, layer in layers.items() if isinstance(layer, LinearLayer) and len(layer.modules) == 1}


class Pairs:
    """The inputs x (n, d) and output gradients g (n, o) behind the `.grad` of every linear layer, as it stands.

    A gradient that is cleared and taken anew (SAM's second pass) begins anew here; one that is added to goes on. A
    gradient that was put in place or changed since the passes were watched, and that of a weight with hooks on it, is
    not Σ gᵀ x: of such a layer there are no pairs.
    """

    def __init__(self, layers: Layers) -> None:
        self.layers = linear_layers(layers)
        self.held: dict[str, list[tuple[Tensor, Tensor]]] = {}
        self.passed: set[str] = set()  # layers whose pairs are of a backward pass that is over
        self.left: dict[str, list[Left]] = {}  # the gradients of weight and bias when the passes were over

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Keeps the pairs of every backward pass inside."""
        handles = [
            layer.module.register_forward_hook(partial(self._forward, name), prepend=True)  # the module's own output
            for name, layer in self.layers.items()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self.left = {
                name: [(p.grad, version(p.grad)) for p in parameters_of(layer)] for name, layer in self.layers.items()
            }

    def _forward(self, name: str, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if name not in self.held or (name in self.passed and self.layers[name].weight.grad is None):
            self.held[name] = []
            self.passed.discard(name)
        if output.grad_fn is not None:  # before the node, all that others do to the output's gradient is done
            output.grad_fn.register_prehook(partial(self._backward, name, inputs[0].detach()))

    def _backward(self, name: str, x: Tensor, gradients: tuple[Tensor, ...]) -> None:
        self.held[name].append((x, gradients[0].detach()))
        self.passed.add(name)

    def of(self, name: str) -> tuple[Tensor, Tensor] | None:
        """All rows [x; 1] (n, width) and g (n, o) of a layer in its weight's dtype; None where they are not few."""
        held = self.held.get(name, ())
        if not held or not self._as_left(name):
            return None
        layer = self.layers[name]
        inputs, gradients = (
            torch.cat([each.reshape(-1, each.shape[-1]) for each in part]).to(layer.weight.dtype)
            for part in zip(*held, strict=True)
        )
        if len(inputs) >= layer.outputs:
            return None
        if layer.bias is not None:
            inputs = torch.cat([inputs, inputs.new_ones(len(inputs), 1)], dim=1)
        return inputs, gradients

    def _as_left(self, name: str) -> bool:
        """Whether the gradients of a layer are still what the watched passes made of them."""
        parameters, left = parameters_of(self.layers[name]), self.left.get(name, ())
        return len(left) == len(parameters) and all(
            p.grad is gradient and version(p.grad) == number and not hooked(p)
            for p, (gradient, number) in zip(parameters, left, strict=True)
        )

    def clear(self) -> None:
        """Forgets all of them."""
        self.held.clear()
        self.passed.clear()
        self.left.clear()


Left = tuple[Tensor | None, int]


def parameters_of(layer: LinearLayer) -> list[Tensor]:
    """Weight and, where there is one, bias."""
    return [parameter for parameter in (layer.weight, layer.bias) if parameter is not None]


def version(gradient: Tensor | None) -> int:
    """How often a gradient was changed in place."""
    return 0 if gradient is None else gradient._version


def hooked(parameter: Tensor) -> bool:
    """Whether hooks on a parameter may change its gradient while it is made."""
    return bool(parameter._backward_hooks) or bool(getattr(parameter, "_post_accumulate_grad_hooks", None))
