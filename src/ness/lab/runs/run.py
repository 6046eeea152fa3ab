"""One run: a job and a seed in a folder of their own, finished once, taken up again wherever it was cut short."""

import hashlib
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import ness
from ness._files import read_bytes, write_bytes
from ness._sealed import write_json
from ness.errors import NessError
from ness.lab import registry
from ness.lab.benchmarks.base import Stream
from ness.lab.benchmarks.dataset_cache import Shelf
from ness.lab.gpu.capture import runner_for
from ness.lab.gpu.coroutines import own_time, pause
from ness.lab.networks.base import NetworkSpec, check_takes
from ness.lab.runs import checkpoint, environment
from ness.lab.runs.environment import Stopwatch
from ness.lab.runs.jobs import SCHEMA, Job
from ness.lab.runs.metrics import scores
from ness.lab.runs.run_folder import RunFolder, lines
from ness.lab.training.loop import Event, Trainer
from ness.lab.training.task_statistics import named
from ness.storage.folder import serialised

Listener = Callable[[Event], None]
MOST_LANES = 64


@dataclass(frozen=True)
class Options:
    """How runs are carried out; another device or number of threads rounds otherwise, the rest changes no result."""

    out: Path = Path("runs")
    data: Path | None = None
    device: str = "cpu"
    again: bool = False
    save_every: float | None = None  # seconds between two checkpoints, at least; None: 30, on a GPU 120
    lanes: int | None = None  # runs side by side on one GPU; None: as many as make sense
    plain: bool = False  # on a GPU: step after step instead of captured graphs
    threads: int = 0  # on the CPU; 0: one for a small network, torch's own choice else
    stop_after: float | None = None  # seconds after which no further run of several is begun


@dataclass(frozen=True)
class Outcome:
    """A finished run: its folder, its result, and whether it was run now, taken up again, or there already."""

    folder: Path
    result: dict[str, Any]
    how: Literal["run", "resumed", "there"]
    times: Mapping[str, float] = field(default_factory=dict)  # seconds by phase in this process


def folder_of(job: Job, seed: int, out: Path) -> Path:
    """The folder of a run, named by method, benchmark, the digest of all settings, and the seed."""
    return out / f"{job.benchmark.name}-{job.method.name}-{job.digest}-seed{seed}"


def run(
    job: Job, seed: int, options: Options, listen: Listener = lambda event: None, shelf: Shelf | None = None
) -> Outcome:
    """Runs a job with a seed to its end, or returns the result that is there; several runs may share a shelf."""
    check_options(options)
    folder = RunFolder(folder_of(job, seed, options.out))
    if not options.again and (found := _finished(folder, listen)) is not None:
        _tell_version(folder, found, listen)
        folder.tidy()
        return Outcome(folder.path, found, "there")
    with folder.held(), _told(folder):
        if (there := prepare(folder, job, seed, options.again, listen)) is not None:
            return there
        watch = Stopwatch()
        with watch.phase("start"):
            device = environment.choose_device(options.device)
            stream = job.load(seed, options.data, shelf)
            network = network_of(job, stream)
            runner = runner_for(device, options.plain)
            made = (job.method, network, stream, job.settings, seed, device, runner, watch, job.fast, options.data)
            trainer = Trainer(*made)
            listen(Event("begun", {"tasks": len(stream), "lessons": len(trainer.lessons)}))
            marks = {"data": stream.fingerprint, "device": device.type}
        size = sum(parameter.numel() for parameter in trainer.context.model.parameters())
        with environment.cpu_threads(options.threads, size) if device.type == "cpu" else nullcontext():
            with watch.phase("start"):
                number = _take_up(folder, trainer, marks, listen)
            with own_time(watch):
                _train(folder, trainer, marks, options, listen, number)
            with watch.phase("checkpoints"):
                weights = _save_weights(folder, trainer)
            result = _conclude(folder, {**_result(job, seed, trainer, stream, marks), "weights": weights})
    return Outcome(folder.path, result, "resumed" if number else "run", watch.times())


def prepare(folder: RunFolder, job: Job, seed: int, again: bool, listen: Listener) -> Outcome | None:
    """Makes a folder that is held ready for a run; returns the outcome of one that is finished already."""
    if again:
        folder.clear()
    elif (found := _finished(folder)) is not None:  # by whoever held it before
        return Outcome(folder.path, found, "there")
    if (wrong := folder.configure(_identity(job, seed))) is not None:
        listen(Event("remark", {"text": wrong}))
    return None


def network_of(job: Job, stream: Stream) -> NetworkSpec:
    """The network that learns a job's stream.

    Raises:
        NessError: it was chosen by hand, and does not take images of this size.
    """
    chosen = bool(job.settings.network)
    name = job.network if chosen else stream.notes.get("network", job.network)  # some streams choose by image size
    network = job.own_network or registry.find("network", name, registry.all_networks())
    if chosen:
        check_takes(network, stream.shape, [task.classes for task in stream.tasks])
    return network


def check_options(options: Options) -> None:
    """Refuses numbers out of their range.

    Raises:
        NessError: names the option as the command line does.
    """
    for name, seconds in (("stop-after", options.stop_after), ("save-every", options.save_every)):
        if seconds is not None and not 0 <= seconds < math.inf:
            raise NessError(f"--{name} {seconds:g}: expected a number of seconds, 0 or more")
    cores = os.cpu_count() or 1
    if not 0 <= options.threads <= cores:
        more = "0 for as many as make sense, or" if options.threads < 0 else f"this machine has {cores} cores:"
        raise NessError(f"--threads {options.threads}: {more} expected 1 to {cores}")
    if options.lanes is not None and not 1 <= options.lanes <= MOST_LANES:
        raise NessError(f"--lanes {options.lanes}: expected 1 to {MOST_LANES}")


def _finished(folder: RunFolder, listen: Listener = lambda event: None) -> dict[str, Any] | None:
    """The result that is there; None also for a damaged one where a checkpoint is left to go on from."""
    try:
        found = folder.result()
    except NessError as error:
        if not checkpoint.paths(folder.path):
            raise
        listen(Event("remark", {"text": f"{error.__cause__ or error}; going on from the last checkpoint"}))
        return None
    if found is not None and (wrong := _damaged_weights(folder, found)):
        listen(Event("remark", {"text": wrong}))
    return found


def _damaged_weights(folder: RunFolder, result: Mapping[str, Any]) -> str | None:
    """What is wrong with the final weights beside a result; None if they are well, or not there."""
    said, path = result.get("weights"), folder.path / "model.safetensors"
    if not isinstance(said, dict) or not path.exists():
        return None
    try:
        content = read_bytes(path)
    except (FileNotFoundError, NessError) as error:
        return str(error)
    if hashlib.sha256(content).hexdigest() == said.get("sha256"):
        return None
    return f"{path}: damaged: altered since it was written (its checksum differs); --again trains them anew"


@contextmanager
def _told(folder: RunFolder) -> Iterator[None]:
    """What ends a run before its time stands in its log, so that who watches does not wait for it."""
    try:
        yield
    except Exception as error:
        kind = "" if isinstance(error, NessError) else f"{type(error).__name__}: "
        with suppress(NessError):
            folder.log("failed", {"reason": f"{kind}{error}"})
        raise


def _identity(job: Job, seed: int) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "version": ness.__version__,
        "benchmark": job.benchmark.name,
        "method": job.method.name,
        "revision": job.revision,
        "preset": job.preset,
        "setting": job.label,
        "digest": job.digest,
        "seed": seed,
        "settings": job.as_dict(),
        "fast": job.fast,
    }


def _tell_version(folder: RunFolder, result: dict[str, Any], listen: Listener) -> None:
    version = result.get("version")
    if isinstance(version, str) and version != ness.__version__:
        text = f"{folder.path.name} was finished by version {version}, this is {ness.__version__}; --again repeats it"
        listen(Event("remark", {"text": text}))


def _take_up(folder: RunFolder, trainer: Trainer, marks: dict[str, str], listen: Listener) -> int:
    """Puts the trainer at the last good checkpoint; its number, or 0 without one."""
    found = folder.last_good()
    if found is None:
        return 0
    path, tensors, manifest, wrong = found
    for problem in wrong:
        listen(Event("remark", {"text": f"{problem}; going on from the checkpoint before it"}))
    try:
        begun, state, conditions = manifest["marks"], manifest["trainer"], manifest.get("conditions", {})
        begun = {mark: begun[mark] for mark in marks}
    except (KeyError, TypeError) as error:
        raise NessError(f"{path}: is no checkpoint of a run ({error} is missing); start over with --again") from error
    for mark, value in marks.items():
        if begun[mark] != value:
            raise NessError(
                f"{folder.path}: begun with {mark} {begun[mark]}, now {mark} is {value}; "
                "go on as it was begun, or start over with --again"
            )
    if text := _other_conditions(conditions, environment.conditions(trainer.device)):
        listen(Event("remark", {"text": text}))
    trainer.load_state(tensors, state)
    facts = {"tasks": trainer.at, "epoch": trainer.learning.epoch if trainer.learning else 0}
    _, damaged = lines(folder.path / "events.jsonl")
    if damaged:
        text = f"{folder.path / 'events.jsonl'}: {damaged} damaged or unfinished lines are passed over"
        listen(Event("remark", {"text": text}))
    folder.log("resumed", facts)
    listen(Event("resumed", facts))
    return checkpoint.number_of(path)


def _other_conditions(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Says in one line under which other conditions a run is taken up; None if they are the same."""
    differing = [f"{name} {before[name]}, now {now[name]}" for name in now if before.get(name, now[name]) != now[name]]
    if not differing:
        return None
    return f"begun with {'; '.join(differing)}: it goes on, but does not end bit-equal to a run that was never cut"


def _train(
    folder: RunFolder, trainer: Trainer, marks: dict[str, str], options: Options, listen: Listener, number: int
) -> None:
    """Trains to the end; logs every event and saves a checkpoint every so many seconds, counted from `number`."""
    saved, every, conditions = time.monotonic(), options.save_every, environment.conditions(trainer.device)
    if every is None:
        every = 120.0 if trainer.device.type == "cuda" else 30.0  # a GPU does four times as much in between

    def keep(event: Event) -> None:
        nonlocal saved, number
        folder.log(event.kind, event.facts)
        if event.kind in ("epoch", "learnt") and time.monotonic() - saved >= every:
            with trainer.watch.phase("checkpoints"):
                tensors, manifest = trainer.state()
                number += 1  # a damaged one that was passed over is replaced
                about = {"trainer": manifest, "marks": marks, "conditions": conditions}
                checkpoint.write(folder.path, tensors, about, number)
            saved = time.monotonic()
        listen(event)

    if trainer.learning is not None and not trainer.learning.over:
        pause("steps")  # taken up in the middle of a task: what comes next is no work between tasks
    trainer.run(keep)


def _result(job: Job, seed: int, trainer: Trainer, stream: Stream, marks: dict[str, str]) -> dict[str, Any]:
    found = scores(trainer.matrix)
    return {
        **_identity(job, seed),
        "tasks": [task.name for task in stream.tasks],
        "accuracy": trainer.matrix,
        "acc": found.acc,
        "bwt": found.bwt,
        "forgetting": found.forgetting,
        "learning_accuracy": found.learning,
        "forward_transfer": None,  # needs the runs of `alone`: tables and reports fill it in
        **({} if (kept := trainer.general_ability()) is None else {"general": kept}),
        "epochs": trainer.epochs,
        "seconds": trainer.seconds,
        "total_seconds": sum(trainer.seconds),
        "times": trainer.times(),
        "peak_memory": environment.peak_memory(trainer.device),
        "notes": trainer.notes,
        "data": {"fingerprint": marks["data"], **stream.notes},
        "environment": environment.describe(trainer.device),
    }


def _save_weights(folder: RunFolder, trainer: Trainer) -> dict[str, Any]:
    """The model's state dict; with norm task also each task's statistics, as 'norms/task/norm/mean' and var."""
    measured = {f"norms/{name}": value for name, value in named(trainer.statistics).items()}
    weights = {
        name: value.detach().to("cpu").contiguous().clone()
        for name, value in {**trainer.context.model.state_dict(), **measured}.items()
    }
    path = folder.path / "model.safetensors"
    content = serialised(weights, {}, str(path))
    write_bytes(path, content, "make room or rights and start again: the run goes on from its last checkpoint")
    return {"file": path.name, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def _conclude(folder: RunFolder, result: dict[str, Any]) -> dict[str, Any]:
    """The weights are there; the result, then the checkpoints are dropped: at no moment is the run's end lost."""
    written = write_json(folder.path / "result.json", result, "make room or rights and start again")
    folder.log("finished", {"acc": result["acc"], "bwt": result["bwt"]})
    folder.drop_checkpoints()
    return written
