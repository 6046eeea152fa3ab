from pathlib import Path

import numpy as np

from ness.report.matrix import figure, mean_matrix, save

TWO = [[[90.0, None], [80.0, 70.0]], [[92.0, None], [70.0, 60.0]]]


def test_mean_over_seeds_with_blanks() -> None:
    mean = mean_matrix(TWO)
    assert mean[1].tolist() == [75.0, 65.0]
    assert np.isnan(mean[0, 1])


def test_every_measured_number_is_written_in_its_field() -> None:
    drawn = figure(TWO, "title")
    axes = drawn.axes[0]
    assert {(text.get_text(), text.get_position()) for text in axes.texts} == {
        ("91.0", (0, 0)), ("75.0", (0, 1)), ("65.0", (1, 1)),
    }  # fmt: skip
    assert axes.get_ylabel() == "after task"


def test_one_row_of_all_tasks_is_the_last() -> None:
    axes = figure([[[80.0, 90.0, 70.0]]], "joint").axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["3"]


def test_three_files_that_are_the_same_each_time(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        paths = save(figure(TWO, "title"), tmp_path / folder / "m.1")
    assert [path.name for path in paths] == ["m.1.png", "m.1.svg", "m.1.pdf"]
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == ["m.1.pdf", "m.1.png", "m.1.svg"]
    for kind in ("png", "pdf"):
        assert (tmp_path / "a" / f"m.1.{kind}").read_bytes() == (tmp_path / "b" / f"m.1.{kind}").read_bytes()
