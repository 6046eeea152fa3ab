"""From a command line to settings: the flags of a run are the fields of its method's and benchmark's dataclasses."""

import contextlib
import dataclasses
import io
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro

from ness.cli.main import WrongUse
from ness.errors import NessError
from ness.lab import registry
from ness.lab.runs.environment import choose_device
from ness.lab.runs.jobs import Job, preset_values, settings_type
from ness.lab.runs.log import ListenerOf
from ness.lab.runs.on_ray import run_on_ray
from ness.lab.runs.ray_driver import Cluster
from ness.lab.runs.run import Options, check_options
from ness.lab.runs.settings import PRESETS, Preset, check_type, compose, overridden, read_toml, same_field, setting
from ness.lab.runs.sweep import Grid, run_all
from ness.lab.runs.workers import places_for, run_on_workers
from ness.lab.training.seeds import checked

T = TypeVar("T")


@dataclass(frozen=True)
class What:
    """What is run."""

    benchmark: str = setting("digits", "see `ness list benchmarks`")
    preset: Preset = setting("fixed", "fixed: traps mended; reference: the code behind the paper; paper: its text")
    seeds: tuple[int, ...] = setting((1,), "one run each")


@dataclass(frozen=True)
class How:
    """How runs are carried out."""

    out: Path = setting(Path("runs"), "folder of the run folders")
    data: Path | None = setting(None, "folder of data sets; the benchmark's own place by default")
    device: str = setting("cpu", "cpu, cuda, cuda:0, … or auto: the GPU with most free memory, else the CPU")
    jobs: int | None = setting(
        None, "worker processes on this machine: one thread each on the CPU, a GPU each with --device cuda"
    )
    ray: str | None = setting(
        None,
        "runs as tasks of a Ray cluster: one on this machine, made for this command; or auto, HOST:PORT: that one",
    )
    gpus_per_run: float | None = setting(None, "with --ray: GPUs, or a part of one, that a run takes; 1 with cuda")
    cpus_per_run: float | None = setting(None, "with --ray: CPUs that a run takes, by default 1; its threads, too")
    lanes: int | None = setting(None, "runs side by side on one GPU; by default as many as its memory takes, at most 5")
    plain: bool = setting(False, "on a GPU: step after step from Python instead of captured graphs")
    fast: bool = setting(False, "bfloat16 steps, on a CPU that has them too; on a GPU a seed then gives no equal bits")
    again: bool = setting(False, "repeat runs that are finished")
    quiet: bool = setting(False, "say nothing but warnings and errors")
    times: bool = setting(False, "say at the end where the time went; on a GPU it is said anyway")
    threads: int = setting(0, "CPU threads, at most the cores; 0: one for a small network, torch's own choice else")
    save_every: float | None = setting(None, "seconds between two checkpoints, at least; by default 30, on a GPU 120")
    stop_after: float | None = setting(
        None, "seconds after which no further run is begun; those under way are finished"
    )
    log: tuple[str, ...] = setting((), "loggers that hear of every epoch and task, e.g. tensorboard")

    def carry_out(self, work: Sequence[tuple[Job, int]], listener: ListenerOf, say: Callable[[str], None]) -> Grid:
        """Runs each job with its seed: in this process, on as many workers as were asked for, or on a cluster."""
        if (cluster := self.cluster()) is not None:
            return run_on_ray(work, self.options(), cluster, listener, say)
        if self.jobs is None:
            return run_all(work, self.options(), listener, say)
        return run_on_workers(work, self.options(), self.jobs, listener, say)

    def cluster(self) -> Cluster | None:
        """The Ray cluster that was asked for, and what a run takes of it.

        Raises:
            NessError: flags that contradict each other, or that Ray cannot follow.
        """
        if self.ray is None:
            for flag, value in (("gpus", self.gpus_per_run), ("cpus", self.cpus_per_run)):
                if value is not None:
                    raise NessError(f"--{flag}-per-run {value:g} goes with --ray; on one machine use --jobs")
            return None
        if self.jobs is not None or self.lanes is not None:
            raise NessError("--ray goes without --jobs and --lanes; --cpus-per-run and --gpus-per-run say how many fit")
        if self.device not in ("cpu", "cuda"):
            raise NessError(f"--device {self.device} with --ray: Ray chooses the GPU; expected cpu or cuda")
        gpus = self.gpus_per_run if self.gpus_per_run is not None else float(self.device == "cuda")
        if self.device == "cuda" and not gpus:
            raise NessError("--gpus-per-run 0 with --device cuda: leave one of them out")
        cluster = Cluster(self.ray, gpus, 1.0 if self.cpus_per_run is None else self.cpus_per_run)
        cluster.check()
        return cluster

    def options(self) -> Options:
        """What the runs themselves need to know of it."""
        return Options(
            out=self.out,
            data=self.data,
            device="cuda" if self.ray is not None and self.gpus_per_run else self.device,
            again=self.again,
            save_every=self.save_every,
            lanes=self.lanes,
            plain=self.plain,
            threads=self.threads,
            stop_after=self.stop_after,
        )


@dataclass(frozen=True)
class Common(How, What):
    """What `run` and `table` share."""

    config: Path | None = setting(None, "TOML file of settings by name; the command line goes before it")


@dataclass(frozen=True)
class Request:
    """A command line that was understood: the command's own fields, and the settings changed by hand."""

    own: Any
    changes: dict[str, Any]


def parse(argv: Sequence[str], own: type, methods: Sequence[str] | None, text: str, prog: str) -> Request:
    """Reads a command line against the fields of `own` and of the settings of these methods.

    `methods` None: the one named by --method, with the values of its preset shown by --help.
    """
    config = read_config(peek(argv, "config"), own)
    defaults = {item.name: item.default for item in dataclasses.fields(own)}
    names = ("benchmark", "preset", "method", "optimizer")
    chosen: dict[str, Any] = {name: peek(argv, name) or config.get(name) or defaults.get(name) for name in names}
    try:
        kind = _arguments(own, methods or [chosen["method"]], chosen["benchmark"])
        base = _preset_shown(chosen) if methods is None else {}
        default = overridden(kind, base, config, f"--config {peek(argv, 'config')}")
    except NessError as error:
        raise WrongUse(str(error)) from error
    parsed: Any = understood(
        _with_help(kind),
        args=with_address(argv),
        prog=prog,
        description=text,
        default=_with_help(kind)(**_values(default)),
    )
    _check_seeds(parsed)
    fields = {item.name for item in dataclasses.fields(kind)}
    explicit = (given(argv) & fields) | set(config)
    changes = {name: getattr(parsed, name) for name in sorted(explicit - set(defaults))}
    mine = own(**{name: getattr(parsed, name) for name in defaults})
    _check_options(mine)
    return Request(mine, changes)


def parse_flags(argv: Sequence[str], own: type[T], text: str, prog: str) -> T:
    """Reads a command line against the fields of `own` alone."""
    parsed: Any = understood(_with_help(own), args=with_address(argv), prog=prog, description=text)
    _check_seeds(parsed)
    mine = own(**_values(parsed))
    _check_options(mine)
    return mine


def understood(kind: type[T], args: Sequence[str], prog: str, **options: Any) -> T:
    """What `tyro.cli` makes of a command line; its complaint, a box of lines, as one line.

    Raises:
        WrongUse: the line was not understood.
    """
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            found: T = tyro.cli(kind, args=list(args), prog=prog, config=(tyro.conf.FlagCreatePairsOff,), **options)
            return found
    except SystemExit as stop:
        if not stop.code:  # --help
            raise
        raise WrongUse(_in_one_line(said.getvalue(), prog)) from stop


def _in_one_line(box: str, prog: str) -> str:
    lines = [line.strip(" │").strip() for line in box.splitlines() if not line.startswith(("╭", "╰"))]
    rule = next((at for at, line in enumerate(lines) if line and not line.strip("─")), len(lines))
    what = " ".join(filter(None, lines[:rule])) or "not understood"
    near = re.search(r"(--[a-z][a-z-]*)", " ".join(lines[rule:])) if "meant" in box else None
    meant = f" Did you mean {near[1]}?" if near else ""
    return f"{what.rstrip('.')}.{meant} `{prog} --help` says more"


def _check_options(own: Any) -> None:
    """Refuses numbers out of their range and devices that are not there, before anything is read or written."""
    if isinstance(own, How):
        try:
            check_options(own.options())
            if own.cluster() is not None:
                return  # devices are those of its nodes
            if own.jobs is not None:
                places_for(own.device, own.jobs, own.lanes)
            if own.device != "auto":
                choose_device(own.device)
        except NessError as error:
            raise WrongUse(str(error)) from error


def _check_seeds(parsed: Any) -> None:
    if getattr(parsed, "seeds", None) is not None:
        try:
            checked(parsed.seeds)
        except NessError as error:
            raise WrongUse(f"--seeds: {error}") from error


def peek(argv: Sequence[str], name: str) -> str | None:
    """The value of `--name value` or `--name=value`, before the whole line can be understood.

    >>> peek(["--method", "ness", "--lr=0.1"], "lr")
    '0.1'
    """
    for word, following in zip(argv, [*argv[1:], None], strict=True):
        if word == f"--{name}":
            return following
        if word.startswith(f"--{name}="):
            return word.split("=", 1)[1]
    return None


def with_address(argv: Sequence[str]) -> list[str]:
    """The command line with the address that --ray alone stands for.

    >>> with_address(["--ray", "--seeds", "1"]), with_address(["--ray", "auto"])
    (['--ray', 'local', '--seeds', '1'], ['--ray', 'auto'])
    """
    words: list[str] = []
    for word, following in zip(argv, [*argv[1:], "-"], strict=True):
        words += [word, "local"] if word == "--ray" and following.startswith("-") else [word]
    return words


def given(argv: Sequence[str]) -> set[str]:
    """The names of the flags on a command line.

    >>> sorted(given(["--lr", "0.1", "--weight-decay=0", "5"]))
    ['lr', 'weight_decay']
    """
    return {word[2:].split("=", 1)[0].replace("-", "_") for word in argv if word.startswith("--") and len(word) > 2}


def read_config(path: str | None, own: type) -> dict[str, Any]:
    """The settings of a TOML file, flat; paths and tuples of the command's own fields are converted."""
    if path is None:
        return {}
    where = f"--config {path}"
    try:
        values = read_toml(Path(path))
        hints = typing.get_type_hints(own)
        for name, value in values.items():
            if isinstance(value, dict):
                raise NessError(f"{path}: [{name}] is a table; settings stand flat, e.g. lr = 0.01")
            if name == "config":
                raise NessError(f"{path}: a file of settings names no other one")
            if isinstance(value, list):
                values[name] = value = tuple(value)
            is_path = hints.get(name) in (Path, Path | None)
            if is_path or name in ("method", "benchmark", "preset", "optimizer"):
                check_type(name, value, str, path)  # before anything is looked up by it
            elif name in hints:
                check_type(name, value, hints[name], path)
            if is_path:
                values[name] = Path(value)
    except NessError as error:
        raise WrongUse(f"{where}: {str(error).removeprefix(f'{path}: ')}") from error
    return values


def _arguments(own: type, methods: Sequence[str], benchmark: str) -> type:
    """The command's own fields and every setting of the methods on the benchmark."""
    bench = registry.find("benchmark", benchmark, registry.all_benchmarks())
    found = [registry.find("method", name, registry.all_methods()) for name in methods]
    settings = compose("Settings", *(settings_type(spec, bench) for spec in found), shared=True)
    return compose("Arguments", own, settings)


def _preset_shown(chosen: Mapping[str, Any]) -> dict[str, Any]:
    """What the preset sets, so that --help shows it."""
    preset = registry.find("preset", chosen["preset"], {known: known for known in PRESETS})
    spec = registry.all_methods()[chosen["method"]]
    return preset_values(spec, registry.all_benchmarks()[chosen["benchmark"]], preset, chosen["optimizer"])


def _with_help(kind: type) -> type:
    """The same fields with the help line of each where the argument parser looks for it."""
    hints = typing.get_type_hints(kind)
    fields = []
    for item in dataclasses.fields(kind):
        hint: Any = hints[item.name]
        if "help" in item.metadata:
            hint = Annotated[hint, tyro.conf.arg(help=item.metadata["help"])]
        fields.append((item.name, hint, same_field(item)))
    return dataclasses.make_dataclass(kind.__name__, fields, frozen=True)


def _values(instance: Any) -> dict[str, Any]:
    return {item.name: getattr(instance, item.name) for item in dataclasses.fields(instance)}
