"""Where the time went, as the commands say it."""

from pathlib import Path

import pytest

import tiny
from ness.cli.main import main
from ness.lab.runs.environment import process_age


def asked(out: Path, *more: str) -> list[str]:
    return ["run", "--benchmark", "tiny", "--method", "finetune", "--epochs", "1", "--out", str(out), *more]


def test_it_is_said_when_asked_for_and_something_ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny.make_known(monkeypatch)
    assert main(asked(tmp_path)) == 0
    assert "whole command" not in capsys.readouterr().err
    assert main(asked(tmp_path, "--times", "--seeds", "2", "3")) == 0
    found = capsys.readouterr()
    assert "whole command" not in found.out
    lines = found.err.splitlines()
    lines = lines[lines.index(next(line for line in lines if line.startswith("time in"))) + 2 :]
    shown = {line[:16].strip(): line[16:].split() for line in lines}
    assert list(shown)[:3] == ["start", "capture", "steps"]
    assert float(shown["whole command"][0]) > 0
    assert main(asked(tmp_path, "--times")) == 0  # it was finished before
    assert "whole command" not in capsys.readouterr().err


def test_the_age_of_the_process_grows() -> None:
    age = process_age()
    if age is not None:
        assert 0 < age <= (process_age() or 0.0)
