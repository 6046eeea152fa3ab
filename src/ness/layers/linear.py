"""`nn.Linear` and the `Conv1D` of transformers: rows are the inputs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ness._precision import product
from ness.layers.base import Layer, Record, first_input, stored_parameter, stores


class LinearLayer(Layer):
    """`nn.Linear`: rows are the inputs, y = x Wᵀ + b."""

    kind = "linear"

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name, self.modules = name, [module]
        self.outputs, self.fan_in = stored_parameter(module, "weight").shape

    @classmethod
    def find(cls, name: str, module: nn.Module) -> list[Layer]:
        """A Linear whose forward is torch's own."""
        own = isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
        return [cls(name, module)] if own and stores(module, "weight", "bias") else []

    def watch(self, module: nn.Module, record: Record) -> RemovableHandle:
        """Rows are all inputs, whatever dimensions stand before the last."""

        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
            record(first_input(args, kwargs, "input", "x").reshape(1, -1, self.fan_in), output)

        return module.register_forward_hook(hook, with_kwargs=True, prepend=True)

    @staticmethod
    def apply(module: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """y = x Wᵀ + b."""
        return F.linear(x, weight, bias)

    def through(self, module: nn.Module, x: Tensor, basis: Tensor, constant: Tensor | None) -> Tensor:
        """x B."""
        if constant is None:
            return product(x, basis[0])
        if torch.compiler.is_compiling():
            return product(x, basis[0]) + constant[0]
        return F.linear(x, basis[0].mT, constant[0])

    def onto(self, hidden: Tensor, update: Tensor) -> Tensor:
        """h Aᵀ."""
        return product(hidden, update[0].mT)


class TransposedLinearLayer(LinearLayer):
    """`Conv1D` of transformers (GPT-2): a Linear whose weight is stored as (d, o). Found by name, not imported."""

    kind = "transformers.Conv1D"

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name, self.modules = name, [module]
        self.fan_in, self.outputs = stored_parameter(module, "weight").shape

    @classmethod
    def find(cls, name: str, module: nn.Module) -> list[Layer]:
        """A class called Conv1D with the attribute `nf`."""
        kind = getattr(module, "_ness_base", type(module))  # another guard may hold it constrained
        found = kind.__name__ == "Conv1D" and hasattr(module, "nf") and stores(module, "weight", "bias")
        return [cls(name, module)] if found else []

    def to_matrix(self, weight: Tensor) -> Tensor:
        """Transposed: (d, o) to (1, o, d)."""
        return weight.mT.unsqueeze(0)

    def to_weight(self, matrix: Tensor) -> Tensor:
        """Transposed back."""
        return matrix[0].mT

    @staticmethod
    def apply(module: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """y = x W + b, by one fused product as in transformers, so that it rounds the same way."""
        flat = x.reshape(-1, x.shape[-1])
        y = flat @ weight if bias is None else torch.addmm(bias, flat, weight)
        return y.reshape(*x.shape[:-1], weight.shape[-1])
