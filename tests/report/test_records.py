import math

import pytest

from ness import NessError
from ness.report import records
from report.making import record, result


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"accuracy": "none"}, "accuracy is no list of rows of 2 numbers"),
        ({"accuracy": [[90.0, None], [80.0]]}, "accuracy is no list of rows"),
        ({"accuracy": [[90.0, None], [None, 70.0]]}, "accuracy of task 1 after task 2 is None"),
        ({"accuracy": [[90.0, None], ["80", 70.0]]}, "accuracy is '80', expected a number"),
        ({"accuracy": [[90.0, None], [math.nan, 70.0]]}, "accuracy is nan"),
        ({"accuracy": [[90.0, None], [180.0, 70.0]]}, "accuracy of task 1 after task 2 is 180.0"),
        ({"accuracy": []}, "accuracy has 0 rows"),
        ({"tasks": None}, "no result of a run"),
        ({"method": ["x"]}, r"method is \['x'\], expected a str"),
        ({"seed": True}, "seed is True"),
        ({"notes": [1]}, "a note is 1"),
        ({"total_seconds": None}, "total_seconds is None"),
    ],
)
def test_nonsense_is_named(changes: dict, message: str) -> None:
    with pytest.raises(NessError, match=message):
        records.from_result({**result(), **changes}, "here")


def test_what_is_missing_is_named() -> None:
    with pytest.raises(NessError, match="here is no result of a run \\('benchmark' is missing\\)"):
        records.from_result({}, "here")


def test_forward_transfer_only_with_the_same_seed_alone() -> None:
    alone = record("alone", 1, [[88.0, None], [88.0, 76.0]])
    found = records.with_forward_transfer([record(seed=1), record(seed=2), alone])
    assert [one.scores.forward for one in found] == [-2.0, None, None]
