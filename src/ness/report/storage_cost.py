"""What a task keeps for itself, and ACC against it: the rows of a plan around NESS+ as it stands."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ness.errors import NessError
from ness.lab import registry
from ness.lab.methods.ness_plus import METHOD, norm_numbers, private_directions
from ness.lab.runs.experiment import Experiment
from ness.lab.runs.jobs import Job
from ness.layers.discovery import discover
from ness.report.experiment_rows import Planned, planned
from ness.report.records import Record

ANY_IMAGE, ANY_CLASSES = (3, 32, 32), (10,)  # outputs and norms depend on neither; fan-ins are the record's


@dataclass(frozen=True)
class Point:
    """A row that ran: what its tasks keep, what that is of the shared weights, and where it ends."""

    name: str
    apart: bool  # differs from NESS+ in something else than how many directions are private
    default: bool  # k follows from `keep`
    directions: int  # k, private directions per layer
    kept: int  # numbers, the most that a task of any seed keeps
    percent: float  # of the shared layers' convolution and linear weights
    acc: float
    deviation: float | None
    seeds: int
    asked: int  # seeds


@dataclass(frozen=True)
class Keeping:
    """ACC against what a task keeps, in the plan's order."""

    title: str
    points: tuple[Point, ...]


def most_kept(runs: Iterable[Record]) -> int | None:
    """The most numbers that a task of any run kept for itself; None where no run says."""
    return max((note["kept"] for run in runs for note in run.notes if "kept" in note), default=None)


def keeping(experiment: Experiment, records: Sequence[Record], where: str) -> Keeping:
    """The rows that ran and are NESS+ as it stands, or NESS+ with one setting of its own changed.

    Where that setting is `private` the row belongs to the course over k, otherwise it stands apart. Rows that train
    otherwise (without mix-up, with batch statistics) would compare recipes, and are left out.
    """
    whole = [job for job in experiment.jobs if job.method.name == METHOD.name and not job.changes]
    if len(whole) != 1:
        raise NessError(f"{where}: {len(whole)} rows are {METHOD.name} as it stands, expected one to compare with")
    rows = [one for one in planned(experiment, records) if one.runs and _belongs(one.job, whole[0])]
    return Keeping(experiment.title, tuple(map(_point, rows)))


def _belongs(job: Job, whole: Job) -> bool:
    """Whether a job is NESS+, or NESS+ but for one setting of its own."""
    if (job.method.name, job.benchmark.name, job.preset) != (whole.method.name, whole.benchmark.name, whole.preset):
        return False
    own = {field.name for field in dataclasses.fields(METHOD.settings)}
    return len(job.changes) <= 1 and job.changes.keys() <= own


def _point(one: Planned) -> Point:
    kept, layers = most_kept(one.runs), shared_layers(one.job, one.runs[0])
    if kept is None or one.row.acc is None:
        raise NessError(f"the runs of {one.job.title!r} do not say what a task keeps; run them again")
    weights = tuple((outputs, fan_in) for outputs, fan_in, _ in layers)
    acc, deviation = one.row.acc
    return Point(
        name=one.job.title,
        apart=not one.job.changes.keys() <= {"private"},
        default=one.job.settings.private is None,
        directions=private_directions(one.job.settings, weights, norm_numbers(_network(one.job))),
        kept=kept,
        percent=round(100 * kept / sum(outputs * fan_in for outputs, fan_in, _ in layers), 4),
        acc=round(acc, 4),
        deviation=None if deviation is None else round(deviation, 4),
        seeds=len(one.runs),
        asked=len(one.seeds),
    )


def shared_layers(job: Job, run: Record) -> list[tuple[int, int, bool]]:
    """(outputs o, fan-in d, whether there is a bias) of each layer in the run's certificate.

    The record has the fan-ins, which may depend on the image; the network of the benchmark has the rest.
    """
    rows: list[Mapping[str, Any]] = next((note["certificate"] for note in run.notes if "certificate" in note), [])
    layers = discover(_network(job), (), ("heads",)).layers
    if [row["name"] for row in rows] != list(layers):
        found = ", ".join(row["name"] for row in rows) or "nothing"
        known = f"{job.network} has {', '.join(layers)}"
        raise NessError(f"a run of {job.title!r} certifies {found}, but {known}; run it again")
    both = zip(layers.values(), rows, strict=True)
    return [(layer.groups * layer.outputs, row["fan_in"], layer.bias is not None) for layer, row in both]


def _network(job: Job) -> torch.nn.Module:
    """The benchmark's network, without numbers."""
    spec = registry.find("network", job.network, registry.all_networks())
    with torch.device("meta"):
        return spec.build(ANY_IMAGE, ANY_CLASSES, job.settings.norm)
