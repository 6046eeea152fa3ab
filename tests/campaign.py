"""Campaigns of faults against everything that is persisted; prints what was tried and what was found.

    python tests/campaign.py all            every campaign, as `make reliability` runs it
    python tests/campaign.py kills 200      SIGKILL at counted calls, all methods in turn

A violated promise is an AssertionError. Processes are forked from one that never trains, since autograd does not
survive a fork.
"""

import argparse
import contextlib
import errno
import functools
import hashlib
import http.server
import io
import logging
import random
import shutil
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file

import ness
import tiny
from faults import Disk, fork, watched
from ness import _files, _sealed
from ness.cli.main import main as command_line
from ness.lab import registry
from ness.lab.datasets.catalogue import Remote
from ness.lab.datasets.download import fetch
from ness.lab.runs import checkpoint
from ness.lab.runs.jobs import Job
from ness.lab.runs.run import Options, folder_of, run
from ness.lab.runs.run_folder import RunFolder
from ness.report import write as report
from ness.report.collect import collect

CODES = (errno.ENOSPC, errno.EIO, errno.EACCES)
Act = Callable[[Path], None]
Check = Callable[[Path, str | None], None]


class Known:
    """Lets `run` and the command line find the tiny benchmark and its networks, in this process."""

    def __enter__(self) -> None:
        self.before = registry.all_networks, registry.all_benchmarks
        networks = {**registry.all_networks(), **{one.name: one for one in (tiny.NETWORK, tiny.WITHOUT_BIAS)}}
        benchmarks = {**registry.all_benchmarks(), "tiny": tiny.BENCHMARK}
        registry.all_networks, registry.all_benchmarks = lambda: networks, lambda: benchmarks

    def __exit__(self, *_: object) -> None:
        registry.all_networks, registry.all_benchmarks = self.before


def job_of(method: str, epochs: int = 1) -> Job:
    """The method on the tiny benchmark, on the network it can work with."""
    job = tiny.job(method, epochs=epochs)
    try:
        tiny.trainer(method, epochs=epochs)
    except ness.NessError:
        job = replace(job, benchmark=replace(tiny.BENCHMARK, network=tiny.WITHOUT_BIAS.name))
    return job


def train(job: Job, base: Path) -> None:
    """The run, from wherever it stands to its end, with a checkpoint at every event."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run(job, 1, Options(out=base, save_every=0.0, threads=1))


def check_same_end(job: Job, base: Path, whole: Path) -> None:
    """Weights and accuracies bit for bit, and nothing that lies about."""
    mine, theirs = (load_file(folder_of(job, 1, place) / "model.safetensors") for place in (base, whole))
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine), f"{job.method.name}: other weights"
    results = [_sealed.read_json(folder_of(job, 1, place) / "result.json") for place in (base, whole)]
    assert results[0]["accuracy"] == results[1]["accuracy"], f"{job.method.name}: other accuracies"
    left = {path.name for path in folder_of(job, 1, base).iterdir()}
    assert left <= {"config.json", "events.jsonl", "result.json", "model.safetensors", "lock", "traceback.txt"}, left


# Faults: a call fails, and afterwards the state is the old one or the new one


def every_fault(
    make: Act, act: Act, check: Check, base: Path, stride: int = 1, codes: tuple[int, ...] = CODES
) -> Counter[str]:
    """Lets each `stride`-th call of `act` fail, once or from then on; figures by name of the call."""
    figures: Counter[str] = Counter()
    make(base / "count")
    with watched(base / "count") as seen:
        act(base / "count")
    for number, at in enumerate(range(1, seen.count + 1, stride)):
        for code in codes if stride == 1 else [codes[number % len(codes)]]:
            folder, lasting = base / f"{at}-{code}", (at + code) % 2 == 0
            make(folder)
            said = None
            with watched(folder, at, code, lasting=lasting, torn=True) as found:
                try:
                    act(folder)
                except ness.NessError as error:
                    said = str(error)
                    assert "\n" not in said, said
            name = found.names[at - 1] if len(found.names) >= at else "not reached"
            check(folder, said)
            figures[name] += 1
            figures["said"] += said is not None
            shutil.rmtree(folder)
    return figures


def nothing(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)


def faults_of_a_run(base: Path, stride: int) -> Counter[str]:
    job = job_of("finetune")
    train(job, base / "whole")

    def check(folder: Path, said: str | None) -> None:
        assert said is None or "Errno" not in said, said
        train(job, folder)
        check_same_end(job, folder, base / "whole")

    return every_fault(nothing, functools.partial(train, job), check, base, stride)


def quietly(argv: list[str]) -> tuple[int, str, str]:
    """Exit code, output and errors of a command."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = command_line(argv)
    return code, out.getvalue(), err.getvalue()


def faults_of_a_table(base: Path, stride: int) -> Counter[str]:
    argv = "table --benchmark tiny --methods finetune frozen --epochs 1 --save-every 0 --format csv --quiet --out"

    def table(folder: Path) -> None:
        code, _, said = quietly([*argv.split(), str(folder / "runs")])
        assert code in (0, 1)
        assert "Traceback" not in said
        assert code == 0 or said.count("\n") >= 1
        if code:
            raise ness.NessError(" / ".join(said.splitlines()))

    def lines(folder: Path) -> list[list[str]]:
        code, out, _ = quietly([*argv.split(), str(folder / "runs")])
        assert code == 0
        return [line.split(",")[1:8] for line in out.splitlines()]

    nothing(base / "whole")
    whole = lines(base / "whole")
    return every_fault(nothing, table, lambda folder, _: _equal(lines(folder), whole), base, stride)


def _equal(one: object, other: object) -> None:
    assert one == other


def small_guard(rows: int) -> ness.NullSpace:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 1, bias=False))
    guard = ness.NullSpace(model, rule=ness.Rank(1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        guard.observe(torch.ones(rows, 2))
    return guard


def faults_of_a_guard(base: Path, stride: int) -> Counter[str]:
    old, new = small_guard(5), small_guard(6)

    def make(folder: Path) -> None:
        folder.mkdir(parents=True)
        old.save(folder / "guard")

    def check(folder: Path, said: str | None) -> None:
        expected = (6,) if said is None else (5, 6)
        assert ness.NullSpace.load(folder / "guard", old.model).grams["0"].count in expected

    return every_fault(make, lambda folder: new.save(folder / "guard"), check, base, stride)


def faults_of_statistics(base: Path, stride: int) -> Counter[str]:
    old, new = ness.Gram.of(torch.ones(3, 2)), ness.Gram.of(torch.ones(4, 2))

    def make(folder: Path) -> None:
        folder.mkdir(parents=True)
        old.save(folder / "gram")

    def check(folder: Path, said: str | None) -> None:
        assert ness.Gram.load(folder / "gram").count == (4 if said is None else 3)

    return every_fault(make, lambda folder: new.save(folder / "gram"), check, base, stride)


def faults_of_a_report(base: Path, stride: int) -> Counter[str]:
    train(job_of("finetune"), base / "runs")
    found = collect([base / "runs"])
    reference = base / "reference"
    for _ in report.tables(found, reference):
        pass

    def act(folder: Path) -> None:
        for _ in report.tables(found, folder / "report"):
            pass

    def check(folder: Path, said: str | None) -> None:
        names = [path.relative_to(folder / "report") for path in (folder / "report").rglob("*.*") if path.is_file()]
        ours = [name for name in names if not name.name.startswith(".ness-")]
        assert all((folder / "report" / name).read_bytes() == (reference / name).read_bytes() for name in ours)
        act(folder)
        whole = {path.relative_to(reference) for path in reference.rglob("*.*")}
        assert {path.relative_to(folder / "report") for path in (folder / "report").rglob("*.*")} == whole

    return every_fault(nothing, act, check, base, stride)


@contextlib.contextmanager
def served(content: bytes) -> Iterator[str]:
    """The address of a file on a local server."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            start = int((self.headers.get("Range") or "bytes=0-")[6:].rstrip("-"))
            self.send_response(206 if start else 200)
            if start:
                self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
            self.send_header("Content-Length", str(len(content) - start))
            self.end_headers()
            with contextlib.suppress(OSError):
                self.wfile.write(content[start:])

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{running.server_address[1]}/data.bin"
        running.shutdown()


def faults_of_a_download(base: Path, stride: int) -> Counter[str]:
    content = bytes(range(256)) * 2000
    logging.getLogger("ness").setLevel(logging.ERROR)
    with served(content) as url:
        remote = Remote("data.bin", (url,), len(content), hashlib.md5(content).hexdigest())

        def act(folder: Path) -> None:
            fetch(remote, folder / "set", "x")

        def check(folder: Path, said: str | None) -> None:
            target = folder / "set" / "data.bin"
            assert said is not None or target.exists()
            assert not target.exists() or target.read_bytes() == content
            act(folder)
            assert target.read_bytes() == content

        return every_fault(nothing, act, check, base, stride)


FAULTS = {
    "run": faults_of_a_run,
    "table": faults_of_a_table,
    "guard": faults_of_a_guard,
    "statistics": faults_of_statistics,
    "report": faults_of_a_report,
    "download": faults_of_a_download,
}


# Power loss


def power_losses(
    make: Act, act: Act, check: Callable[[Path, bool], None], base: Path, moments: int, draws: int, seed: int = 0
) -> int:
    """After each of some steps of `act` the power fails, `draws` times in different ways; how often in all.

    `check` gets a folder as it may be afterwards, and whether `act` had come to its end.
    """
    make(base / "live")
    disk = Disk.holding(base / "live")
    with watched(base / "live") as seen:
        act(base / "live")
    draw, number = random.Random(seed), 0
    chosen = set(range(len(seen.steps) + 1))
    if len(chosen) > moments:
        chosen = {*draw.sample(sorted(chosen), moments - 1), len(seen.steps)}
    for at in range(len(seen.steps) + 1):
        for _ in range(draws if at in chosen else 0):
            after = base / f"after-{number}"
            disk.after_power_loss(draw, after)
            check(after, at == len(seen.steps))
            shutil.rmtree(after)
            number += 1
        if at < len(seen.steps):
            disk.do(seen.steps[at])
    return number


def power_of_json(base: Path, moments: int) -> int:
    def make(folder: Path) -> None:
        folder.mkdir(parents=True)
        _sealed.write_json(folder / "x.json", {"state": "old"})

    def check(folder: Path, done: bool) -> None:
        state = _sealed.read_json(folder / "x.json")["state"]
        assert state == "new" if done else state in ("old", "new")

    return power_losses(
        make, lambda f: _sealed.write_json(f / "x.json", {"state": "new"}) and None, check, base, moments, 20
    )


def power_of_a_guard(base: Path, moments: int) -> int:
    old, new = small_guard(5), small_guard(6)

    def make(folder: Path) -> None:
        folder.mkdir(parents=True)
        old.save(folder / "guard")

    def check(folder: Path, done: bool) -> None:
        count = ness.NullSpace.load(folder / "guard", old.model).grams["0"].count
        assert count == 6 if done else count in (5, 6)

    return power_losses(make, lambda folder: new.save(folder / "guard"), check, base, moments, 20)


def power_of_checkpoints(base: Path, moments: int) -> int:
    def act(folder: Path) -> None:
        for number in range(1, 5):
            checkpoint.write(folder / "run", {"x": torch.full((9,), float(number))}, {"number": number})
            _files.append_line(folder / "written", str(number).encode())

    def check(folder: Path, done: bool) -> None:
        written = _files.read_bytes(folder / "written").split() if (folder / "written").exists() else []
        sure = max((int(line) for line in written if line.isdigit()), default=0)
        found = RunFolder(folder / "run").last_good() if sure else None
        assert (found[2]["number"] if found else 0) >= sure, "a checkpoint that was written is lost"

    return power_losses(nothing, act, check, base, moments, 20)


def power_of_a_run(base: Path, moments: int) -> int:
    job = job_of("ness")
    train(job, base / "whole")

    def check(folder: Path, done: bool) -> None:
        if done:
            assert RunFolder(folder_of(job, 1, folder)).result() is not None, "a finished run is lost"
        train(job, folder)
        check_same_end(job, folder, base / "whole")

    return power_losses(nothing, functools.partial(train, job), check, base, moments, 1)


POWER = {"json": power_of_json, "guard": power_of_a_guard, "checkpoints": power_of_checkpoints, "run": power_of_a_run}


# Kills


def kills_of(method: str, base: Path, least: int, seed: int = 0) -> tuple[int, int]:
    """SIGKILL at counted calls, in half of a write too; every run taken up until it ends: (kills, runs)."""
    job = job_of(method, epochs=2)
    whole, counted = base / "whole", base / "calls"

    def unbroken() -> None:
        with watched(whole) as seen:
            train(job, whole)
        counted.write_text(str(seen.count))

    whole.mkdir(parents=True)
    assert fork(unbroken) == 0, f"{method}: the unbroken run failed"
    calls, draw, kills, runs = int(counted.read_text()), random.Random(f"{method} {seed}"), 0, 0
    while kills < least:
        cut = base / f"cut-{runs}"
        cut.mkdir()
        while True:
            at, torn = draw.randint(1, max(2, calls // 2)), draw.random() < 0.5

            def killed(cut: Path = cut, at: int = at, torn: bool = torn) -> None:
                with watched(cut, at, 0, torn=torn):
                    train(job, cut)

            code = fork(killed)
            assert code in (0, -9), f"{method}: exit code {code}"
            kills += code == -9
            if code == 0:
                break
        check_same_end(job, cut, whole)
        shutil.rmtree(cut)
        runs += 1
    return kills, runs


def kill_all(base: Path, count: int, methods: list[str]) -> tuple[int, int, int]:
    """The methods in turn: (kills, runs, methods)."""
    share = -(-count // len(methods))
    found = [kills_of(method, base / method, share) for method in methods]
    return sum(kills for kills, _ in found), sum(runs for _, runs in found), len(methods)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["all", "faults", "power", "kills"])
    parser.add_argument("count", nargs="?", type=int, default=200, help="kills, or power losses of a run")
    parser.add_argument("--stride", type=int, default=1, help="of faults: every so many calls")
    parser.add_argument("--methods", nargs="+", default=[], help="of kills")
    own = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, Known():
        base, began = Path(folder), time.monotonic()
        if own.what in ("all", "kills"):  # first: those that train are forked from a process that has not
            kills, runs, methods = kill_all(base / "kills", own.count, own.methods or sorted(registry.all_methods()))
            print(f"kills: {kills} SIGKILLs, {runs} runs of {methods} methods, lost 0, different 0", flush=True)
        if own.what in ("all", "faults"):
            for name, campaign in FAULTS.items():
                found = campaign(base / f"faults-{name}", own.stride)
                said, tried = found.pop("said"), sum(found.values())
                print(
                    f"faults, {name}: {tried} failed calls, {said} said in one line, lost 0 ({dict(found)})", flush=True
                )
        if own.what in ("all", "power"):
            for name, power in POWER.items():
                print(f"power, {name}: {power(base / f'power-{name}', own.count)} losses, lost 0", flush=True)
        print(f"in {time.monotonic() - began:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
