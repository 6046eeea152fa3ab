"""How long the report's page takes, and how large it is: 500 runs of 20 tasks, and 100 settings of 5 seeds each.

Reading the run folders is counted; the promise is 20 s and 5 MB.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from pathlib import Path

from ness.report.collect import collect
from ness.report.page import page

TASKS, LAYERS = 20, 20


def result(setting: int, seed: int, draw: random.Random) -> dict[str, object]:
    loss = setting % 7 * 0.4
    accuracy = [
        [90 - 3 * (i % 4) - loss * (t - i) + draw.gauss(0, 1.5) if i <= t else None for i in range(TASKS)]
        for t in range(TASKS)
    ]
    row = {"fan_in": 576, "rank": 400, "bound": 9.0, "rms_bound": 2.0, "rms_drift": 0.5, "relative_drift": 0.01}
    certificate = [{"name": f"layer{layer}.conv", **row} for layer in range(LAYERS)]
    return {
        "benchmark": "made up", "method": f"method{setting % 12}", "setting": f"fixed lr={setting}",
        "digest": f"{setting:010x}", "preset": "fixed", "seed": seed, "tasks": [f"task {i + 1}" for i in range(TASKS)],
        "accuracy": accuracy, "total_seconds": 30.0, "peak_memory": None, "version": "0", "epochs": [9] * TASKS,
        "seconds": [1.5] * TASKS, "notes": [{}] + [{"certificate": certificate}] * (TASKS - 1),
    }  # fmt: skip


def main() -> None:
    draw = random.Random(1)
    for settings, seeds in ((100, 5), (500, 1)):
        with tempfile.TemporaryDirectory() as name:
            for setting in range(settings):
                for seed in range(seeds):
                    folder = Path(name) / f"{setting}-{seed}"
                    folder.mkdir()
                    (folder / "result.json").write_text(json.dumps(result(setting, seed, draw)))
            began = time.perf_counter()
            found = collect([Path(name)])
            read = time.perf_counter() - began
            size = len(page(found).encode())
            total = time.perf_counter() - began
        what = f"{settings} settings × {seeds} seeds, {TASKS} tasks, {LAYERS} layers"
        print(f"{what}: {size / 1e6:.2f} MB in {total:.1f} s, of which reading {read:.1f} s")


if __name__ == "__main__":
    main()
