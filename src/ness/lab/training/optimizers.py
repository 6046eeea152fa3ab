"""The optimizers of the loop, with the learning rate as a tensor, and SAM's ascent as pure functions."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from ness.lab.runs.settings import Training


def make(training: Training, parameters: Sequence[nn.Parameter], lr: Tensor) -> Optimizer:
    """The optimizer of a task; whoever writes into `lr` (one number, on the device) changes its rate.

    What it remembers starts as zeros instead of at the first step: then all steps of a task are the same computation,
    and whatever a step changes is there before it.
    """
    optimizer: Optimizer
    if training.optimizer == "adamw":
        on_card = lr.is_cuda  # or torch refuses to capture its step
        optimizer = AdamW(parameters, lr=lr, weight_decay=training.weight_decay, fused=True, capturable=on_card)
        optimizer._warned_capturable_if_run_uncaptured = True  # the step before capture is no oversight
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


def sam_scale(gradients: Sequence[Tensor], rho: float) -> Tensor:
    """What makes SAM's ascent of a gradient: ρ/(‖g‖₂ + 1e-16), the norm taken over all gradients together."""
    return rho / (torch.nn.utils.get_total_norm(gradients) + 1e-16)


@torch.no_grad()
def ascend(parameters: Sequence[nn.Parameter], rho: float) -> list[tuple[nn.Parameter, Tensor]]:
    """Moves every parameter that has a gradient to w + ρ·g/‖g‖; returns what to restore.

    Parameters get other memory for it, so that nothing is copied there and back.
    """
    moved = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
    kept = [(parameter, parameter.data) for parameter, _ in moved]
    scale = sam_scale([gradient for _, gradient in moved], rho)
    for parameter, gradient in moved:
        parameter.data = torch.addcmul(parameter, gradient, scale)
    return kept


def restore(kept: Sequence[tuple[nn.Parameter, Tensor]]) -> None:
    """Gives back the memory that `ascend` returned: the same values, bit for bit."""
    for parameter, value in kept:
        parameter.data = value


@contextmanager
def restoring(kept: Sequence[tuple[nn.Parameter, Tensor]]) -> Iterator[None]:
    """Gives back on the way out what `ascend` returned, also where what is inside fails."""
    try:
        yield
    finally:
        restore(kept)


@contextmanager
def taking_part(frozen: Sequence[nn.Parameter]) -> Iterator[None]:
    """Inside, backward passes give frozen parameters a gradient too; afterwards they are as before, without one."""
    before = [parameter.requires_grad for parameter in frozen]
    try:
        for parameter in frozen:
            parameter.requires_grad_(True)
        yield
    finally:
        for parameter, flag in zip(frozen, before, strict=True):
            parameter.grad = None
            parameter.requires_grad_(flag)
