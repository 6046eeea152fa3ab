"""Dropout whose masks come from the run's own generator, so that a seed gives the same run alone or beside others."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Generator, Tensor, nn

from ness.errors import NessError


class _Masked(torch.autograd.Function):
    """x · kept · scale in one pass over memory, forward and backward, with a mask of one byte a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(kept)
        ctx.scale = scale
        result: Tensor = torch.ops.aten.native_dropout_backward(x, kept, scale)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (kept,) = ctx.saved_tensors
        return torch.ops.aten.native_dropout_backward(gradient, kept, ctx.scale), None, None


def masked(x: Tensor, kept: Tensor, scale: float) -> Tensor:
    """x · kept · scale, differentiable."""
    if x.device.type == "cpu":  # where that one pass is three
        return x * kept.to(x.dtype).mul_(scale)
    result: Tensor = _Masked.apply(x, kept, scale)  # type: ignore[no-untyped-call]
    return result


def drawn(x: Tensor, p: float, generator: Generator) -> Tensor:
    """Which numbers of x are kept, each dropped with probability p; in x's layout, in which kernels read it.

    On a CPU sixteen bits decide, so that a draw of the generator is enough for four numbers: p as a multiple of 2⁻¹⁶.
    """
    if x.device.type != "cpu":
        return torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - p, generator=generator)
    words = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(2**63), None, generator=generator)
    bits, kept = words.view(torch.int16)[: x.numel()], torch.empty_like(x, dtype=torch.bool)  # bits from -2¹⁵ on
    least = min(round(p * 2**16), 2**16 - 1) - 2**15
    return torch.ge(bits.as_strided(kept.shape, kept.stride()), least, out=kept)  # both in the order they lie in


class Dropout(nn.Module):
    """Sets each number to zero with probability p and scales the others by 1/(1-p), while training.

    >>> layer = Dropout(0.5)
    >>> layer.generator = torch.Generator().manual_seed(1)
    >>> layer(torch.ones(6)).tolist()
    [0.0, 0.0, 0.0, 2.0, 2.0, 0.0]
    >>> layer.eval()(torch.ones(2)).tolist()
    [1.0, 1.0]
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p
        self.generator: Generator | None = None  # belongs to the run; on the device of the activations

    @property
    def scale(self) -> float:
        """What kept numbers are multiplied by."""
        return 1 / (1 - self.p)

    def draw(self, x: Tensor) -> Tensor | None:
        """Which numbers of x are kept, drawn anew each time; None where all are."""
        if not self.training or self.p == 0:
            return None
        if self.generator is None:
            raise NessError("Dropout has no generator: set `.generator`, or build the network with nets.base.build")
        return drawn(x, self.p, self.generator)

    def forward(self, x: Tensor) -> Tensor:
        """The input, masked while training."""
        kept = self.draw(x)
        return x if kept is None else masked(x, kept, self.scale)

    def extra_repr(self) -> str:
        """The probability, for printing the network."""
        return f"p={self.p}"


@contextmanager
def without_dropout(network: nn.Module) -> Iterator[None]:
    """Forward passes inside drop nothing and draw nothing; all else stays in the mode it is in."""
    layers = [module for module in network.modules() if isinstance(module, Dropout | nn.modules.dropout._DropoutNd)]
    modes = [module.training for module in layers]
    for module in layers:
        module.training = False
    try:
        yield
    finally:
        for module, mode in zip(layers, modes, strict=True):
            module.training = mode
