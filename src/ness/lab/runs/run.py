"""One run: a job and a seed in a folder of their own, finished once, taken up again wherever it was cut short."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from safetensors.torch import save_file

import ness
from ness.errors import NessError
from ness.lab import registry
from ness.lab.benchmarks.base import Stream
from ness.lab.benchmarks.dataset_cache import Shelf
from ness.lab.gpu.capture import runner_for
from ness.lab.gpu.coroutines import own_time, pause
from ness.lab.runs import checkpoint, environment
from ness.lab.runs.checkpoint import write_json
from ness.lab.runs.environment import Stopwatch
from ness.lab.runs.jobs import SCHEMA, Job
from ness.lab.runs.metrics import scores
from ness.lab.runs.run_folder import RunFolder
from ness.lab.training.loop import Event, Trainer
from ness.lab.training.task_statistics import named

Listener = Callable[[Event], None]


@dataclass(frozen=True)
class Options:
    """How runs are carried out; another device or number of threads rounds otherwise, the rest changes no result."""

    out: Path = Path("runs")
    data: Path | None = None
    device: str = "cpu"
    again: bool = False
    save_every: float | None = None  # seconds between two checkpoints, at least; None: 30, on a card 120
    lanes: int | None = None  # runs side by side on one card; None: as many as make sense
    plain: bool = False  # on a card: step after step instead of captured graphs
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
    folder = RunFolder(folder_of(job, seed, options.out))
    if not options.again and (found := folder.result()) is not None:
        _tell_version(folder, found, listen)
        return Outcome(folder.path, found, "there")
    with folder.held(), _told(folder):
        if options.again:
            folder.clear()
        elif (found := folder.result()) is not None:  # finished by whoever held it before
            return Outcome(folder.path, found, "there")
        folder.configure(_identity(job, seed))
        watch = Stopwatch()
        with watch.phase("start"):
            device = environment.choose_device(options.device)
            stream = job.load(seed, options.data, shelf)
            name = stream.notes.get("network", job.benchmark.network)  # a stream of any image size chooses by it
            network = registry.find("network", name, registry.all_networks())
            runner = runner_for(device, options.plain)
            trainer = Trainer(job.method, network, stream, job.settings, seed, device, runner, watch, job.fast)
            listen(Event("begun", {"tasks": len(stream), "lessons": len(trainer.lessons)}))
            marks = {"data": stream.fingerprint, "device": device.type}
        size = sum(parameter.numel() for parameter in trainer.context.model.parameters())
        with environment.cpu_threads(options.threads, size) if device.type == "cpu" else nullcontext():
            with watch.phase("start"):
                resumed = _take_up(folder, trainer, marks, listen)
            with own_time(watch):
                _train(folder, trainer, marks, options, listen)
            with watch.phase("checkpoints"):
                _save_weights(folder, trainer)
            result = _result(job, seed, trainer, stream, marks)
            _conclude(folder, result)
    return Outcome(folder.path, result, "resumed" if resumed else "run", watch.times())


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


def _take_up(folder: RunFolder, trainer: Trainer, marks: dict[str, str], listen: Listener) -> bool:
    """Puts the trainer at the last good checkpoint; False without one."""
    found = folder.last_good()
    if found is None:
        return False
    tensors, manifest, wrong = found
    for text in wrong:
        listen(Event("remark", {"text": f"{text}; going on from the checkpoint before it"}))
    for mark, value in marks.items():
        if manifest["marks"][mark] != value:
            raise NessError(
                f"{folder.path}: begun with {mark} {manifest['marks'][mark]}, now {mark} is {value}; "
                "go on as it was begun, or start over with --again"
            )
    trainer.load_state(tensors, manifest["trainer"])
    facts = {"tasks": trainer.at, "epoch": trainer.learning.epoch if trainer.learning else 0}
    folder.log("resumed", facts)
    listen(Event("resumed", facts))
    return True


def _train(folder: RunFolder, trainer: Trainer, marks: dict[str, str], options: Options, listen: Listener) -> None:
    """Trains to the end; logs every event and saves a checkpoint every so many seconds."""
    saved, every = time.monotonic(), options.save_every
    if every is None:
        every = 120.0 if trainer.device.type == "cuda" else 30.0  # a GPU does four times as much in between

    def keep(event: Event) -> None:
        nonlocal saved
        folder.log(event.kind, event.facts)
        if event.kind in ("epoch", "learnt") and time.monotonic() - saved >= every:
            with trainer.watch.phase("checkpoints"):
                tensors, manifest = trainer.state()
                checkpoint.write(folder.path, tensors, {"trainer": manifest, "marks": marks})
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
        "epochs": trainer.epochs,
        "seconds": trainer.seconds,
        "total_seconds": sum(trainer.seconds),
        "times": trainer.times(),
        "peak_memory": environment.peak_memory(trainer.device),
        "notes": trainer.notes,
        "data": {"fingerprint": marks["data"], **stream.notes},
        "environment": environment.describe(trainer.device),
    }


def _save_weights(folder: RunFolder, trainer: Trainer) -> None:
    """The model's state dict; with norm task also each task's statistics, as 'norms/task/norm/mean' and var."""
    measured = {f"norms/{name}": value for name, value in named(trainer.statistics).items()}
    weights = {
        name: value.detach().to("cpu").contiguous().clone()
        for name, value in {**trainer.context.model.state_dict(), **measured}.items()
    }
    temporary = folder.path / ".model.tmp"
    try:
        save_file(weights, temporary)
        checkpoint.replace_durably(temporary, folder.path / "model.safetensors")
    except OSError as error:
        raise NessError(
            f"cannot write {folder.path / 'model.safetensors'} ({error.strerror}); make room or rights"
        ) from error


def _conclude(folder: RunFolder, result: dict[str, Any]) -> None:
    """The weights are there; the result, then the checkpoints are dropped: at no moment is the run's end lost."""
    write_json(folder.path / "result.json", result)
    folder.log("finished", {"acc": result["acc"], "bwt": result["bwt"]})
    for path in checkpoint.paths(folder.path):
        path.unlink()
