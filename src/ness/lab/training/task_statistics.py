"""Statistics of a task's own that are lent to BatchNorm layers while it is tested: measured, put in place, saved."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from ness.errors import NessError
from ness.lab.networks.base import BatchNorm1d, BatchNorm2d

Statistics = dict[str, tuple[Tensor, Tensor]]  # mean and variance (c,) by the norm's name


def own_norms(network: nn.Module) -> dict[str, BatchNorm1d | BatchNorm2d]:
    """The norms that statistics can be lent to, by name; a network with others, or with none, is refused."""
    found = {name: module for name, module in network.named_modules() if isinstance(module, _BatchNorm)}
    ours = {name: norm for name, norm in found.items() if isinstance(norm, BatchNorm1d | BatchNorm2d)}
    if not ours or len(ours) < len(found):
        others = sorted({type(norm).__name__ for name, norm in found.items() if name not in ours}) or ["none"]
        raise NessError(
            f"norm task measures BatchNorm layers made by ness.lab.networks.base.norm1d or norm2d; found "
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
        mean, var = _mean_and_variance(x)
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


def _mean_and_variance(x: Tensor) -> tuple[Tensor, Tensor]:
    """Of each channel (c,) over images and places, the variance unbiased."""
    if x.device.type != "cpu":
        var, mean = torch.var_mean(x, (0, *range(2, x.ndim)), correction=1)
        return mean, var
    mean, var = x.new_zeros(
        2, x.shape[1]
    ).unbind()  # what BatchNorm itself finds: there var_mean takes ten times as long
    F.batch_norm(x, mean, var, training=True, momentum=1.0)
    return mean, var


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
    return any(getattr(module, "measured", None) is not None for module in network.modules())


def named(statistics: Mapping[int, Statistics]) -> dict[str, Tensor]:
    """Statistics by task as tensors with names, 'task/norm/mean' and 'task/norm/var', as files hold them."""
    return {
        f"{task}/{name}/{which}": value
        for task, found in statistics.items()
        for name, pair in found.items()
        for which, value in zip(("mean", "var"), pair, strict=True)
    }


def by_task(tensors: Mapping[str, Tensor], device: torch.device) -> dict[int, Statistics]:
    """What `named` made tensors of, on the device."""
    found: dict[int, Statistics] = {}
    for key in tensors:
        task, name, which = key.split("/")
        if which == "mean":
            mean, var = (tensors[f"{task}/{name}/{each}"].to(device) for each in ("mean", "var"))
            found.setdefault(int(task), {})[name] = mean, var
    return found
