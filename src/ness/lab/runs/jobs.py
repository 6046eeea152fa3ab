"""What a run is asked to do: a method on a benchmark under settings that a preset begins and the user changes."""

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ness.errors import NessError
from ness.lab import registry
from ness.lab.benchmarks.base import Benchmark, Request, Stream
from ness.lab.benchmarks.dataset_cache import Shelf
from ness.lab.benchmarks.validation import on_validation
from ness.lab.methods.base import MethodSpec
from ness.lab.networks.base import NetworkSpec
from ness.lab.runs.settings import (
    AND_WITH,
    ONLY_WITH,
    PRESETS,
    NetworkChoice,
    Preset,
    Training,
    check_contradictions,
    check_training,
    compose,
    identifying_settings,
    overridden,
    part_of,
)

MOST = 1 << 31  # no count of ours reaches this
SCHEMA = 1  # raise it when the same settings would give another result


@dataclass(frozen=True)
class Job:
    """A method, a benchmark and resolved settings; a run is a job and a seed."""

    method: MethodSpec
    benchmark: Benchmark
    preset: Preset
    settings: Any
    label: str  # the preset and what was changed by hand, for tables
    fast: bool = False  # speed before repeatability: see `ness.lab.gpu.amp`
    name: str = ""  # what a table calls it; by default the method's name
    own_network: NetworkSpec | None = None  # one that no registry knows, handed over from Python

    @property
    def digest(self) -> str:
        """Ten hexadecimal digits that name method and its revision, benchmark, settings, schema, and whether fast."""
        settings = identifying_settings(self.as_dict())
        revised = [{"revision": self.revision}] if self.revision > 1 else []  # the first was recorded without a number
        named = [self.method.name, self.benchmark.name, SCHEMA, settings, *(["fast"] if self.fast else []), *revised]
        text = json.dumps(named, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:10]

    @property
    def revision(self) -> int:
        """Which of the method's rules the settings ask for, counted from 1: see `MethodSpec.revision`."""
        return 1 if self.method.revision is None else self.method.revision(self.settings)

    @property
    def title(self) -> str:
        """What people read: the job's own name, or its method's."""
        return self.name or self.method.name

    @property
    def network(self) -> str:
        """The network that learns: the one chosen, or else the benchmark's own."""
        return str(self.settings.network or self.benchmark.network)

    @property
    def changes(self) -> dict[str, Any]:
        """What was set by hand: the settings that are not the preset's."""
        return departures(self.method, self.benchmark, self.preset, self.settings)

    def as_dict(self) -> dict[str, Any]:
        """The settings by name."""
        return dataclasses.asdict(self.settings)

    def load(self, seed: int, data: Path | None, shelf: Shelf | None = None) -> Stream:
        """The benchmark's stream for a seed; runs of several methods that share a shelf share it."""
        options = part_of(self.settings, self.benchmark.options)
        load = partial(self.benchmark.load, Request(seed, data, options, shelf))
        return load() if shelf is None else shelf.lend((self.benchmark.name, seed, data, str(options)), load)


@dataclass(frozen=True)
class JobDescription:
    """A job in plain data, which another process or machine makes the same job of: specs go by their names."""

    method: str
    benchmark: str
    first_tasks: int | None  # judged on validation data; None: the whole benchmark
    preset: Preset
    settings: Mapping[str, Any]
    label: str
    fast: bool
    name: str
    digest: str

    @classmethod
    def of(cls, job: Job) -> "JobDescription":
        """The description of a job."""
        whole, tasks = job.benchmark.whole or job.benchmark, job.benchmark.tasks if job.benchmark.whole else None
        names = (job.method.name, whole.name, tasks, job.preset)
        return cls(*names, job.as_dict(), job.label, job.fast, job.name, job.digest)

    def job(self) -> Job:
        """The job.

        Raises:
            NessError: method or benchmark are not installed here, or another version makes another job of it.
        """
        spec = registry.find("method", self.method, registry.all_methods())
        bench = registry.find("benchmark", self.benchmark, registry.all_benchmarks())
        if self.first_tasks is not None:
            bench = on_validation(bench, self.first_tasks)
        try:
            settings = settings_type(spec, bench)(**self.settings)
        except TypeError as error:
            raise NessError(
                f"{self.method} on {self.benchmark}: {error}; install one version of ness and of its methods everywhere"
            ) from error
        job = Job(spec, bench, self.preset, settings, self.label, self.fast, self.name)
        if job.digest != self.digest:
            raise NessError(
                f"{self.method} on {self.benchmark}: its settings have the digest {job.digest} here, expected "
                f"{self.digest}; install one version of ness and of its methods everywhere"
            )
        return job


def settings_type(method: MethodSpec, benchmark: Benchmark) -> type:
    """The flat dataclass of a run: shared training fields, the network, the method's, the benchmark's."""
    return compose("Settings", Training, NetworkChoice, method.settings, benchmark.options)


def preset_values(method: MethodSpec, benchmark: Benchmark, preset: Preset, optimizer: str | None) -> dict[str, Any]:
    """What a preset sets: the benchmark's part, then the method's; the general before the particular.

    The optimizer (the one asked for, else the preset's) chooses among the entries such as "cifar100/sam".
    """
    layers = ("fixed",) if preset == "fixed" else ("fixed", preset)
    values: dict[str, Any] = {}
    for layer in layers:
        values |= benchmark.settings.get(layer, {})
    for layer in layers:
        own = method.presets.get(layer, {})
        values |= own.get("*", {})
        values |= own.get(benchmark.name, {})
    chosen = optimizer or values.get("optimizer", Training.optimizer)
    for layer in layers:
        own = method.presets.get(layer, {})
        values |= own.get(f"*/{chosen}", {})
        values |= own.get(f"{benchmark.name}/{chosen}", {})
    return values


def resolve(
    method: str | MethodSpec,
    benchmark: str | Benchmark,
    preset: str = "fixed",
    changes: Mapping[str, Any] | None = None,
    fast: bool = False,
    network: NetworkSpec | None = None,
) -> Job:
    """A job by names, or by specs of your own; everything unknown or contradictory is refused here."""
    spec = method if isinstance(method, MethodSpec) else registry.find("method", method, registry.all_methods())
    bench = (
        benchmark
        if isinstance(benchmark, Benchmark)
        else registry.find("benchmark", benchmark, registry.all_benchmarks())
    )
    name = registry.find("preset", preset, {known: known for known in PRESETS})
    changes = {**(changes or {}), **({} if network is None else {"network": network.name})}
    if changes.get("network") == bench.network and network is None:
        changes["network"] = ""  # its own: the same run, however it was asked for
    kind = settings_type(spec, bench)
    base = preset_values(spec, bench, name, changes.get("optimizer"))
    settings = overridden(kind, {}, base, f"preset {name} of {spec.name} on {bench.name}")
    settings = overridden(kind, dataclasses.asdict(settings), changes, f"{spec.name} on {bench.name}")
    check(spec, settings, changes)
    if settings.network:
        known = registry.all_networks()
        if network is None:
            registry.find("network", settings.network, known)
        elif known.get(network.name, network) is not network:
            raise NessError(f"a network is called {network.name!r} already; give yours another name")
    if bench.check is not None:
        bench.check(part_of(settings, bench.options))
    differing = [f"{key}={value}" for key, value in departures(spec, bench, name, settings).items()]
    label = " ".join([name, *differing, *(["fast"] if fast else [])])
    return Job(spec, bench, name, settings, label, fast, own_network=network)


def departures(method: MethodSpec, benchmark: Benchmark, preset: Preset, settings: Any) -> dict[str, Any]:
    """The settings that are not those of the preset under the optimizer asked for; nor, then, is the optimizer."""
    base = preset_values(method, benchmark, preset, settings.optimizer)
    default = settings_type(method, benchmark)(**base)
    return {key: value for key, value in dataclasses.asdict(settings).items() if value != getattr(default, key)}


def check(method: MethodSpec, settings: Any, changes: Mapping[str, Any]) -> None:
    """Refuses settings out of range, contradictory ones, and what the method cannot work with."""
    for name, value in dataclasses.asdict(settings).items():
        if isinstance(value, float) and not math.isfinite(value):
            raise NessError(f"{name} is {value}, expected a number")
        if type(value) is int and not -MOST < value < MOST:
            raise NessError(f"{name} is {value:.3e}, expected a whole number of less than {MOST}")
    training = part_of(settings, Training)
    check_training(training)
    for conditions in (ONLY_WITH, AND_WITH, method.only_with):
        check_contradictions(settings, changes, conditions)
    chosen = [training.optimizer, training.schedule, *(["mixup"] if training.mixup else [])]
    for choice in chosen:
        if choice in method.refuses:
            raise NessError(f"{method.name} does not go with {choice}: {method.refuses[choice]}")
    if method.check is not None:
        method.check(settings)
