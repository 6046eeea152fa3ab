"""What is done to BatchNorm layers as a whole: hold or measure stored statistics, pass without update or in parts."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ness.lab.networks.base import BatchNorm1d, BatchNorm2d, Network
from ness.lab.training.loader import LARGE_BATCH
from ness.lab.training.task_statistics import lent


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


def takes_parts(network: nn.Module) -> bool:
    """Whether `in_parts` reaches every BatchNorm that, as the network is now, uses the statistics of the batch.

    Another one would normalise the whole batch. Where there is none at all nothing is known of how samples meet.
    """
    found = {type(norm) for norm in batch_norms(network) if norm.training or norm.running_mean is None}
    return bool(found) and found <= {BatchNorm1d, BatchNorm2d} and not lent(network)


@contextmanager
def in_parts(network: nn.Module, parts: int) -> Iterator[None]:
    """Batches inside are so many equal consecutive parts, each normalised as if it were passed alone."""
    norms = [norm for norm in batch_norms(network) if isinstance(norm, BatchNorm1d | BatchNorm2d)]
    before = [norm.parts for norm in norms]
    for norm in norms:
        norm.parts = parts
    try:
        yield
    finally:
        for norm, held in zip(norms, before, strict=True):
            norm.parts = held


def batches_at_once(network: Network, size: int) -> int:
    """How many batches of `size` are worth passing as one, in parts: on a GPU as many as fill it.

    There a pass waits for its launches, a large one as long as a small one. On the CPU a large one is the slower.
    """
    return max(1, LARGE_BATCH // size) if on_gpu(network) and takes_parts(network) else 1


def on_gpu(network: nn.Module) -> bool:
    """Whether the network's parameters are on a GPU."""
    return next(network.parameters()).is_cuda


def passed_apart(network: Network, images: Tensor, sizes: Sequence[int]) -> Tensor:
    """Features of images, each stretch of so many as if it were passed alone; in one pass where that can be."""
    if len(set(sizes)) == 1 and takes_parts(network):
        with in_parts(network, len(sizes)):
            return network.features(images)
    return torch.cat([network.features(stretch) for stretch in torch.split(images, list(sizes))])


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
