"""Layer kinds: what a layer's input rows are, and how a matrix of shape (groups, o, d) becomes its weight.

A `Layer` is one place where input rows meet a weight. Most modules hold one; `nn.MultiheadAttention` holds four (q, k,
v and the output projection). A new kind is one class with `find`.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

Rows = Tensor  # (groups, n, d), or (groups, samples, …) whose entries are those of the rows, in their order
#: Takes the rows of one forward call and the outputs that belong to them.
Record = Callable[[Rows, Tensor], None]


class Layer(ABC):
    """One place where input rows meet a weight: its names, its sizes, its rows.

    `modules` are all modules that hold this very weight (more than one where weights are tied), `hosts` those whose
    forward calls show its rows, one beside each. `weight_part` and `bias_part` cut a stacked parameter along its first
    dimension, as the in-projection of attention needs.
    """

    kind: ClassVar[str] = ""
    kinds: ClassVar[list[type[Layer]]] = []

    name: str
    modules: list[nn.Module]
    weight_name = "weight"
    bias_name: str | None = "bias"
    weight_part: slice | None = None
    bias_part: slice | None = None
    groups: int = 1
    outputs: int  # o, output units a group
    fan_in: int  # d, inputs a group, the constant 1 of a bias not counted

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.kind:
            Layer.kinds.append(cls)

    @classmethod
    @abstractmethod
    def find(cls, name: str, module: nn.Module) -> list[Layer]:
        """The layers of this kind that `module` holds, or none."""

    @property
    def hosts(self) -> Sequence[nn.Module]:
        """The modules to watch: those that hold the weight, unless others run it for them."""
        return self.modules

    def join(self, other: Layer) -> None:
        """Take over the modules of a layer that has the same weight."""
        self.modules.extend(other.modules)

    @abstractmethod
    def watch(self, module: nn.Module, record: Record) -> RemovableHandle:
        """Call `record(rows, outputs)` once at every forward call of `module`, one of the hosts."""

    # -- parameters -------------------------------------------------------------------------------------------------

    @property
    def module(self) -> nn.Module:
        """The first module that holds the weight."""
        return self.modules[0]

    @property
    def weight(self) -> nn.Parameter:
        """The whole parameter as the model stores it."""
        return _parameter(self.module, self.weight_name)

    @property
    def bias(self) -> nn.Parameter | None:
        """The whole bias parameter, if there is one."""
        return None if self.bias_name is None else self.module._parameters.get(self.bias_name)

    @property
    def width(self) -> int:
        """Columns of the Gram: the fan-in, and one more for the constant of a bias."""
        return self.fan_in + (self.bias is not None)

    def stored(self) -> Tensor:
        """[W b] as the model stores it, (groups, o, width), a copy in the parameter's own dtype."""
        return self.joint(self.weight.detach(), None if self.bias is None else self.bias.detach())

    def joint(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """[W b] (groups, o, width) of a parameter pair."""
        matrix = self.to_matrix(weight if self.weight_part is None else weight[self.weight_part])
        if bias is None:
            return matrix.clone()
        part = bias if self.bias_part is None else bias[self.bias_part]
        return torch.cat([matrix, part.reshape(self.groups, self.outputs, 1)], dim=-1)

    def to_matrix(self, weight: Tensor) -> Tensor:
        """A weight in torch's layout as (groups, o, d)."""
        return weight.reshape(self.groups, self.outputs, self.fan_in)

    def to_weight(self, matrix: Tensor) -> Tensor:
        """(groups, o, d) in torch's layout of the weight."""
        shape = self.weight.shape
        return matrix.reshape(-1, *shape[1:])

    # -- forward ----------------------------------------------------------------------------------------------------

    #: The module's own forward with another weight, or None where the weight can only be read by the module itself.
    apply: Callable[[nn.Module, Tensor, Tensor, Tensor | None], Tensor] | None = None

    def through(self, module: nn.Module, x: Tensor, basis: Tensor, constant: Tensor | None) -> Tensor:
        """x B: inputs in the coordinates of a basis (groups, d, r), `constant` (groups, r) added."""
        raise NotImplementedError(f"{self.kind} has no factored form")

    def onto(self, hidden: Tensor, update: Tensor) -> Tensor:
        """h Aᵀ: from the coordinates of a basis to outputs, A (groups, o, r)."""
        raise NotImplementedError(f"{self.kind} has no factored form")


def _parameter(module: nn.Module, name: str) -> nn.Parameter:
    parameter = module._parameters[name]
    assert parameter is not None
    return parameter


def _first(args: tuple[Any, ...], kwargs: Mapping[str, Any], *names: str) -> Tensor:
    """The module's input tensor, given by position or by name."""
    value = args[0] if args else next(kwargs[name] for name in names if name in kwargs)
    assert isinstance(value, Tensor)
    return value


def _plain(module: nn.Module, *names: str) -> bool:
    """Whether the module stores all these parameters itself (a parametrised weight is computed, not stored)."""
    return all(name in module._parameters for name in names)


class LinearLayer(Layer):
    """`nn.Linear`: rows are the inputs, y = x Wᵀ + b."""

    kind = "linear"

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name, self.modules = name, [module]
        self.outputs, self.fan_in = _parameter(module, "weight").shape

    @classmethod
    def find(cls, name: str, module: nn.Module) -> list[Layer]:
        """A Linear whose forward is torch's own."""
        own = isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
        return [cls(name, module)] if own and _plain(module, "weight", "bias") else []

    def watch(self, module: nn.Module, record: Record) -> RemovableHandle:
        """Rows are all inputs, whatever dimensions stand before the last."""

        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
            record(_first(args, kwargs, "input", "x").reshape(1, -1, self.fan_in), output)

        return module.register_forward_hook(hook, with_kwargs=True, prepend=True)

    @staticmethod
    def apply(module: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """y = x Wᵀ + b."""
        return F.linear(x, weight, bias)

    def through(self, module: nn.Module, x: Tensor, basis: Tensor, constant: Tensor | None) -> Tensor:
        """x B."""
        return F.linear(x, basis[0].mT, None if constant is None else constant[0])

    def onto(self, hidden: Tensor, update: Tensor) -> Tensor:
        """h Aᵀ."""
        return F.linear(hidden, update[0])


class TransposedLinearLayer(LinearLayer):
    """`Conv1D` of transformers (GPT-2): a Linear whose weight is stored as (d, o). Found by name, not imported."""

    kind = "transformers.Conv1D"

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name, self.modules = name, [module]
        self.fan_in, self.outputs = _parameter(module, "weight").shape

    @classmethod
    def find(cls, name: str, module: nn.Module) -> list[Layer]:
        """A class called Conv1D with the attribute `nf`."""
        found = type(module).__name__ == "Conv1D" and hasattr(module, "nf") and _plain(module, "weight", "bias")
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


class ConvLayer(Layer):
    """`nn.Conv1d`, `nn.Conv2d`, `nn.Conv3d`: rows are the patches under the kernel, one set a group."""

    kind = "conv"

    def __init__(self, name: str, module: nn.modules.conv._ConvNd) -> None:
        self.name, self.modules = name, [module]
        self.groups = module.groups
        self.outputs = module.out_channels // module.groups
        self.fan_in = _parameter(module, "weight")[0].numel()

    @classmethod
    def find(cls, name: str, module: nn.Module) -> list[Layer]:
        """A convolution whose forward is torch's own."""
        for torch_kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
            if isinstance(module, torch_kind) and type(module).forward is torch_kind.forward:
                return [cls(name, module)] if _plain(module, "weight", "bias") else []
        return []

    def watch(self, module: nn.Module, record: Record) -> RemovableHandle:
        """Rows are patches, handed over as a view of the images: whoever needs them copies a few at a time."""

        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
            x = _first(args, kwargs, "input", "x")
            if x.ndim == self.weight.ndim - 1:  # one image without a batch dimension
                x, output = x.unsqueeze(0), output.unsqueeze(0)
            record(self.windows(module, x), output)

        return module.register_forward_hook(hook, with_kwargs=True, prepend=True)

    def patches(self, module: nn.Module, x: Tensor) -> Rows:
        """Patches (groups, n, d) of images (b, c, …), padded, strided and dilated as the layer itself does it.

        >>> conv = nn.Conv2d(2, 3, kernel_size=2, stride=2)
        >>> ConvLayer("conv", conv).patches(conv, torch.zeros(5, 2, 8, 8)).shape
        torch.Size([1, 80, 8])
        """
        return self.windows(module, x).reshape(self.groups, -1, self.fan_in)

    def windows(self, module: nn.Module, x: Tensor) -> Rows:
        """The patches as a view (groups, b, *positions, c / groups, *kernel) of the padded images.

        >>> conv = nn.Conv2d(2, 3, kernel_size=2, stride=2)
        >>> ConvLayer("conv", conv).windows(conv, torch.zeros(5, 2, 8, 8)).shape
        torch.Size([1, 5, 4, 4, 2, 2, 2])
        """
        assert isinstance(module, nn.modules.conv._ConvNd)
        if any(module._reversed_padding_repeated_twice):
            mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
            x = F.pad(x, module._reversed_padding_repeated_twice, mode=mode)
        spatial = len(module.kernel_size)
        for axis, (size, stride, dilation) in enumerate(
            zip(module.kernel_size, module.stride, module.dilation, strict=True), start=2
        ):
            x = x.unfold(axis, dilation * (size - 1) + 1, stride)[..., ::dilation]
        split = x.shape[0], self.groups, x.shape[1] // self.groups
        x = x.view(*split, *x.shape[2:])  # (b, groups, c / groups, *positions, *kernel)
        positions = range(3, 3 + spatial)
        kernel = range(3 + spatial, 3 + 2 * spatial)
        return x.permute(1, 0, *positions, 2, *kernel)

    @staticmethod
    def apply(module: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The module's own convolution with another weight."""
        result: Tensor = module._conv_forward(x, weight, bias)  # type: ignore[operator]
        return result

    def through(self, module: nn.Module, x: Tensor, basis: Tensor, constant: Tensor | None) -> Tensor:
        """A convolution with the basis as r kernels a group."""
        kernels = basis.mT.reshape(-1, *self.weight.shape[1:])
        return self.apply(module, x, kernels, None if constant is None else constant.flatten())

    def onto(self, hidden: Tensor, update: Tensor) -> Tensor:
        """A 1×1 convolution back to the outputs."""
        spatial = self.weight.ndim - 2
        kernels = update.reshape(self.groups * self.outputs, -1, *[1] * spatial)
        convolve = (F.conv1d, F.conv2d, F.conv3d)[spatial - 1]
        return convolve(hidden, kernels, groups=self.groups)


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
        self.outputs, self.fan_in = module.embed_dim, self.weight.shape[1]

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
            record(rows, outputs)

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


def layers_of(name: str, module: nn.Module) -> list[Layer]:
    """All layers that one module holds: none where its kind is not supported."""
    return [layer for kind in Layer.kinds for layer in kind.find(name, module)]
