"""What adapting a language model costs: change of old predictions against loss on new text, a mark per setting."""

from collections.abc import Sequence

from ness.report.pictures.drawing import SIGNS, Group, Mark, Picture, Shape, Words, legend, titled
from ness.report.pictures.lines import power_of_ten
from ness.report.pictures.scale import around, powers_around

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 560, 380, 56, 16, 14, 44
HUES = 10

Course = tuple[str, bool, Sequence[tuple[float, float, str]]]  # family, whether it is ours, (new loss, change, setting)


def picture(title: str, base: float, courses: Sequence[Course], seeds: str) -> Picture:
    """Down and to the left is better: more is learnt for less change. Families that are not ours are hollow."""
    points = [point for _, _, mine in courses for point in mine]
    x = around([base, *(new for new, _, _ in points)], LEFT, WIDTH - RIGHT, 0.05, 0.1)
    y = powers_around([change for _, change, _ in points], HEIGHT - BOTTOM, TOP)
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    grid = "".join(f"M{LEFT} {y(value):g}H{right}" for value in y.ticks())
    axis: list[Mark] = [Words(LEFT - 6, y(value) + 3.5, power_of_ten(value), "", "end") for value in y.ticks()]
    axis += [Words(x(value), bottom + 14, f"{value:g}", "", "middle") for value in x.ticks(6)]
    axis.append(Words((LEFT + right) / 2, HEIGHT - 8, "loss on held-out new text, nats per token", "", "middle"))
    axis.append(Words(11, (TOP + bottom) / 2, "KL(base ‖ model) on held-out old text", "", "middle", turned=True))
    marks: list[Mark] = [Shape(grid, "grid"), Group(tuple(axis), style="axis")]
    marks += [Shape(f"M{x(base):g} {TOP}V{bottom}", "ceiling"), Words(x(base) - 4, TOP + 10, "base", "axis", "end")]
    entries = []
    for n, (family, ours, mine) in enumerate(courses):
        sign, style = SIGNS[n % len(SIGNS)], f"{'dot' if ours else 'hollow'}-h{n % HUES}"
        entries.append((sign, style, family))
        for new, change, setting in mine:
            said = f"{family}, {setting}: new loss {new:.3f}, KL {change:.4f}"
            marks.append(Group((Shape(sign, style),), (x(new), y(change)), title=said))
    listed, room = legend(entries, WIDTH - LEFT, HEIGHT + 2)
    words = f"change of predictions on old text against loss on new text, {seeds}; down and left is better"
    whole = Picture(WIDTH, HEIGHT + room + 4, words, (*marks, Group(listed, (LEFT - 10.0, 0.0))))
    return titled(whole, title)
