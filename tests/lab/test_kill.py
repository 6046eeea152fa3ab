"""Real processes killed with SIGKILL at random moments: started again, they end bit-equal to an unbroken run."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ness

pytestmark = pytest.mark.kill
HERE = {**os.environ, "PYTHONPATH": str(Path(ness.__file__).parents[1])}


def command(method: str, out: Path) -> list[str]:
    settings = ["--method", method, "--benchmark", "digits", "--epochs", "6", "--save-every", "0", "--out", str(out)]
    return [sys.executable, "-m", "ness", "run", *settings]


def finished(out: Path) -> list[Path]:
    return [path.parent for path in out.glob("*/result.json")]


def killed_after(argv: list[str], out: Path, seconds: float) -> bool:
    """Starts the run and kills it so long after it wrote its first event; False if it was done before that."""
    seen = sum(path.stat().st_size for path in out.glob("*/events.jsonl"))
    process = subprocess.Popen(argv, env=HERE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    while process.poll() is None and sum(path.stat().st_size for path in out.glob("*/events.jsonl")) == seen:
        time.sleep(0.005)
    time.sleep(seconds)
    if process.poll() is None:
        process.send_signal(signal.SIGKILL)
    _, errors = process.communicate()
    assert process.returncode in (0, -signal.SIGKILL), errors.decode()
    return process.returncode != 0


@pytest.mark.parametrize("method", ["finetune", "joint", "ness", "ness-plus"])
def test_killed_at_random_moments(method: str, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    subprocess.run(command(method, whole), env=HERE, check=True, capture_output=True)
    lasted = json.loads((finished(whole)[0] / "result.json").read_text())["total_seconds"]
    draw, kills = random.Random(method), 0
    for _ in range(40):
        # beginning a task costs a new process a quarter of the whole: its first optimizer is imported
        kills += killed_after(command(method, cut), cut, draw.uniform(0, lasted / 2))
        if finished(cut):
            break
    (one,), (other,) = finished(whole), finished(cut)
    assert kills >= 3
    mine, theirs = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    results = [json.loads((folder / "result.json").read_text()) for folder in (one, other)]
    assert results[0]["accuracy"] == results[1]["accuracy"]
    assert not list(other.glob(".*.tmp"))
