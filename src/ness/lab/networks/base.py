"""What a network of the laboratory is: shared features, one head per task, weights drawn from the run's generator."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from ness.errors import NessError
from ness.lab.gpu.ghost_batchnorm import batch_norm_in_parts
from ness.lab.networks.dropout import Dropout

Norms = Literal["batch", "stored"]


@dataclass(frozen=True)
class Wire:
    """How one layer of the shared part is wired, for methods that gate hidden units (`hat`).

    Units are named by the module that puts them out, after all that acts on them one by one; the layer's outputs are
    the units `writes`, its inputs the units `reads`, or the image where that is None. A linear layer that reads the
    maps of a convolution sees each unit as many times as its map has places, one after the other.
    """

    layer: str
    writes: str
    reads: str | None = None
    norm: str | None = None  # the BatchNorm between the layer and its units


class Network(nn.Module, ABC):
    """Shared layers and one bias-free head per task: `net(x, t)` is `net.heads[t](net.features(x))`."""

    heads: nn.ModuleList
    wires: tuple[Wire, ...] = ()  # one per layer of the shared part; a network without them cannot be gated
    mixable: bool = True  # whether a mean of two inputs is an input
    static: bool = True  # whether a pass reads no value on the host, so that it can be captured, or vectorised

    @abstractmethod
    def features(self, x: Tensor) -> Tensor:
        """What all heads read, (n, width), from images (n, c, h, w)."""

    def load_pretrained(self, data: Path | None) -> None:
        """Puts published weights in the place of the random start; most networks have none.

        Args:
            data: folder to look in first.
        """

    def forward(self, x: Tensor, task: int) -> Tensor:
        """Logits (n, classes of the task)."""
        logits: Tensor = self.heads[task](self.features(x))
        return logits


@dataclass(frozen=True)
class NetworkSpec:
    """A named network: how it is built for images of a shape, the classes of each task and a BatchNorm policy."""

    name: str
    title: str
    build: Callable[[tuple[int, ...], Sequence[int], Norms], Network]


def heads(width: int, classes: Sequence[int]) -> nn.ModuleList:
    """One bias-free linear layer per task on features of that width."""
    return nn.ModuleList(nn.Linear(width, count, bias=False) for count in classes)


class _Norm(_BatchNorm):
    """BatchNorm that counts no batches, by torch's own kernels on a GPU.

    The count is for averages that these networks do not take. cuDNN's kernels give a channel to a block, so that twenty
    channels use a seventh of an H200, or are cooperative ones, whose captured graphs are slow to launch.
    """

    parts: int = 1  # equal consecutive parts of a batch that are normalised apart: set by `nets.norms.in_parts`
    measured: tuple[Tensor, Tensor] | None = None  # mean and variance for eval mode: set by `nets.lent.using`

    def forward(self, input: Tensor) -> Tensor:
        """(n, c, ...) to the same shape."""
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        mean, var = self.running_mean, self.running_var
        if self.measured is not None and not self.training:
            mean, var = self.measured
        batch = self.training or mean is None
        held = mean, var, self.weight, self.bias
        if batch and self.parts > 1:
            return batch_norm_in_parts(input, self.parts, *held, self.momentum or 0.0, self.eps)
        with torch.backends.cudnn.flags(enabled=False) if input.is_cuda else nullcontext():
            return F.batch_norm(input, *held, batch, self.momentum or 0.0, self.eps)


class BatchNorm1d(_Norm, nn.BatchNorm1d):
    """After a linear layer."""


class BatchNorm2d(_Norm, nn.BatchNorm2d):
    """After a convolution."""


def norm1d(width: int, norms: Norms) -> BatchNorm1d:
    """BatchNorm after a linear layer; see `norm2d` for the policies."""
    return BatchNorm1d(width, track_running_stats=norms == "stored")


def norm2d(width: int, norms: Norms) -> BatchNorm2d:
    """BatchNorm after a convolution.

    "batch": the statistics of the batch, at training and at test, as in the lineage; accuracy depends on who shares
    a test batch. "stored": running statistics of training at test; accuracy does not depend on the test batch.
    """
    return BatchNorm2d(width, track_running_stats=norms == "stored")


def build(
    spec: NetworkSpec,
    shape: tuple[int, ...],
    classes: Sequence[int],
    norms: Norms,
    *,
    weights: Generator,
    dropout: Generator,
    device: torch.device,
    channels_last: bool = False,
    data: Path | None = None,
) -> Network:
    """The network on `device`: initial weights from `weights` (a CPU generator), dropout masks from `dropout`.

    Published weights, where a network has them, are looked for in `data` first.

    Torch's global generator is neither used nor moved. With `channels_last` kernels are laid out so.
    """
    with torch.device("meta"):
        network = spec.build(shape, classes, norms)
    network.to_empty(device="cpu")
    initialise(network, weights)
    network.load_pretrained(data)
    for module in network.modules():
        if isinstance(module, Dropout):
            module.generator = dropout
    network = network.to(device)
    if channels_last:
        network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return network


def check_takes(spec: NetworkSpec, shape: tuple[int, ...], classes: Sequence[int]) -> None:
    """Raise unless the network gives logits for images of this shape; tried without numbers, on the meta device."""
    expected = (2, classes[0])
    try:
        with torch.device("meta"), torch.no_grad():
            found = tuple(spec.build(shape, classes, "batch").eval()(torch.zeros(2, *shape), 0).shape)
    except NessError:
        raise
    except Exception as error:  # whatever a layer says of inputs that are too small
        raise NessError(
            f"network {spec.name!r} does not take images of shape {shape} ({error}); see `ness list networks`"
        ) from error
    if found != expected:
        raise NessError(f"network {spec.name!r} gives logits {found} for two images, expected {expected}")


def initialise(network: nn.Module, generator: Generator) -> None:
    """Torch's default start, U(±1/√d) for weights and biases and γ = 1, β = 0, drawn in module order."""
    for name, module in network.named_modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            nn.init.kaiming_uniform_(module.weight, a=math.sqrt(5), generator=generator)
            if module.bias is not None:
                bound = 1 / math.sqrt(module.weight[0].numel())
                nn.init.uniform_(module.bias, -bound, bound, generator=generator)
        elif isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            module.reset_parameters()
        elif next(module.parameters(recurse=False), None) is not None:
            raise NessError(
                f"{name!r} is a {type(module).__name__} with parameters; initial weights are known for Linear, "
                "Conv2d and BatchNorm: teach nets.base.initialise the new kind"
            )
