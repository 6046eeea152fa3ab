from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from matplotlib.text import Text

from ness.report.figures.kept import figure
from ness.report.storage_cost import Keeping, Point

SHARES = {0: 0.28, 4: 0.56, 8: 0.84, 16: 1.4, 32: 2.5, 64: 4.71, 68: 4.98}
ODD = "100 $ of_$ \\frac"  # nothing is taken for mathematics


def point(k: int, acc: float, **changes) -> Point:
    has = {"name": f"k = {k}", "apart": False, "default": k == 68, "directions": k, "kept": 1, "percent": SHARES[k]}
    return Point(**{**has, "acc": acc, "deviation": 0.3, "seeds": 5, "asked": 5, **changes})


def boxes(drawn) -> list:
    drawn.draw_without_rendering()
    return [Text.get_window_extent(text) for text in drawn.axes[0].texts]


@settings(max_examples=15, deadline=None)
@given(some.lists(some.floats(74, 81), min_size=len(SHARES), max_size=len(SHARES)))
def test_labels_overlap_neither_one_another_nor_the_frame(accs) -> None:
    points = [point(k, acc) for k, acc in zip(SHARES, accs, strict=True)]
    apart = point(68, accs[0] - 1, apart=True, name="no shared update")
    drawn = figure(Keeping("T", (*points, apart)))
    found = boxes(drawn)
    assert len(found) == len(SHARES)
    for one, other in combinations(found, 2):
        assert not one.overlaps(other)
    inside = drawn.axes[0].bbox.padded(1)
    assert all(inside.containsx(box.x0) and inside.containsx(box.x1) for box in found)
    assert all(inside.containsy(box.y0) and inside.containsy(box.y1) for box in found)


def test_every_row_is_named_and_the_default_said() -> None:
    rows = (point(4, 75.0, seeds=2), point(68, 79.0), point(68, 78.0, apart=True, name=ODD))
    drawn = figure(Keeping(ODD, rows))
    assert [text.get_text() for text in drawn.axes[0].texts] == ["k = 4, 2 of 5 seeds", "k = 68 (default)"]
    legend = [text.get_text() for text in drawn.legends[0].get_texts()]
    assert legend == ["NESS+, k private directions a layer", f"{ODD}, k = 68"]


@pytest.mark.parametrize(("percent", "left"), [(0.0, 0.0), (0.56, 0.25)])
def test_nothing_kept_has_its_place_and_one_seed_no_bar(percent, left) -> None:
    axes = figure(Keeping("T", (point(4, 75.0, percent=percent, deviation=None),))).axes[0]
    assert axes.get_xlim()[0] == left
    assert axes.containers[0].lines[0].get_xydata().tolist() == [[percent, 75.0]]
    assert not any(len(path.vertices) and path.vertices[0, 1] == path.vertices[0, 1]
                   for bar in axes.containers[0].lines[2] for path in bar.get_paths())  # fmt: skip
