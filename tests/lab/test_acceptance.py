"""The embedded benchmark does what the README says: fine-tuning forgets, NESS does not and beats frozen features."""

import time
from pathlib import Path
from statistics import mean

import pytest

from ness.lab.runs.jobs import resolve
from ness.lab.runs.run import Options, run

SEEDS = (1, 2, 3, 4, 5)


@pytest.mark.slow
def test_digits_over_five_seeds(tmp_path: Path) -> None:
    acc, bwt = {}, {}
    for method in ("finetune", "frozen", "ness"):
        began = time.monotonic()
        results = [run(resolve(method, "digits"), seed, Options(tmp_path)).result for seed in SEEDS]
        acc[method], bwt[method] = mean(r["acc"] for r in results), mean(r["bwt"] for r in results)
        if method == "ness":
            assert time.monotonic() - began < 15 * len(SEEDS)
    assert bwt["finetune"] < -15
    assert bwt["ness"] > -3
    assert acc["ness"] >= acc["finetune"] + 15
    assert acc["ness"] >= acc["frozen"] + 3
