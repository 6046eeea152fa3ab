"""The plans in experiments/: complete, resolvable, and each row what it says it is."""

import shlex
import statistics
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest

from ness.cli.arguments import parse
from ness.cli.run import RunArguments
from ness.errors import NessError
from ness.lab.runs.experiment import Experiment, experiment, located, plans, read
from ness.lab.runs.jobs import Job, resolve
from ness.report.collect import collect
from ness.report.documents import command
from ness.report.experiment_rows import planned
from ness.report.paper import numbers

FOLDER = Path(__file__).parents[1] / "experiments"
# of `ness table`; a file that names a model instead is one of `ness study`
PLANS = [path for path in sorted(FOLDER.glob("*.toml")) if "model" not in tomllib.loads(path.read_text("utf-8"))]
RECIPE = {
    "optimizer": "sgdm",
    "lr": 0.01,
    "schedule": "cosine",
    "epochs": 50,
    "drop_last": True,
    "norm": "task",
    "mixup": 0.2,
}


def plan(name: str) -> Experiment:
    return read(FOLDER / f"{name}.toml")


def named(name: str) -> dict[str, Job]:
    return {job.title: job for job in plan(name).jobs}


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_every_row_of_every_file_resolves_and_is_a_run_of_its_own(path: Path) -> None:
    found = read(path)
    assert found.title
    assert found.seeds == ((1, 2, 3) if path.stem.startswith(("short", "text")) else (1, 2, 3, 4, 37))
    assert len({job.digest for job in found.jobs}) == len(found.jobs)


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_the_command_of_every_row_asks_for_the_same_run(path: Path) -> None:
    for job in read(path).jobs:
        words = shlex.split(command(job, (1, 2)))
        assert words[:2] == ["ness", "run"]
        request = parse(words[2:], RunArguments, None, "", "ness run")
        own = request.own
        again = resolve(own.method, own.benchmark, own.preset, request.changes, own.fast)
        assert (again.digest, again.label, own.seeds) == (job.digest, job.label, (1, 2))


@pytest.mark.parametrize("benchmark", ["cifar100", "five-datasets", "mini-imagenet"])
def test_every_number_of_the_paper_has_its_row(benchmark: str) -> None:
    asked = [one.row.paper for one in planned(plan(f"paper-{benchmark}"), [])]
    left = [one for one in numbers() if one.benchmark == benchmark and one not in asked]
    if benchmark == "mini-imagenet":  # NESS without weight decay and most of DFGP's weights are run on CIFAR-100 alone
        assert [one.when["weight_decay"] for one in left if one.method == "ness"] == [False] * 2
        assert [one.when["mix_weight"] for one in left if one.method == "dfgp"] == [0.1, 0.05, 0.001, 0.0001]
        assert {one.method for one in left} == {"ness", "dfgp"}
    else:
        assert left == []


def test_every_table_of_the_paper_is_among_them() -> None:
    found = {path.stem for path in PLANS}
    assert found >= {"paper-cifar100", "paper-five-datasets", "paper-mini-imagenet", "recipe-cifar100"}


def test_the_example_in_the_documents_is_a_plan() -> None:
    text = (FOLDER.parent / "docs/reproduction.md").read_text(encoding="utf-8")
    found = experiment(tomllib.loads(text.split("```toml\n")[1].split("```")[0]), "the example")
    assert [job.label for job in found.jobs] == ["reference", "fixed weight_decay=0.0"]


def test_what_is_said_of_the_first_task_follows_from_the_records() -> None:
    records = collect([FOLDER.parent / "results"]).records
    runs = [one for one in records if (one.method, one.benchmark) == ("ness", "cifar100")]
    runs = [one for one in runs if one.setting in ("reference", "fixed")]
    first, acc = [one.accuracy[0][0] for one in runs], [one.scores.acc for one in runs]
    slope = statistics.linear_regression(first, acc).slope
    epochs = statistics.mean(sum(one.epochs) for one in runs)
    text = " ".join((FOLDER.parent / "docs/reproduction.md").read_text(encoding="utf-8").split())
    for said in (
        f"{len(runs)} runs of NESS with SGDm and decay in `results/` its accuracy is "
        f"{statistics.mean(first):.2f} ± {statistics.stdev(first):.2f}",
        f"accuracy with ACC is {statistics.correlation(first, acc):.2f}, and a point in it is worth {slope:.2f} points",
        f"our runs take {epochs:.0f} epochs in the mean",
    ):
        assert said in text
    hard = planned(plan("ness-plus-ablation"), records)[0].row
    assert hard.acc is not None
    for document in ("docs/reproduction.md",):
        text = " ".join((FOLDER.parent / document).read_text(encoding="utf-8").split())
        assert f"ends at {hard.acc[0]:.2f} ± {hard.acc[1]:.2f}" in text


def test_one_recipe_for_all() -> None:
    rows = named("recipe-cifar100")
    learners = {"NESS", "GPM", "SGP", "TRGP", "CODE-CL", "CUBER", "WSN", "NESS+"}
    assert set(rows) == {"finetune", "frozen", "joint", *learners}
    for title, job in rows.items():
        found = {name: getattr(job.settings, name) for name in RECIPE}
        own = {
            "joint": {"mixup": 0.0},
            "WSN": {"optimizer": "adamw", "lr": 0.001},  # for its scores
            "NESS+": {"norm": "stored"},  # whose norms are a task's own by themselves
        }
        assert found == RECIPE | own.get(title, {}), title
    assert rows["NESS+"].changes == {}


def test_five_datasets_has_every_row_under_both_readings_of_the_fourth_task() -> None:
    rows = named("paper-five-datasets")
    true = [title for title in rows if not title.endswith(", MNIST twice")]
    assert list(rows) == [*true, *(f"{title}, MNIST twice" for title in true)]
    for title in true:
        mine, theirs = rows[title].as_dict(), rows[f"{title}, MNIST twice"].as_dict()
        assert {key: (mine[key], theirs[key]) for key in mine if mine[key] != theirs[key]} == {
            "fashion": ("true", "mnist-copy")
        }, title
    methods = {job.method.name for job in rows.values()}
    shown = {one.method for one in numbers() if one.benchmark == "five-datasets"}
    assert methods == shown | {"ness-plus", "wsn", "cuber", "codecl", "joint", "finetune", "frozen"}
    for reading in ("", ", MNIST twice"):  # every number of the paper stands beside a run of each reading
        jobs = [job for title, job in rows.items() if title.endswith("MNIST twice") == bool(reading)]
        asked = [one.row.paper for one in planned(Experiment("", (1,), tuple(jobs)), [])]
        assert [one for one in numbers() if one.benchmark == "five-datasets" and one not in asked] == []


@pytest.mark.parametrize("benchmark", ["cifar100", "five-datasets", "mini-imagenet"])
def test_the_rivals_of_ness_plus_are_in_every_paper_table(benchmark: str) -> None:
    found = {job.method.name for job in plan(f"paper-{benchmark}").jobs}
    assert found >= {"wsn", "cuber", "codecl", "joint", "finetune", "frozen"}


def test_the_ablation_adds_one_part_at_a_time() -> None:
    jobs = plan("ness-plus-ablation").jobs
    steps = [jobs[n].as_dict() for n in range(5)]
    differing = [{key for key in one if one[key] != other[key]} for one, other in pairwise(steps)]
    assert differing == [{"rule", "eps"}, {"norms", "norm"}, {"private"}, {"mixup"}]
    assert jobs[4].changes == {}
    others = [job.changes for job in jobs[5:]]
    assert others == [
        {"rule": "none"},
        *({"private": k} for k in (4, 8, 16, 32, 64)),
        {"norm": "batch"},
        {"basis": "own"},
        *({key: value for key, value in job.changes.items() if key != "norm"} for job in jobs[:2]),
    ]


def test_a_plan_goes_by_its_name_or_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert plans().keys() == {path.stem for path in FOLDER.glob("*.toml")}
    for name in ("paper-cifar100", "paper-cifar100.toml", "experiments/paper-cifar100.toml"):
        assert located(Path(name)).samefile(FOLDER / "paper-cifar100.toml")
    Path("paper-cifar100.toml").write_text("a file of mine")
    assert located(Path("paper-cifar100.toml")) == Path("paper-cifar100.toml")
    assert located(Path("elsewhere/paper-cifar100.toml")) == Path("elsewhere/paper-cifar100.toml")
    with pytest.raises(NessError, match=r"no plan is called 'paper-cifar', and no file. Did you mean paper-cifar100\?"):
        located(Path("paper-cifar"))
