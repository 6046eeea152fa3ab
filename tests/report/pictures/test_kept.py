from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from ness.report.pictures.drawing import Group, Shape, Words, every, text_width
from ness.report.pictures.kept import HEIGHT, WIDTH, picture
from ness.report.storage_cost import Keeping, Point

SHARES = {0: 0.28, 4: 0.56, 8: 0.84, 16: 1.4, 32: 2.5, 64: 4.71, 68: 4.98}
ODD = "100 $ of_$ \\frac"  # nothing is taken for mathematics


def point(k: int, acc: float, **changes) -> Point:
    has = {"name": f"k = {k}", "apart": False, "default": k == 68, "directions": k, "kept": 1, "percent": SHARES[k]}
    return Point(**{**has, "acc": acc, "deviation": 0.3, "seeds": 5, "asked": 5, **changes})


def names(drawn) -> list[Words]:
    """The labels beside points."""
    points = [one for one in every(drawn.marks, Group) if one.title]
    return [mark for one in points for mark in one.marks if isinstance(mark, Words)]


@settings(max_examples=25, deadline=None)
@given(some.lists(some.floats(74, 81), min_size=len(SHARES), max_size=len(SHARES)))
def test_labels_overlap_neither_one_another_nor_the_frame(accs) -> None:
    points = [point(k, acc) for k, acc in zip(SHARES, accs, strict=True)]
    apart = point(68, accs[0] - 1, apart=True, name="no shared update")
    found = names(picture(Keeping("T", (*points, apart))))
    assert len(found) == len(SHARES)
    boxes = [(one.x - text_width(one.text) / 2, one.y - 10, one.x + text_width(one.text) / 2, one.y) for one in found]
    for one, other in combinations(boxes, 2):
        assert one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]
    assert all(box[0] >= 0 and box[2] <= WIDTH and box[1] >= 0 and box[3] <= HEIGHT for box in boxes)


def test_every_row_is_named_and_the_default_said() -> None:
    rows = (point(4, 75.0, seeds=2), point(68, 79.0), point(68, 78.0, apart=True, name=ODD))
    drawn = picture(Keeping(ODD, rows))
    assert [one.text for one in names(drawn)] == ["k = 4, 2 of 5 seeds", "k = 68 (default)"]
    said = [one.text for one in every(drawn.marks, Words)]
    assert {"NESS+, k private directions per layer", f"{ODD}, k = 68"} <= set(said)


@pytest.mark.parametrize("percent", [0.0, 0.56])
def test_nothing_kept_has_its_place_and_one_seed_no_bar(percent) -> None:
    drawn = picture(Keeping("T", (point(4, 75.0, percent=percent, deviation=None),)))
    assert ("0" in [one.text for one in every(drawn.marks, Words)]) == (percent == 0.0)
    shapes = [one for one in every(drawn.marks, Shape) if one.style == "line-h0"]
    assert [one.path for one in shapes] == [""]
