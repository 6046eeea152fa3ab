"""What is marked in a table, as in the paper's Table 1: the best, the second, and BWT above -1 %."""

from collections.abc import Sequence
from dataclasses import dataclass

from ness.report.groups import CEILINGS
from ness.report.table import Measured, Row

KEPT = -1.0  # percent; a BWT above it counts as kept


@dataclass(frozen=True)
class Mark:
    """How one number stands out."""

    best: bool = False
    second: bool = False
    kept: bool = False  # a BWT above -1 %


@dataclass(frozen=True)
class Marks:
    """The marks of one row."""

    acc: Mark
    bwt: Mark


def marks(rows: Sequence[Row]) -> list[Marks]:
    """The marks of each row among those of its benchmark.

    Compared as shown, at two digits, so that equals are marked alike; `joint` and `alone` are ceilings and do not
    compete; among fewer than two competitors nothing is best.
    """
    out = []
    for row in rows:
        rivals = [one for one in rows if one.benchmark == row.benchmark and one.method not in CEILINGS]
        competes = row.method not in CEILINGS
        acc = _place(row.acc, [one.acc for one in rivals]) if competes else 0
        bwt = _place(row.bwt, [one.bwt for one in rivals]) if competes else 0
        kept = competes and row.bwt is not None and round(row.bwt[0], 2) > KEPT
        out.append(Marks(Mark(acc == 1, acc == 2), Mark(bwt == 1, bwt == 2, kept)))
    return out


def _place(value: Measured, among: Sequence[Measured]) -> int:
    """1 for the best, 2 for the second, 0 for all others."""
    known = sorted({round(one[0], 2) for one in among if one is not None}, reverse=True)
    if value is None or sum(one is not None for one in among) < 2 or round(value[0], 2) not in known[:2]:
        return 0
    return known.index(round(value[0], 2)) + 1
