"""Which figures a set of runs has, and the names of their files."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from matplotlib.figure import Figure

from ness.report import certificates
from ness.report.detail_tables import task_seconds
from ness.report.figures import curves, drift, heat, scatter, times
from ness.report.groups import Setting, file_name, labels, stems
from ness.report.table import row

Drawing = Callable[[], Figure | None]  # drawn when it is written; None where there is nothing to draw
TOGETHER = 12  # settings that a figure of a whole benchmark shows at most


def of_settings(found: Sequence[Setting]) -> Iterator[tuple[str, Drawing]]:
    """(file name, figure) for each setting: heat-map, courses, certificate."""
    for setting, label, stem in zip(found, labels(found), stems(found), strict=True):
        title = f"{label} on {setting.first.benchmark}, {seeds_text(setting)}"
        matrix, promises = setting.accuracy, certificates.promises(setting)
        yield f"accuracy-{stem}", partial(heat.figure, matrix, title)
        yield f"course-{stem}", partial(curves.figure, matrix, title)
        if promises:
            yield f"certificate-{stem}", partial(drift.figure, promises, title)


def of_benchmarks(found: Sequence[Setting]) -> Iterator[tuple[str, Drawing]]:
    """(file name, figure) for each benchmark: ACC against BWT, heat-maps side by side, times."""
    for name in dict.fromkeys(setting.first.benchmark for setting in found):
        mine = [setting for setting in found if setting.first.benchmark == name]
        shown = labels(mine)
        stem = file_name(name)
        table = [row(setting) for setting in mine]
        yield f"acc-bwt-{stem}", partial(scatter.figure, table, shown, name)
        learners = [(one, label) for one, label in zip(mine, shown, strict=True) if len(one.accuracy) > 1][:TOGETHER]
        if len(learners) > 1:
            matrices, titles = [one.accuracy for one, _ in learners], [label for _, label in learners]
            yield f"compare-{stem}", partial(heat.side_by_side, matrices, titles)
        timed = [(task_seconds(one), label) for one, label in zip(mine, shown, strict=True)]
        pieces = [one for one, _ in timed if one]
        names = [label for one, label in timed if one]
        if pieces and len(pieces) <= 4 * TOGETHER:
            yield f"times-{stem}", partial(times.figure, pieces, names, name)


def of_runs(found: Sequence[Setting]) -> Iterator[tuple[str, Drawing]]:
    """(file name, figure) for the heat-map of every single run."""
    for setting, label, stem in zip(found, labels(found), stems(found), strict=True):
        for record in setting.records:
            title = f"{label} on {record.benchmark}, seed {record.seed}"
            yield f"accuracy-{stem}-seed{record.seed}", partial(heat.figure, record.accuracy, title)


def seeds_text(setting: Setting) -> str:
    """'seed 1' or 'mean of 5 seeds'."""
    seeds = setting.seeds
    return f"seed {seeds[0]}" if len(seeds) == 1 else f"mean of {len(seeds)} seeds"
