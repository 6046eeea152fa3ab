import pytest

from ness.lab.runs.metrics import backward_transfer, forgetting, learning_accuracy, mean_and_deviation, scores


def test_the_oracle_of_the_protocol() -> None:
    found = scores([[90.0, None], [80.0, 70.0]])
    assert (found.acc, found.bwt) == (75.0, -10.0)


def test_joint_has_one_row_and_no_transfer() -> None:
    found = scores([[80.0, 90.0, 70.0]])
    assert found.acc == 80.0
    assert found.bwt is found.forgetting is found.learning is found.forward is None


def test_forgetting_counts_from_the_best_ever() -> None:
    matrix = [[90.0, None, None], [95.0, 70.0, None], [80.0, 75.0, 60.0]]
    assert backward_transfer(matrix) == pytest.approx((-10 + 5) / 2)
    assert forgetting(matrix) == pytest.approx((15 - 5) / 2)
    assert learning_accuracy(matrix) == pytest.approx((90 + 70 + 60) / 3)
    assert scores(matrix, [91.0, 71.0, 61.0]).forward == pytest.approx(-1)


def test_deviation_is_the_sample_one() -> None:
    assert mean_and_deviation([72.76, 72.59, 72.55]) == (
        pytest.approx(72.6333, abs=1e-4),
        pytest.approx(0.1115, abs=1e-4),
    )
