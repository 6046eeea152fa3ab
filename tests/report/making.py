"""Records for tests of the report."""

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


def record(*args, **changes) -> Record:
    return from_result(result(*args, **changes), "a test")
