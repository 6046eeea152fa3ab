"""What a table's runs came to, and which processes are there, for tests of whoever carries runs out."""

import hashlib
import json
import time
from pathlib import Path


def facts(out: Path) -> dict[str, tuple[object, ...]]:
    """What must not depend on who carries a run out, by run: accuracies, epochs and the hash of the final weights."""
    found = {}
    for path in sorted(out.glob("*/result.json")):
        result = json.loads(path.read_text())
        weights = hashlib.sha256((path.parent / "model.safetensors").read_bytes()).hexdigest()
        assert weights == result["weights"]["sha256"]
        found[path.parent.name] = (result["accuracy"], result["epochs"], weights, result["notes"])
    return found


def children(process: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def is_alive(process: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except FileNotFoundError:
        return False


def gone_soon(processes: list[int]) -> bool:
    until = time.monotonic() + 60
    while any(map(is_alive, processes)) and time.monotonic() < until:
        time.sleep(0.05)
    return not any(map(is_alive, processes))
