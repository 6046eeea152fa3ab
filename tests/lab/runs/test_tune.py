"""Choosing settings: the front, the choice, and that neither test data nor later tasks are ever touched."""

import dataclasses
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

import tiny
from ness import NessError
from ness.cli.main import main
from ness.lab import registry
from ness.lab.benchmarks.base import Split
from ness.lab.benchmarks.validation import first_tasks, on_validation
from ness.lab.runs.settings import Training
from ness.lab.runs.tune import Trial, as_toml, choose, combinations, pareto, parse_over, trial

TUNE = ["tune", "--benchmark", "tiny", "--method", "finetune", "--epochs", "1", "--first-tasks", "2"]


@dataclass(frozen=True)
class Poisoned(Split):
    """A split that must not be read: whoever looks at its images or labels is told off."""

    def __getattribute__(self, name: str):
        if name in ("images", "labels") and POISON["armed"]:
            raise AssertionError("looked at data that settings must not be chosen on")
        return super().__getattribute__(name)


POISON = {"armed": False}


def poisoned(request):
    """The tiny stream with test splits, and all splits of its last task, that nobody may read."""
    stream = tiny.load(request)

    def poison(task, *splits):
        held = {name: getattr(task, name) for name in splits}
        return dataclasses.replace(task, **{n: Poisoned(split.images, split.labels) for n, split in held.items()})

    *first, last = stream.tasks
    POISON["armed"] = False
    tasks = (*(poison(task, "test") for task in first), poison(last, "train", "valid", "test"))
    POISON["armed"] = True
    return dataclasses.replace(stream, tasks=tasks)


@pytest.fixture(autouse=True)
def _known(monkeypatch, tmp_path: Path):
    tiny.make_known(monkeypatch)
    benchmarks = {
        **registry.all_benchmarks(),
        "poisoned": dataclasses.replace(tiny.BENCHMARK, name="poisoned", load=poisoned),
    }
    monkeypatch.setattr(registry, "all_benchmarks", lambda: benchmarks)
    monkeypatch.chdir(tmp_path)
    yield
    POISON["armed"] = False


@pytest.mark.parametrize("method", ["finetune", "ness", "ewc", "hat", "agem"])
def test_neither_test_data_nor_later_tasks_are_touched(method: str, capsys) -> None:
    argv = ["--benchmark", "poisoned", "--method", method, "--epochs", "1"]
    assert main(["tune", *argv, "--over", "lr=0.01,0.05", "--first-tasks", "2"]) == 0
    assert "chosen" in capsys.readouterr().out
    assert main(["run", *argv]) == 1
    assert "must not be chosen on" in capsys.readouterr().err  # the poison works


def test_the_whole_of_it(capsys, tmp_path: Path) -> None:
    assert main([*TUNE, "--over", "lr=0.001,0.1", "weight-decay=0,0.001", "--seeds", "1", "2"]) == 0
    caught = capsys.readouterr()
    lines = caught.out.splitlines()
    assert lines[0].split() == ["lr", "weight_decay", "valid", "ACC", "valid", "BWT"]
    assert len(lines) == 6
    assert sum("chosen" in line for line in lines) == 1
    assert "[8/8] finetune on tiny-first-2-valid, seed 2: task 2/2" in caught.err
    assert len(list(Path("tuning").glob("*/result.json"))) == 8
    assert not Path("runs").exists()
    chosen = tomllib.loads(Path("tuning/tiny-finetune.toml").read_text())
    assert chosen["lr"] == 0.1  # the other learns nothing in an epoch
    assert [chosen[name] for name in ("benchmark", "method", "preset", "epochs")] == ["tiny", "finetune", "fixed", 1]
    assert main(["run", "--config", "tuning/tiny-finetune.toml"]) == 0
    assert "lr=0.1" in capsys.readouterr().out


def test_it_resumes(capsys, tmp_path: Path) -> None:
    argv = [*TUNE, "--over", "lr=0.01,0.05,0.1"]
    assert main(argv) == 0
    first = capsys.readouterr()
    gone = sorted(Path("tuning").glob("*/result.json"))[1]
    kept = gone.read_text()
    assert "accuracy" in kept
    gone.unlink()
    assert main(argv) == 0
    second = capsys.readouterr()
    assert second.out == first.out
    assert second.err.count("task 2/2") == 1  # only the one without a result is run
    assert gone.exists()


def test_a_setting_that_diverges_is_left_out(capsys) -> None:
    assert main([*TUNE, "--over", "lr=0.05,1e25"]) == 0
    caught = capsys.readouterr()
    assert "left out, since not every seed came to its end: lr=1e+25" in caught.err
    assert len(caught.out.splitlines()) == 3
    assert main([*TUNE, "--over", "lr=1e25"]) == 1
    assert "no setting of the grid" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ([], "--over is empty"),
        (["--over", "lr"], "expected name=value,value"),
        (["--over", "esp=1"], "no setting is called 'esp'"),
        (["--over", "lr=fast"], "expected float"),
        (["--over", "optimizer=adam"], "Did you mean adamw?"),
        (["--over", "lr=0.1", "lr=0.2"], "there twice"),
        (["--over", "lr=0.1", "--lr", "0.2"], "lr is set and in --over too"),
        (["--over", "lr=-1"], "lr is -1"),
        (["--over", "lr=0.1", "--first-tasks", "1"], "expected 2 to 3"),
        (["--over", "lr=0.1", "--first-tasks", "4"], "expected 2 to 3"),
        (["--over", "lr=0.1", "--method", "joint"], "learns all tasks at once"),
    ],
)
def test_wrong_use(more: list[str], message: str, capsys) -> None:
    assert main([*TUNE, *more]) == 2
    assert message in capsys.readouterr().err


def test_the_best_of_the_front_and_a_floor_for_bwt() -> None:
    greedy, careful, beaten = (Trial({"n": n}, *rest) for n, *rest in ((1, 90.0, -9.0), (2, 85.0, -1.0), (3, 84.0, -2)))
    assert pareto([beaten, careful, greedy]) == [greedy, careful]
    assert pareto([greedy, dataclasses.replace(greedy, values={"n": 4})])[1].values == {"n": 4}  # a draw beats nobody
    assert choose([beaten, careful, greedy]) is greedy
    assert choose([beaten, careful, greedy], least_bwt=-3.0) is careful
    with pytest.raises(NessError, match=r"no setting reaches a BWT of 0; the best is -1\.00"):
        choose([beaten, careful, greedy], least_bwt=0.0)


def test_trials_are_means_over_seeds() -> None:
    found = trial({}, [{"acc": 80.0, "bwt": -1.0}, {"acc": 90.0, "bwt": -3.0}])
    assert (found.acc, found.bwt) == (85.0, -2.0)
    with pytest.raises(NessError, match="no BWT"):
        trial({}, [{"acc": 80.0, "bwt": None}])


def test_values_have_the_settings_types_and_survive_toml() -> None:
    over = parse_over(["epochs=1,2", "drop-last=true,false", "norm=stored", "lr=1,1e-5"], Training)
    assert over == {"epochs": (1, 2), "drop_last": (True, False), "norm": ("stored",), "lr": (1.0, 1e-5)}
    assert len(combinations(over)) == 8
    for values in combinations(over):
        assert tomllib.loads(as_toml(values, ["ε₁"])) == values


def test_a_stream_is_cut_to_its_beginning_with_validation_in_the_place_of_test() -> None:
    from ness.lab.benchmarks.base import Request

    stream = on_validation(tiny.BENCHMARK, 2).load(Request(1))
    assert [task.name for task in stream.tasks] == ["task 0", "task 1"]
    assert all(task.test is task.valid for task in stream.tasks)
    with pytest.raises(NessError, match="expected 2 to 3"):
        first_tasks(tiny.load(Request(1)), 4)
