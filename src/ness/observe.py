"""Watching a model's forward passes: every layer's Gram in one pass, batch by batch, all or nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ness.errors import NessError
from ness.gram import Gram, gram_of_rows, with_ones
from ness.layers import Layer, Rows

Forward = Callable[[nn.Module, Any], Any]


class Staged:
    """What one forward pass has shown of one layer, not yet part of its statistics."""

    def __init__(self, layer: Layer, device: torch.device) -> None:
        self.gram = Gram.zeros(layer.groups, layer.width, device)
        self.energy = torch.zeros((), dtype=torch.float64, device=device)
        self.calls = 0


class Recorder:
    """Collects one forward pass at a time and hands it over when the pass is complete and finite."""

    def __init__(self, devices: Mapping[str, torch.device], dtype: torch.dtype) -> None:
        self.devices, self.dtype = devices, dtype
        self.staged: dict[str, Staged] = {}

    def record(self, layer: Layer, pieces: Iterable[tuple[Rows, Tensor]]) -> None:
        """Add one forward call of one layer."""
        staged = self.staged.get(layer.name)
        if staged is None:
            staged = self.staged[layer.name] = Staged(layer, self.devices[layer.name])
        staged.calls += 1
        for rows, outputs in pieces:
            wide = with_ones(rows) if layer.bias is not None else rows
            staged.gram.matrix += gram_of_rows(wide.detach(), self.dtype).to(staged.gram.matrix.device)
            staged.gram.count += rows.shape[1]
            staged.energy += energy(outputs).to(staged.energy.device)

    def take(self, where: str) -> dict[str, Staged]:
        """The finished pass; NaN or Inf anywhere is an error, and nothing of the pass counts."""
        staged, self.staged = self.staged, {}
        if not staged:
            return {}
        # diagonals alone: an entry of x that is not finite makes its own square so; and one answer for all layers
        finite = [torch.isfinite(part.gram.matrix.diagonal(dim1=-2, dim2=-1)).all() for part in staged.values()]
        answers = torch.stack([flag.to(finite[0].device) for flag in finite]).tolist()
        for name, fine in zip(staged, answers, strict=True):
            if not fine:
                raise NessError(
                    f"layer {name!r}: NaN or Inf in its input ({where}); this batch was left out of the statistics. "
                    "Clean the data, or exclude the layer"
                )
        return staged


def energy(outputs: Tensor) -> Tensor:
    """Σ‖y‖² in float64: norms of short stretches in the outputs' own precision, summed in float64.

    Widening all outputs first would cost more than the layer itself.
    """
    dtype = torch.promote_types(outputs.dtype, torch.float32)
    norms: Tensor = torch.linalg.vector_norm(outputs.detach(), dim=-1, dtype=dtype)
    return norms.to(torch.float64).square().sum()


@contextmanager
def watching(model: nn.Module, layers: Iterable[Layer], recorder: Recorder) -> Iterator[None]:
    """Eval mode, no autograd, hooks on every layer; everything as before afterwards.

    Attention's fast paths read weights without calling the layers; they are switched off meanwhile.
    """
    modes = [(module, module.training) for module in model.modules()]
    fast_path = torch.backends.mha.get_fastpath_enabled()
    handles = []
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        for layer in layers:
            for module in layer.modules:
                handles.append(layer.watch(module, _bound(recorder, layer)))
        model.eval()
        with torch.no_grad():
            yield
    finally:
        for handle in handles:
            handle.remove()
        for module, mode in modes:
            module.training = mode
        torch.backends.mha.set_fastpath_enabled(fast_path)


def _bound(recorder: Recorder, layer: Layer) -> Callable[[Iterable[tuple[Rows, Tensor]]], None]:
    return lambda pieces: recorder.record(layer, pieces)


def batches_of(batches: Any) -> Iterable[Any]:
    """Any iterable of batches; a bare tensor or a dict is one batch."""
    if isinstance(batches, (Tensor, Mapping)):
        return [batches]
    if not isinstance(batches, Iterable):
        raise NessError(f"observe: found {type(batches).__name__}, expected batches: an iterable, or one tensor")
    return batches


def call_model(model: nn.Module, batch: Any, forward: Forward | None) -> Any:
    """Run the model on one batch: a tensor, (input, target), a dict of arguments, or as `forward` says."""
    batch = to_device(batch, device_of(model))
    if forward is not None:
        return forward(model, batch)
    if isinstance(batch, Tensor):
        return model(batch)
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, (tuple, list)) and len(batch) == 2 and isinstance(batch[0], Tensor):
        return model(batch[0])
    shape = f"{type(batch).__name__} of {len(batch)}" if isinstance(batch, (tuple, list)) else type(batch).__name__
    raise NessError(
        f"a batch is a {shape}; expected a tensor, (input, target) or a dict of arguments. "
        "Pass forward=lambda model, batch: ... to say how the model is called"
    )


def device_of(model: nn.Module) -> torch.device:
    """The device of the model's first parameter."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def to_device(value: Any, device: torch.device) -> Any:
    """Tensors moved to a device, inside tuples, lists and dicts too."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {key: to_device(item, device) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(to_device(item, device) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(to_device(item, device) for item in value)
    return value
