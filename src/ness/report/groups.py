"""Runs that differ in nothing but the seed: a setting, its mean accuracy matrix, and its name among others."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ness.lab.runs.metrics import Matrix, mean_and_deviation
from ness.report.records import Record

CEILINGS = ("joint", "alone")  # they do not learn task after task with one network: what others are held against


@dataclass(frozen=True)
class Setting:
    """A method under one setting on one benchmark: its runs in the order of their seeds."""

    records: tuple[Record, ...]

    @property
    def first(self) -> Record:
        """The run that speaks for what all share."""
        return self.records[0]

    @property
    def seeds(self) -> tuple[int, ...]:
        """In order."""
        return tuple(record.seed for record in self.records)

    @property
    def accuracy(self) -> Matrix:
        """The mean accuracy matrix over the seeds."""
        return mean_matrix([record.accuracy for record in self.records])

    @property
    def lessons(self) -> tuple[str, ...]:
        """What was learnt one after another: the tasks, or all of them at once."""
        tasks = self.first.tasks
        return tasks if len(self.first.accuracy) == len(tasks) else ("all tasks",)

    @property
    def is_ceiling(self) -> bool:
        """Whether this is no continual learner but the ceiling of one."""
        return self.first.method in CEILINGS


def settings(records: Iterable[Record]) -> list[Setting]:
    """One for each benchmark, method, digest of the settings, and tasks, in the order of their first record."""
    groups: dict[tuple[str, str, str, tuple[str, ...]], list[Record]] = {}
    for record in records:
        groups.setdefault((record.benchmark, record.method, record.digest, record.tasks), []).append(record)
    return [Setting(tuple(sorted(group, key=lambda record: record.seed))) for group in groups.values()]


def mean_matrix(matrices: Sequence[Matrix]) -> Matrix:
    """The mean of matrices of one shape, entry by entry; None where nothing was measured.

    >>> mean_matrix([[[90.0, None], [80.0, 70.0]], [[92.0, None], [70.0, 60.0]]])
    [[91.0, None], [75.0, 65.0]]
    """

    def mean(values: tuple[float | None, ...]) -> float | None:
        known = [value for value in values if value is not None]
        return mean_and_deviation(known)[0] if len(known) == len(values) else None

    return [[mean(values) for values in zip(*rows, strict=True)] for rows in zip(*matrices, strict=True)]


def labels(found: Sequence[Setting]) -> list[str]:
    """The method's name; with what sets it apart where a benchmark has several settings of it."""
    several = Counter((one.first.benchmark, one.first.method) for one in found)
    names = [
        one.first.method
        if several[one.first.benchmark, one.first.method] == 1
        else f"{one.first.method} ({one.first.setting})"
        for one in found
    ]
    alike = Counter((one.first.benchmark, name) for one, name in zip(found, names, strict=True))
    return [
        name if alike[one.first.benchmark, name] == 1 else f"{name} {one.first.digest}"
        for one, name in zip(found, names, strict=True)
    ]


def stems(found: Sequence[Setting]) -> list[str]:
    """A file name for each setting, without odd characters, no two alike.

    Two that would be alike, on a file system that does not tell capitals either, are numbered.
    """
    seen: Counter[str] = Counter()
    names = []
    for one in found:
        stem = file_name(f"{one.first.benchmark}-{one.first.method}-{one.first.digest}")
        seen[stem.lower()] += 1
        names.append(stem if seen[stem.lower()] == 1 else f"{stem}-{seen[stem.lower()]}")
    return names


def file_name(text: str) -> str:
    """The text with every character that a file name should not have made an underscore.

    >>> file_name("a/b method")
    'a_b_method'
    """
    return re.sub(r"[^\w.-]", "_", text)[:120]
