"""The accuracy matrices of some rows of a plan, to be seen beside one another."""

from collections.abc import Sequence
from dataclasses import dataclass

from ness.errors import NessError
from ness.lab.runs.experiment import Experiment
from ness.lab.runs.metrics import Matrix
from ness.lab.runs.settings import nearest
from ness.report.experiment_rows import Planned, planned
from ness.report.groups import Setting
from ness.report.number_format import number
from ness.report.records import Record


@dataclass(frozen=True)
class Map:
    """A row that ran: its mean accuracy matrix, and the scores that follow from it, as they are read."""

    name: str
    acc: str
    bwt: str
    seeds: int
    asked: int  # seeds
    accuracy: Matrix


@dataclass(frozen=True)
class Maps:
    """One map a row."""

    title: str
    maps: tuple[Map, ...]


def maps(experiment: Experiment, methods: Sequence[str], records: Sequence[Record], where: str) -> Maps:
    """The rows of these methods that ran, in the order in which the methods are named; all rows where none is."""
    rows = planned(experiment, records)
    known = dict.fromkeys(one.job.method.name for one in rows)
    for method in methods:
        if method not in known:
            raise NessError(f"{where}: no row is of {method!r}; there are {', '.join(known)}.{nearest(method, known)}")
    wanted = [one for method in methods or known for one in rows if one.job.method.name == method]
    return Maps(experiment.title, tuple(_map(one) for one in wanted if one.runs))


def _map(one: Planned) -> Map:
    accuracy = [[None if value is None else round(value, 2) for value in row] for row in Setting(one.runs).accuracy]
    bwt = number(one.row.bwt, signed=True).replace("-", "−")
    return Map(one.job.title, number(one.row.acc), bwt, len(one.runs), len(one.seeds), accuracy)
