import json
import shutil
from pathlib import Path

import pytest

import tiny
from ness.cli.main import main
from ness.cli.watch import screen
from ness.lab.runs import queue
from ness.lab.runs.queue import RunRequest
from ness.lab.runs.run_folder import History
from ness.lab.runs.status import Standing


@pytest.fixture(autouse=True)
def _known(monkeypatch, tmp_path: Path) -> None:
    tiny.make_known(monkeypatch)
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is folded."""
    monkeypatch.setenv("COLUMNS", "200")


def test_what_is_done_runs_and_is_left() -> None:
    runs = [Standing(RunRequest("f", "b", "ness", "fixed lr=1", seed, 2, 4), "waiting") for seed in range(9)]
    past = History(((90.0,),), (4,), (8.0,), 2, 81.25, 0.0)
    runs.append(Standing(RunRequest("f", "b", "ness", "fixed", 9, 2, 4), "running", past, spent=12.0))
    shown = screen(runs, height=12).splitlines()
    assert shown[0] == "0 of 10 runs done ██░░░░░░░░░░░░░░░░░░ 1 running, 9 waiting, about 2 min 28 s to go"
    assert shown[4].split() == [
        "ness",
        "on",
        "b,",
        "seed",
        "9",
        "running",
        "████████░░",
        "task",
        "2/2",
        "epoch",
        "2/4",
        "valid",
        "81.2",
        "%",
        "90.0",
        "%",
    ]
    assert shown[5].startswith("ness on b, seed 0 (fixed lr=1)")
    assert shown[-1] == "… and 4 more"
    assert screen([]) == "no run yet\n"


def test_away_from_a_terminal_the_state_is_printed_once(capsys) -> None:
    assert main(["run", "--benchmark", "tiny", "--method", "finetune", "--epochs", "1"]) == 0
    queue.note(Path("runs"), [(tiny.job("frozen"), 1)])
    capsys.readouterr()
    assert main(["watch"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(
        "1 of 2 runs done ██████████░░░░░░░░░░ 1 waiting, no process runs them: the same command goes on\n"
    )
    assert "tiny       finetune  fixed epochs=1" in out


def test_wrong_use(capsys) -> None:
    assert main(["watch", "nowhere"]) == 1
    assert "nowhere is no folder" in capsys.readouterr().err
    assert main(["watch", "--every", "0"]) == 2
    assert "--every is 0" in capsys.readouterr().err


def test_what_failed_is_not_waited_for_a_copy_is_not_counted_and_nonsense_is_not_done(capsys, tmp_path: Path) -> None:
    argv = ["run", "--benchmark", "tiny", "--method", "finetune", "--epochs", "1"]
    assert main([*argv, "--lr", "1e25"]) == 1
    assert main([*argv, "--seeds", "1", "2"]) == 0
    fine, nonsense = sorted(path.parent for path in tmp_path.glob("runs/*/result.json"))
    shutil.copytree(fine, tmp_path / "runs" / "copy")
    record = json.loads((nonsense / "result.json").read_text())
    record["accuracy"][0][0] = float("nan")
    (nonsense / "result.json").write_text(json.dumps(record))
    capsys.readouterr()
    assert main(["watch", "runs", "--once"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("1 of 3 runs done")
    assert "1 failed, 1 damaged" in shown
    assert "no process runs them" not in shown
    assert "diverged" in shown
    assert "result.json is no result: --again" in shown
