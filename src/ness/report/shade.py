"""How a field of the accuracy matrix is coloured: blue when learnt, green where it gained since, red where it lost.

Five steps each way, so that the page, its script and the figures for papers show the same, in light and in dark.
"""

from bisect import bisect_left

from ness.lab.runs.metrics import Matrix

STEPS = (0.5, 2.0, 5.0, 10.0, 20.0)  # points of accuracy above which a step begins

# class -> (field, letters); "d" learnt just now, "n" about the same, g1 … g5 gained, l1 … l5 lost
LIGHT = {
    "d": ("#a9cef0", "#0c1b2b"), "n": ("#eff1f4", "#1d2127"),
    "g1": ("#dcf2e2", "#12301c"), "g2": ("#b5e1c0", "#0f2b18"), "g3": ("#85cb97", "#0a2312"),
    "g4": ("#4fb06c", "#04170a"), "g5": ("#1c7a40", "#ffffff"),
    "l1": ("#fde5de", "#3d1711"), "l2": ("#f8c3b4", "#37130d"), "l3": ("#f09a86", "#2b0d08"),
    "l4": ("#e06a57", "#1d0704"), "l5": ("#ad231b", "#ffffff"),
}  # fmt: skip
DARK = {
    "d": ("#1d5386", "#ffffff"), "n": ("#2a2f37", "#dfe3e8"),
    "g1": ("#1e3527", "#d9f0e0"), "g2": ("#204c31", "#e2f5e8"), "g3": ("#22683f", "#ffffff"),
    "g4": ("#2f9455", "#000000"), "g5": ("#4fd07f", "#04170a"),
    "l1": ("#3b2523", "#f6ddd8"), "l2": ("#5c2d27", "#fbe6e1"), "l3": ("#85372d", "#ffffff"),
    "l4": ("#c2453a", "#ffffff"), "l5": ("#ff6b57", "#1d0704"),
}  # fmt: skip


def shade(change: float) -> str:
    """The class of a change in points since the task was learnt.

    >>> shade(0.2), shade(1.0), shade(-3.0), shade(-50.0)
    ('n', 'g1', 'l2', 'l5')
    """
    step = bisect_left(STEPS, abs(round(change, 2)))
    return "n" if step == 0 else f"{'g' if change > 0 else 'l'}{step}"


def shades(matrix: Matrix) -> list[list[str]]:
    """The class of every field; "" where nothing was measured. Tasks learnt at once are all just learnt."""
    if len(matrix) == 1:
        return [["" if value is None else "d" for value in matrix[0]]]
    learnt = [matrix[task][task] for task in range(len(matrix))]
    return [[_class(value, learnt[i], t == i) for i, value in enumerate(row)] for t, row in enumerate(matrix)]


def _class(value: float | None, learnt: float | None, is_new: bool) -> str:
    if value is None or learnt is None:
        return ""
    return "d" if is_new else shade(value - learnt)
