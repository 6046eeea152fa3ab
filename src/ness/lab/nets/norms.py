"""What is done to BatchNorm layers as a whole: statistics held, measured or lent; passes without update or in parts."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ness.errors import NessError
from ness.lab.loader import LARGE_BATCH
from ness.lab.nets.base import BatchNorm1d, BatchNorm2d, Network

Statistics = dict[str, tuple[Tensor, Tensor]]  # mean and variance (c,) by the norm's name


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
    """How many batches of `size` are worth passing as one, in parts: on a card as many as fill it.

    There a pass waits for its launches, a large one as long as a small one. On the CPU a large one is the slower.
    """
    return max(1, LARGE_BATCH // size) if on_card(network) and takes_parts(network) else 1


def on_card(network: nn.Module) -> bool:
    """Whether the network's parameters are on a card."""
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


def own_norms(network: nn.Module) -> dict[str, BatchNorm1d | BatchNorm2d]:
    """The norms that statistics can be lent to, by name; a network with others, or with none, is refused."""
    found = {name: module for name, module in network.named_modules() if isinstance(module, _BatchNorm)}
    ours = {name: norm for name, norm in found.items() if isinstance(norm, BatchNorm1d | BatchNorm2d)}
    if not ours or len(ours) < len(found):
        others = sorted({type(norm).__name__ for name, norm in found.items() if name not in ours}) or ["none"]
        raise NessError(
            f"norm task measures BatchNorm layers made by ness.lab.nets.base.norm1d or norm2d; found "
            f"{', '.join(others)} in {type(network).__name__}. Build them so, or use --norm batch"
        )
    return ours


@contextmanager
def measuring(network: nn.Module) -> Iterator[Statistics]:
    """Of all batches that pass inside, in eval mode: each norm's mean and unbiased variance, averaged over images.

    They are there once it is left.
    """
    found: Statistics = {}
    sums: dict[str, tuple[Tensor, Tensor]] = {}
    counts: dict[str, int] = {}

    def add(name: str, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        x = inputs[0].detach().float()
        var, mean = torch.var_mean(x, (0, *range(2, x.ndim)), correction=1)
        old = sums.get(name, (torch.zeros_like(mean), torch.zeros_like(var)))
        sums[name] = old[0] + len(x) * mean, old[1] + len(x) * var
        counts[name] = counts.get(name, 0) + len(x)

    handles = [norm.register_forward_hook(partial(add, name)) for name, norm in own_norms(network).items()]
    try:
        yield found
        found.update({name: (mean / counts[name], var / counts[name]) for name, (mean, var) in sums.items()})
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def using(network: nn.Module, statistics: Statistics) -> Iterator[None]:
    """Inside, norms in eval mode normalise by these, whatever else they hold."""
    norms = own_norms(network) if statistics else {}
    for name, held in statistics.items():
        norms[name].measured = held
    try:
        yield
    finally:
        for name in statistics:
            norms[name].measured = None


def lent(network: nn.Module) -> bool:
    """Whether statistics are lent to the norms now, so that samples of a batch do not meet."""
    return any(getattr(norm, "measured", None) is not None for norm in batch_norms(network))
