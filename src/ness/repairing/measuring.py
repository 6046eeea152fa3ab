"""The model run under the base, the tuned or the repaired weights, and how far its outputs move from end to end."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ness.comparison import _tensors
from ness.errors import NessError
from ness.repairing.weights import Weights
from ness.statistics.recorder import Forward, call_model

CACHE_BYTES = 2**28  # outputs under base and tuned weights are kept up to this size, else computed again
PIECE = 1 << 22  # entries compared at a time

Values = Mapping[str, Tensor]


class Shadow:
    """A copy of a model's modules that shares its parameters; `put` gives it other values, and not the model."""

    def __init__(self, model: nn.Module, weights: Weights) -> None:
        shared: dict[int, Any] = {id(parameter): parameter for parameter in model.parameters()}
        try:
            self.model: nn.Module = copy.deepcopy(model, shared)
        except Exception as error:
            raise NessError(
                f"the model cannot be copied ({type(error).__name__}: {error}), and repair works on a copy; "
                "take out what holds it (loaders, locks, graphs)"
            ) from error
        self.weights = weights
        modules = dict(self.model.named_modules(remove_duplicate=False))
        self.places: dict[str, list[tuple[nn.Module, str]]] = {}
        for name, pair in weights.pairs.items():
            self.places[name] = [_place(modules, alias) for alias in pair.names]

    def put(self, values: Mapping[str, Tensor]) -> None:
        """Run from now on with these values by first name, and with the tuned ones elsewhere."""
        for name, pair in self.weights.pairs.items():
            self.set(name, values.get(name, pair.tuned))

    def set(self, name: str, value: Tensor) -> None:
        """Give one tensor, under all its names, another value; buffers are copied, for passes may write to them."""
        pair = self.weights.pairs[name]
        if isinstance(pair.tuned, nn.Parameter):
            value = value if isinstance(value, nn.Parameter) else nn.Parameter(value, requires_grad=False)
        else:
            value = value.detach().clone()
        for module, key in self.places[name]:
            setattr(module, key, value)

    def own(self, values: Mapping[str, Tensor]) -> nn.Module:
        """The finished copy: parameters of its own with these values, flags as the model's."""
        for name, pair in self.weights.pairs.items():
            value = values.get(name, pair.tuned).detach()
            if isinstance(pair.tuned, nn.Parameter):
                parameter = copy.deepcopy(pair.tuned)
                with torch.no_grad():
                    parameter.copy_(value)
                self.set(name, parameter)
            else:
                self.set(name, value)
        return self.model


def _place(modules: Mapping[str, nn.Module], name: str) -> tuple[nn.Module, str]:
    path, _, key = name.rpartition(".")
    module = modules.get(path)
    if module is None or not (key in module._parameters or key in module._buffers):
        raise NessError(f"{name!r} of the state dict is no parameter or buffer of the model; rename it back")
    return module, key


@dataclass(frozen=True)
class Movement:
    """Outputs from end to end over some batches, relative to their size under the base."""

    before: float  # RMS(tuned − base) / RMS(base)
    after: float  # RMS(repaired − base) / RMS(base)
    kept: float  # 1 − MS(repaired − tuned) / MS(tuned − base): the share of the tuned change that is there still


class Meter:
    """Measures a shadow's outputs on a few batches."""

    def __init__(self, shadow: Shadow, batches: Iterable[Any], forward: Forward | None, what: str) -> None:
        self.shadow, self.batches, self.forward, self.what = shadow, list(batches), forward, what
        self.base = shadow.weights.at(0.0)
        self._cache: dict[tuple[int, bool], list[Tensor]] = {}
        self._cached = 0

    def movement(self, values: Values) -> Movement:
        """All three figures for one set of repaired weights."""
        sums = dict.fromkeys(("base", "before", "after", "left"), 0.0)
        with evaluating(self.shadow.model):
            for index in range(len(self.batches)):
                base, tuned = self._reference(index, self.base, False), self._reference(index, {}, True)
                now = self._outputs(index, values)
                for b, t, n in zip(base, tuned, now, strict=True):
                    sums["base"] += squares(b)
                    sums["before"] += squares(t, b)
                    sums["after"] += squares(n, b)
                    sums["left"] += squares(n, t)
        before, after = (relative(sums[key], sums["base"]) for key in ("before", "after"))
        kept = 1 - sums["left"] / sums["before"] if sums["before"] else math.nan
        return Movement(before, after, kept)

    def change(self, values: Values) -> float:
        """RMS(these − base) / RMS(base)."""
        size = moved = 0.0
        with evaluating(self.shadow.model):
            for index in range(len(self.batches)):
                for b, n in zip(self._reference(index, self.base, False), self._outputs(index, values), strict=True):
                    size += squares(b)
                    moved += squares(n, b)
        return relative(moved, size)

    def _reference(self, index: int, values: Values, tuned: bool) -> list[Tensor]:
        key = index, tuned
        if key in self._cache:
            return self._cache[key]
        outputs = self._outputs(index, values)
        size = sum(output.numel() * output.element_size() for output in outputs)
        if self._cached + size <= CACHE_BYTES:
            self._cache[key] = outputs
            self._cached += size
        return outputs

    def _outputs(self, index: int, values: Values) -> list[Tensor]:
        self.shadow.put(values)
        batch = self.batches[index]
        outputs = [x.detach() for x in _tensors(call_model(self.shadow.model, batch, self.forward)) if x.numel()]
        if not outputs:
            raise NessError(
                f"repair({self.what}=...): the model gave no floating-point output; "
                "pass forward=lambda model, batch: ..."
            )
        mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
        if isinstance(mask, Tensor) and mask.ndim == 2:  # what the model says at padding is of no interest
            chosen = mask.to(outputs[0].device).bool()
            outputs = [x[chosen] if x.shape[:2] == chosen.shape else x for x in outputs]
        return outputs


def squares(x: Tensor, y: Tensor | None = None) -> float:
    """Σ (x − y)², or Σ x², summed in float64 a piece at a time."""
    a = x.reshape(-1)
    total = torch.zeros((), dtype=torch.float64, device=a.device)
    for start in range(0, len(a), PIECE):
        part = a[start : start + PIECE].to(torch.float64)
        if y is not None:
            part = part - y.reshape(-1)[start : start + PIECE].to(part)
        total += part.dot(part)
    return float(total)


def relative(moved: float, size: float) -> float:
    """√(moved / size); infinite where what was all 0 has moved."""
    if size == 0:
        return math.inf if moved else 0.0
    return math.sqrt(moved / size)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode without autograd; every module's own mode afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode
