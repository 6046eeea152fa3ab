"""The report as one self-contained page: what it shows of each benchmark, and how it becomes HTML."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

import ness
from ness.lab.runs.metrics import average_accuracy
from ness.report import certificates, detail_tables, embedded, groups
from ness.report.certificates import Promise
from ness.report.collect import Found
from ness.report.groups import Setting
from ness.report.listing import Listing, listing
from ness.report.number_format import number, short
from ness.report.pictures import heat, lines, scatter, times
from ness.report.pictures.drawing import SIGNS, Picture
from ness.report.pictures.palette import COLOURS, STEPS, css, looks
from ness.report.pictures.scale import Scale
from ness.report.records import with_forward_transfer
from ness.report.summary import Summary, summary
from ness.report.table import Row, row

FIELDS = 40_000  # fields of all heat-maps up to which numbers are written in them
COURSES = 40  # settings of a benchmark whose courses are drawn where there are more fields than that
PROMISES = 12_000  # rows of all certificates up to which they are drawn


@dataclass(frozen=True)
class Map:
    """One setting: its heat-map, and the course of its tasks."""

    label: str
    scores: str
    heat: Picture
    course: Picture | None


@dataclass(frozen=True)
class Kept:
    """One setting's certificate."""

    label: str
    layers: int
    last: tuple[Promise, ...]  # after the last task, a row per layer; nothing where there are too many certificates
    bound: str  # which bound that is held against
    worst: float  # the largest share of its bound that a measured drift takes
    relative: float  # the largest share of a layer's own output
    free: Picture | None
    drift: Picture | None


@dataclass(frozen=True)
class Section:
    """One benchmark."""

    name: str
    anchor: str
    tasks: tuple[str, ...]
    runs: int
    summary: Summary
    listing: Listing
    scatter: Picture | None
    averages: Picture | None
    times: tuple[tuple[str, Picture], ...]  # (device, its bars)
    recipes: tuple[str, ...]  # what the letters in the names stand for
    maps: tuple[Map, ...]
    kept: tuple[Kept, ...]


def page(found: Found) -> str:
    """The whole page."""
    settings = groups.settings(with_forward_transfer(found.records))
    labels = groups.labels(settings)
    environment = Environment(
        loader=PackageLoader("ness.report"), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        undefined=StrictUndefined,
    )  # fmt: skip
    environment.filters["short"] = short
    environment.filters["capitalize_first"] = lambda text: text[:1].upper() + text[1:]
    return environment.get_template("page.html").render(
        sections=sections(settings, labels),
        full=is_small(settings),
        problems=found.problems,
        runs=len(found.records),
        data=embedded.embedded(embedded.runs(settings, labels)),
        styles=Markup(css()),
        colours=COLOURS,
        steps=STEPS,
        version=ness.__version__,
        environments=environments(found),
    )


def is_small(settings: Sequence[Setting]) -> bool:
    """Whether everything can be drawn in full and the page stays light."""
    return sum(len(setting.first.accuracy) * len(setting.first.tasks) // 2 for setting in settings) <= FIELDS


def sections(settings: Sequence[Setting], labels: Sequence[str]) -> list[Section]:
    """One a benchmark, in order; what is drawn in full depends on how much there is of it."""
    full = is_small(settings)
    every = [certificates.promises(setting) for setting in settings]
    drawn = sum(map(len, every)) <= PROMISES
    first = 0
    starts = []
    for setting in settings:
        starts.append(range(first, first + len(setting.records)))
        first += len(setting.records)
    names = list(dict.fromkeys(setting.first.benchmark for setting in settings))
    out = []
    for n, name in enumerate(names):
        chosen = [i for i, setting in enumerate(settings) if setting.first.benchmark == name]
        chosen.sort(key=lambda i: (settings[i].is_ceiling, -average_accuracy(settings[i].accuracy)))
        mine, called = [settings[i] for i in chosen], [labels[i] for i in chosen]
        table = [row(setting) for setting in mine]
        drawn_as = looks([setting.first.method for setting in mine], SIGNS)
        axis = lines.axis_of([setting.accuracy for setting in mine])
        pairs = zip(called, (every[i] for i in chosen), strict=True)
        maps = [
            _map(setting, line, label, starts[i], axis if full or place < COURSES else None, full)
            for place, (i, setting, line, label) in enumerate(zip(chosen, mine, table, called, strict=True))
        ]
        section = Section(
            name=name,
            anchor=f"b{n}",
            tasks=max((setting.first.tasks for setting in mine), key=len),
            runs=sum(len(setting.records) for setting in mine),
            summary=summary(table, called),
            listing=listing(table, called),
            scatter=scatter.picture(table, called, drawn_as, groups.recipes(mine)),
            averages=averages(mine, called, drawn_as),
            times=tuple(bars(mine, called)),
            recipes=tuple(groups.recipes(mine)),
            maps=tuple(maps),
            kept=tuple(_kept(label, promises, drawn) for label, promises in pairs if promises),
        )
        out.append(section)
    return out


def averages(found: Sequence[Setting], labels: Sequence[str], looks: Sequence[tuple[str, str]]) -> Picture | None:
    """Mean accuracy over the tasks so far of all that learn task after task; the best where there are too many."""
    every = zip(found, labels, looks, strict=True)
    learners = [(one, label, look) for one, label, look in every if len(one.accuracy) > 1 and not one.is_ceiling]
    if not learners:
        return None
    settings, names, drawn_as = zip(*learners[:COURSES], strict=True)
    label = f"Mean accuracy over the tasks seen so far, {len(names)} settings on {settings[0].first.benchmark}"
    return lines.averages([one.accuracy for one in settings], names, drawn_as, label, groups.recipes(found))


def bars(found: Sequence[Setting], labels: Sequence[str]) -> Iterator[tuple[str, Picture]]:
    """(device, times): never two devices in one picture."""
    for device in dict.fromkeys(one.device for one in found):
        mine = [(one, label) for one, label in zip(found, labels, strict=True) if one.device == device]
        seconds = [detail_tables.task_seconds(one) for one, _ in mine]
        if (drawn := times.picture(seconds, [label for _, label in mine], device)) is not None:
            yield device, drawn


def _map(setting: Setting, line: Row, label: str, runs: Sequence[int], axis: Scale | None, values: bool) -> Map:
    """The setting's pictures; its courses only where there is an axis for them."""
    bwt = f", BWT {number(line.bwt, signed=True)}".replace("-", "−") if line.bwt else ""
    scores = f"ACC {number(line.acc)}{bwt}"
    matrix = setting.accuracy
    described = f"{label} on {setting.first.benchmark}: {scores}"
    return Map(
        label,
        scores,
        heat.picture(matrix, f"Accuracy matrix of {described}", runs, values),
        lines.courses(matrix, f"Accuracy of each task over time, {described}", setting.first.tasks, axis)
        if axis
        else None,
    )


def _kept(label: str, promises: Sequence[Promise], drawn: bool) -> Kept:
    end = promises[-1].task
    return Kept(
        label=label,
        layers=len(certificates.layers(promises)),
        last=tuple(one for one in promises if one.task == end) if drawn else (),
        bound=certificates.limit_name(promises),
        worst=max((one.drift / one.limit for one in promises if one.limit > 0), default=0.0),
        relative=max(one.relative for one in promises),
        free=lines.free(promises, f"Free directions of each layer, {label}") if drawn else None,
        drift=lines.drift(promises, f"Measured drift and bound of each layer, {label}") if drawn else None,
    )


def environments(found: Found) -> list[str]:
    """What the runs ran on, each kind once."""

    def said(facts: Any) -> str:
        return ", ".join(f"{name} {value}" for name, value in facts.items() if isinstance(value, str | int | float))

    return list(dict.fromkeys(said(record.environment) for record in found.records if record.environment))
