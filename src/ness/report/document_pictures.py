"""Pictures inside documents: what each is made of, what it says in words, and its SVG, which carries what it shows.

The metadata of an SVG holds the data it was drawn from. So a test can hold it against the records without drawing, and
a file is drawn anew only where its data changed: another version of matplotlib touches nothing.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from ness._files import write_bytes
from ness.errors import NessError
from ness.lab.runs.experiment import Experiment
from ness.lab.runs.settings import nearest
from ness.report import studies
from ness.report.accuracy_maps import Map, Maps, maps
from ness.report.number_format import number
from ness.report.pictures import drawing, heat, kept, tradeoff
from ness.report.records import Record
from ness.report.storage_cost import Keeping, Point, keeping

FOLDER = Path("docs/pictures")
DESCRIPTION = "{http://purl.org/dc/elements/1.1/}description"


@dataclass(frozen=True)
class Picture:
    """What a file shows, as data and in words, and who draws it; None where no row has run yet."""

    name: str
    data: str  # JSON
    words: str
    draw: Callable[[], drawing.Picture] | None

    @property
    def file(self) -> Path:
        """Where it lies, from the root of the repository."""
        return FOLDER / f"{self.name}.svg"


def picture(name: str, experiment: Experiment, words: Sequence[str], records: Sequence[Record], where: str) -> Picture:
    """The picture of this name, from a plan's rows; `words` are what stands behind the plan in the mark."""
    if name not in PICTURES:
        raise NessError(
            f"{where}: no picture is called {name!r}; there are {', '.join(PICTURES)}.{nearest(name, PICTURES)}"
        )
    return PICTURES[name](name, experiment, words, records, where)


def renew(found: Picture, root: Path) -> bool:
    """Writes the file if it does not show this already, removes it if there is nothing to show; whether it changed."""
    path = root / found.file
    if shown(path) == (found.data if found.draw else None):
        return False
    if found.draw is None:
        path.unlink()
        return True
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = drawing.svg(found.draw(), file=True, description=found.data)
    write_bytes(path, str(whole).encode(), "choose another place for the documents")
    return True


def shown(path: Path) -> str | None:
    """The data that an SVG was drawn from; None where there is no file, and "" where it does not say."""
    if not path.exists():
        return None
    try:
        return ElementTree.parse(path).findtext(f".//{DESCRIPTION}") or ""
    except ElementTree.ParseError:
        return ""


def _kept(name: str, experiment: Experiment, words: Sequence[str], records: Sequence[Record], where: str) -> Picture:
    if words:
        raise NessError(f"{where}: picture {name} takes a plan alone, found {' '.join(words)} behind it")
    found = keeping(experiment, records, where)

    def draw() -> drawing.Picture:
        return kept.picture(found)

    said = f"{found.title}: ACC against what a task keeps, as a share of the shared weights. "
    said += "; ".join(map(_said_of_point, found.points))
    return Picture(name, _json(found), f"{said}.", draw if found.points else None)


def study_picture(name: str, found: studies.Found) -> Picture:
    """Every point of a study of language models: change of old predictions against loss on new text."""
    courses = []
    for family in found.families:
        mine = [point for point in found.points if point.family == family]
        marks = [
            (round(studies.mean(one.test.new), 4), round(studies.mean(one.test.change), 5), one.setting) for one in mine
        ]
        courses.append((family, mine[0].ours, marks))
    base = round(found.base["test"][0], 4) if found.base else 0.0
    seeds = f"mean over {len(found.seeds)} seed{'s' if len(found.seeds) > 1 else ''}"
    data = json.dumps({"title": found.title, "base": base, "seeds": seeds, "courses": courses}, ensure_ascii=False)

    def draw() -> drawing.Picture:
        return tradeoff.picture(found.title, base, courses, seeds)

    said = f"{found.title}: change of predictions on old text against loss on new text, down and left is better. "
    said += f"Families: {'; '.join(found.families)}."
    return Picture(name, data, said, draw if found.points else None)


def _said_of_point(one: Point) -> str:
    k = f"k = {one.directions}{' (the default)' if one.default and not one.apart else ''}"
    what = f"{one.name}, {k}" if one.apart else k
    return f"{what}: keeps {one.percent:.2f} %, ACC {number((one.acc, one.deviation))}{_missing(one)}"


def _heat_maps(
    name: str, experiment: Experiment, words: Sequence[str], records: Sequence[Record], where: str
) -> Picture:
    found = maps(experiment, words, records, where)

    def draw() -> drawing.Picture:
        titles = [
            (f"{one.name}{_missing(one)}", f"ACC {one.acc}{f', BWT {one.bwt}' if one.bwt else ''}")
            for one in found.maps
        ]
        few, many = min(one.seeds for one in found.maps), max(one.seeds for one in found.maps)
        over = f"{few} seed{'s' if few > 1 else ''}" if few == many else f"{few} to {many} seeds"
        title = f"{found.title}: test accuracy (%), mean of {over}"
        return heat.in_a_row([one.accuracy for one in found.maps], titles, title)

    said = f"{found.title}: the accuracy of every task after every task. "
    said += "; ".join(map(_said_of_map, found.maps))
    return Picture(name, _json(found), f"{said}.", draw if found.maps else None)


def _said_of_map(one: Map) -> str:
    return f"{one.name}: ACC {one.acc}{f', BWT {one.bwt}' if one.bwt else ''}{_missing(one)}"


def _missing(one: Point | Map) -> str:
    """Which seeds a figure stands on, where it is not all."""
    return "" if one.seeds == one.asked else f" ({one.seeds} of {one.asked} seeds)"


def _json(found: Keeping | Maps) -> str:
    return json.dumps(dataclasses.asdict(found), ensure_ascii=False, separators=(",", ":"))


PICTURES: Mapping[str, Callable[[str, Experiment, Sequence[str], Sequence[Record], str], Picture]] = {
    "kept": _kept,
    "heat-maps": _heat_maps,
}
