"""Normalisation layers: which they are, what a task keeps of them, and how one task's values replace another's."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

KINDS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)  # _NormBase: every BatchNorm and InstanceNorm

NormValues = dict[str, Tensor]  # "bn1.weight" -> its values, statistics included


def norm_modules(model: nn.Module, excluded: set[str]) -> dict[str, nn.Module]:
    """All norm layers of the model by name, those in excluded modules left out."""
    return {
        name: module for name, module in model.named_modules() if isinstance(module, KINDS) and name not in excluded
    }


def uses_batch_statistics(module: nn.Module) -> bool:
    """Whether the layer normalises by the current batch even in eval mode, so that outputs depend on it."""
    return isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is None


def affine_parameters(norms: dict[str, nn.Module]) -> list[nn.Parameter]:
    """The affine parameters γ, β of all norms."""
    return [p for module in norms.values() for p in module.parameters(recurse=False)]


def live_tensors(norms: dict[str, nn.Module]) -> NormValues:
    """Everything the norms hold, by name: γ, β, running mean and variance, batch counter."""
    return {
        f"{name}.{key}": value
        for name, module in norms.items()
        for key, value in (*module._parameters.items(), *module._buffers.items())
        if value is not None
    }


def read_norms(norms: dict[str, nn.Module]) -> NormValues:
    """A copy of everything the norms hold."""
    return {name: value.detach().clone() for name, value in live_tensors(norms).items()}


def norm_swaps(norms: dict[str, nn.Module], values: NormValues) -> list[tuple[Tensor, Tensor]]:
    """Everything the norms hold, each tensor with the value that a copy gives it."""
    return [(target, values[name]) for name, target in live_tensors(norms).items()]
