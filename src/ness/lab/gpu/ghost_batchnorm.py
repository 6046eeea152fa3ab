"""BatchNorm of a batch in parts: each is normalised by its own statistics, as if it were passed alone."""

import math

import torch
from torch import Tensor

from ness.errors import NessError


def batch_norm_in_parts(
    x: Tensor,
    parts: int,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    momentum: float,
    eps: float,
) -> Tensor:
    """x (parts·n, c, …) to the same shape and memory layout; running statistics move once a part, in order.

    >>> x = torch.tensor([[1.0], [3.0], [10.0], [30.0]])
    >>> batch_norm_in_parts(x, 2, None, None, None, None, 0.0, 0.0).flatten()
    tensor([-1.,  1., -1.,  1.])
    """
    values = len(x) // parts * math.prod(x.shape[2:])
    if len(x) % parts or values < 2:
        raise NessError(
            f"a batch of {len(x)} in {parts} parts; expected equal parts, each with at least 2 values a channel"
        )
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = wide.view(parts, len(x) // parts, *x.shape[1:])  # in any memory layout: its first dimension is outermost
    var, mean = torch.var_mean(wide, (1, *range(3, wide.ndim)), correction=0, keepdim=True)
    scale = torch.rsqrt(var + eps)
    if weight is not None:
        scale = scale * _by_channel(weight, x.ndim)
    centred = wide - mean
    y = centred * scale if bias is None else torch.addcmul(_by_channel(bias, x.ndim), centred, scale)
    if running_mean is not None and running_var is not None:
        move_(running_mean, mean.detach().view(parts, -1), momentum)
        move_(running_var, var.detach().view(parts, -1) * (values / (values - 1)), momentum)
    return y.flatten(0, 1).to(x.dtype)


def _by_channel(values: Tensor, dimensions: int) -> Tensor:
    """(c,) as it spreads over (n, c, …)."""
    return values.view(-1, *[1] * (dimensions - 2))


def move_(running: Tensor, found: Tensor, momentum: float) -> None:
    """r ← (1 - m)·r + m·f for every row f of (parts, c), one after another, in closed form.

    >>> running = torch.tensor([8.0])
    >>> move_(running, torch.tensor([[0.0], [4.0]]), 0.5)
    >>> running
    tensor([4.])
    """
    later = torch.arange(len(found) - 1, -1, -1, device=found.device)  # parts that follow each
    weights = momentum * (1 - momentum) ** later
    running.mul_((1 - momentum) ** len(found)).add_((weights.unsqueeze(1) * found).sum(0))
