"""What is said about an accuracy matrix: ACC, BWT, forgetting, learning accuracy, transfer; mean ± sample deviation.

`A[t][i]` is the test accuracy of task i after task t, in percent; entries that were never measured are None.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

Matrix = Sequence[Sequence[float | None]]


@dataclass(frozen=True)
class Scores:
    """The scores of one run, in percent; None where a score has no meaning."""

    acc: float
    bwt: float | None
    forgetting: float | None
    learning: float | None
    forward: float | None

    def as_dict(self) -> dict[str, float | None]:
        """By name."""
        return asdict(self)


def scores(matrix: Matrix, alone: Sequence[float] | None = None) -> Scores:
    """All scores of a finished run; `alone` are the accuracies of the tasks trained alone.

    >>> scores([[90.0, None], [80.0, 70.0]])
    Scores(acc=75.0, bwt=-10.0, forgetting=10.0, learning=80.0, forward=None)
    """
    return Scores(
        average_accuracy(matrix),
        backward_transfer(matrix),
        forgetting(matrix),
        learning_accuracy(matrix),
        None if alone is None else forward_transfer(matrix, alone),
    )


def average_accuracy(matrix: Matrix) -> float:
    """ACC = (1/T) Σᵢ A_{T,i}."""
    last = [value for value in matrix[-1] if value is not None]
    return sum(last) / len(last)


def backward_transfer(matrix: Matrix) -> float | None:
    """BWT = 1/(T-1) Σ_{i<T} (A_{T,i} - A_{i,i}); None for one task or tasks learnt at once."""
    if len(matrix) < 2:
        return None
    return _mean([_at(matrix, -1, i) - _at(matrix, i, i) for i in range(len(matrix) - 1)])


def forgetting(matrix: Matrix) -> float | None:
    """1/(T-1) Σ_{i<T} (max_{t<T} A_{t,i} - A_{T,i}): from the best a task ever was; positive is worse.

    >>> forgetting([[90.0, None, None], [95.0, 70.0, None], [80.0, 72.0, 60.0]])
    6.5
    """
    if len(matrix) < 2:
        return None
    last = len(matrix) - 1
    best = [max(_at(matrix, t, i) for t in range(i, last)) for i in range(last)]
    return _mean([best[i] - _at(matrix, last, i) for i in range(last)])


def learning_accuracy(matrix: Matrix) -> float | None:
    """(1/T) Σᵢ A_{i,i}: how well each task was learnt when it was its turn."""
    if len(matrix) != len(matrix[-1]):
        return None
    return _mean([_at(matrix, i, i) for i in range(len(matrix))])


def forward_transfer(matrix: Matrix, alone: Sequence[float]) -> float | None:
    """(1/T) Σᵢ (A_{i,i} - accuracy of task i trained alone).

    >>> forward_transfer([[90.0, None], [80.0, 70.0]], [89.0, 75.0])
    -2.0
    """
    learnt = learning_accuracy(matrix)
    return None if learnt is None else learnt - _mean(list(alone))


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and sample standard deviation (n - 1), which one value does not have.

    >>> mean_and_deviation([1.0, 3.0])
    (2.0, 1.4142135623730951)
    >>> mean_and_deviation([5.0])
    (5.0, None)
    """
    mean = _mean(values)
    if len(values) < 2:
        return mean, None
    return mean, math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))


def _at(matrix: Matrix, t: int, i: int) -> float:
    value = matrix[t][i]
    assert value is not None, f"A[{t}][{i}] was not measured"
    return value


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
