"""Tables and pictures of studies of language models: chosen on validation, shown of test, made of records."""

import json

import pytest

from ness.errors import NessError
from ness.report import studies
from ness.report.document_pictures import study_picture
from ness.report.documents import renewed
from ness.report.pictures.drawing import svg

PLAN = """title = "A, new domain B"
model = "stories15m"
domain = "reviews"
general = "self"
held_out = ["self"]
seeds = [1, 2]

[[row]]
name = "full"
method = "full"
rate = [1e-3, 1e-2]

[[row]]
name = "NESS"
method = "null-space"
rate = 1e-3

[[row]]
name = "OSF"
method = "osf"
rate = 1e-3
"""


def point(rate, new, change, after="", **more):
    """Validation and test differ, so that a mix-up of them shows."""
    valid = {"new": [new, 0.0], "self": [3.0, change]}
    test = {"new": [new + 0.1, 0.0], "self": [3.1, 2 * change]}
    spent = {"cpu_seconds": 10.0}
    step = {} if after else {"step": 150}
    return {"rate": rate, "trained": 2_000_000, "after": after, "valid": valid, "test": test, **step, **spent, **more}


def record(name, method, seed, *points):
    base = {"valid": {"new": [5.0, 0.0], "self": [2.0, 0.0]}, "test": {"new": [5.1, 0.0], "self": [2.1, 0.0]}}
    return {
        "schema": 1,
        "study": "language-x",
        "plan": {"model": "stories15m", "seeds": [1, 2], "steps": 150},
        "row": {"name": name, "method": method},
        "seed": seed,
        "base": base,
        "points": list(points),
    }


@pytest.fixture
def root(tmp_path):
    (tmp_path / "language-x.toml").write_text(PLAN)
    folder = tmp_path / "results" / "language" / "language-x"
    folder.mkdir(parents=True)
    for seed in (1, 2):
        full = [point(1e-3, 4.0, 0.1 * seed), point(1e-2, 3.0, 0.4 * seed)]
        mended = point(1e-2, 3.0, 0.1 * seed, "repair", strength=1.0)
        (folder / f"full-seed{seed}.json").write_text(json.dumps(record("full", "full", seed, *full, mended)))
        own = record("NESS", "null-space", seed, point(1e-3, 3.5, 0.05 * seed))
        (folder / f"ness-seed{seed}.json").write_text(json.dumps(own))
    return tmp_path


def read(root):
    return studies.read(root / "language-x.toml", root / "results" / "language")


def test_a_point_is_chosen_on_validation_text_and_shown_of_test_text(root):
    found = read(root)
    assert found.families == ["full", "full, repaired", "NESS"]
    assert studies.level(found, 0.5) == pytest.approx(4.0)
    best = studies.chosen(found, ["full"], 0.5)
    assert best.setting == "rate 0.001, 150 steps"
    assert best.test.change == pytest.approx((0.2, 0.4))
    assert studies.chosen(found, ["full"], 0.7).setting == "rate 0.01, 150 steps"
    assert studies.chosen(found, ["NESS"], 0.9) is None  # its loss is too high


def test_the_table_says_who_is_ahead_by_how_much_and_what_is_missing(root):
    said = studies.table(read(root), "experiments/language-x.toml")
    assert "| NESS | 2.00 M | 10 | **150.00 ± 70.71** | **150.00 ± 70.71** | – | – |" in said
    assert "| full, repaired | 2.00 M | 20 |" in said
    ahead = "At 50 % full (rate 0.001, 150 steps; new loss 4.100) changes 2.00 times as much (2.00 to 2.00 by seed)"
    assert ahead in said
    assert "Rows not run: OSF." in said


def test_a_short_table_has_each_family_at_one_level_the_least_change_first(root):
    said = studies.brief(read(root), "x.toml", 0.7)
    lines = [line for line in said.splitlines() if line.startswith("| ")][2:]
    assert [line.split(" | ")[0] for line in lines] == ["| NESS", "| full, repaired", "| full"]
    assert lines[0] == "| NESS | 3.600 ± 0.000 | 0.150 ± 0.071 |"
    text = "<!-- study: language-x.toml brief -->\n<!-- end study -->\n"
    assert "with 80 % of the largest gain" in renewed(text, root, [], "a.md").text
    with pytest.raises(NessError, match="may stand brief alone, found short"):
        renewed(text.replace("brief", "short"), root, [], "a.md")


def test_seeds_that_are_missing_are_said(root):
    (root / "results/language/language-x/ness-seed2.json").unlink()
    assert "Fewer than 2 seeds: NESS." in studies.table(read(root), "x.toml")


def test_without_records_the_table_says_so(root):
    for path in (root / "results/language/language-x").iterdir():
        path.unlink()
    assert studies.table(read(root), "x.toml") == "\n*A, new domain B: not run yet*\n\n"
    assert study_picture("study-x", read(root)).draw is None


def test_the_picture_holds_every_point(root):
    made = study_picture("study-x", read(root))
    courses = json.loads(made.data)["courses"]
    assert courses[0][:2] == ["full", False]
    assert [mark[:2] for mark in courses[0][2]] == [[4.1, 0.3], [3.1, 1.2]]
    assert courses[2] == ["NESS", True, [[3.6, 0.15, "rate 0.001, 150 steps"]]]
    assert made.draw is not None
    drawn = str(svg(made.draw(), file=True))
    assert "NESS, rate 0.001, 150 steps: new loss 3.600, KL 0.1500" in drawn


def test_a_document_shows_them(root):
    table, shown = ("<!-- study: language-x.toml -->", "<!-- picture: study-x language-x.toml -->")
    text = f"{table}\n<!-- end study -->\n{shown}\n<!-- end picture -->\n"
    after = renewed(text, root, [], "docs/a.md")
    assert "| NESS |" in after.text
    assert "![A, new domain B: change of" in after.text
    assert renewed(after.text, root, [], "docs/a.md").text == after.text


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"schema": 9}, "is no record of the study"),
        ({"study": "other"}, "is no record of the study"),
        ({"plan": {"model": "other"}}, "different sizes or texts"),
        ({"row": {"name": "nobody", "method": "full"}}, "nobody is no row"),
    ],
)
def test_a_record_of_something_else_is_refused(root, change, reason):
    path = root / "results/language/language-x/ness-seed1.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(NessError, match=reason):
        read(root)
