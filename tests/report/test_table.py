import pytest

from ness.report.table import rows
from report.making import record


def test_mean_and_sample_deviation_over_seeds() -> None:
    (row,) = rows([record(seed=seed) for seed in (3, 1, 2)])
    assert row.seeds == (1, 2, 3)
    assert row.acc == (pytest.approx(74.0), pytest.approx(0.5))
    assert row.bwt == (pytest.approx(-12.0), pytest.approx(1.0))
    assert row.seconds is not None
    assert row.seconds[0] == 4.0
    assert row.memory == 3000


def test_settings_of_one_method_are_rows_apart() -> None:
    assert len(rows([record(), record(digest="other", setting="fixed lr=1")])) == 2


def test_settings_that_read_alike_are_told_apart() -> None:
    same, other = rows([record(), record(digest="other")])
    assert other.setting == f"{record().setting} no. 2"
    assert same.setting == f"{record().setting} no. 1"


def test_nothing_is_said_rather_than_a_mean_over_fewer_seeds() -> None:
    alone = record("alone", 1, [[88.0, None], [88.0, 76.0]])
    row = rows([record(seed=1), record(seed=2), alone])[0]
    assert row.forward is None
    joint = rows([record("joint", 1, [[80.0, 90.0]])])[0]
    assert (joint.acc, joint.bwt, joint.learning) == ((85.0, None), None, None)
