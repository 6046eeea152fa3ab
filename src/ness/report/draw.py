"""Which figures a set of runs has, and the names of their files."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from ness.lab.runs.metrics import Matrix
from ness.report import certificates
from ness.report.detail_tables import task_seconds
from ness.report.groups import Setting, file_name, labels, recipes, stems
from ness.report.pictures import heat, lines, scatter, times
from ness.report.pictures.drawing import SIGNS, Picture, beside, titled
from ness.report.pictures.palette import looks
from ness.report.table import row

Drawing = Callable[[], Picture | None]  # drawn when it is written; None where there is nothing to draw
TOGETHER = 12  # settings whose heat-maps stand side by side in one figure at most
LINES = 40  # settings of a benchmark on one axis at most


def of_settings(found: Sequence[Setting]) -> Iterator[tuple[str, Drawing]]:
    """(file name, figure) for each setting: heat-map, courses, certificate."""
    for setting, label, stem in zip(found, labels(found), stems(found), strict=True):
        title = f"{label} on {setting.first.benchmark}, {seeds_text(setting)}"
        yield f"accuracy-{stem}", partial(_heat, setting, title)
        yield f"course-{stem}", partial(_course, setting, title)
        if certificates.promises(setting):
            yield f"certificate-{stem}", partial(_certificate, setting, title)


def of_benchmarks(found: Sequence[Setting]) -> Iterator[tuple[str, Drawing]]:
    """(file name, figure) for each benchmark: ACC against BWT, mean accuracy so far, heat-maps, times by device."""
    for name in dict.fromkeys(setting.first.benchmark for setting in found):
        mine = [setting for setting in found if setting.first.benchmark == name]
        shown, stem = labels(mine), file_name(name)
        drawn_as = looks([one.first.method for one in mine], SIGNS)
        yield f"acc-bwt-{stem}", partial(_scatter, mine, shown, drawn_as, name)
        learners = [n for n, one in enumerate(mine) if len(one.accuracy) > 1]
        if learners:
            yield f"average-{stem}", partial(_averages, mine, shown, drawn_as, learners[:LINES], name)
        if len(learners) > 1:
            yield f"compare-{stem}", partial(_compare, mine, shown, learners[:TOGETHER], name)
        yield from _times(mine, shown, stem)


def of_runs(found: Sequence[Setting]) -> Iterator[tuple[str, Drawing]]:
    """(file name, figure) for the heat-map of every single run."""
    for setting, label, stem in zip(found, labels(found), stems(found), strict=True):
        for record in setting.records:
            title = f"{label} on {record.benchmark}, seed {record.seed}"
            yield f"accuracy-{stem}-seed{record.seed}", partial(_map_of_run, record.accuracy, title)


def seeds_text(setting: Setting) -> str:
    """'seed 1' or 'mean of 5 seeds'."""
    seeds = setting.seeds
    return f"seed {seeds[0]}" if len(seeds) == 1 else f"mean of {len(seeds)} seeds"


def _heat(setting: Setting, title: str) -> Picture:
    return titled(heat.picture(setting.accuracy, title), title)


def _map_of_run(accuracy: Matrix, title: str) -> Picture:
    return titled(heat.picture(accuracy, title), title)


def _course(setting: Setting, title: str) -> Picture | None:
    axis = lines.axis_of([setting.accuracy])
    drawn = lines.courses(setting.accuracy, title, setting.first.tasks, axis)
    return titled(drawn, title) if drawn else None


def _certificate(setting: Setting, title: str) -> Picture:
    found = certificates.promises(setting)
    free, drift = lines.free(found, title, named=True), lines.drift(found, title, named=True)
    return titled(beside([free, drift], title) if drift else free, f"{title}{'' if drift else ': no drift at all'}")


def _scatter(
    found: Sequence[Setting], shown: Sequence[str], looks: Sequence[tuple[str, str]], name: str
) -> Picture | None:
    drawn = scatter.picture([row(one) for one in found], shown, looks, recipes(found))
    return titled(drawn, name) if drawn else None


def _averages(
    found: Sequence[Setting],
    shown: Sequence[str],
    looks: Sequence[tuple[str, str]],
    which: Sequence[int],
    name: str,
) -> Picture:
    matrices = [found[n].accuracy for n in which]
    names, drawn_as = [shown[n] for n in which], [looks[n] for n in which]
    return titled(lines.averages(matrices, names, drawn_as, name, recipes(found)), name)


def _compare(found: Sequence[Setting], shown: Sequence[str], which: Sequence[int], name: str) -> Picture:
    return heat.side_by_side([found[n].accuracy for n in which], [shown[n] for n in which], name)


def _times(found: Sequence[Setting], shown: Sequence[str], stem: str) -> Iterator[tuple[str, Drawing]]:
    """One figure for each device: seconds of different devices cannot be compared."""
    devices = list(dict.fromkeys(one.device for one in found))
    for device in devices:
        mine = [(task_seconds(one), label) for one, label in zip(found, shown, strict=True) if one.device == device]
        timed = [(seconds, label) for seconds, label in mine if seconds]
        if timed:
            suffix = f"-{file_name(device.replace(' ', '-'))}" if len(devices) > 1 and device else ""
            yield f"times-{stem}{suffix}", partial(_bars, timed, device)


def _bars(timed: Sequence[tuple[Sequence[float], str]], device: str) -> Picture | None:
    drawn = times.picture([seconds for seconds, _ in timed], [label for _, label in timed], device)
    return titled(drawn, drawn.label) if drawn else None
