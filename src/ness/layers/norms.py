"""Normalisation layers: which they are, what a task keeps of them, and how one task's values replace another's."""

from __future__ import annotations

import itertools
import warnings

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

KINDS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)  # _NormBase: every BatchNorm and InstanceNorm
SCALES = (4.0, 16.0, 64.0)  # of the probe's rows: so large that no usual ε counts, and half precision does not overflow
TOLERANCE = 0.02  # of the probe's outputs: half precision inside a norm is within it

NormValues = dict[str, Tensor]  # "bn1.weight" -> its values, statistics included


def norm_modules(model: nn.Module, excluded: set[str]) -> dict[str, nn.Module]:
    """All norm layers of the model by name, those in excluded modules left out."""
    return {name: module for name, module in model.named_modules() if name not in excluded and is_norm(module)}


def is_norm(module: nn.Module) -> bool:
    """Whether a module is one of torch's norms, or computes what one computes, whatever its class is called.

    >>> class Mine(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.gain = nn.Parameter(torch.zeros(8))
    ...     def forward(self, x):
    ...         return (1 + self.gain) * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
    >>> is_norm(Mine()), is_norm(nn.PReLU(8))
    (True, False)
    """
    return isinstance(module, KINDS) or _computes_norm(module)


def _computes_norm(module: nn.Module) -> bool:
    """Whether it gives (w or 1 + w) · x / rms(x), or the same of x − mean(x), plus a bias if there is one.

    Tried on a twin with values of the test's own: the module, its hooks and its parameters see nothing of it.
    """
    own = {name: value for name, value in module._parameters.items() if value is not None}
    shapes = {value.shape for value in own.values()}
    shape = next(iter(shapes), torch.Size())
    vector = sum(size > 1 for size in shape) == 1  # (d,), or (1, d, 1, 1), as norms of images may have it
    if len(own) not in (1, 2) or len(shapes) != 1 or not vector:
        return False
    if module._modules or isinstance(module, torch.jit.ScriptModule):
        return False
    width, generator = shape.numel(), torch.Generator().manual_seed(0)
    values = {name: 0.5 + torch.rand(width, generator=generator, dtype=torch.float32, device="cpu") for name in own}
    x = torch.randn(2, 3, width, generator=generator, dtype=torch.float32, device="cpu")
    x = x * torch.tensor(SCALES, device="cpu").unsqueeze(-1)
    images = x.movedim(-1, 1).unsqueeze(-1)  # (2, width, 3, 1): channels first, as norms of images have them
    for rows, of_images in ((x, False), (x.flatten(0, 1), False), (images, True)):
        found = _run(module, {name: value.reshape(shape) for name, value in values.items()}, rows)
        if found is None:
            continue
        there, given = (t.squeeze(-1).movedim(1, -1) if of_images else t for t in (found, rows))
        if _is_normalised(there, given, list(values.values())):
            return True
    return False


def _run(module: nn.Module, values: dict[str, Tensor], x: Tensor) -> Tensor | None:
    """The outputs of a twin of the module with these parameters, or None where it has none to give."""
    twin = type(module).__new__(type(module))
    twin.__dict__ |= module.__dict__ | {"training": False}
    try:
        twin.__dict__["_parameters"] = {name: nn.Parameter(value.clone()) for name, value in values.items()}
        twin.__dict__["_buffers"] = {
            name: None if value is None else value.detach().to("cpu", copy=True)
            for name, value in module._buffers.items()
        }
        quiet, seeds = warnings.catch_warnings(action="ignore"), torch.random.fork_rng(devices=[])
        with quiet, seeds, torch.no_grad(), torch.autocast("cpu", enabled=False):
            found = type(module).forward(twin, x.clone())
    except Exception:  # whatever it wants, it is not the one tensor that a norm takes
        return None
    same = isinstance(found, Tensor) and found.shape == x.shape and found.is_floating_point()
    return found.to("cpu", torch.float32) if same else None


def _is_normalised(found: Tensor, x: Tensor, values: list[Tensor]) -> bool:
    """Whether outputs are those of an RMSNorm or a LayerNorm with these parameters in any of their roles."""
    for weight, *bias in itertools.permutations(values):
        for rows, offset in itertools.product((x, x - x.mean(-1, keepdim=True)), (0.0, 1.0)):
            expected = (offset + weight) * rows / rows.square().mean(-1, keepdim=True).sqrt() + sum(bias)
            if float((found - expected).norm()) <= TOLERANCE * float(expected.norm()):
                return True
    return False


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
