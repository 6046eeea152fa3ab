"""`ness table --plan`: rows from a file."""

import csv
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

import tiny
from ness.cli.main import main

PLAN = """
title = "three rows"
benchmark = "tiny"
seeds = [2, 1]
[[row]]
method = "finetune"
name = "diverges"
lr = 1e25
[[row]]
method = "finetune"
epochs = 1
[[row]]
method = "ness"
name = "NESS, wide"
eps = 0.03
epochs = 1
"""


@pytest.fixture(autouse=True)
def plan(monkeypatch, tmp_path: Path) -> Path:
    tiny.make_known(monkeypatch)
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "plan.toml"
    path.write_text(PLAN)
    return path


def lines(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_a_plan_runs_seed_by_seed_notes_what_fails_and_goes_on(capsys, tmp_path: Path) -> None:
    assert main(["table", "--plan", "plan.toml", "--format", "csv", "--out", "here"]) == 1
    caught = capsys.readouterr()
    assert [row["name"] for row in lines(caught.out)] == ["finetune", "NESS, wide"]
    assert [row["seeds"] for row in lines(caught.out)] == ["1 2", "1 2"]
    assert "three rows: 3 rows, 2 seeds" in caught.err
    for seed in (1, 2):
        assert f"ness: diverges on tiny, seed {seed}: task 1, epoch" in caught.err
    asked = [json.loads(line) for line in (tmp_path / "here/asked.jsonl").read_text().splitlines()]
    assert [(one["method"], one["seed"]) for one in asked] == [
        ("finetune", 2), ("finetune", 2), ("ness", 2), ("finetune", 1), ("finetune", 1), ("ness", 1),
    ]  # fmt: skip
    main(["table", "--plan", "plan.toml", "--format", "csv", "--out", "here"])
    again = capsys.readouterr()
    assert again.out == caught.out
    assert "NESS" not in again.err  # what is finished is not run again


def test_a_plan_that_runs_out_of_time_says_so_and_goes_on_next_time(capsys, tmp_path: Path) -> None:
    flags = ["table", "--plan", "plan.toml", "--format", "csv"]
    assert main([*flags, "--stop-after", "0"]) == 1
    assert "ness: 6 runs were not begun" in capsys.readouterr().err
    main(flags)
    assert len(lines(capsys.readouterr().out)) == 2


def test_processes_with_the_same_table_share_its_runs_and_all_print_it(tmp_path: Path) -> None:
    asked = "table --benchmark digits --methods finetune frozen --seeds 1 2 3 --epochs 1 --threads 1 --format csv"
    argv = [sys.executable, "-m", "ness", *asked.split(), "--out", str(tmp_path / "shared")]
    both = [subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    (first, said), (second, also_said) = [process.communicate(timeout=300) for process in both]
    assert [process.returncode for process in both] == [0, 0], said + also_said
    assert first == second
    assert [row["seeds"] for row in lines(first)] == ["1 2 3", "1 2 3"]
    logs = [path.read_text() for path in (tmp_path / "shared").glob("*/events.jsonl")]
    assert len(logs) == 6
    assert all(log.count('"learnt"') == 5 for log in logs)  # each of a run's tasks was trained once


def test_only_the_rows_that_are_named(capsys, tmp_path: Path) -> None:
    assert main(["table", "--plan", "plan.toml", "--rows", "NESS, wide", "--seeds", "1", "--format", "csv"]) == 0
    assert [row["name"] for row in lines(capsys.readouterr().out)] == ["NESS, wide"]
    flags = ["table", "--plan", "plan.toml", "--from", "runs", "--format", "csv"]
    assert main([*flags, "--rows", "NESS, wide", "finetune"]) == 0
    assert [row["name"] for row in lines(capsys.readouterr().out)] == ["finetune", "NESS, wide"]
    assert main([*flags, "--rows", "NESS wide"]) == 2
    assert "no row of the plan is called 'NESS wide'" in capsys.readouterr().err
    assert main([*flags, "--rows"]) == 2
    assert "--rows without a name" in capsys.readouterr().err


def test_the_command_lines_seeds_go_before_the_files(capsys, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")  # all columns
    main(["table", "--plan=plan.toml", "--seeds", "7"])
    assert "NESS, wide  fixed epochs=1 eps=0.03  7 " in capsys.readouterr().out
    assert {path.parent.name[-5:] for path in tmp_path.glob("runs/*/result.json")} == {"seed7"}


def test_from_records_alone_what_is_missing_is_shown(capsys, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")  # all columns
    (tmp_path / "runs").mkdir()
    argv = ["table", "--plan", "plan.toml", "--from", "runs"]
    assert main(argv) == 0
    assert capsys.readouterr().out.count("not run yet") == 3
    run = ["run", "--benchmark", "tiny", "--method", "ness", "--eps", "0.03", "--epochs", "1", "--seeds", "1"]
    assert main(run) == 0
    capsys.readouterr()
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert out.count("not run yet") == 2
    assert "NESS, wide  fixed epochs=1 eps=0.03  1 " in out
    assert main([*argv, "--format", "latex"]) == 0
    assert "NESS, wide & $" in capsys.readouterr().out
    assert main([*argv, "--seeds", "2"]) == 0
    assert capsys.readouterr().out.count("not run yet") == 3
    assert main([*argv, "--fast"]) == 0
    assert capsys.readouterr().out.count("not run yet") == 3


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--methods", "ness"], "--methods does not go with --plan: put it in plan.toml"),
        (["--lr", "0.1", "--weight-decay=0"], "--lr, --weight-decay does not go with --plan"),
        (["--aperture", "3"], "--aperture does not go with --plan"),
        (["--preset", "fixed"], "--preset does not go with --plan"),
        (["--lanez", "3"], "--lanez"),
        (["--from", "runs", "--out", "x"], "--out"),
    ],
)
def test_what_stands_in_the_plan_is_no_flag(flags: list[str], message: str, capsys) -> None:
    assert main(["table", "--plan", "plan.toml", *flags]) == 2
    caught = capsys.readouterr()
    assert message in caught.err
    assert caught.out == ""


def test_a_wrong_plan_is_refused_before_anything_runs(capsys, plan: Path, tmp_path: Path) -> None:
    plan.write_text(PLAN + "epz = 1\n")
    assert main(["table", "--plan", "plan.toml"]) == 2
    assert "row 3 (NESS, wide): ness on tiny has no setting 'epz'. Did you mean eps?" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


DAMAGE = {
    "[]": "holds a list",
    '{"loss": 3}': "'benchmark' is missing",
    "{": "cannot be read",
    "NaN": "found NaN, expected a number",
}


@pytest.mark.parametrize("text", DAMAGE)
def test_a_damaged_result_costs_no_other_row(text: str, capsys, tmp_path: Path) -> None:
    argv = ["table", "--benchmark", "tiny", "--methods", "finetune", "frozen", "--epochs", "1", "--format", "csv"]
    assert main(argv) == 0
    (result,) = tmp_path.glob("runs/tiny-finetune-*/result.json")
    record = json.loads(result.read_text())
    record["accuracy"][0][0] = float("nan")
    result.write_text(json.dumps(record) if text == "NaN" else text)
    capsys.readouterr()
    assert main(argv) == 1
    caught = capsys.readouterr()
    assert [row["method"] for row in lines(caught.out)] == ["frozen"]
    assert DAMAGE[text] in caught.err
    assert "repeat the run with --again" in caught.err
    assert "version None" not in caught.err


SEEDS = {"1 1": "the same seed twice", "-1": "seed -1: expected", "99999999999999999999": "from 0 to 2**63 - 1", "": ""}


@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize("command", ["run", "table", "plan"])
def test_seeds_that_are_none_are_refused(command: str, seeds: str, capsys) -> None:
    flags = {"run": ["run", "--benchmark", "tiny"], "table": ["table", "--benchmark", "tiny"]}
    argv = flags.get(command, ["table", "--plan", "plan.toml"])
    assert main([*argv, "--seeds", *seeds.split()]) == 2
    assert (SEEDS[seeds] or "seeds is empty") in capsys.readouterr().err


def test_numbers_that_are_none_and_unknown_devices_are_refused(capsys) -> None:
    assert main(["run", "--benchmark", "tiny", "--method", "finetune", "--lr", "inf"]) == 2
    assert "lr is inf, expected a number" in capsys.readouterr().err
    assert main(["run", "--benchmark", "tiny", "--method", "finetune", "--device", "mps"]) == 2
    assert "--device mps: found mps, expected cpu, cuda" in capsys.readouterr().err
