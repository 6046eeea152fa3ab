from ness.report.highlight import marks
from ness.report.table import rows
from report.making import record


def matrix(first: float, later: float, second: float) -> list:
    return [[first, None], [later, second]]


def test_best_second_and_kept_among_those_of_a_benchmark() -> None:
    found = rows([
        record("a", 1, matrix(90.0, 89.5, 80.0)),
        record("b", 1, matrix(90.0, 89.5, 90.0)),
        record("c", 1, matrix(90.0, 89.0, 91.0)),
        record("joint", 1, [[99.0, 99.0]]),
        record("elsewhere", 1, matrix(90.0, 95.0, 99.0), benchmark="other"),
    ])  # fmt: skip
    shown = [(one.acc.best, one.acc.second, one.bwt.best, one.bwt.second, one.bwt.kept) for one in marks(found)]
    assert shown == [
        (False, False, True, False, True),
        (False, True, True, False, True),
        (True, False, False, True, False),  # exactly -1 % is not above it
        (False,) * 5,
        (False, False, False, False, True),  # alone on its benchmark: best of nobody
    ]
