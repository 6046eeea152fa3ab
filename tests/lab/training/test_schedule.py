import pytest

from ness.lab.runs.settings import Training
from ness.lab.training.optimizers import Plateau, plateau, rates


def trace(losses: list[float], training: Training) -> list[Plateau]:
    state, seen = Plateau(training.lr, training.patience), []
    for loss in losses:
        state = plateau(state, loss, training)
        seen.append(state)
    return seen


def test_first_decay_at_epoch_seven() -> None:
    seen = trace([1.0, 2, 2, 2, 2, 2, 2], Training(lr=0.01, patience=6, lr_factor=2.0))
    assert [state.lr for state in seen] == [0.01] * 6 + [0.005]
    assert [state.improved for state in seen] == [True] + [False] * 6


def test_equal_loss_is_no_improvement_and_a_lower_one_restores_patience() -> None:
    seen = trace([1.0, 1.0, 0.9, 0.9], Training(patience=2))
    assert [state.left for state in seen] == [2, 1, 2, 1]


@pytest.mark.parametrize(  # decays until stop
    ("lr", "factor", "lr_min", "decays"),
    [(0.05, 2.0, 1e-5, 13), (0.01, 2.0, 1e-5, 10), (0.005, 2.0, 1e-5, 9), (0.1, 3.0, 1e-3, 5), (0.05, 3.0, 1e-3, 4)],
)
def test_decays_until_stop(lr: float, factor: float, lr_min: float, decays: int) -> None:
    training = Training(lr=lr, lr_factor=factor, lr_min=lr_min, patience=1)
    state, count = plateau(Plateau(lr, 1), 1.0, training), 0
    while not state.stop:
        state = plateau(state, 2.0, training)
        count += 1
    assert count == decays


def test_cosine_goes_from_lr_to_nothing_over_all_steps() -> None:
    training = Training(lr=0.1, epochs=4, schedule="cosine")
    every = [rate for epoch in range(4) for rate in rates(training, 99.0, epoch, 5)]
    assert every[0] == 0.1
    assert every == sorted(every, reverse=True)
    assert 0 < every[-1] < 0.001
    assert abs(every[10] - 0.05) < 1e-12
