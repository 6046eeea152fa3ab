"""The process that has Ray: submits runs as tasks and passes on what they send; and what a task does on its node.

Data travel through Ray's object store, once per node. A run works in a folder of its own on its node, and what it
writes there goes home in parts.
"""

import contextlib
import math
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from ness._files import reason, write_bytes
from ness.errors import NessError, NessWarning
from ness.lab.benchmarks.base import Request, Stream
from ness.lab.benchmarks.dataset_cache import Shelf
from ness.lab.gpu import amp, devices
from ness.lab.runs import checkpoint
from ness.lab.runs.environment import choose_device
from ness.lab.runs.jobs import JobDescription
from ness.lab.runs.run import Listener, Options, Outcome, folder_of, run
from ness.lab.runs.settings import part_of
from ness.lab.runs.sweep import attempt, carry_out
from ness.lab.runs.workers import end_with_parent
from ness.lab.training.loop import Event

SCRATCH = "ness-ray-"  # how folders of runs begin on the nodes
KEPT_FILES = ("model.safetensors", "result.json", "traceback.txt")  # besides checkpoints; in the order of writing
PART_SECONDS = 0.25  # between two parts of a run that bring no file
NODES_SECONDS = 2.0  # between two looks at the cluster
CONNECT_SECONDS = 10.0  # to reach the head of a cluster
STOP_SECONDS = 40.0  # that the cluster has to end the runs


@dataclass(frozen=True)
class Cluster:
    """Which Ray cluster, and what a run takes of it."""

    address: str = "local"  # "local": one on this machine for this command; "auto": the one it belongs to; HOST:PORT
    gpus: float = 0.0
    cpus: float = 1.0

    def check(self) -> None:
        """Refuses what Ray cannot do, and a missing Ray.

        Raises:
            NessError: names the option as the command line does.
        """
        if not math.isfinite(self.cpus) or not 0 < self.cpus <= 4096:
            raise NessError(f"--cpus-per-run {self.cpus:g}: expected more than 0, up to 4096")
        if not math.isfinite(self.gpus) or not 0 <= self.gpus <= 64 or (self.gpus > 1 and self.gpus % 1):
            raise NessError(f"--gpus-per-run {self.gpus:g}: expected a part of a GPU, such as 0.25, or a whole number")
        if "://" in self.address:
            raise NessError(
                f"--ray {self.address}: Ray's client cannot bring checkpoints back; start the command on a machine of "
                "the cluster, with --ray auto"
            )
        host, _, port = self.address.rpartition(":")
        if self.address not in ("local", "auto") and not (host and port.isdigit()):
            raise NessError(f"--ray {self.address}: expected local, auto or HOST:PORT, e.g. --ray 10.0.0.1:6379")
        if find_spec("ray") is None:
            raise NessError("--ray needs the package ray, which is not installed: pip install 'ness-cl[lab,ray]'")


@dataclass
class Part:
    """What a run sends home: new lines of its log, new files, dropped checkpoints, events, and at last its end."""

    node: str = ""
    lines: bytes = b""
    files: dict[str, bytes] = field(default_factory=dict)
    gone: list[str] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    end: tuple[Any, ...] | None = None  # ("outcome", how, times) or ("failed", text)


def drive(connection: "Connection[Any, Any]", cluster: Cluster, threads: int, log: str) -> None:
    """Connects to Ray, submits runs and passes on what they send, until it is told to stop or its parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, daemon=True).start()
    with open(log, "wb", buffering=0) as file:  # noqa: PTH123
        os.dup2(file.fileno(), 1)  # Ray and the nodes' processes write there
        os.dup2(file.fileno(), 2)
    try:
        driver = _Driver(connection, cluster, threads)
    except Exception as error:
        connection.send(("fatal", f"--ray {cluster.address}: no connection to a cluster ({reason(error)[:300]})"))
        return
    try:
        driver.until_stopped()
    except EOFError:
        pass
    except Exception as error:
        connection.send(("fatal", f"the Ray cluster is gone, or this machine's part of it ({reason(error)[:300]})"))
        raise
    finally:
        driver.close()


class _Driver:
    def __init__(self, connection: "Connection[Any, Any]", cluster: Cluster, threads: int) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        import ray

        self.ray, self.connection, self.cluster, self.threads = ray, connection, cluster, threads
        host, _, port = cluster.address.rpartition(":")
        if port.isdigit():  # Ray itself would try for minutes
            socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
        more = {"include_dashboard": False} if cluster.address == "local" else {}
        ray.init(address=cluster.address, log_to_driver=False, logging_level="error", **more)
        self.scratch = SCRATCH + secrets.token_hex(6)
        self.task = ray.remote(on_node)
        self.streams: dict[int, Any] = {}
        self.data: dict[tuple[object, ...], Any] = {}

    def until_stopped(self) -> None:
        """Submits, listens, and looks at the nodes now and then."""
        looked = -math.inf
        while True:
            if time.monotonic() - looked >= NODES_SECONDS:
                looked = time.monotonic()
                self.connection.send(("nodes", self._nodes()))
            while self.connection.poll(0 if self.streams else 0.2):
                kind, *facts = self.connection.recv()
                if kind == "stop":
                    return
                if kind == "withdraw":
                    self._cancel(self.streams.pop(facts[0], None))
                else:
                    self._submit(*facts)
            if self.streams:
                ready, _ = self.ray.wait(list(self.streams.values()), num_returns=1, timeout=0.1)
                for number in [number for number, stream in self.streams.items() if stream in ready]:
                    self._next(number)

    def _nodes(self) -> list[dict[str, Any]]:
        found = []
        for node in self.ray.nodes():
            has = node.get("Resources", {})
            name = f"{node['NodeManagerHostname']} ({node['NodeID'][:6]})"
            alive = bool(node["Alive"])
            found.append({"name": name, "alive": alive, "cpus": has.get("CPU", 0.0), "gpus": has.get("GPU", 0.0)})
        return found

    def _submit(self, number: int, described: JobDescription, seed: int, options: Options, files: Any) -> None:
        try:
            data = self._data_of(described, seed, options)
        except NessError as error:
            self.connection.send(("failed", number, str(error)))
            return
        remote = self.task.options(
            num_cpus=self.cluster.cpus, num_gpus=self.cluster.gpus, num_returns="streaming", max_retries=0
        )
        threads = self.threads or max(1, int(self.cluster.cpus))
        self.streams[number] = remote.remote(data, described, seed, options, files, self.scratch, threads)

    def _data_of(self, described: JobDescription, seed: int, options: Options) -> Any:
        """A reference to what a run reads: what is the same for all seeds, or else its stream."""
        job = described.job()
        own = part_of(job.settings, job.benchmark.options)
        alike = (job.benchmark.name, str(own))
        for key in (alike, (*alike, seed)):
            if key in self.data:
                return self.data[key]
        shelf = Shelf()
        stream = job.benchmark.load(Request(seed, options.data, own, shelf))
        key = alike if shelf.contents else (*alike, seed)
        self.data[key] = self.ray.put(Data(shelf.contents, None if shelf.contents else stream))
        return self.data[key]

    def _next(self, number: int) -> None:
        """The next part of a run, or what ended it."""
        from ray import exceptions

        try:
            part = self.ray.get(next(self.streams[number]))
        except StopIteration:
            del self.streams[number]
            self.connection.send(("lost", number, "its worker ended without a word", False))
            return
        except exceptions.RayError as error:
            del self.streams[number]
            if isinstance(error, exceptions.RayTaskError):
                cause = error.cause if isinstance(getattr(error, "cause", None), BaseException) else error
                text = f"{type(cause).__name__}: {str(cause).strip().splitlines()[-1][:300]}"
                self.connection.send(("failed", number, text))
            elif isinstance(error, exceptions.WorkerCrashedError | exceptions.OutOfMemoryError):
                self.connection.send(("lost", number, f"its worker died ({type(error).__name__})", False))
            else:
                self.connection.send(("lost", number, f"its node is gone ({type(error).__name__})", True))
            return
        if part.end is not None:
            del self.streams[number]
        self.connection.send(("part", number, part))

    def _cancel(self, stream: Any, force: bool = True) -> None:
        if stream is not None:
            with contextlib.suppress(Exception):
                self.ray.cancel(stream, force=force)

    def close(self) -> None:
        """Ends what runs, removes what it left on the nodes, and leaves the cluster.

        Runs are interrupted, not killed, so that they remove their folders, and their processes are there for a look.
        """
        streams = list(self.streams.values())
        with contextlib.suppress(Exception):
            for stream in streams:
                self._cancel(stream, force=False)
            from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

            clean = self.ray.remote(remove_scratch)
            ids = [node["NodeID"] for node in self.ray.nodes() if node["Alive"]] if streams else []
            where = [NodeAffinitySchedulingStrategy(node, soft=False) for node in ids]
            waited = [clean.options(num_cpus=0, scheduling_strategy=one).remote(self.scratch) for one in where]
            if waited:
                self.ray.wait(waited, num_returns=len(waited), timeout=STOP_SECONDS / 2)
        for stream in streams:
            self._cancel(stream)
        with contextlib.suppress(Exception):
            self.ray.shutdown()


# On a node


@dataclass(frozen=True)
class Data:
    """What a run reads: what a shelf holds for all seeds of a benchmark, or the stream of one seed."""

    shelf: Mapping[Any, Any]
    stream: Stream | None


class _Given(Shelf):
    """A shelf from which a run takes a stream that is made already."""

    def __init__(self, data: Data) -> None:
        super().__init__(data.shelf)
        self._stream = data.stream

    def lend(self, key: Any, make: Callable[[], Any]) -> Any:
        return self._stream if self._stream is not None else super().lend(key, make)


class Outbox:
    """What a run on a node has to send home."""

    def __init__(self, folder: Path, node: str, files: Mapping[str, bytes]) -> None:
        self.folder, self.part, self.node = folder, Part(node), node
        self.sent, self.known = len(files.get("events.jsonl", b"")), self._marks()
        self.when = -math.inf

    def _marks(self) -> dict[str, tuple[int, int, int]]:
        found = {}
        for entry in os.scandir(self.folder) if self.folder.is_dir() else []:
            if entry.name in KEPT_FILES or checkpoint.NAME.fullmatch(entry.name):
                about = entry.stat()
                found[entry.name] = (about.st_ino, about.st_mtime_ns, about.st_size)
        return found

    def due(self) -> bool:
        """Whether there is a new file, or enough time has gone by."""
        return time.monotonic() - self.when >= PART_SECONDS or self._marks().keys() - self.known.keys() != set()

    def take(self) -> Part:
        """All that is new since the last time."""
        part, self.part, self.when = self.part, Part(self.node), time.monotonic()
        now = self._marks()
        new = [name for name, mark in now.items() if self.known.get(name) != mark]
        for name in sorted(new, key=lambda name: KEPT_FILES.index(name) if name in KEPT_FILES else -1):
            part.files[name] = (self.folder / name).read_bytes()
        part.gone = [name for name in self.known if name not in now]
        self.known = now
        with contextlib.suppress(FileNotFoundError), (self.folder / "events.jsonl").open("rb") as log:
            log.seek(self.sent)
            part.lines = log.read()
            self.sent += len(part.lines)
        return part


def on_node(
    data: Data,
    described: JobDescription,
    seed: int,
    options: Options,
    files: Mapping[str, bytes],
    scratch: str,
    threads: int,
) -> Iterator[Part]:
    """A run on a node, as a generator of what it sends home; it has a stack of its own, and waits meanwhile."""
    import ray
    from greenlet import getcurrent, greenlet

    context = ray.get_runtime_context()
    node = next((one for one in ray.nodes() if one["NodeID"] == context.get_node_id()), None)
    name = f"{node['NodeManagerHostname'] if node else '?'} ({context.get_node_id()[:6]})"
    remove_abandoned()
    place = Path(tempfile.gettempdir()) / scratch / f"{os.getpid()}-{secrets.token_hex(4)}"
    try:
        there = replace(options, out=place)
        folder = folder_of(described.job(), seed, place)
        for file, content in files.items():
            write_bytes(folder / file, content)
        outbox, main = Outbox(folder, name, files), getcurrent()

        def listen(event: Event) -> None:
            outbox.part.events.append(event)
            if outbox.due():
                main.switch((getcurrent(), outbox.take()))

        def work(_: object) -> tuple[None, Part]:
            with _warnings_into(outbox):
                end = _ended(data, described, seed, there, threads, listen)
            part = outbox.take()
            part.end = end if end[0] == "outcome" else ("failed", str(end[1]).replace(str(place), str(options.out)))
            return None, part

        stack: Any = greenlet(work)
        while stack is not None:
            stack, part = stack.switch(None)
            yield part
    finally:
        shutil.rmtree(place, ignore_errors=True)
        with contextlib.suppress(OSError):
            place.parent.rmdir()


def _ended(
    data: Data, described: JobDescription, seed: int, options: Options, threads: int, listen: Listener
) -> tuple[Any, ...]:
    """Carries a run out: ("outcome", how, times), or ("failed", why)."""
    torch.set_num_threads(threads)
    try:
        job, device = described.job(), choose_device(options.device)
        if job.fast:
            amp.check(device)
        one = partial(run, job, seed, options, listen, _Given(data))
        attempted = partial(attempt, one, folder_of(job, seed, options.out))
        (end,) = carry_out([attempted], device, job.fast, None if device.type == "cpu" else 1, devices.UNKNOWN_NEED)
    except NessError as error:
        return "failed", str(error)
    return ("outcome", end.how, dict(end.times)) if isinstance(end, Outcome) else ("failed", str(end))


@contextlib.contextmanager
def _warnings_into(outbox: Outbox) -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("always", NessWarning)
        plain = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *rest: Any, **more: Any) -> None:
            if issubclass(category, NessWarning):
                outbox.part.warnings.append(str(message))
            else:
                plain(message, category, *rest, **more)

        warnings.showwarning = show
        yield


def remove_scratch(name: str) -> None:
    """Removes a command's folder from this node, should its interrupted runs not do it in a few seconds."""
    folder, began = Path(tempfile.gettempdir()) / name, time.monotonic()
    while folder.exists() and time.monotonic() - began < STOP_SECONDS / 4:
        if time.monotonic() - began > STOP_SECONDS / 8:
            shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.05)


def remove_abandoned() -> None:
    """Removes what killed runs of earlier commands left on this node."""
    for folder in Path(tempfile.gettempdir()).glob(f"{SCRATCH}*/*-*"):
        process = folder.name.partition("-")[0]
        if process.isdigit() and sys.platform == "linux" and not Path("/proc", process).exists():
            shutil.rmtree(folder, ignore_errors=True)
            with contextlib.suppress(OSError):
                folder.parent.rmdir()
