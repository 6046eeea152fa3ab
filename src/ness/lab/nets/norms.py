"""What is done to BatchNorm layers as a whole: hold their stored statistics, or keep a pass from updating them."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ness.lab.nets.base import Network


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


@torch.no_grad()
def measure_statistics(network: Network, batches: Iterable[Tensor]) -> None:
    """Replaces stored statistics by the mean over these images, as the network runs without dropout.

    Those gathered in training are of activations under dropout, whose variance is larger than at test. A network that
    stores none is left as it is. The network ends up in eval mode.
    """
    network.eval()
    norms = [norm for norm in batch_norms(network) if norm.track_running_stats]
    if not norms:
        return
    momenta, seen = [norm.momentum for norm in norms], 0
    for images in batches:
        seen += len(images)
        for norm in norms:
            norm.train()
            norm.momentum = len(images) / seen  # 1 for the first batch, which so replaces what was there
        network.features(images)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    network.eval()
