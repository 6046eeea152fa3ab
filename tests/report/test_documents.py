"""Documents whose figures cannot go stale."""

import json
from pathlib import Path

import pytest

from ness import NessError
from ness.lab.runs.experiment import read
from ness.lab.runs.metrics import scores
from ness.report.collect import collect
from ness.report.document_pictures import FOLDER, shown
from ness.report.documents import Renewed, main, records_in, renewed
from report.making import record, result, write

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
END, END_PICTURE = "<!-- end rows -->", "<!-- end picture -->"
RESULTS = sorted((ROOT / "results").glob("*/result.json"))

PLAN = """
title = "A table"
benchmark = "cifar100"
seeds = [1, 2]
[[row]]
method = "ewc"
[[row]]
method = "finetune"
name = "plain"
drop_last = true
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "results").mkdir()
    (tmp_path / "plan.toml").write_text(PLAN)
    return tmp_path


def of(root: Path, text: str, *records) -> str:
    return renewed(text, root, records, "a.md").text


def plain(root: Path, seed: int, **changes) -> dict:
    digest = read(root / "plan.toml").jobs[1].digest
    return result("finetune", seed, benchmark="cifar100", digest=digest, **changes)


def of_document(path: Path) -> Renewed:
    text, records = path.read_text(encoding="utf-8"), records_in(ROOT / "results")
    return renewed(text, ROOT, records, str(path.relative_to(ROOT)))


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_the_tables_of_every_document_are_those_of_the_records(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert of_document(path).text == text, "run `make tables`"


def test_the_pictures_of_the_documents_are_those_of_the_records() -> None:
    pictures = [one for path in DOCUMENTS for one in of_document(path).pictures]
    assert {one.name for one in pictures} >= {"kept", "heat-maps"}
    for one in pictures:
        assert shown(ROOT / one.file) == (one.data if one.draw else None), "run `make tables`"
    assert sorted((ROOT / FOLDER).iterdir()) == sorted({ROOT / one.file for one in pictures if one.draw})
    for path in (ROOT / FOLDER).iterdir():
        assert path.stat().st_size < 60_000


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.parent.name)
def test_what_a_record_says_follows_from_its_accuracy_matrix(path: Path) -> None:
    said = json.loads(path.read_text(encoding="utf-8"))
    found = scores(said["accuracy"])
    for name, value in (("acc", found.acc), ("bwt", found.bwt), ("forgetting", found.forgetting)):
        assert said[name] == (None if value is None else pytest.approx(value, abs=1e-9)), name
    assert path.parent.name == f"{said['benchmark']}-{said['method']}-{said['digest']}-seed{said['seed']}"


def test_what_stands_between_the_marks_is_made_anew(root: Path) -> None:
    text = f"before\n<!-- rows: plan.toml -->\nanything\n{END}\nafter\n"
    runs = [record(**{"method": "finetune", **plain(root, seed)}) for seed in (1, 2)]
    found = of(root, text, *runs)
    assert found.startswith("before\n<!-- rows: plan.toml -->\n\n|  | seeds | ACC | BWT | paper's ACC |")
    assert found.endswith(f"\n\n{END}\nafter\n")
    lines = [line.split(" | ") for line in found.splitlines() if line.startswith("|")]
    assert [cell.strip("| ") for cell in lines[2][:6]] == ["ewc (1)", "", "not run yet", "", "68.88 ± 0.80", "−2 ± 1"]
    assert [cell.strip("| ") for cell in lines[3][:4]] == ["plain", "2", "74.25 ± 0.35", "−11.50 ± 0.71"]
    assert lines[3][-2:] == ["3", "`ness run --benchmark cifar100 --method finetune --drop-last --seeds 1 2` |"]
    assert "(1) The paper's figures: copied there from CODE-CL" in found
    assert of(root, found, *runs) == found
    assert "1 of 2" in of(root, text, runs[0])


def test_a_block_may_name_its_columns(root: Path) -> None:
    notes = [{}, {"kept": 1234}]
    run = record(**{"method": "finetune", **plain(root, 1, notes=notes)})
    found = of(root, f"<!-- rows: plan.toml kept acc -->\n{END}\n", run)
    assert "|  | numbers a task keeps | ACC |\n" in found
    assert "| plain | 1,234 | 74.50 |\n" in found
    assert "CODE-CL" not in found  # no figure of the paper is shown


def test_a_block_may_leave_out_what_is_not_run_to_its_end(root: Path) -> None:
    runs = [record(**{"method": "finetune", **plain(root, seed)}) for seed in (1, 2)]
    text = f"<!-- rows: plan.toml finished acc paper-acc -->\n{END}\n"
    found = of(root, text, *runs)
    assert "| plain | 74.25 ± 0.35 |" in found
    assert "ewc" not in found
    assert "Run so far: 1 of 2 rows." in found
    assert "| plain |" not in of(root, text, runs[0])


def test_a_block_may_show_the_rows_as_they_are_run_fast(root: Path) -> None:
    digest = read(root / "plan.toml", True).jobs[1].digest
    quick = record(**result("finetune", 1, benchmark="cifar100", digest=digest, fast=True))
    plainly, fast = (of(root, f"<!-- rows: plan.toml{word} acc command -->\n{END}\n", quick) for word in ("", " fast"))
    assert "| plain | not run yet |" in plainly
    assert "| plain | 74.50 |" in fast
    assert "--method finetune --drop-last --fast --seeds 1 2`" in fast
    assert "ness table --plan plan.toml --fast --device auto" in fast
    assert "--fast" not in plainly


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- rows: plan.toml -->\n", "a.md, line 1: the block has no end"),
        (f"x\n{END}\n", "a.md, line 2: .* where no block may end"),
        ("<!-- rows: plan.toml -->\n<!-- rows: plan.toml -->\n", "a.md, line 2: .* where no block may begin"),
        (f"<!-- rows: plan.toml ac -->\n{END}\n", r"a.md, line 1: no column is called 'ac'.* Did you mean acc\?"),
        (f"<!-- rows: plans.toml -->\n{END}\n", "plans.toml: cannot be read"),
        (f"<!-- rows: plan.toml -->\n{END_PICTURE}\n", "a.md, line 2: .* where no block may end"),
        (
            "<!-- picture: heat-maps plan.toml -->\n",
            "line 1: the block has no end; expected a line <!-- end picture -->",
        ),
        (f"<!-- picture: kept -->\n{END_PICTURE}\n", "a.md, line 1: a picture needs its name and a plan, found kept"),
        (f"<!-- picture: heat plan.toml -->\n{END_PICTURE}\n", "no picture is called 'heat'.* Did you mean heat-maps?"),
        (f"<!-- picture: heat-maps plan.toml ness -->\n{END_PICTURE}\n", "line 1: no row is of 'ness'; there are ewc"),
        (
            f"<!-- picture: kept plan.toml acc -->\n{END_PICTURE}\n",
            "line 1: picture kept takes a plan alone, found acc",
        ),
        (
            f"<!-- picture: kept plan.toml -->\n{END_PICTURE}\n",
            "line 1: 0 rows are ness-plus as it stands, expected one",
        ),
    ],
)
def test_wrong_marks_are_refused(root: Path, text: str, message: str) -> None:
    with pytest.raises(NessError, match=message):
        of(root, text)


def test_main_renews_files_and_names_those_that_changed(root: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(root)
    write(root / "results/a", plain(root, 1))
    Path("with.md").write_text(f"<!-- rows: plan.toml -->\n{END}\n")
    Path("without.md").write_text("nothing\n")
    assert main(["with.md", "without.md"]) == 0
    assert capsys.readouterr().out == "with.md\n"
    assert "74.50" in Path("with.md").read_text()
    assert main(["with.md", "without.md"]) == 0
    assert capsys.readouterr().out == ""


def picture_of(methods: str) -> str:
    return f"<!-- picture: heat-maps plan.toml {methods} -->\nold\n{END_PICTURE}\n"


def test_main_draws_a_picture_anew_where_its_data_changed_and_nowhere_else(root: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(root)
    Path("docs").mkdir()
    Path("docs/a.md").write_text(picture_of("finetune"))
    file = Path("docs/pictures/heat-maps.svg")

    def changed() -> list[str]:
        assert main(["docs/a.md"]) == 0
        return capsys.readouterr().out.split()

    assert changed() == ["docs/a.md"]
    assert "*not run yet*" in Path("docs/a.md").read_text()
    first = write(root / "results/a", plain(root, 1))
    assert changed() == [str(file), "docs/a.md"]
    link = "![A table: the accuracy of every task after every task. plain: ACC 74.50, BWT −11.00 (1 of 2 seeds).]"
    assert f"-->\n\n{link}(pictures/heat-maps.svg)\n\n<!--" in Path("docs/a.md").read_text()
    other = file.read_text().replace("<svg ", "<svg  ")  # as another version of matplotlib would have drawn it
    file.write_text(other)
    assert changed() == []
    assert file.read_text() == other
    write(root / "results/b", plain(root, 2))
    assert changed() == [str(file), "docs/a.md"]
    assert file.read_text() != other
    for folder in (first, root / "results/b"):
        (folder / "result.json").unlink()
    assert changed() == [str(file), "docs/a.md"]
    assert not file.exists()


def test_a_picture_shows_one_thing_in_all_documents(root: Path, monkeypatch) -> None:
    monkeypatch.chdir(root)
    write(root / "results/a", plain(root, 1))
    Path("a.md").write_text(picture_of("finetune"))
    Path("b.md").write_text(picture_of("ewc"))
    assert main(["a.md", "a.md"]) == 0
    with pytest.raises(NessError, match=r"b.md: docs/pictures/heat-maps.svg shows something else in another document"):
        main(["a.md", "b.md"])


def test_a_record_that_cannot_be_counted_is_an_error(root: Path) -> None:
    assert records_in(root / "results") == ()
    write(root / "results/a", {})
    with pytest.raises(NessError, match="is no result of a run"):
        records_in(root / "results")
    assert collect([root / "results"], none_is_fine=True).records == ()
