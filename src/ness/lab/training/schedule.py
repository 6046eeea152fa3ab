"""How the learning rate goes: the lineage's plateau schedule and a cosine one, as pure functions."""

import math
from dataclasses import dataclass, replace

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
