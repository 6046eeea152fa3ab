"""Optimizers and schedules of the learning rate."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from ness.lab.runs.settings import Training


@dataclass(frozen=True)
class Plateau:
    """Where a plateau schedule stands: the rate, the lowest validation loss, epochs of patience left."""

    lr: float
    left: int
    best: float = math.inf
    stop: bool = False
    improved: bool = False  # whether the last epoch was the best so far: its weights are the ones to keep


def plateau(state: Plateau, loss: float, training: Training) -> Plateau:
    """The state after an epoch with this validation loss.

    A loss that is strictly lower is kept and restores the patience. Otherwise the patience shrinks; at 0 the rate is
    divided by `lr_factor`; a rate below `lr_min` ends the task. Weights are not reloaded at a decay.

    >>> settings = Training(lr=1.0, lr_min=0.4, patience=2, lr_factor=2.0)
    >>> state = Plateau(settings.lr, settings.patience)
    >>> for loss in (3.0, 3.0, 3.0, 3.0, 3.0):
    ...     state = plateau(state, loss, settings)
    ...     print(state.lr, state.left, state.stop)
    1.0 2 False
    1.0 1 False
    0.5 2 False
    0.5 1 False
    0.25 2 True
    """
    if loss < state.best:
        return replace(state, best=loss, left=training.patience, improved=True)
    if state.left > 1:
        return replace(state, left=state.left - 1, improved=False)
    lr = state.lr / training.lr_factor
    return replace(state, lr=lr, left=training.patience, stop=lr < training.lr_min, improved=False)


def cosine(lr: float, done: float) -> float:
    """lr·(1 + cos πx)/2 for the fraction x of the task's steps that is done.

    >>> cosine(0.1, 0.0), round(cosine(0.1, 0.5), 6), cosine(0.1, 1.0)
    (0.1, 0.05, 0.0)
    """
    return lr * (1 + math.cos(math.pi * done)) / 2


def rates(training: Training, plateau_lr: float, epoch: int, steps: int) -> list[float]:
    """The learning rate of each step of an epoch (counted from 0)."""
    if training.schedule == "plateau":
        return [plateau_lr] * steps
    total = training.epochs * steps
    return [cosine(training.lr, (epoch * steps + step) / total) for step in range(steps)]


def make(training: Training, parameters: Sequence[nn.Parameter], lr: Tensor) -> Optimizer:
    """The optimizer of a task; whoever writes into `lr` (one number, on the device) changes its rate.

    What it remembers starts as zeros instead of at the first step: then all steps of a task are the same computation,
    and whatever a step changes is there before it.
    """
    optimizer: Optimizer
    if training.optimizer == "adamw":
        on_gpu = lr.is_cuda  # or torch refuses to capture its step
        optimizer = AdamW(parameters, lr=lr, weight_decay=training.weight_decay, fused=True, capturable=on_gpu)
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
