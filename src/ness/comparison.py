"""The true end-to-end change of a model on data that is still at hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ness.errors import NessError
from ness.layers.names import listed
from ness.statistics.recorder import Forward, batches_of, call_model
from ness.verbs.remainder import same_bits, write_all


@dataclass(frozen=True)
class Comparison:
    """How far a model's outputs are from what they were, over all samples compared.

    `not_counted` names the tensors whose earlier values are not known, each with the reason: those that were added, or
    changed while no guard was there. They are the same in both passes.
    """

    samples: int
    rms_change: float  # root-mean-square over all output entries
    max_change: float  # largest single entry
    rms_output: float  # of the outputs as they were
    not_counted: Mapping[str, str] = field(default_factory=dict)

    @property
    def relative_change(self) -> float:
        """The RMS change over the RMS of the outputs; infinite where these were all 0 and moved."""
        if self.rms_output == 0:
            return math.inf if self.rms_change else 0.0
        return self.rms_change / self.rms_output

    def left_out(self) -> str:
        """What the figures leave out, in words; empty where they are of the whole model."""
        reasons: dict[str, list[str]] = {}
        for name, why in self.not_counted.items():
            reasons.setdefault(why, []).append(repr(name))
        parts = [f"{listed(names)} ({why})" for why, names in reasons.items()]
        return f"not counted, the same in both passes: {'; '.join(parts)}" if parts else ""

    def __str__(self) -> str:
        figures = (
            f"{self.samples} samples: outputs moved since the last observe by {self.relative_change:.2%} of "
            f"their size (RMS {self.rms_change:.3g} of {self.rms_output:.3g}, at most {self.max_change:.3g})"
        )
        return f"{figures}\n{self.left_out()}" if self.not_counted else figures


@dataclass
class _Sums:
    """Sums over all output entries so far."""

    samples: int = 0
    entries: int = 0
    square: float = 0.0
    energy: float = 0.0
    largest: float = 0.0

    def add(self, now: Tensor, then: Tensor) -> None:
        before = then.to(torch.float64)
        change = now.to(torch.float64) - before
        self.entries += change.numel()
        self.square += float(change.square().sum())
        self.energy += float(before.square().sum())
        largest = float(change.abs().max()) if change.numel() else 0.0
        self.largest = largest if math.isnan(largest) else max(largest, self.largest)  # NaN stays: max(NaN, x) is NaN


def compare_outputs(
    model: nn.Module,
    batches: Any,
    forward: Forward | None,
    as_it_was: Callable[[], AbstractContextManager[None]],
    not_counted: Mapping[str, str],
) -> Comparison:
    """Run every batch through the model as it is and as it was, in eval mode; the model is left as it is."""
    sums = _Sums()
    modes = [(module, module.training) for module in model.modules()]
    with torch.no_grad(), _buffers_kept(model):
        try:
            model.eval()
            for batch in batches_of(batches):
                now = [output.clone() for output in _tensors(call_model(model, batch, forward))]
                with as_it_was():
                    then = list(_tensors(call_model(model, batch, forward)))
                if [x.shape for x in now] != [x.shape for x in then]:
                    raise NessError(
                        "compare: the outputs have other shapes than when the model was last observed "
                        f"({[tuple(x.shape) for x in now]} now, {[tuple(x.shape) for x in then]} then); "
                        "pass forward=lambda model, batch: ... for outputs that are in both"
                    )
                sums.samples += next((len(output) for output in now if output.ndim), 1)  # a loss alone has no samples
                for a, b in zip(now, then, strict=True):
                    sums.add(a, b)
        finally:
            for module, mode in modes:
                module.training = mode
    if not sums.entries:
        raise NessError("compare: the batches gave no floating-point output; pass forward=lambda model, batch: ...")
    rms = [(total / sums.entries) ** 0.5 for total in (sums.square, sums.energy)]
    return Comparison(sums.samples, rms[0], sums.largest, rms[1], dict(not_counted))


@contextmanager
def _buffers_kept(model: nn.Module) -> Iterator[None]:
    """Buffers that forward passes change (counters, caches) are put back afterwards."""
    before = [
        (module, dict(module._buffers), {key: b.clone() for key, b in module._buffers.items() if b is not None})
        for module in model.modules()
        if module._buffers
    ]
    try:
        yield
    finally:
        for module, buffers, values in before:
            module._buffers.clear()
            module._buffers.update(buffers)
            write_all([(buffers[key], value) for key, value in values.items() if not same_bits(buffers[key], value)])  # type: ignore[misc, arg-type]


def _tensors(output: Any) -> Iterator[Tensor]:
    """All floating-point tensors of a model's output, in order; complex ones as pairs of real numbers."""
    if isinstance(output, Tensor):
        if output.is_complex():
            yield torch.view_as_real(output.resolve_conj())
        elif output.is_floating_point():
            yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, (tuple, list)):
        for value in output:
            yield from _tensors(value)
