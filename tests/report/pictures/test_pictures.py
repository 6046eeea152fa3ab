import itertools
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ness.report.certificates import Promise, promises
from ness.report.groups import settings
from ness.report.pictures import heat, lines, scatter, times
from ness.report.pictures.drawing import SIGNS, Group, Picture, Shape, Words, beside, every, legend, svg, titled
from ness.report.pictures.export import figure, outline, save
from ness.report.pictures.palette import METHODS, STYLES, looks
from ness.report.pictures.scale import Bent, Scale, around, far_off, powers_around
from ness.report.records import from_result
from ness.report.table import rows
from report.making import record, with_certificate

MATRIX = [[90.0, None, None], [93.0, 80.0, None], [80.0, 80.1, 70.0]]
ODD = '100 $ of_$ \\frac <b> & "so"'  # nothing is taken for mathematics or markup
DOT = ("h0", SIGNS[0])


def said(picture: Picture) -> list[str]:
    return [one.text for one in every(picture.marks, Words) if isinstance(one, Words)]


def shapes(picture: Picture) -> dict[str, str]:
    return {one.style: one.path for one in every(picture.marks, Shape) if isinstance(one, Shape)}


def titles(picture: Picture) -> list[str]:
    return [one.title for one in every(picture.marks, Group) if isinstance(one, Group) and one.title]


def test_an_axis_with_round_numbers() -> None:
    scale = Scale(0.0, 100.0, 200.0, 0.0)
    assert (scale(25.0), scale.ticks()) == (150.0, [0.0, 20.0, 40.0, 60.0, 80.0, 100.0])
    assert around([97.58], 0.0, 100.0)(97.58) == 50.0
    log = powers_around([0.03, 40.0], 0.0, 40.0)
    assert (log.ticks(), log(1.0)) == ([0.01, 0.1, 1.0, 10.0, 100.0], 20.0)
    assert powers_around([1.0], 0.0, 1.0).high == 10.0


def test_a_bent_axis_keeps_the_order_and_gives_its_lower_part_less_room() -> None:
    axis = Bent(30.0, 80.0, 400.0, 0.0, False, 70.0, 300.0)
    places = [axis(value) for value in (30.0, 50.0, 70.0, 75.0, 80.0)]
    assert places == [400.0, 350.0, 300.0, 150.0, 0.0]
    assert all(30.0 <= tick <= 80.0 for tick in axis.ticks())


def test_the_heat_map_has_a_field_and_a_number_for_every_entry() -> None:
    picture = heat.picture(MATRIX, "label", [4, 5])
    fields = {style: path.count("M") for style, path in shapes(picture).items()}
    assert fields == {"fd": 3, "fg2": 1, "fl3": 1, "fn": 1, "corner": 2}
    assert sorted(text for text in said(picture) if "." in text) == ["70.0", "80.0", "80.0", "80.1", "90.0", "93.0"]
    assert picture.data == {"runs": "4,5", "unit": "36"}


def test_a_small_heat_map_joins_neighbours_and_hatches_losses() -> None:
    picture = heat.picture([[90.0, None, None], [80.0, 90.0, None], [80.0, 80.0, 70.0]], "label", [0], values=False)
    found = shapes(picture)
    assert {style: path.count("M") for style, path in found.items()} == {"fd": 3, "fl3": 2, "hatch": 2}
    assert found["hatch"] == found["fl3"]
    assert not [text for text in said(picture) if "." in text]


def test_small_maps_say_where_a_task_was_learnt_where_it_ended_and_what_colours_mean() -> None:
    three = [[90.0, None, None], [70.0, 65.0, None], [60.0, 65.0, 50.0]]
    picture = heat.in_a_row([three, MATRIX], [(ODD, "ACC 1"), ("b", "")], "both")
    texts = said(picture)
    assert [text for text in texts if "." in text and text[0].isdigit()].count("70.0") == 1  # an end of the second
    meanings = [text for text in texts if text in heat.MEANING.values()]
    assert meanings == ["gained over 2", "within 0.5", "lost over 5", "lost over 10", "lost over 20", "just learnt"]
    assert ODD in texts


def test_tasks_learnt_at_once_are_one_row_and_have_no_course() -> None:
    assert said(heat.picture([[80.0, 90.0]], "joint", [0]))[:3] == ["1", "2", "2"]
    assert lines.courses([[80.0, 90.0]], "joint", ["a", "b"], lines.axis_of([[[80.0]]])) is None


def test_a_course_begins_where_its_task_was_learnt() -> None:
    picture = lines.courses(MATRIX, "label", ["a", "b", "c"], lines.axis_of([MATRIX]))
    assert picture is not None
    assert titles(picture)[0] == "task 1, a: 90.0 → 80.0 %"
    drawn = [one for one in every(picture.marks, Shape) if isinstance(one, Shape) and one.style.startswith("line-")]
    assert [one.path.count("L") for one in drawn] == [2, 1, 0]
    ends = [one for one in every(picture.marks, Words) if isinstance(one, Words) and one.style.startswith("end-")]
    assert abs(ends[0].y - ends[1].y) >= 10  # both end at 80: their names stand apart


@pytest.mark.parametrize("count", [1, 5, 40])
def test_names_are_spread_within_the_picture(count: int) -> None:
    places = lines.spread([50.0] * count, 10.0, 10.0, 176.0)
    assert min(places) >= 9.9
    assert max(places) <= 176.1
    assert len(set(places)) == count


@pytest.mark.parametrize("count", [2, 30])
def test_every_method_has_its_line_and_its_name_on_one_axis(count: int) -> None:
    matrices = [[[90.0, None], [80.0 - n / 10, 70.0]] for n in range(count)]
    matrices[0] = [[90.0, None], [5.0, 20.0]]  # one is far off
    names = [f"method {n}" for n in range(count)]
    picture = lines.averages(matrices, names, looks(names, SIGNS), "label", ["recipe A: 3 epochs"])
    ends = [one for one in every(picture.marks, Words) if isinstance(one, Words) and one.style.startswith("end-")]
    assert [one.text for one in ends] == names
    assert min(abs(a.y - b.y) for a, b in itertools.combinations(ends, 2)) >= 12
    assert ("below: drawn smaller" in said(picture)) == (count > 2)
    assert "recipe A: 3 epochs" in said(picture)
    assert titles(picture)[0] == "method 0: 90.0 % after the first task, 12.5 % at the end"


def test_the_certificate_as_lines() -> None:
    found = promises(settings([from_result(with_certificate(), "")])[0])
    free = lines.free(found, "")
    assert [text for text in said(free) if text in ("1", "2")][-2:] == ["1", "2"]
    assert {"conv", "fc"} <= set(said(lines.free(found, "", named=True)))
    drift = lines.drift(found, "")
    assert drift is not None
    assert titles(drift) == ["fc: RMS bound 2 after task 2", "fc: drift 0.5, 1 % of its output, after task 2"]
    assert said(drift)[-1] == "2"  # the second layer, though the first did not move
    assert lines.drift([Promise("fc", 2, 8, 0.0, 0.0, 0.0, 0.0, 0.0)], "") is None


def gpm_and_joint() -> list:
    return rows([
        record("gpm", 1, benchmark="cifar100"), record("gpm", 2, benchmark="cifar100"),
        record("joint", 1, [[80.0, 90.0]], benchmark="cifar100"),
    ])  # fmt: skip


def test_the_scatter() -> None:
    found = gpm_and_joint()
    picture = scatter.picture(found, [ODD, "joint"], [DOT, DOT])
    assert picture is not None
    assert f"{ODD}: ACC 74.25 ± 0.35 %, BWT -11.50 ± 0.71 %" in titles(picture)
    assert sum(title.startswith(f"{ODD} in the paper") for title in titles(picture)) <= 1
    assert "joint: 85.0 %" in said(picture)
    assert scatter.picture(found[1:], ["joint"], [DOT]) is None


def test_what_is_far_off_does_not_squeeze_the_rest() -> None:
    accuracies = [[[90.0, None], [40.0, 50.0]], *([[90.0, None], [89.0 + n / 20, 88.0 + n / 10]] for n in range(6))]
    found = rows([record(f"m{n}", 1, accuracy) for n, accuracy in enumerate(accuracies)])
    labels = [f"m{n}" for n in range(7)]
    picture = scatter.picture(found, labels, looks(labels, SIGNS))
    assert picture is not None
    assert "all of them, in small" in said(picture)
    assert "m0" in said(picture)
    assert scatter.picture(found[1:], labels[1:], looks(labels[1:], SIGNS)) is not None


@given(st.lists(st.tuples(st.floats(-60, 1), st.floats(10, 90)), max_size=20))
def test_at_most_a_third_is_far_off(places: list) -> None:
    assert len(far_off(places)) <= len(places) // 3


numbers = st.integers(-5, 5).map(float)


@given(st.lists(st.tuples(numbers, numbers), max_size=12))
def test_nobody_on_the_front_is_beaten_and_everybody_else_is(points: list) -> None:
    def beaten(one: tuple) -> bool:
        return any(other != one and other[0] >= one[0] and other[1] >= one[1] for other in points)

    assert sorted(scatter.front(points)) == [i for i, one in enumerate(points) if not beaten(one)]


def test_times_of_one_device() -> None:
    picture = times.picture([[1.0, 2.0, 1.0], []], ["a", "b"], "H200")
    assert picture is not None
    assert (shapes(picture)["odd"].count("M"), shapes(picture)["even"].count("M")) == (2, 1)
    assert said(picture) == ["a", "4.0 s"]
    assert picture.label == "seconds of a run on H200; the longest takes 4.0 s"
    assert times.picture([[]], ["a"]) is None


def test_a_method_has_its_own_colour_and_no_two_of_eighty_look_alike() -> None:
    found = looks(["ness"] * 40 + list(METHODS), SIGNS)
    assert len(set(found)) == len(found)
    assert looks(["gpm", "ness"], SIGNS)[0] == looks(["sgp", "gpm"], SIGNS)[1]


def pictures() -> Iterator[Picture]:
    """One of each kind."""
    yield heat.picture(MATRIX, ODD)
    yield titled(heat.side_by_side([MATRIX] * 3, ["a", "b", ODD], ODD), ODD)
    course = lines.courses(MATRIX, ODD, ["a", ODD, "c"], lines.axis_of([MATRIX]))
    assert course is not None
    yield course
    drawn = scatter.picture(gpm_and_joint(), [ODD, "joint"], [DOT, DOT])
    assert drawn is not None
    yield drawn
    bars = times.picture([[1.0]], [ODD])
    assert bars is not None
    yield bars


def test_files_hold_what_the_page_shows(tmp_path: Path) -> None:
    for n, picture in enumerate(pictures()):
        for folder in ("a", "b"):
            (tmp_path / folder).mkdir(exist_ok=True)
            paths = save(picture, tmp_path / folder / f"m.{n}")
        assert [path.name for path in paths] == [f"m.{n}.png", f"m.{n}.svg", f"m.{n}.pdf"]
        for path in paths:  # the same runs give the same files
            assert (tmp_path / "a" / path.name).read_bytes() == path.read_bytes()
        words = [text.text for text in ElementTree.parse(paths[1]).iter("{http://www.w3.org/2000/svg}text")]
        assert words == said(picture)
        axes = figure(picture).axes[0]
        assert [text.get_text() for text in axes.texts] == said(picture)
        assert len(axes.patches) == sum(bool(one.path) for one in every(picture.marks, Shape) if isinstance(one, Shape))


def test_names_stay_text_and_every_style_is_known() -> None:
    for picture in pictures():
        page = ElementTree.fromstring(str(svg(picture)).replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"', 1))
        assert page.get("aria-label") == picture.label
        used = {one.style for kind in (Shape, Words, Group) for one in every(picture.marks, kind) if one.style}
        assert used <= STYLES.keys()


def test_a_grid_leaves_no_picture_on_another() -> None:
    small = heat.picture(MATRIX, "")
    grid = beside([small] * 3, "", columns=2, gap=10)
    assert (grid.width, grid.height) == (2 * small.width + 10, 2 * small.height + 10)
    assert {one.at for one in grid.marks if isinstance(one, Group)} == {
        (0.0, 0.0), (small.width + 10, 0.0), (0.0, small.height + 10),
    }  # fmt: skip


def test_a_legend_names_all_in_columns() -> None:
    marks, height = legend([(SIGNS[0], "dot-h0", f"name {n}") for n in range(7)], 300.0, 50.0)
    assert [one.text for one in marks if isinstance(one, Words)] == [f"name {n}" for n in range(7)]
    assert height < 7 * 17
    assert all(one.x < 300 for one in marks if isinstance(one, Words))


def test_paths_of_svg_are_read_as_svg_reads_them() -> None:
    assert outline("M1-2l.5 3-1 1h2V0Z").vertices.tolist() == [
        [1.0, -2.0], [1.5, 1.0], [0.5, 2.0], [2.5, 2.0], [2.5, 0.0], [1.0, -2.0],
    ]  # fmt: skip
    assert len(outline(SIGNS[0], (10.0, 20.0)).vertices) == 14
