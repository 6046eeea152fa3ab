"""Convolutions: rows are the patches under the kernel."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ness.layers.base import Layer, Record, Rows, first_input, stored_parameter, stores


class ConvLayer(Layer):
    """`nn.Conv1d`, `nn.Conv2d`, `nn.Conv3d`: rows are the patches under the kernel, one set a group."""

    kind = "conv"

    def __init__(self, name: str, module: nn.modules.conv._ConvNd) -> None:
        self.name, self.modules = name, [module]
        self.groups = module.groups
        self.outputs = module.out_channels // module.groups
        self.fan_in = stored_parameter(module, "weight")[0].numel()

    @classmethod
    def find(cls, name: str, module: nn.Module) -> list[Layer]:
        """A convolution whose forward is torch's own."""
        for torch_kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
            if isinstance(module, torch_kind) and type(module).forward is torch_kind.forward:
                return [cls(name, module)] if stores(module, "weight", "bias") else []
        return []

    def watch(self, module: nn.Module, record: Record) -> RemovableHandle:
        """Rows are patches, handed over as a view of the images: whoever needs them copies a few at a time."""

        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
            x = first_input(args, kwargs, "input", "x")
            if x.ndim == self.weight.ndim - 1:  # one image without a batch dimension
                x, output = x.unsqueeze(0), output.unsqueeze(0)
            record(self.windows(module, x), output)

        return module.register_forward_hook(hook, with_kwargs=True, prepend=True)

    def by_position(self, outputs: Tensor) -> Tensor:
        """(b, o, *positions) to (b, *positions, o)."""
        return outputs.movedim(1, -1)

    def patches(self, module: nn.Module, x: Tensor) -> Rows:
        """Patches (groups, n, d) of images (b, c, …), padded, strided and dilated as the layer itself does it.

        >>> import torch
        >>> conv = nn.Conv2d(2, 3, kernel_size=2, stride=2)
        >>> ConvLayer("conv", conv).patches(conv, torch.zeros(5, 2, 8, 8)).shape
        torch.Size([1, 80, 8])
        """
        return self.windows(module, x).reshape(self.groups, -1, self.fan_in)

    def windows(self, module: nn.Module, x: Tensor) -> Rows:
        """The patches as a view (groups, b, *positions, c / groups, *kernel) of the padded images.

        >>> import torch
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
        """A convolution with the basis as r kernels per group."""
        kernels = basis.mT.reshape(-1, *self.weight.shape[1:])
        return self.apply(module, x, kernels, None if constant is None else constant.flatten())

    def onto(self, hidden: Tensor, update: Tensor) -> Tensor:
        """A 1×1 convolution back to the outputs."""
        spatial = self.weight.ndim - 2
        kernels = update.reshape(self.groups * self.outputs, -1, *[1] * spatial)
        convolve = (F.conv1d, F.conv2d, F.conv3d)[spatial - 1]
        return convolve(hidden, kernels, groups=self.groups)
