"""The rows of a plan, from records: those that ran, and those that did not yet."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ness.lab.runs.experiment import Experiment
from ness.lab.runs.jobs import Job
from ness.lab.runs.settings import draws_validation
from ness.report.groups import Setting
from ness.report.paper import number_for
from ness.report.records import Record, with_forward_transfer
from ness.report.table import Row, row


@dataclass(frozen=True)
class Planned:
    """A row of a plan: what was asked for, the runs of it that are there, and what the table says of them."""

    job: Job
    seeds: tuple[int, ...]  # asked for
    runs: tuple[Record, ...]
    row: Row


def planned(experiment: Experiment, records: Iterable[Record]) -> list[Planned]:
    """One for each row of the plan, in its order."""
    scored = with_forward_transfer(records)
    return [_planned(job, experiment.seeds, scored) for job in experiment.jobs]


def _planned(job: Job, seeds: tuple[int, ...], records: Sequence[Record]) -> Planned:
    wanted = [record for record in runs_of(job, records) if record.seed in seeds]
    runs = tuple(sorted(wanted, key=lambda record: record.seed))
    said = replace(row(Setting(runs)), name=job.name) if runs else not_run(job)
    return Planned(job, seeds, runs, said)


def runs_of(job: Job, records: Iterable[Record]) -> list[Record]:
    """The runs of a job: those of its digest; where there are none, of the newest that were the same before.

    A setting that a method has been given since gives another digest to the same run: then the preset, what was set by
    hand, the revision of the method's rule, and every setting the record has must agree. Of several such generations
    the newest knows the most settings.
    """
    names = (job.method.name, job.benchmark.name)
    mine = [record for record in records if (record.method, record.benchmark) == names]
    if same := [record for record in mine if record.digest == job.digest]:
        return same
    now = json.loads(json.dumps(job.as_dict()))  # tuples as a record has them
    label = job.label.replace(" valid_order=fixed", "")  # there was no choice before
    before = [
        record
        for record in mine
        if record.preset == job.preset
        and record.revision == job.revision
        and record.setting in (job.label, label)
        and all(key in now and now[key] == value for key, value in record.settings.items())
        and draws_validation(now) == draws_validation(record.settings)
    ]
    newest = max(before, key=lambda record: (len(record.settings), record.digest), default=None)
    return [record for record in before if newest is not None and record.digest == newest.digest]


def not_run(job: Job) -> Row:
    """The row of a job without a run; the paper's number is known before."""
    return Row(
        benchmark=job.benchmark.name,
        method=job.method.name,
        setting=job.label,
        seeds=(),
        acc=None,
        bwt=None,
        forgetting=None,
        learning=None,
        forward=None,
        seconds=None,
        memory=None,
        paper=number_for(job.method.name, job.benchmark.name, job.as_dict(), job.label),
        name=job.name,
    )
