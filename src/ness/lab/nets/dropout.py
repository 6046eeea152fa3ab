"""Dropout whose masks come from the run's own generator, so that a seed gives the same run alone or beside others."""

import torch
from torch import Generator, Tensor, nn

from ness.errors import NessError


class Dropout(nn.Module):
    """Sets each number to zero with probability p and scales the others by 1/(1-p), while training.

    >>> layer = Dropout(0.5)
    >>> layer.generator = torch.Generator().manual_seed(1)
    >>> layer(torch.ones(6)).tolist()
    [2.0, 0.0, 0.0, 2.0, 0.0, 2.0]
    >>> layer.eval()(torch.ones(2)).tolist()
    [1.0, 1.0]
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p
        self.generator: Generator | None = None  # belongs to the run; on the device of the activations

    def forward(self, x: Tensor) -> Tensor:
        """The input, masked while training."""
        if not self.training or self.p == 0:
            return x
        if self.generator is None:
            raise NessError("Dropout has no generator: set `.generator`, or build the network with nets.base.build")
        kept = torch.rand(x.shape, generator=self.generator, device=x.device) >= self.p
        return x * kept / (1 - self.p)

    def extra_repr(self) -> str:
        """The probability, for printing the network."""
        return f"p={self.p}"
