"""Pictures that carry what they show."""

import json
from dataclasses import replace
from pathlib import Path

from ness.lab.runs.experiment import read
from ness.report.document_pictures import Picture, picture, renew, shown
from report.making import keeping_run

PLAN = read(Path(__file__).parents[2] / "experiments/ness-plus-ablation.toml")
WHOLE, FOUR, OWN = (
    next(job for job in PLAN.jobs if job.changes == has) for has in ({}, {"private": 4}, {"basis": "own"})
)
RUNS = [keeping_run(WHOLE, seed, 79.0 + seed / 10, 324_966) for seed in PLAN.seeds]
RUNS += [keeping_run(FOUR, 1, 75.0, 32_497), keeping_run(OWN, 1, 78.0, 649_933)]


def kept() -> Picture:
    return picture("kept", PLAN, [], RUNS, "a test")


def test_the_words_state_the_numbers() -> None:
    assert kept().words == (
        "NESS+ on Split CIFAR-100, part by part: ACC against what a task keeps, as a share of the shared weights. "
        "k = 68 (the default): keeps 5.00 %, ACC 79.94 ± 1.55; k = 4: keeps 0.50 %, ACC 75.00 (1 of 5 seeds); "
        "a basis per task, k = 68: keeps 10.00 %, ACC 78.00 (1 of 5 seeds)."
    )


def test_a_file_says_what_it_shows_and_is_the_same_each_time(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        assert renew(kept(), tmp_path / folder)
        assert not renew(kept(), tmp_path / folder)
    one, other = (tmp_path / folder / "docs/pictures/kept.svg" for folder in ("a", "b"))
    assert one.read_bytes() == other.read_bytes()
    assert shown(one) == kept().data
    assert [point["directions"] for point in json.loads(kept().data)["points"]] == [68, 4, 68]
    assert ">k = 68 (default)</text>" in one.read_text(encoding="utf-8")  # words are text


def test_a_file_that_shows_something_else_is_drawn_anew(tmp_path: Path) -> None:
    path = tmp_path / kept().file
    for before in (None, "no picture", "<svg/>"):
        if before is not None:
            path.write_text(before)
        assert shown(path) == (None if before is None else "")
        assert renew(kept(), tmp_path)
        assert shown(path) == kept().data
    assert renew(replace(kept(), data="{}"), tmp_path)
    assert shown(path) == "{}"


def test_where_nothing_ran_there_is_no_file(tmp_path: Path) -> None:
    none = picture("kept", PLAN, [], [], "a test")
    assert not renew(none, tmp_path)
    assert renew(kept(), tmp_path)
    assert renew(none, tmp_path)
    assert not (tmp_path / none.file).exists()
