"""What is built has all that is needed: plans in the wheel, tests and documents in the sdist."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import ness

STALE = "is stale: its Python is gone, or the folder was moved; it is made anew"
ROOT = Path(__file__).parents[1]
ROOT_FILES = ("pyproject.toml", "setup.py", "MANIFEST.in", "Makefile", "constraints.txt", "mkdocs.yml")
ROOT_DOCUMENTS = ("README.md", "CHANGELOG.md", "LICENSE", "CITATION.cff", "CONTRIBUTING.md", "SECURITY.md")
FOLDERS = (".ci", "docs", "examples", "experiments", "src", "tests", "benchmarks")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with wheel and sdist, built from a copy without records."""
    folder = tmp_path_factory.mktemp("package")
    for name in (*ROOT_FILES, *ROOT_DOCUMENTS):
        shutil.copy(ROOT / name, folder / name)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    (folder / "results" / "one").mkdir(parents=True)
    (folder / "results" / "one" / "result.json").write_text("{}")
    code = "import setuptools.build_meta as b; b.build_wheel('out'); b.build_sdist('out')"
    (folder / "out").mkdir()
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "out"


def test_the_wheel_has_the_plans_and_the_pages_templates(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src").rglob("*.py")}
    plans = {f"ness/experiments/{path.name}" for path in (ROOT / "experiments").glob("*.toml")}
    assert modules | plans | {"ness/py.typed", "ness/report/paper.toml", "ness/report/templates/page.html"} <= names


def test_the_sdist_has_what_tests_and_documents_need(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    assert {*ROOT_FILES, *ROOT_DOCUMENTS, ".ci/run", "results/one/result.json"} <= names
    for folder in ("docs", "examples", "experiments", "tests", "benchmarks"):
        own = {path.relative_to(ROOT).as_posix() for path in (ROOT / folder).rglob("*") if path.is_file()}
        assert {name for name in own if "__pycache__" not in name and "egg-info" not in name} <= names


def test_plans_of_a_wheel_go_by_name(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r})\n"
        "from pathlib import Path; from ness.lab.runs.experiment import located, plans, read\n"
        "print(len(plans()), located(Path('ness-plus')), len(read(Path('experiments/ness-plus.toml')).jobs))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    count, place, rows = done.stdout.split()
    assert int(count) == len(list((ROOT / "experiments").glob("*.toml")))
    assert place == str(tmp_path / "site" / "ness" / "experiments" / "ness-plus.toml")
    assert int(rows) == 4


@pytest.fixture
def working_copy(tmp_path: Path) -> Path:
    """A folder with a Makefile, a package, and an environment in which that is installed."""
    folder = tmp_path / "copy"
    (folder / "src" / "ness").mkdir(parents=True)
    (folder / "src" / "ness" / "__init__.py").touch()
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "setup.py"):
        shutil.copy(ROOT / name, folder / name)
    venv.create(folder / ".venv", symlinks=True)
    (packages,) = folder.glob(".venv/lib/python*/site-packages")
    (packages / "ness.pth").write_text(str(folder / "src"))
    (folder / ".venv" / ".ready").touch()
    return folder


def is_stale(folder: Path) -> bool:
    done = subprocess.run(["make", "-n", "types"], cwd=folder, capture_output=True, text=True, check=True)
    return 'if [ -n "stale" ]' in done.stdout and STALE in done.stdout


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_a_stale_environment_is_noticed(working_copy: Path) -> None:
    assert not is_stale(working_copy)
    moved = working_copy.rename(working_copy.with_name("moved"))
    assert is_stale(moved)
    moved.rename(working_copy)
    assert not is_stale(working_copy)
    python = working_copy / ".venv" / "bin" / "python"
    python.unlink()
    python.symlink_to("/nowhere/python")
    assert is_stale(working_copy)


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_an_environment_that_make_did_not_make_is_left_alone(working_copy: Path) -> None:
    (working_copy / ".venv" / ".ready").unlink()
    (working_copy / "src" / "ness" / "__init__.py").unlink()
    assert not is_stale(working_copy)


def test_one_version_everywhere() -> None:
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"\nversion: {ness.__version__}\n" in citation
    assert f"\n## {ness.__version__}\n" in changelog
