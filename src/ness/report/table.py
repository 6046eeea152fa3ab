"""The table of a set of runs: one row a setting, mean ± sample deviation over seeds."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ness.lab.metrics import mean_and_deviation
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


def rows(records: Iterable[Record]) -> list[Row]:
    """One row for each benchmark, method and setting, in the order of their first record."""
    groups: dict[tuple[str, str, str], list[Record]] = {}
    for record in with_forward_transfer(records):
        groups.setdefault((record.benchmark, record.method, record.digest), []).append(record)
    return [_row(sorted(group, key=lambda record: record.seed)) for group in groups.values()]


def _row(group: Sequence[Record]) -> Row:
    first = group[0]
    memory = [record.memory for record in group if record.memory is not None]
    return Row(
        benchmark=first.benchmark,
        method=first.method,
        setting=first.setting,
        seeds=tuple(record.seed for record in group),
        acc=_measured([record.scores.acc for record in group]),
        bwt=_measured([record.scores.bwt for record in group]),
        forgetting=_measured([record.scores.forgetting for record in group]),
        learning=_measured([record.scores.learning for record in group]),
        forward=_measured([record.scores.forward for record in group]),
        seconds=_measured([record.seconds for record in group]),
        memory=max(memory) if memory else None,
    )


def _measured(values: Sequence[float | None]) -> Measured:
    """Mean and deviation; nothing where a seed has no value, rather than a mean over fewer seeds."""
    known = [value for value in values if value is not None]
    return mean_and_deviation(known) if known and len(known) == len(values) else None
