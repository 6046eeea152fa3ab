"""The optimizers of the loop, with the learning rate as a tensor, and SAM's ascent as pure functions."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from ness.lab.settings import Training


def make(training: Training, parameters: Sequence[nn.Parameter], lr: Tensor) -> Optimizer:
    """The optimizer of a task; whoever writes into `lr` (one number, on the device) changes its rate.

    What it remembers starts as zeros instead of at the first step: then all steps of a task are the same computation,
    and whatever a step changes is there before it.
    """
    optimizer: Optimizer
    if training.optimizer == "adamw":
        on_card = lr.is_cuda  # or torch refuses to capture its step
        optimizer = AdamW(parameters, lr=lr, weight_decay=training.weight_decay, fused=True, capturable=on_card)
        memory = ["exp_avg", "exp_avg_sq"]
    else:
        momentum = training.momentum if training.optimizer == "sgdm" else 0.0
        optimizer = SGD(parameters, lr=lr, momentum=momentum, weight_decay=training.weight_decay, fused=True)
        memory = ["momentum_buffer"] if momentum else []
    for parameter in parameters:
        optimizer.state[parameter] |= {name: torch.zeros_like(parameter) for name in memory}
        if training.optimizer == "adamw":
            optimizer.state[parameter]["step"] = torch.zeros((), device=parameter.device)  # steps done
    return optimizer


def state_of(optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> dict[str, Tensor]:
    """What the optimizer remembers, as 'number of the parameter/name of the buffer' -> tensor."""
    return {
        f"{number}/{name}": value
        for number, parameter in enumerate(parameters)
        for name, value in optimizer.state[parameter].items()
    }


def load_state(optimizer: Optimizer, parameters: Sequence[nn.Parameter], tensors: dict[str, Tensor]) -> None:
    """Puts back what `state_of` took out."""
    for key, value in tensors.items():
        number, name = key.split("/", 1)
        parameter = parameters[int(number)]
        optimizer.state[parameter][name] = value.to(parameter.device)


def sam_offsets(gradients: Sequence[Tensor], rho: float) -> list[Tensor]:
    """E = ρ·g/(‖g‖₂ + 1e-16), the norm taken over all gradients together."""
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(gradient) for gradient in gradients]))
    scale = rho / (norm + 1e-16)
    return [gradient * scale for gradient in gradients]


@torch.no_grad()
def ascend(parameters: Sequence[nn.Parameter], rho: float) -> list[tuple[nn.Parameter, Tensor]]:
    """Moves every parameter that has a gradient to w + e; returns the exact values to restore."""
    moved = [parameter for parameter in parameters if parameter.grad is not None]
    kept = [(parameter, parameter.detach().clone()) for parameter in moved]
    gradients = [parameter.grad for parameter in moved if parameter.grad is not None]
    for parameter, offset in zip(moved, sam_offsets(gradients, rho), strict=True):
        parameter.add_(offset)
    return kept


@torch.no_grad()
def restore(kept: Sequence[tuple[nn.Parameter, Tensor]]) -> None:
    """Puts back the values `ascend` returned, bit for bit."""
    for parameter, value in kept:
        parameter.copy_(value)
