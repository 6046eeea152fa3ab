"""Which weights are the largest, as masks, and masks at a bit per weight."""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F


def smallest(values: Tensor, rank: int) -> Tensor:
    """The number with so many smaller ones before it, counted from 0, as (1,) on the device of the values.

    Args:
        values: Any shape, on any device.
        rank: From 0 to `values.numel() - 1`.

    >>> smallest(torch.tensor([[3.0, 1.0], [2.0, 5.0]]), 2)
    tensor([3.])
    """
    flat = values.flatten()
    if flat.is_cpu and flat.dtype in (torch.float32, torch.float64):  # a seventh of torch's time
        found = flat.new_empty(1)
        found.numpy()[0] = np.partition(flat.numpy(), rank)[rank]
        return found
    largest = flat.topk(len(flat) - rank, sorted=False).values  # kthvalue gives a GPU's whole work to one block
    return largest.amin().reshape(1)


def winners(scores: Tensor, capacity: float) -> Tensor:
    """Which weights a task uses: those of the largest |s|, as booleans of the same shape; at least one.

    >>> winners(torch.tensor([0.1, -4.0, 2.0, 0.3]), 0.5)
    tensor([False,  True,  True, False])
    """
    magnitude = scores.detach().abs()
    return magnitude >= smallest(magnitude, round((1 - capacity) * (magnitude.numel() - 1)))


def packed(mask: Tensor) -> Tensor:
    """Booleans as bytes (⌈n/8⌉,), eight in each.

    >>> packed(torch.tensor([True, False, True, False, False, False, False, False, True]))
    tensor([5, 1], dtype=torch.uint8)
    """
    bits = mask.flatten().to(torch.uint8)
    bits = F.pad(bits, (0, -len(bits) % 8)).view(-1, 8)
    return (bits << torch.arange(8, dtype=torch.uint8, device=mask.device)).sum(1, dtype=torch.uint8)


def unpacked(bits: Tensor, shape: torch.Size) -> Tensor:
    """What `packed` made bytes of, as booleans of that shape."""
    each = (bits.unsqueeze(1) >> torch.arange(8, dtype=torch.uint8, device=bits.device)) & 1
    return each.flatten()[: shape.numel()].view(shape).bool()
