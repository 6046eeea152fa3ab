"""The command line as a user meets it: what goes where, exit codes, no traceback for a mistake."""

import csv
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import ness
import tiny
from ness.cli.main import main


@pytest.fixture(autouse=True)
def _known(monkeypatch, tmp_path: Path) -> None:
    tiny.make_known(monkeypatch)
    monkeypatch.chdir(tmp_path)


RUN = ["run", "--benchmark", "tiny", "--epochs", "1", "--method"]


def test_no_command_help_and_version(capsys) -> None:
    assert main([]) == 2
    assert "usage: ness" in capsys.readouterr().err
    assert main(["--help"]) == 0
    assert "ness table" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"ness {ness.__version__}\n"


@pytest.mark.parametrize("command", ["run", "table", "tune", "report", "watch", "list"])
def test_every_command_has_help_with_an_example(command: str, capsys) -> None:
    assert main([command, "--help"]) == 0
    assert f"ness {command} " in capsys.readouterr().out.split("options")[0].replace("usage: ness", "")


def test_run_prints_the_table_alone_on_standard_output(capsys, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")  # all columns
    assert main([*RUN, "finetune", "--seeds", "1", "2"]) == 0
    caught = capsys.readouterr()
    assert caught.out.splitlines()[0].startswith("benchmark")
    assert len(caught.out.splitlines()) == 3
    assert "[2/2] finetune on tiny, seed 2: task 3/3" in caught.err
    assert len(list(tmp_path.glob("runs/*/result.json"))) == 2
    assert main([*RUN, "finetune", "--seeds", "1", "2"]) == 0
    again = capsys.readouterr()
    assert again.out == caught.out
    assert "was finished before" in again.err
    assert "task 3/3" not in again.err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["rum"], "no command is called 'rum'"),
        ([*RUN, "finetun"], "Did you mean finetune?"),
        (["run", "--benchmark", "digit"], "Did you mean digits?"),
        ([*RUN, "ness", "--esp", "1"], "--eps"),
        ([*RUN, "ness", "--optimizer", "sgmd"], "sgmd"),
        ([*RUN, "ness", "--lr", "fast"], "fast"),
        ([*RUN, "finetune", "--eps", "1"], "--eps"),
        ([*RUN, "finetune", "--optimizer", "sgd", "--momentum", "0.5"], "momentum was set, but optimizer is 'sgd'"),
        ([*RUN, "finetune", "--schedule", "cosine", "--patience", "6"], "patience was set, but schedule is 'cosine'"),
        ([*RUN, "joint", "--mixup", "0.2"], "joint does not go with mixup"),
        ([*RUN, "ness", "--eps", "3"], "eps is 3"),
        ([*RUN, "ness", "--preset", "fix"], "Did you mean fixed?"),
        ([*RUN, "ness", "--config", "missing.toml"], "cannot be read"),
        (["table", "--benchmark", "tiny", "--methods", "finetune", "--eps", "1"], "--eps"),
        (["table", "--benchmark", "tiny", "--methods", "fine", "ness"], "Did you mean finetune?"),
        (["list", "things"], "things"),
    ],
)
def test_wrong_use_is_exit_code_two_and_no_traceback(argv: list[str], message: str, capsys) -> None:
    assert main(argv) == 2
    caught = capsys.readouterr()
    assert message in caught.err
    assert "Traceback" not in caught.err
    assert caught.out == ""


def test_what_fails_is_exit_code_one(capsys, tmp_path: Path) -> None:
    assert main([*RUN, "finetune", "--lr", "1e25"]) == 1
    assert "ness: finetune on tiny, seed 1: task 1, epoch" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert main([*RUN, "finetune", "--out", "file"]) == 1
    assert "choose another --out" in capsys.readouterr().err
    assert main(["report", "nowhere"]) == 1
    assert "is no folder" in capsys.readouterr().err


def test_settings_from_toml_and_the_command_line_before_it(tmp_path: Path, capsys) -> None:
    config = tmp_path / "settings.toml"
    config.write_text('benchmark = "tiny"\nmethod = "ness"\neps = 0.03\nepochs = 2\nseeds = [5]\nout = "elsewhere"\n')
    assert main(["run", "--config", str(config), "--epochs", "1"]) == 0
    (path,) = tmp_path.glob("elsewhere/*/config.json")
    found = json.loads(path.read_text())
    assert (found["method"], found["seed"], found["settings"]["eps"], found["settings"]["epochs"]) == (
        "ness",
        5,
        0.03,
        1,
    )
    assert found["setting"] == "fixed epochs=1 eps=0.03"
    for text, message in {
        "epz = 1": "no setting is called 'epz'. Did you mean eps?",
        'lr = "x"': "lr is 'x', a str; expected float",
        "[lr]\nx = 1": "[lr] is a table",
        "lr = ": "is not TOML",
        'seeds = ["a"]': "seeds is 'a'",
        'optimizer = "sgd"\nmomentum = 0.5': "momentum was set",
    }.items():
        config.write_text(f'benchmark = "tiny"\nmethod = "ness"\n{text}\n')
        capsys.readouterr()
        assert main(["run", "--config", str(config)]) == 2, text
        assert message in capsys.readouterr().err


def test_table_runs_prints_and_resumes(capsys, tmp_path: Path) -> None:
    argv = ["table", "--benchmark", "tiny", "--methods", "finetune", "ness", "--epochs", "1", "--eps", "0.03"]
    assert main([*argv, "--format", "csv"]) == 0
    caught = capsys.readouterr()
    rows = list(csv.DictReader(io.StringIO(caught.out)))
    assert [row["method"] for row in rows] == ["finetune", "ness"]
    assert main(["table", "--from", "runs", "--format", "csv"]) == 0
    assert {row["acc"] for row in csv.DictReader(io.StringIO(capsys.readouterr().out))} == {row["acc"] for row in rows}
    assert main([*argv, "--format", "markdown"]) == 0
    later = capsys.readouterr()
    assert later.out.startswith("| benchmark |")
    assert later.err == ""  # nothing was run again


def test_report_says_where_it_is(capsys, tmp_path: Path) -> None:
    assert main([*RUN, "frozen"]) == 0
    capsys.readouterr()
    (tmp_path / "runs/damaged").mkdir()
    (tmp_path / "runs/damaged/result.json").write_text("{")
    assert main(["report", "runs"]) == 0
    caught = capsys.readouterr()
    assert "the report is in runs/report" in caught.err
    assert "left out: runs/damaged: damaged: result.json cannot be read" in caught.err
    assert all(Path(line).is_file() for line in caught.out.splitlines())
    assert main(["table", "--from", "runs", "--format", "csv"]) == 0
    assert "left out: runs/damaged" in capsys.readouterr().err
    assert (tmp_path / "runs/report/table.md").exists()


def test_list(capsys) -> None:
    assert main(["list", "methods"]) == 0
    out = capsys.readouterr().out
    assert "ness " in out
    assert "Gram" in out
    assert main(["list", "benchmarks"]) == 0
    assert "digits" in capsys.readouterr().out


def test_a_warning_is_one_line_on_standard_error(capsys) -> None:
    assert main([*RUN, "ness", "--eps", "1e-9"]) == 0
    caught = capsys.readouterr()
    assert "warning: no direction is free in any layer" in caught.err
    assert ".py" not in caught.err


def test_an_interrupt_is_one_line(monkeypatch, capsys) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ness.lab.training.loop.Trainer.epoch", interrupt)
    assert main([*RUN, "finetune"]) == 130
    said = capsys.readouterr().err
    assert "ness: interrupted; the same command goes on with finetune on tiny, seed 1, from its beginning" in said
    assert "Traceback" not in said


def test_a_missing_package_is_named(monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "ness.cli.list", None)
    monkeypatch.setattr("ness.cli.main.import_module", _raise_missing)
    assert main(["list", "methods"]) == 1
    assert "pip install 'ness-cl[lab]'" in capsys.readouterr().err


def _raise_missing(name: str) -> None:
    raise ModuleNotFoundError("No module named 'tyro'", name="tyro")


def test_as_a_module_without_a_terminal() -> None:
    here = {**os.environ, "PYTHONPATH": str(Path(ness.__file__).parents[1])}
    argv = [sys.executable, "-m", "ness", "list", "benchmarks"]
    done = subprocess.run(argv, capture_output=True, text=True, env=here)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
