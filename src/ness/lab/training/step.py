"""One training step: tensors in, the loss out, nothing read on the host, so that it can be captured in a graph."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor, nn
from torch.optim import Optimizer

from ness.lab.gpu.amp import narrow
from ness.lab.methods.base import Method, clear
from ness.lab.training.loader import Clock, Samples, mixed_up


@dataclass(frozen=True)
class Inputs:
    """What differs from step to step, as tensors on the device."""

    index: Tensor  # (n,) which samples
    lr: Tensor  # one number
    share: Tensor | None  # one number, with mix-up
    clock: Clock


@dataclass(frozen=True)
class Step:
    """The step of one task; the same objects for all its steps, so their memory stays where a graph found it."""

    method: Method
    samples: Samples
    trained: Sequence[nn.Parameter]
    optimizer: Optimizer
    lr: Tensor  # what the optimizer reads
    random: Generator
    sam: bool
    fast: bool = False

    def __call__(self, inputs: Inputs) -> Tensor:
        """Learns from the samples at `inputs.index`; the loss before the step, detached."""
        self.lr.copy_(inputs.lr)
        batch = replace(self.samples.take(inputs.index), clock=inputs.clock, rate=inputs.lr)
        if inputs.share is not None:
            batch = mixed_up(batch, inputs.share, self.random)
        clear(self.trained)
        with tensor_cores(self.lr.device), narrow(self.lr.device, self.fast), self.method.watching():
            loss = self.method.gradients(batch, self.trained, sam=self.sam)
        self.method.after_backward(batch)
        self.optimizer.step()
        self.method.after_step(batch)
        return loss.detach()


@contextmanager
def tensor_cores(device: torch.device) -> Iterator[None]:
    """On a GPU, float32 products inside run as its convolutions do: TF32 factors, float32 sums.

    That is for losses and gradients; projections and statistics, whose exactness is the promise, stay outside.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if device.type == "cuda" else before)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
