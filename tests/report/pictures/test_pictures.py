import pytest

from ness.report.certificates import promises
from ness.report.groups import settings
from ness.report.pictures import heat, lines, scatter, times
from ness.report.pictures.scale import Scale, around, powers_around
from ness.report.records import from_result
from ness.report.table import rows
from report.making import record, with_certificate

MATRIX = [[90.0, None, None], [93.0, 80.0, None], [80.0, 80.1, 70.0]]


def test_an_axis_with_round_numbers() -> None:
    scale = Scale(0.0, 100.0, 200.0, 0.0)
    assert (scale(25.0), scale.ticks()) == (150.0, [0.0, 20.0, 40.0, 60.0, 80.0, 100.0])
    assert around([97.58], 0.0, 100.0)(97.58) == 50.0
    log = powers_around([0.03, 40.0], 0.0, 40.0)
    assert (log.ticks(), log(1.0)) == ([0.01, 0.1, 1.0, 10.0, 100.0], 20.0)
    assert powers_around([1.0], 0.0, 1.0).high == 10.0


def test_the_heat_map_has_a_field_and_a_number_for_every_entry() -> None:
    picture = heat.picture(MATRIX, "label", [4, 5])
    assert {shade: path.count("M") for shade, path in picture.fields} == {"d": 3, "g2": 1, "l3": 1, "n": 1}
    assert sorted(text for _, found in picture.letters for *_, text in found) == [
        "70.0", "80.0", "80.0", "80.1", "90.0", "93.0",
    ]  # fmt: skip
    assert (picture.marks.count("M"), picture.runs, picture.hatch) == (2, "4,5", "")


def test_a_small_heat_map_joins_neighbours_and_hatches_losses() -> None:
    picture = heat.picture([[90.0, None, None], [80.0, 90.0, None], [80.0, 80.0, 70.0]], "label", [0], values=False)
    assert {shade: path.count("M") for shade, path in picture.fields} == {"d": 3, "l3": 2}
    assert (picture.letters, picture.marks, picture.hatch) == ((), "", dict(picture.fields)["l3"])


def test_tasks_learnt_at_once_are_one_row_and_have_no_course() -> None:
    picture = heat.picture([[80.0, 90.0]], "joint", [0])
    assert [text for *_, text in picture.rows] == ["2"]
    assert lines.courses([[80.0, 90.0]], "joint", ["a", "b"], lines.axis_of([[[80.0]]])) is None


def test_a_course_begins_where_its_task_was_learnt() -> None:
    picture = lines.courses(MATRIX, "label", ["a", "b", "c"], lines.axis_of([MATRIX]))
    assert picture is not None
    assert [len(line.points.split()) for line in picture.lines] == [3, 2, 1]
    assert picture.lines[0].title == "task 1, a: 90.0 → 80.0 %"
    assert picture.lines[0].end is not None
    assert picture.lines[1].end is not None
    assert abs(picture.lines[0].end[1] - picture.lines[1].end[1]) >= 10  # both end at 80: their names stand apart


@pytest.mark.parametrize("count", [1, 5, 40])
def test_names_are_spread_within_the_picture(count: int) -> None:
    places = lines.spread([50.0] * count, 10.0, 10.0, 176.0)
    assert min(places) >= 9.9
    assert max(places) <= 176.1
    assert len(set(places)) == count


def test_the_certificate_as_lines() -> None:
    found = promises(settings([from_result(with_certificate(), "")])[0])
    assert [line.end and line.end[2] for line in lines.free(found, "").lines] == ["1", "2"]
    drift = lines.drift(found, "")
    assert drift is not None
    assert [(line.dashed, line.title) for line in drift.lines] == [
        (True, "fc: RMS bound 2 after task 2"), (False, "fc: drift 0.5, 1 % of its output, after task 2"),
    ]  # fmt: skip
    assert drift.lines[1].end is not None
    assert drift.lines[1].end[2] == "2"  # the second layer, though the first did not move
    assert lines.drift(found[:1], "") is None


def test_the_scatter() -> None:
    found = rows([
        record("gpm", 1, benchmark="cifar100"), record("gpm", 2, benchmark="cifar100"),
        record("joint", 1, [[80.0, 90.0]], benchmark="cifar100"),
    ])  # fmt: skip
    picture = scatter.picture(found, ["gpm", "joint"])
    assert picture is not None
    ours, paper = picture.points
    assert ours.title == "gpm: ACC 74.25 ± 0.35 %, BWT -11.50 ± 0.71 %"
    assert (ours.on_front, ours.bars.count("M"), ours.name and ours.name.text) == (True, 2, "gpm")
    assert (paper.is_paper, paper.sign) == (True, ours.sign)
    assert picture.ceilings[0][1] == "joint: 85.0 %"
    assert scatter.picture(found[1:], ["joint"]) is None


def test_times() -> None:
    picture = times.picture([[1.0, 2.0, 1.0], []], ["a", "b"])
    assert picture is not None
    (bar,) = picture.bars
    assert (bar.odd.count("M"), bar.even.count("M"), bar.total) == (2, 1, "4.0 s")
    assert times.picture([[]], ["a"]) is None
