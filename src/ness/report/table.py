"""The table of a set of runs: one row per setting, mean ± sample deviation over seeds, the paper's number beside it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ness.lab.runs.metrics import mean_and_deviation
from ness.report import groups
from ness.report.groups import Setting
from ness.report.paper import PaperNumber, number_for
from ness.report.records import Record, with_forward_transfer

Measured = tuple[float, float | None] | None  # mean and deviation, or nothing to say


@dataclass(frozen=True)
class Row:
    """A method under one setting on one benchmark."""

    benchmark: str
    method: str
    setting: str
    seeds: tuple[int, ...]
    acc: Measured
    bwt: Measured
    forgetting: Measured
    learning: Measured
    forward: Measured
    seconds: Measured
    memory: int | None  # bytes, the largest of the seeds
    paper: PaperNumber | None = None
    device: str = ""  # what the seconds are of
    name: str = ""  # what a plan calls it

    @property
    def title(self) -> str:
        """What people read: the plan's name for it, or the method's."""
        return self.name or self.method


def rows(records: Iterable[Record]) -> list[Row]:
    """One row for each setting, in the order of their first record; those that read alike say what differs."""
    found = groups.settings(with_forward_transfer(records))
    made = [row(setting) for setting in found]
    places: dict[tuple[str, str, str], list[int]] = {}
    for n, one in enumerate(made):
        places.setdefault((one.benchmark, one.method, one.setting), []).append(n)
    for alike in places.values():
        if len(alike) > 1:
            for n, words in zip(alike, groups.differences([found[n].first for n in alike]), strict=True):
                made[n] = replace(made[n], setting=f"{made[n].setting} {words}")
    return made


def row(setting: Setting) -> Row:
    """What the table says of a setting."""
    first, runs = setting.first, setting.records
    memory = [record.memory for record in runs if record.memory is not None]
    return Row(
        benchmark=first.benchmark,
        method=first.method,
        setting=first.setting,
        seeds=setting.seeds,
        acc=_measured([record.scores.acc for record in runs]),
        bwt=_measured([record.scores.bwt for record in runs]),
        forgetting=_measured([record.scores.forgetting for record in runs]),
        learning=_measured([record.scores.learning for record in runs]),
        forward=_measured([record.scores.forward for record in runs]),
        seconds=_measured([record.seconds for record in runs]),
        memory=max(memory) if memory else None,
        device=setting.device,
        paper=number_for(first.method, first.benchmark, first.settings, first.setting),
    )


def _measured(values: Sequence[float | None]) -> Measured:
    """Mean and deviation; nothing where a seed has no value, rather than a mean over fewer seeds."""
    known = [value for value in values if value is not None]
    return mean_and_deviation(known) if known and len(known) == len(values) else None
