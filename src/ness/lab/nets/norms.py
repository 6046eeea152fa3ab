"""What is done to BatchNorm layers as a whole: hold their stored statistics, or keep a pass from updating them."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def batch_norms(network: nn.Module) -> list[_BatchNorm]:
    """Every BatchNorm of the network, in module order."""
    return [module for module in network.modules() if isinstance(module, _BatchNorm)]


def hold_statistics(network: nn.Module) -> None:
    """Puts BatchNorm layers with stored statistics in eval mode, so that training moves nothing in them."""
    for norm in batch_norms(network):
        if norm.track_running_stats:
            norm.eval()


@contextmanager
def without_update(network: nn.Module) -> Iterator[None]:
    """Forward passes inside do not count towards running statistics (the second pass of SAM is no new data)."""
    norms = [norm for norm in batch_norms(network) if norm.track_running_stats]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 0.0
    try:
        yield
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
