"""What `--jobs` and `--ray` cost, and how near a table on many devices comes to the shortest time there is.

Measured: a table of short runs on 1, 2 and 4 workers against as many plain processes that share the same runs, as a
ratio of wall times and as CPU milliseconds per run beyond those of a plain process, starting up not counted (the
difference of a long and a short table). Ray, where it is installed, on a cluster of its own.

Simulated: 8 nodes of 8 devices. Runs are sleeps of the lengths in results/, scaled; who is next is decided by the code
that decides it for `--jobs` and `--ray`. Nothing of Ray itself is in it.

Usage: python benchmarks/scaling.py [measured | simulated]
"""

from __future__ import annotations

import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import threading
import time
from importlib.util import find_spec
from pathlib import Path

from ness.lab.runs.queue import Lengths, RunRequest

FEW, MANY = 4, 12  # runs of the short and the long table
DEVICES, IDEAL = 64, 6.0  # seconds that the simulated table takes at best


def table(out: str, seeds: list[int], *flags: str) -> list[str]:
    words = [sys.executable, "-m", "ness", "table", "--benchmark", "digits", "--methods", "frozen", "--epochs", "2"]
    return [*words, "--threads", "1", "--out", out, "--quiet", "--seeds", *map(str, seeds), *flags]


def timed(commands: list[list[str]]) -> tuple[float, float]:
    """Wall and CPU seconds of commands side by side, their own children included."""
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    running = [subprocess.Popen(one, stdout=subprocess.DEVNULL) for one in commands]
    if any(one.wait() for one in running):
        raise SystemExit(f"a command failed: {commands[0]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - began, spent


def plain(folder: Path, runs: int, workers: int) -> list[list[str]]:
    """As many plain processes, each with its share of the seeds, in folders of their own."""
    seeds = list(range(1, runs + 1))
    return [table(str(folder / f"part{part}"), seeds[part::workers]) for part in range(workers)]


def measured() -> None:
    ways = [("plain", 1, ()), *[(f"--jobs {n}", n, ("--jobs", str(n))) for n in (1, 2, 4)]]
    if find_spec("ray"):
        ways.append(("--ray", os.cpu_count() or 1, ("--ray",)))
    alone = 0.0  # CPU seconds per run of a plain process
    print(f"{os.cpu_count()} cores; load at the beginning {os.getloadavg()[0]:.1f}; runs: frozen on digits, 2 epochs")
    print(f"{'':10} {'s wall':>8} {'plain':>8} {'efficiency':>11} {'CPU ms per run':>15} {'overhead ms':>12}")
    with tempfile.TemporaryDirectory() as name:
        for way, workers, flags in ways:
            found = {}
            for runs in (FEW, MANY):
                place = Path(name) / f"{way} {runs}"
                command = [table(str(place), list(range(1, runs + 1)), *flags)]
                found[runs] = timed(command), timed(plain(place / "plain", runs, workers)) if flags else (0.0, 0.0)
            (wall, spent), (wall_plain, _) = found[MANY]
            each = (spent - found[FEW][0][1]) / (MANY - FEW)
            alone = each if not flags else alone
            ratio = f"{wall_plain:8.1f} {wall_plain / wall:11.2f}" if flags else f"{'':8} {'':11}"
            print(f"{way:10} {wall:8.1f} {ratio} {1000 * each:15.0f} {1000 * (each - alone):12.0f}", flush=True)


def records() -> list[tuple[RunRequest, float, float]]:
    """Every recorded run: what it was, its units (tasks times epochs at most), and its seconds."""
    found = []
    for path in sorted((Path(__file__).parents[1] / "results").glob("*/result.json")):
        one = json.loads(path.read_text())
        epochs, tasks = one["settings"]["epochs"], len(one["tasks"])
        asked = RunRequest(
            path.parent.name, one["benchmark"], one["method"], one["setting"], one["seed"], tasks, epochs
        )
        found.append((asked, float(tasks * epochs), one["total_seconds"]))
    return found


def makespan(work: list[tuple[RunRequest, float, float]], lengths: Lengths | None, scale: float) -> float:
    """Seconds until all is done on `DEVICES` threads that sleep; without lengths in the order given."""
    waiting, lock, began = list(work), threading.Lock(), time.perf_counter()

    def device() -> None:
        while True:
            with lock:
                if not waiting:
                    return
                longest = waiting[0] if lengths is None else max(waiting, key=lambda one: lengths.expected(*one[:2]))
                waiting.remove(longest)
            time.sleep(longest[2] * scale)
            if lengths is not None:
                with lock:
                    lengths.add(*longest)

    threads = [threading.Thread(target=device) for _ in range(DEVICES)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    return (time.perf_counter() - began) / scale


def simulated() -> None:
    work = records()
    for copies in (1, 3):
        runs = [one for one in work for _ in range(copies)]
        random.Random(1).shuffle(runs)
        total, longest = sum(one[2] for one in runs), max(one[2] for one in runs)
        bound = max(total / DEVICES, longest)
        print(f"{len(runs)} runs of {total:.0f} s on {DEVICES} devices: no order takes less than {bound:.0f} s")
        known, nothing = Lengths(), Lengths()
        for one in work:
            known.add(*one)
        ways = {"in a random order": None, "longest first, nothing recorded": nothing, "longest first, recorded": known}
        for way, lengths in ways.items():
            took = makespan(runs, lengths, IDEAL / bound)
            print(f"  {way:32} {took:6.0f} s, {took / bound:.3f} of the bound", flush=True)


if __name__ == "__main__":
    asked = sys.argv[1:] or ["simulated", "measured"]
    for part in asked:
        {"measured": measured, "simulated": simulated}[part]()
