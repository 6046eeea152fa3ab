"""Records for tests of the report."""

import json
import random
from pathlib import Path

from ness.lab.runs.jobs import Job
from ness.report.records import Record, from_result


def result(method: str = "finetune", seed: int = 1, accuracy=None, **changes) -> dict:
    accuracy = [[90.0, None], [80.0 - seed, 70.0]] if accuracy is None else accuracy
    return {
        "benchmark": "digits",
        "method": method,
        "setting": "fixed",
        "digest": f"d-{method}",
        "preset": "fixed",
        "seed": seed,
        "tasks": ["a", "b"],
        "accuracy": accuracy,
        "total_seconds": 2.0 * seed,
        "peak_memory": 1000 * seed,
        "version": "0",
        **changes,
    }


CERTIFICATE = [
    {"name": "conv", "fan_in": 9, "rank": 0, "bound": 0.0, "rms_bound": 0.0, "rms_drift": 0.0, "relative_drift": 0.0},
    {"name": "fc", "fan_in": 64, "rank": 40, "bound": 9.0, "rms_bound": 2.0, "rms_drift": 0.5, "relative_drift": 0.01},
]


def with_certificate(seed: int = 1, **changes) -> dict:
    notes = [{}, {"certificate": [{**row, "rms_drift": row["rms_drift"] * seed} for row in CERTIFICATE]}]
    return result("ness", seed, notes=notes, seconds=[1.0, 2.0 * seed], epochs=[3, 4], **changes)


def keeping_run(job: Job, seed: int, acc: float, kept: int) -> Record:
    """A run of NESS+ on AlexNet that ends at `acc`, with a task that keeps so many numbers."""
    fan_ins = {"conv1.conv": 48, "conv2.conv": 576, "conv3.conv": 512, "fc1.linear": 1024, "fc2.linear": 2048}
    certificate = [{"name": name, "fan_in": fan_in} for name, fan_in in fan_ins.items()]
    notes = [{}, {"certificate": certificate, "kept": kept}]
    changes = {"benchmark": "cifar100", "digest": job.digest, "setting": job.label, "notes": notes}
    return record(job.method.name, seed, [[acc, None], [acc, acc]], **changes)


def large(settings: int, seeds: int, tasks: int, layers: int = 0) -> list[Record]:
    """Made-up runs, as many as asked for, of many tasks."""
    draw = random.Random(1)
    names = [f"task {task + 1}" for task in range(tasks)]
    found = []
    for setting in range(settings):
        for seed in range(seeds):
            loss = (setting % 7) * 0.4
            accuracy = [
                [90 - 3 * (i % 4) - loss * (t - i) + draw.gauss(0, 1.5) if i <= t else None for i in range(tasks)]
                for t in range(tasks)
            ]
            certificate = [
                {**CERTIFICATE[1], "name": f"layer{layer}.conv", "rms_drift": 0.1} for layer in range(layers)
            ]
            changes = {"tasks": names, "digest": f"{setting:010x}", "setting": f"fixed lr={setting}"}
            changes |= {
                "seconds": [1.5] * tasks,
                "epochs": [9] * tasks,
                "notes": [{}] + [{"certificate": certificate}] * (tasks - 1),
            }
            found.append(record(f"method{setting % 12}", seed, accuracy, **changes))
    return found


def write(folder: Path, found: dict) -> Path:
    """A finished run's folder."""
    folder.mkdir(parents=True)
    (folder / "result.json").write_text(json.dumps(found))
    return folder


def record(*args, **changes) -> Record:
    return from_result(result(*args, **changes), "a test")
