"""A table on several worker processes of this machine: started, watched, replaced and ended by one command.

A worker takes a run, reports what happens in it, and asks for the next; files are written by the worker itself, into
the run's folder, as a command without workers does. So whatever ends a worker, its run goes on from its checkpoint.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from ness.errors import NessError, NessWarning
from ness.lab.benchmarks.dataset_cache import Shelf
from ness.lab.gpu import amp, devices
from ness.lab.gpu.scheduler import allow_many_streams, lanes_for
from ness.lab.runs.dispatch import Dispatch
from ness.lab.runs.environment import choose_device
from ness.lab.runs.jobs import Job, JobDescription
from ness.lab.runs.run import Listener, Options, Outcome, check_options, folder_of, run
from ness.lab.runs.run_folder import RunLocked
from ness.lab.runs.sweep import LOOK_EVERY, Grid, attempt, carry_out

MOST_JOBS = 256
PATIENCE = 5.0  # seconds that workers have to leave their runs tidily
Assignment = tuple[int, JobDescription, int, Options]  # the run's number, job, seed, and how


def run_on_workers(
    work: Iterable[tuple[Job, int]],
    options: Options,
    jobs: int,
    listener: Callable[[Job, int], Listener],
    say: Callable[[str], None] = lambda line: None,
) -> Grid:
    """Runs each job with its seed on `jobs` processes; results are those of `ness.lab.runs.sweep.run_all`.

    On the CPU a worker has one thread (or `options.threads`), on GPUs a GPU. A worker that dies is replaced and its
    run taken up from its checkpoint; a run that takes three workers with it has failed.

    Args:
        work: the runs; they must be of methods and benchmarks that other processes find by name.
        options: as for one process.
        jobs: how many workers at most.
        listener: makes the ear of each run; all of them are called in this process.
        say: is told in one line when a worker dies, and whom the command waits for.
    """
    check_options(options)
    asked = list(work)
    places = places_for(options.device, jobs, options.lanes)
    device = choose_device(places[0])
    if any(job.fast for job, _ in asked):
        amp.check(device)
    dispatch = Dispatch(asked, options, listener, say)
    dispatch.settle()
    if not dispatch.over:
        need = devices.need_of([job.network for job, _ in asked])
        descriptions = [JobDescription.of(job) for job, _ in asked]
        pool = Pool(places[: len(dispatch.waiting)], options.threads, options.lanes, need)
        with pool:
            _until_over(dispatch, pool, descriptions)
    return Grid.of(asked, [dispatch.ends[number] for number in range(len(asked))], device.type == "cuda")


def places_for(device: str, jobs: int, lanes: int | None = None) -> list[str]:
    """The device of each worker: a GPU each, as far as there are any, or the CPU for all.

    >>> places_for("cpu", 3)
    ['cpu', 'cpu', 'cpu']
    """
    if not 1 <= jobs <= MOST_JOBS:
        raise NessError(f"--jobs {jobs}: expected 1 to {MOST_JOBS} worker processes")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "cpu" or (device == "auto" and not count):
        lanes_for(torch.device("cpu"), lanes)
        return ["cpu"] * jobs
    chosen = choose_device("cuda" if device == "auto" else device)
    if chosen.index is not None and jobs > 1:
        raise NessError(f"--jobs {jobs} with --device {device}: each worker has a GPU of its own; use --device cuda")
    if jobs > count:
        raise NessError(
            f"--jobs {jobs}: there are {count} GPUs, and each worker has one; use --jobs {count}, and --lanes for "
            "several runs on each"
        )
    return [device] if chosen.index is not None else [f"cuda:{index}" for index in range(jobs)]


def _until_over(dispatch: Dispatch, pool: "Pool", descriptions: Sequence[JobDescription]) -> None:
    """Hands out runs and hears of them until each has its end."""
    while not dispatch.over:
        for worker in pool.idle():
            share = -(-len(dispatch.waiting) // len(pool.workers))
            parcel: list[Assignment] = []
            while len(parcel) < max(1, min(worker.lanes, share)) and (number := dispatch.take()) is not None:
                if dispatch.losses[number] and parcel:  # alone, so that it shows which of several ends its worker
                    dispatch.waiting.append(number)
                    break
                parcel.append((number, descriptions[number], dispatch.work[number][1], dispatch.options_of(number)))
                if dispatch.losses[number]:
                    break
            if parcel:
                worker.assign(parcel)
        for worker, message in pool.messages(LOOK_EVERY if not dispatch.over else 0.0):
            if message is None:
                lost = worker.unfinished
                for number in lost:
                    dispatch.lost(number, f"its worker (process {worker.process.pid}) {cause(worker.process)}")
                pool.replace(worker, needed=bool(dispatch.waiting or dispatch.held))
                continue
            kind, *facts = message
            if kind == "event":
                dispatch.heard(*facts)
            elif kind == "warning":
                warnings.warn(facts[0], NessWarning, stacklevel=2)
            elif kind == "end":
                number, end = facts[0], _end_of(*facts[1:])
                worker.unfinished.remove(number)
                dispatch.ended(number, end)


def cause(process: BaseProcess) -> str:
    """Why a process is gone, in words."""
    code = process.exitcode
    if code is None or code >= 0:
        return f"ended by itself with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    often = " (often: the machine was out of memory)" if -code == 9 else ""
    return f"was killed by {name}{often}"


@dataclass
class Worker:
    """A worker process, seen from the command."""

    number: int
    device: str
    process: BaseProcess
    connection: "Connection[Any, Any]"
    is_ready: bool = False
    lanes: int = 1
    unfinished: list[int] = field(default_factory=list)  # the runs it has

    def assign(self, parcel: Sequence[Assignment]) -> None:
        """Hands it runs; should it be gone, that is heard of soon enough."""
        self.unfinished = [one[0] for one in parcel]
        with contextlib.suppress(OSError):
            self.connection.send(parcel)


class Pool:
    """Worker processes, one a place; at the end of the `with` none is left, whatever happened."""

    def __init__(self, places: Sequence[str], threads: int, lanes: int | None, need: int) -> None:
        self.workers: list[Worker] = []
        self._facts = (threads, lanes, need)
        self._places = places
        self._failed_starts = 0

    def __enter__(self) -> "Pool":
        try:
            for number, device in enumerate(self._places):
                self._start(number, device)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, number: int, device: str) -> None:
        context = multiprocessing.get_context("spawn")  # a process with CUDA or threads must not be forked
        mine, its = context.Pipe()
        process = context.Process(target=serve, args=(its, device, *self._facts), name=f"ness-worker-{number}")
        with without_ctrl_c():  # one that comes meanwhile finds the worker among those that are ended
            process.start()
            self.workers.append(Worker(number, device, process, mine))
        its.close()

    def replace(self, gone: Worker, needed: bool) -> None:
        """Starts a worker in the place of one that is gone, if there is anything left to do for it."""
        gone.connection.close()
        self._failed_starts = 0 if gone.is_ready else self._failed_starts + 1
        if self._failed_starts == 3:
            raise NessError(
                f"three worker processes in a row ended before they could begin (the last one {cause(gone.process)}); "
                "what they said stands above. Without --jobs the runs are carried out in the command's own process"
            )
        self.workers.remove(gone)
        if needed:
            self._start(gone.number, gone.device)

    def idle(self) -> list[Worker]:
        """The workers that have nothing to do."""
        return [worker for worker in self.workers if worker.is_ready and not worker.unfinished]

    def messages(self, timeout: float) -> Iterator[tuple[Worker, tuple[Any, ...] | None]]:
        """What workers say, at most one message each; None of one that is gone, after its last message."""
        handles: dict[Any, Worker] = {}
        for worker in self.workers:
            handles[worker.connection] = handles[worker.process.sentinel] = worker
        spoken = {handles[handle].number: handles[handle] for handle in wait(list(handles), timeout)}
        for worker in spoken.values():
            try:
                message = worker.connection.recv() if worker.connection.poll() else None
            except (EOFError, OSError):
                message = None
            if message is None:
                worker.process.join(PATIENCE)
                if worker.process.is_alive():
                    worker.process.kill()
                    worker.process.join()
            elif message[0] == "ready":
                worker.is_ready, worker.lanes = True, message[1]
                self._failed_starts = 0
                continue
            yield worker, message

    def close(self) -> None:
        """Ends all workers: asked first, so that they leave their runs tidily, then by force."""
        try:
            for worker in self.workers:
                with contextlib.suppress(OSError):
                    worker.connection.send(None)
                if worker.unfinished or not worker.is_ready:
                    worker.process.terminate()
            until = time.monotonic() + PATIENCE
            for worker in self.workers:
                worker.process.join(max(0.0, until - time.monotonic()))
        finally:
            for worker in self.workers:
                if worker.process.is_alive():
                    worker.process.kill()
                worker.process.join()
                worker.connection.close()


@contextlib.contextmanager
def without_ctrl_c() -> Iterator[None]:
    """A process that is started inside is left alone by Ctrl-C at the terminal: its parent hears it and ends it."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()  # it would be started inside, and unmask the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_of(kind: str, *facts: Any) -> Outcome | NessError:
    if kind == "locked":
        return RunLocked(*facts)
    found: Outcome | NessError = facts[0] if kind == "outcome" else NessError(facts[0])
    return found


def serve(connection: "Connection[Any, Any]", device: str, threads: int, lanes: int | None, need: int) -> None:
    """A worker's life: takes runs from the connection and reports on them, until None comes or its parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # `finally` blocks run
    threading.Thread(target=end_with_parent, daemon=True).start()
    warnings.simplefilter("always", NessWarning)
    plain = warnings.showwarning

    def send(*message: Any) -> None:
        try:
            connection.send(message)
        except OSError:
            os._exit(1)  # nobody hears it any more; a run's folder is whole at any moment

    def show(message: Warning | str, category: type[Warning], *rest: Any, **more: Any) -> None:
        if issubclass(category, NessWarning):
            send("warning", str(message))
        else:
            plain(message, category, *rest, **more)

    warnings.showwarning = show
    torch.set_num_threads(threads or 1)
    allow_many_streams()
    here = choose_device(device)
    lanes = lanes_for(here, lanes, need)
    shelf = Shelf()
    send("ready", lanes)
    while (parcel := connection.recv()) is not None:
        _carry_out(parcel, here, lanes, need, shelf, send)


def _carry_out(
    parcel: Sequence[Assignment], device: torch.device, lanes: int, need: int, shelf: Shelf, send: Callable[..., None]
) -> None:
    runs = []
    for number, description, seed, options in parcel:
        there = replace(options, device=str(device))

        def attempted(
            number: int = number, described: JobDescription = description, seed: int = seed, options: Options = there
        ) -> Outcome:
            job = described.job()
            hear = partial(send, "event", number)
            return attempt(partial(run, job, seed, options, hear, shelf), folder_of(job, seed, options.out))

        runs.append(attempted)
    quick = any(description.fast for _, description, _, _ in parcel)
    for (number, *_), end in zip(parcel, carry_out(runs, device, quick, lanes, need), strict=True):
        if isinstance(end, RunLocked):
            send("end", number, "locked", end.path, end.holder)
        elif isinstance(end, NessError):
            send("end", number, "failed", str(end))
        else:
            send("end", number, "outcome", end)


def end_with_parent() -> None:
    """Ends this process when the command that started it is gone, however that went."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
