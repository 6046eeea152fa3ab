"""Plans: what a file asks for, and what is said where it is wrong."""

import tomllib
from pathlib import Path

import pytest

from ness import NessError
from ness.lab.runs.experiment import experiment, read
from ness.lab.runs.jobs import resolve


def of(text: str):
    return experiment(tomllib.loads(text), "plan.toml")


ROW = 'benchmark = "digits"\nseeds = [1]\n[[row]]\nmethod = "ness"\n'


def test_rows_are_jobs_under_their_names() -> None:
    found = of(
        """
        title = "a table"
        benchmark = "digits"
        seeds = [2, 1]
        [[row]]
        method = "ness"
        preset = "reference"
        name = "as published"
        lr = 1
        [[row]]
        method = "gpm"
        layer_images = [5, 6]
        [[row]]
        method = "ness"
        benchmark = "cifar100"
        """
    )
    assert (found.title, found.seeds) == ("a table", (2, 1))
    one, two, three = found.jobs
    assert one.digest == resolve("ness", "digits", "reference", {"lr": 1.0}).digest  # as on a command line
    assert (one.title, two.title, three.title) == ("as published", "gpm", "ness")
    assert two.settings.layer_images == (5, 6)
    assert three.benchmark.name == "cifar100"


def test_seed_by_seed_so_that_an_interrupted_table_is_even() -> None:
    found = of(ROW.replace("[1]", "[3, 1]") + '[[row]]\nmethod = "frozen"\n')
    assert [(job.title, seed) for job, seed in found.work()] == [
        ("ness", 3), ("frozen", 3), ("ness", 1), ("frozen", 1),
    ]  # fmt: skip


def test_rows_without_a_name_are_told_apart_by_their_settings() -> None:
    found = of(ROW + '[[row]]\nmethod = "ness"\nlr = 0.5\n')
    assert [job.title for job in found.jobs] == ["ness (fixed)", "ness (fixed lr=0.5)"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (ROW + "epz = 1", r"plan.toml, row 1 \(ness\): ness on digits has no setting 'epz'. Did you mean eps\?"),
        (ROW + 'presett = "fixed"', r"has no setting 'presett'. Did you mean preset\?"),
        (ROW + 'preset = "fixd"', r"Did you mean fixed\?"),
        (ROW + 'name = "mine"\nlr = "x"', r"row 1 \(mine\): ness on digits: lr is 'x', a str; expected float"),
        (ROW + "epochs = 1.5", r"epochs is 1.5, a float; expected int"),
        (ROW + 'optimizer = "sgd"\nmomentum = 0.5', r"row 1 \(ness\): momentum was set, but optimizer is 'sgd'"),
        (ROW + "name = 3", r"row 1: name is 3, a int; expected text"),
        (ROW + '[[row]]\nmethod = "nes"', r"row 2 \(nes\): no method is called 'nes'.* Did you mean ness\?"),
        (ROW + '[[row]]\nmetod = "ness"', r"row 2: has no method, .* it has metod"),
        (ROW + '[[row]]\nmethod = "joint"\nmixup = 0.2', r"row 2 \(joint\): joint does not go with mixup"),
        (ROW + '[[row]]\nmethod = "ness"\nname = "b"', r"row 2 \(b\): asks for the same runs as plan.toml, row 1"),
        (ROW + '[[row]]\nmethod = "gpm"\nname = "ness"', r"row 2 \(ness\): .*row 1 \(ness\) is called 'ness' too"),
        ('seed = [1]\n' + ROW, r"plan.toml: no key is called 'seed'.* Did you mean seeds\?"),
        (ROW.replace("[1]", "[]"), r"seeds is \[\], expected a list of whole numbers"),
        (ROW.replace("[1]", "[true]"), r"seeds is \[True\]"),
        (ROW.replace("[1]", "[1, 1]"), r"the same seed twice"),
        (ROW.replace('benchmark = "digits"', ""), r"row 1 \(ness\): there is no benchmark"),
        (ROW.replace("digits", "digit"), r"Did you mean digits\?"),
        ('benchmark = "digits"\nseeds = [1]', r"has no \[\[row\]\] tables"),
    ],
)  # fmt: skip
def test_mistakes_name_the_row_and_the_nearest_key(text: str, message: str) -> None:
    with pytest.raises(NessError, match=message):
        of(text)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(NessError, match="cannot be read"):
        read(tmp_path / "missing.toml")
    (tmp_path / "bad.toml").write_text("row = ")
    with pytest.raises(NessError, match="is not TOML"):
        read(tmp_path / "bad.toml")


def test_fast_is_another_setting_of_every_row(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(ROW)
    plain, fast = read(tmp_path / "plan.toml"), read(tmp_path / "plan.toml", fast=True)
    assert fast.jobs[0].digest == resolve("ness", "digits", fast=True).digest != plain.jobs[0].digest
