from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import tiny
from ness import NessError
from ness.cli.main import main
from ness.lab import registry
from ness.lab.runs import log
from ness.lab.runs.run import Options
from ness.lab.runs.sweep import run_all
from ness.lab.training.loop import Trainer

QUIET = lambda job, seed: lambda event: None  # noqa: E731


@pytest.fixture(autouse=True)
def _known(monkeypatch) -> None:
    tiny.make_known(monkeypatch)


class Notebook:
    """A logger that remembers."""

    books: list["Notebook"]

    def __init__(self) -> None:
        self.began: list[int] = []
        self.steps: list[int] = []
        self.values: list[Mapping[str, float]] = []
        self.ends = 0
        self.books.append(self)

    def begin(self, folder: Path, settings: Mapping[str, Any], step: int) -> None:
        assert (folder / "config.json").exists()
        assert settings["epochs"] == 2
        self.began.append(step)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self.steps.append(step)
        self.values.append(values)

    def end(self) -> None:
        self.ends += 1


@pytest.fixture
def books(monkeypatch) -> list[Notebook]:
    Notebook.books = []
    monkeypatch.setattr(registry, "loggers", lambda: {"notebook": Notebook})
    return Notebook.books


def run(out: Path, method: str = "finetune") -> list[str]:
    with log.logged(log.named(["notebook"]), out, QUIET) as listener:
        return list(run_all([(tiny.job(method, epochs=2), 1)], Options(out=out, save_every=0.0), listener).failures)


def test_every_epoch_and_task_in_steps_of_epochs(books: list[Notebook], tmp_path: Path) -> None:
    assert run(tmp_path) == []
    book = books[-1]
    assert (book.began, book.steps, book.ends) == ([0], [1, 2, 2, 3, 4, 4, 5, 6, 6], 1)
    assert book.values[0]["train/task"] == 1.0
    assert {"train/loss", "valid/loss", "valid/accuracy", "train/lr"} < book.values[0].keys()
    last = book.values[-1]
    assert last["test/mean of tasks so far"] == pytest.approx(sum(last[f"test/task 0{i}"] for i in (1, 2, 3)) / 3)
    assert "test/BWT so far" in last
    assert run(tmp_path) == []  # it is there: nobody is told anything
    assert (books[-1].began, books[-1].ends) == ([], 0)


def test_a_run_that_is_taken_up_goes_on_with_its_steps(books: list[Notebook], tmp_path: Path, monkeypatch) -> None:
    assert run(tmp_path / "whole") == []
    whole = books[-1]
    plain, calls = Trainer.close_epoch, []

    def cut(self: Trainer, *args: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:
            raise NessError("cut short")
        return plain(self, *args)

    monkeypatch.setattr(Trainer, "close_epoch", cut)
    assert len(run(tmp_path / "cut")) == 1
    assert (books[-1].steps, books[-1].ends) == ([1, 2, 2, 3], 1)
    assert run(tmp_path / "cut") == []
    assert books[-1].began == [3]
    assert books[-1].steps == [4, 4, 5, 6, 6]
    assert books[-1].values[-1] == {
        **whole.values[-1],
        "train/seconds of task": books[-1].values[-1]["train/seconds of task"],
    }


def test_tasks_learnt_at_once(books: list[Notebook], tmp_path: Path) -> None:
    assert run(tmp_path, "joint") == []
    assert (books[-1].steps, books[-1].ends) == ([1, 2, 2], 1)
    assert "test/BWT so far" not in books[-1].values[-1]


def test_a_logger_of_no_such_name(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["run", "--benchmark", "tiny", "--log", "tensorbored"]) == 2
    assert "no logger is called 'tensorbored'" in capsys.readouterr().err
    assert main(["table", "--benchmark", "tiny", "--methods", "finetune", "--log", "x"]) == 2


def test_tensorboard_that_is_not_installed_is_named_before_training(monkeypatch, tmp_path: Path, capsys) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError("No module named 'tensorboard'", name="tensorboard")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ness.lab.runs.tensorboard.import_module", missing)
    assert main(["run", "--benchmark", "tiny", "--log", "tensorboard"]) == 1
    assert "pip install 'ness-cl[tensorboard]'" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    reading = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="tensorboard is not installed"
    )
    from ness.lab.runs.tensorboard import TensorBoard

    for start, steps in ((0, (1, 2, 3, 4)), (2, (3, 4, 5))):  # cut short after step 4, taken up after step 2
        board = TensorBoard()
        board.begin(tmp_path, {"lr": 0.1}, start)
        for step in steps:
            board.write(step, {"train/loss": step + 10.0 * start})
        board.end()
    found = reading.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(one.step, one.value) for one in found.Scalars("train/loss")] == [(1, 1), (2, 2), (3, 23), (4, 24), (5, 25)]
