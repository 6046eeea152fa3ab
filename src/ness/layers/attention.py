"""`nn.MultiheadAttention`: q, k, v and the output projection, four layers in one module."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.hooks import RemovableHandle

from ness.layers.base import Layer, Record
from ness.layers.linear import LinearLayer


class AttentionInput(Layer):
    """One of q, k, v in the in-projection of `nn.MultiheadAttention`, each with a Gram of its own."""

    kind = "attention-input"

    def __init__(self, name: str, module: nn.MultiheadAttention, role: int) -> None:
        letter = "qkv"[role]
        self.name = f"{name}.in_proj.{letter}" if name else f"in_proj.{letter}"
        self.modules, self.role = [module], role
        part = slice(role * module.embed_dim, (role + 1) * module.embed_dim)
        if module._qkv_same_embed_dim:
            self.weight_name, self.weight_part = "in_proj_weight", part
        else:
            self.weight_name = f"{letter}_proj_weight"
        self.bias_name, self.bias_part = "in_proj_bias", part
        self.outputs, self.fan_in, self.batch_first = module.embed_dim, self.weight.shape[1], module.batch_first

    @classmethod
    def find(cls, name: str, module: nn.Module) -> list[Layer]:
        """Attention whose forward is torch's own."""
        own = isinstance(module, nn.MultiheadAttention) and type(module).forward is nn.MultiheadAttention.forward
        stored = "in_proj_weight" in module._parameters and "in_proj_bias" in module._parameters
        return [cls(name, module, role) for role in range(3)] if own and stored else []  # type: ignore[arg-type]

    def watch(self, module: nn.Module, record: Record) -> RemovableHandle:
        """Rows are the query, key or value as they enter."""

        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], __: Any) -> None:
            x = args[self.role] if len(args) > self.role else kwargs[("query", "key", "value")[self.role]]
            matrix = self.stored()[0]
            bias = None if self.bias is None else matrix[:, -1]
            rows = x.reshape(1, -1, self.fan_in)
            outputs = F.linear(rows, matrix[:, : self.fan_in].to(rows), None if bias is None else bias.to(rows))
            record(rows, outputs.view(*x.shape[:-1], self.outputs))

        return module.register_forward_hook(hook, with_kwargs=True, prepend=True)


class AttentionOutput(LinearLayer):
    """The out-projection of `nn.MultiheadAttention`: its parent reads its weight and never calls it.

    Its true input is what the attention gives with the identity in its place.
    """

    kind = "attention-output"
    apply = None  # type: ignore[assignment]  # the parent reads the weight: an update must act on it

    def __init__(self, name: str, module: nn.MultiheadAttention) -> None:
        super().__init__(f"{name}.out_proj" if name else "out_proj", module.out_proj)
        self.attentions: list[nn.Module] = [module]
        self.batch_first = module.batch_first

    @property
    def hosts(self) -> Sequence[nn.Module]:
        """The attentions."""
        return self.attentions

    def join(self, other: Layer) -> None:
        """Its attentions as well."""
        super().join(other)
        self.attentions.extend(other.hosts)

    @classmethod
    def find(cls, name: str, module: nn.Module) -> list[Layer]:
        """Attention whose forward is torch's own."""
        return [cls(name, module)] if AttentionInput.find(name, module) else []  # type: ignore[arg-type]

    def watch(self, module: nn.Module, record: Record) -> RemovableHandle:
        """Run the attention once more with the identity as out-projection: its output is the rows."""
        unhooked, signature = _Unhooked(module), inspect.signature(nn.MultiheadAttention.forward)

        def hook(attention: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            identity = torch.eye(self.fan_in, dtype=self.weight.dtype, device=self.weight.device)
            replaced = {"module.out_proj.weight": identity}
            if self.bias is not None:
                replaced["module.out_proj.bias"] = torch.zeros_like(self.bias)
            call = signature.bind(attention, *args, **kwargs)
            call.arguments["need_weights"] = False
            context, _ = torch.func.functional_call(unhooked, replaced, call.args[1:], call.kwargs)
            record(context.reshape(1, -1, self.fan_in), output[0])

        return module.register_forward_hook(hook, with_kwargs=True, prepend=True)


class _Unhooked(nn.Module):
    """A module's forward without its hooks: nobody is told of a pass that is ours alone."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own."""
        return self.module.forward(*args, **kwargs)
