"""Somebody else's method, benchmark and network: distributions of their own, run like ours."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
METHODS = """
import sys
from pathlib import Path
from ness.cli.main import main
from ness.lab.runs import checkpoint
from ness.lab.runs.jobs import resolve
from ness.lab.runs.run import Options, run

def cut(event):
    if event.kind == "learnt" and event.facts["task"] == 1:
        raise KeyboardInterrupt

assert main(["list", "methods"]) == 0
run_it = ["--benchmark", "digits", "--epochs", "1", "--quiet"]
assert main(["run", "--method", "anchor", "--pull", "0.3", *run_it, "--out", "runs"]) == 0
job = resolve("anchor", "digits", changes={"epochs": 1, "pull": 0.3})
try:
    run(job, 1, Options(Path("cut"), save_every=0.0), cut)
except KeyboardInterrupt:
    pass
assert len(checkpoint.paths(next(Path("cut").iterdir()))) > 0
assert run(job, 1, Options(Path("cut"))).how == "resumed"
assert main(["run", "--method", "anchor", "--pull", "-1", *run_it]) == 2
assert main(["table", "--methods", "anchor", "finetune", *run_it, "--out", "table"]) == 0
assert main(["tune", "--method", "anchor", "--over", "pull=0.1,1", "--first-tasks", "2", *run_it]) == 0
assert main(["report", "table"]) == 0
"""
BENCHMARKS = """
from ness.cli.main import main

assert main(["list", "benchmarks"]) == 0
assert main(["list", "networks"]) == 0
short = ["--epochs", "1", "--quiet"]
assert main(["run", "--benchmark", "symbols", "--method", "finetune", *short]) == 0
theirs = ["--benchmark", "digits", "--network", "symbols-net"]
assert main(["table", *theirs, "--methods", "finetune", "ness", *short]) == 0
assert main(["report", "runs"]) == 0
"""


def python(folder: Path, *arguments: str, path: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(path), str(ROOT / "src")])}
    environment |= {"OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """A folder that holds the example as pip installs it, from a copy, without the network."""
    folder = tmp_path_factory.mktemp("own")
    shutil.copytree(ROOT / "examples" / "own_method", folder / "source")
    pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-build-isolation"]
    done = python(folder, *pip, "--no-index", "--target", "site", "./source", path=folder)
    assert done.returncode == 0, done.stderr
    return folder / "site"


def test_it_is_listed_runs_resumes_tunes_and_reports_like_ours(installed: Path, tmp_path: Path) -> None:
    done = python(tmp_path, "-c", METHODS, path=installed)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^anchor +A pull to the weights the last task left +one number a parameter", done.stdout, re.M)
    (whole,) = tmp_path.glob("runs/digits-anchor-*/result.json")
    (later,) = tmp_path.glob("cut/digits-anchor-*/result.json")
    found, resumed = (json.loads(path.read_text()) for path in (whole, later))
    assert found["method"] == "anchor"
    assert found["settings"]["pull"] == 0.3
    assert found["settings"]["optimizer"] == "sgd"  # its own preset
    assert [sorted(note) for note in found["notes"]] == [[], *[["moved"]] * 4]
    assert resumed["accuracy"] == found["accuracy"]
    weights = [path.with_name("model.safetensors").read_bytes() for path in (whole, later)]
    assert weights[0] == weights[1]
    assert "pull is -1" in done.stderr
    assert "anchor" in (tmp_path / "table" / "report" / "table.md").read_text()
    assert (tmp_path / "tuning" / "digits-anchor.toml").exists()


def test_the_test_in_the_documentation_passes(installed: Path, tmp_path: Path) -> None:
    text = (ROOT / "docs" / "your-own-method.md").read_text(encoding="utf-8")
    (block,) = [block for block in re.findall(r"```python\n(.*?)```", text, re.S) if "def test_" in block]
    (tmp_path / "test_anchor.py").write_text(block)
    module = [str(installed / "ness_anchor.py"), "--doctest-modules"]
    done = python(tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_anchor.py", *module, path=installed)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout


def test_the_settings_in_the_documentation_are_the_examples() -> None:
    text = (ROOT / "docs" / "your-own-method.md").read_text(encoding="utf-8")
    module = (ROOT / "examples" / "own_method" / "ness_anchor.py").read_text(encoding="utf-8")
    assert re.search(r"    pull: float = .*\n", text)[0] in module


def test_a_benchmark_and_a_network_of_ones_own_are_known_by_name(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples" / "own_benchmark", tmp_path / "source")
    pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-build-isolation"]
    done = python(tmp_path, *pip, "--no-index", "--target", "site", "./source", path=tmp_path)
    assert done.returncode == 0, done.stderr
    done = python(tmp_path, "-c", BENCHMARKS, path=tmp_path / "site")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^symbols +Three tasks of eight noisy symbols +3 +symbols-net", done.stdout, re.M)
    assert re.search(r"^symbols-net +One convolution and one linear layer +symbols", done.stdout, re.M)
    settings = {
        path.parent.name.rsplit("-", 2)[0]: json.loads(path.read_text())["settings"]["network"]
        for path in tmp_path.glob("runs/*/result.json")
    }
    assert settings == {"symbols-finetune": "", "digits-finetune": "symbols-net", "digits-ness": "symbols-net"}
    assert "network=symbols-net" in (tmp_path / "runs" / "report" / "table.csv").read_text()
