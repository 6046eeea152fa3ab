"""The Pareto front: settings that no other beats in both ACC and BWT."""

from collections.abc import Sequence


def front(points: Sequence[tuple[float, float]]) -> list[int]:
    """The indices of (BWT, ACC) points that none other equals or beats in both and beats in one, by rising BWT.

    >>> front([(-10.0, 60.0), (0.0, 70.0), (-1.0, 75.0), (-2.0, 74.0)])
    [2, 1]
    """
    order = sorted(range(len(points)), key=lambda i: (-points[i][0], -points[i][1]))
    best, kept = float("-inf"), list[int]()
    for i in order:
        same = kept and points[i] == points[kept[-1]]
        if points[i][1] > best or same:
            kept.append(i)
            best = points[i][1]
    return kept[::-1]
