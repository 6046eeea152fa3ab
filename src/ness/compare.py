"""The true end-to-end change of a model on data that is still at hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ness.errors import NessError
from ness.observe import Forward, batches_of, call_model


@dataclass(frozen=True)
class Comparison:
    """How far a model's outputs are from what they were, over all samples compared."""

    samples: int
    rms_change: float  # root-mean-square over all output entries
    max_change: float  # largest single entry
    rms_output: float  # of the outputs as they were

    @property
    def relative_change(self) -> float:
        """The RMS change over the RMS of the outputs."""
        return self.rms_change / self.rms_output if self.rms_output else float(self.rms_change > 0)

    def __str__(self) -> str:
        return (
            f"{self.samples} samples: outputs moved since the last observe by {self.relative_change:.2%} of "
            f"their size (RMS {self.rms_change:.3g} of {self.rms_output:.3g}, at most {self.max_change:.3g})"
        )


def compare_outputs(
    model: nn.Module,
    batches: Any,
    forward: Forward | None,
    as_it_was: Callable[[], AbstractContextManager[None]],
) -> Comparison:
    """Run every batch through the model as it is and as it was, in eval mode; the model is left as it is."""
    samples = entries = 0
    square = energy = largest = 0.0
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            for batch in batches_of(batches):
                now = list(_tensors(call_model(model, batch, forward)))
                with as_it_was():
                    then = list(_tensors(call_model(model, batch, forward)))
                samples += len(now[0]) if now and now[0].ndim else 1
                for a, b in zip(now, then, strict=True):
                    change, before = (a - b).to(torch.float64), b.to(torch.float64)
                    entries += change.numel()
                    square += float(change.square().sum())
                    energy += float(before.square().sum())
                    largest = max(largest, float(change.abs().max()) if change.numel() else 0.0)
    finally:
        for module, mode in modes:
            module.training = mode
    if not entries:
        raise NessError("compare: the batches gave no floating-point output; pass forward=lambda model, batch: ...")
    return Comparison(samples, (square / entries) ** 0.5, largest, (energy / entries) ** 0.5)


def _tensors(output: Any) -> Iterator[Tensor]:
    """All floating-point tensors of a model's output, in order."""
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, (tuple, list)):
        for value in output:
            yield from _tensors(value)
