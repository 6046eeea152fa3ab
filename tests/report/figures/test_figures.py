import itertools
from pathlib import Path

from ness.report.certificates import Promise, promises
from ness.report.figures import curves, drift, heat, scatter, times
from ness.report.figures.canvas import save
from ness.report.groups import settings
from ness.report.records import from_result
from ness.report.table import rows
from report.making import record, with_certificate

MATRIX = [[90.0, None], [78.5, 65.0]]
ODD = "100 $ of_$ \\frac"  # nothing is taken for mathematics


def test_every_number_is_written_in_its_field_and_fields_tell_gain_from_loss() -> None:
    axes = heat.figure(MATRIX, ODD).axes[0]
    assert {(text.get_text(), text.get_position()) for text in axes.texts} == {
        ("90.0", (0, 0)), ("78.5", (0, 1)), ("65.0", (1, 1)),
    }  # fmt: skip
    assert len({patch.get_facecolor() for patch in axes.patches}) == 2


def test_one_row_of_all_tasks_is_the_last() -> None:
    axes = heat.figure([[80.0, 90.0, 70.0]], "joint").axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["3"]


def test_side_by_side_leaves_no_empty_frame() -> None:
    drawn = heat.side_by_side([MATRIX] * 3, ["a", "b", "c"])
    assert [axes.axison for axes in drawn.axes] == [True, True, True, False]


def test_small_maps_say_where_a_task_was_learnt_where_it_ended_and_what_colours_mean() -> None:
    three = [[90.0, None, None], [70.0, 65.0, None], [60.0, 65.0, 50.0]]
    drawn = heat.in_a_row([three, MATRIX], [ODD, "b"], ODD)
    one, other = drawn.axes
    assert [text.get_text() for text in one.texts] == ["90.0", "65.0", "60.0", "65.0", "50.0"]
    assert [text.get_text() for text in other.texts] == ["90.0", "78.5", "65.0"]
    legend = [text.get_text() for text in drawn.legends[0].get_texts()]
    assert legend == ["within 0.5", "lost over 10", "lost over 20", "just learnt"]


def test_the_scatter_shows_those_that_learn_task_after_task() -> None:
    found = rows([record(), record("joint", 1, [[80.0, 90.0]])])
    drawn = scatter.figure(found, [ODD, "joint"], ODD)
    assert drawn is not None
    assert {text.get_text() for text in drawn.axes[0].texts} == {ODD, "joint: all tasks at once"}
    assert scatter.figure(found[1:], ["joint"], "") is None


def test_courses_certificate_and_times() -> None:
    drawn = curves.figure(MATRIX, ODD)
    assert drawn is not None
    assert len(drawn.axes[0].lines) == 2
    assert curves.figure([[80.0, 90.0]], "joint") is None
    found = promises(settings([from_result(with_certificate(), "")])[0])
    assert drift.figure(found, ODD).axes[1].get_yscale() == "log"
    assert times.figure([[1.0, 2.0]], [ODD], ODD).axes[0].texts[0].get_text().strip() == "3.0 s"


def test_three_files_that_are_the_same_each_time(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        paths = save(heat.figure(MATRIX, ODD), tmp_path / folder / "m.1")
    assert [path.name for path in paths] == ["m.1.png", "m.1.svg", "m.1.pdf"]
    for path in paths:
        assert (tmp_path / "a" / path.name).read_bytes() == path.read_bytes()


def test_labels_of_points_that_lie_together_do_not() -> None:
    placed = scatter.spread([3.0, 1.0, 1.1, 1.05, 9.0], 0.5)
    apart = sorted(placed)
    assert all(b - a >= 0.5 - 1e-6 for a, b in itertools.pairwise(apart))
    assert sorted(range(5), key=lambda i: placed[i]) == [1, 3, 2, 0, 4]
    assert placed[0] == 3.0
    assert placed[4] == 9.0


def test_a_certificate_without_drift_says_so() -> None:
    still = Promise("fc", 2, 8, 0.0, 0.0, 0.0, 0.0, 0.0)
    drawn = drift.figure([still], ODD)
    assert [text.get_text() for text in drawn.axes[1].texts] == ["no drift at all"]
