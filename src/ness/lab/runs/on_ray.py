"""A table on a Ray cluster: each run a task, its checkpoints and records back in the command's folder as they are made.

Nodes share no files with the command. What a run writes on its node comes back in parts, so that a node that is lost
costs the time since the last checkpoint. Ray itself lives in a process of its own (`ray_driver.drive`): whatever ends
that one, the command goes on to say what became of its runs.
"""

import contextlib
import multiprocessing
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ness._files import append_line, make_folder, read_bytes, write_bytes
from ness._sealed import write_json
from ness.errors import NessError, NessWarning
from ness.lab.runs import checkpoint, status
from ness.lab.runs.dispatch import Dispatch
from ness.lab.runs.jobs import Job, JobDescription
from ness.lab.runs.ray_driver import KEPT_FILES, STOP_SECONDS, Cluster, Part, drive
from ness.lab.runs.run import Listener, Options, Outcome, check_options, prepare
from ness.lab.runs.run_folder import RunFolder, me
from ness.lab.runs.sweep import Grid
from ness.lab.runs.workers import without_ctrl_c

NODE_PATIENCE = 120.0  # seconds to wait for a node on which a run fits


class ClusterLost(NessError):
    """The cluster, or this command's connection to it, is gone."""


def run_on_ray(
    work: Iterable[tuple[Job, int]],
    options: Options,
    cluster: Cluster,
    listener: Callable[[Job, int], Listener],
    say: Callable[[str], None] = lambda line: None,
) -> Grid:
    """Runs each job with its seed as a task of a Ray cluster; results are those of `ness.lab.runs.sweep.run_all`.

    Args:
        work: the runs; their methods and benchmarks must be installed on every node.
        options: as for one process; `device` is cpu or cuda, and Ray chooses which GPU.
        cluster: where, and what a run takes.
        listener: makes the ear of each run; all of them are called in this process.
        say: is told in one line when a worker or a node dies, and whom the command waits for.
    """
    check_options(options)
    cluster.check()
    asked = list(work)
    dispatch = Dispatch(asked, options, listener, say)
    dispatch.settle()
    if not dispatch.over:
        with _Head(dispatch, options, cluster) as head:
            head.until_over()
    return Grid.of(asked, [dispatch.ends[number] for number in range(len(asked))], options.device == "cuda")


class _Head:
    """The command's side: it holds the folders of the runs under way, and writes into them what the nodes send."""

    def __init__(self, dispatch: Dispatch, options: Options, cluster: Cluster) -> None:
        self.dispatch, self.options, self.cluster = dispatch, options, cluster
        self.descriptions = [JobDescription.of(job) for job, _ in dispatch.work]
        self.holds: dict[int, ExitStack] = {}  # of the runs that are handed to the cluster
        self.node_of: dict[int, str] = {}  # of those that have begun
        self.slots: int | None = None  # runs that fit on the cluster; None: not known yet
        self.since = time.monotonic()

    def __enter__(self) -> "_Head":
        make_folder(self.options.out)
        context = multiprocessing.get_context("spawn")
        self.connection, its = context.Pipe()
        facts = (self.cluster, self.options.threads, str(self.options.out.absolute() / "ray.log"))
        self.driver = context.Process(target=drive, args=(its, *facts), name="ness-ray")
        try:
            with without_ctrl_c():
                self.driver.start()
            its.close()
        except BaseException:  # Ctrl-C meanwhile
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            with contextlib.suppress(OSError):
                self.connection.send(("stop",))
            self.driver.join(STOP_SECONDS)
        finally:
            if self.driver.is_alive():
                self.driver.kill()
                self.driver.join()
            self.connection.close()
            for hold in self.holds.values():
                hold.close()
            with contextlib.suppress(OSError):
                (self.options.out / status.NODES).unlink()

    def until_over(self) -> None:
        """Hands out runs and takes what comes back, until each has its end."""
        while True:
            self._hand_out()
            if self.dispatch.over:
                return
            try:
                if self.connection.poll(1.0):
                    kind, *facts = self.connection.recv()
                    getattr(self, f"_hear_{kind}")(*facts)
            except (EOFError, OSError):
                raise ClusterLost(
                    f"the Ray cluster is gone, or this machine's part of it ({self.options.out / 'ray.log'} has what "
                    "Ray said); what had come back is kept"
                ) from None

    def _hand_out(self) -> None:
        """As many runs as fit, and as many again, so that a node never waits for this command."""
        self.dispatch.drop_late([number for number in self.holds if number not in self.node_of], self._withdraw)
        if self.slots == 0 and not self.node_of and time.monotonic() - self.since > NODE_PATIENCE:
            self._no_node()
        while self.slots is not None and len(self.holds) < 2 * max(1, self.slots):
            if (number := self.dispatch.take()) is None:
                return
            self._begin(number)

    def _no_node(self) -> None:
        raise NessError(
            f"no node of the cluster has what a run asks for: {self.cluster.cpus:g} CPUs and {self.cluster.gpus:g} "
            "GPUs; lower --cpus-per-run or --gpus-per-run"
        )

    def _begin(self, number: int) -> None:
        folder, (job, seed) = RunFolder(self.dispatch.folders[number]), self.dispatch.work[number]
        with ExitStack() as stack:
            try:
                stack.enter_context(folder.held(queued=True))
                again = self.dispatch.options_of(number).again
                there = prepare(folder, job, seed, again, partial(self.dispatch.heard, number))
                if there is not None:
                    self.dispatch.ended(number, there)
                    return
                self.dispatch.cleared.add(number)
                names = ["config.json", "events.jsonl", *(path.name for path in checkpoint.paths(folder.path))]
                files = {name: read_bytes(folder.path / name) for name in names if (folder.path / name).exists()}
            except NessError as error:
                self.dispatch.ended(number, error)
                return
            options = replace(self.options, again=False, stop_after=None)
            with contextlib.suppress(OSError):  # heard of at once
                self.connection.send(("run", number, self.descriptions[number], seed, options, files))
            self.holds[number] = stack.pop_all()

    def _withdraw(self, number: int) -> None:
        with contextlib.suppress(OSError):
            self.connection.send(("withdraw", number))
        self._let_go(number)

    def _let_go(self, number: int) -> None:
        self.holds.pop(number).close()
        self.node_of.pop(number, None)

    def _hear_fatal(self, text: str) -> None:
        raise ClusterLost(text) if self.node_of else NessError(text)

    def _hear_nodes(self, nodes: list[dict[str, Any]]) -> None:
        """The nodes as they are: how many runs fit, and a file for `ness watch`."""
        before, self.slots = self.slots, sum(_fitting(node, self.cluster) for node in nodes if node["alive"])
        if self.slots:
            self.since = time.monotonic()
        elif self.cluster.address == "local":
            self._no_node()
        elif before != 0:
            self.dispatch.say("waiting for a node of the cluster that has what a run asks for")
        running = list(self.node_of.values())
        shown = [{**node, "runs": running.count(str(node["name"]))} for node in nodes]
        with contextlib.suppress(NessError):
            write_json(self.options.out / status.NODES, {**me(), "nodes": shown})

    def _hear_lost(self, number: int, why: str, place: bool) -> None:
        if number in self.holds:
            self._let_go(number)
            self.dispatch.lost(number, why, place)

    def _hear_failed(self, number: int, text: str) -> None:
        if number in self.holds:
            self._let_go(number)
            self.dispatch.ended(number, NessError(text))

    def _hear_part(self, number: int, part: Part) -> None:
        """Writes what a run sends into its folder, in the order in which the run itself wrote it."""
        if number not in self.holds:  # it was withdrawn meanwhile
            return
        folder = RunFolder(self.dispatch.folders[number])
        if part.node != self.node_of.get(number):
            self.node_of[number] = part.node
            folder.say_holder(node=part.node)
        try:
            receive(folder.path, part)
            for text in part.warnings:
                warnings.warn(text, NessWarning, stacklevel=2)
            for event in part.events:
                self.dispatch.heard(number, event)
            end: Outcome | NessError | None = None
            if part.end is not None and part.end[0] == "failed":
                end = NessError(part.end[1])
            elif part.end is not None:
                end = Outcome(folder.path, folder.result() or {}, *part.end[1:])
        except NessError as error:
            with contextlib.suppress(OSError):
                self.connection.send(("withdraw", number))
            end = error
        if end is not None:
            self._let_go(number)
            self.dispatch.ended(number, end)


def receive(folder: Path, part: Part) -> None:
    """Writes a part into the run's folder: lines, then files, and only then drops the checkpoints that are replaced."""
    for line in part.lines.split(b"\n"):
        if line.strip():
            append_line(folder / "events.jsonl", line)
    for name, content in part.files.items():
        if name in KEPT_FILES or checkpoint.NAME.fullmatch(name):
            write_bytes(folder / name, content, "make room or rights and start again")
    for name in part.gone:
        if checkpoint.NAME.fullmatch(name):
            with contextlib.suppress(OSError):
                (folder / name).unlink()


def _fitting(node: Mapping[str, Any], cluster: Cluster) -> int:
    """How many runs a node takes."""
    by_cpu = int(node["cpus"] / cluster.cpus + 1e-9)
    return min(by_cpu, int(node["gpus"] / cluster.gpus + 1e-9)) if cluster.gpus else by_cpu
