"""A picture: shapes and words in pixels. The page shows it as SVG, and `export` writes the same picture to files."""

import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from markupsafe import Markup, escape

from ness.report.pictures.palette import css

FONT = 'font-family="system-ui,DejaVu Sans,Verdana,sans-serif"'
CIRCLE = "M-5 0C-5-2.76-2.76-5 0-5C2.76-5 5-2.76 5 0C5 2.76 2.76 5 0 5C-2.76 5-5 2.76-5 0Z"
SIGNS = (  # paths around (0, 0), told apart without colour
    CIRCLE, "M-4.5-4.5h9v9h-9Z", "M0-6l5.5 10h-11Z", "M0-6.5l6 6.5l-6 6.5l-6-6.5Z", "M0 6l5.5-10h-11Z",
    "M-2-6h4v4h4v4h-4v4h-4v-4h-4v-4h4Z", "M-6 0l10-5.5v11Z", "M6 0l-10-5.5v11Z",
)  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """A path (M, L, H, V, C, Z, and their small letters) in a style of the palette."""

    path: str
    style: str = ""


@dataclass(frozen=True)
class Words:
    """A line of text; a style of "" is that of the group around it."""

    x: float
    y: float
    text: str
    style: str = ""
    anchor: str = ""  # "start", "middle" or "end"; "" is that of the group around it, else "start"
    turned: bool = False  # read upwards


@dataclass(frozen=True)
class Group:
    """Marks that belong together: moved together, named together when pointed at."""

    marks: "tuple[Mark, ...]"
    at: tuple[float, float] = (0.0, 0.0)
    title: str = ""
    style: str = ""
    name: str = ""  # a class for the page's style and script
    anchor: str = ""  # of the words in it
    focusable: bool = False


Mark = Shape | Words | Group
Kind = TypeVar("Kind", Shape, Words, Group)


@dataclass(frozen=True)
class Picture:
    """Marks on a canvas of so many pixels, and what they show in words."""

    width: float
    height: float
    label: str
    marks: tuple[Mark, ...]
    name: str = "chart"
    data: Mapping[str, str] = field(default_factory=dict)  # for the page's script
    focusable: bool = False

    def __html__(self) -> str:
        """What a template inserts."""
        return svg(self)


def svg(picture: Picture, *, file: bool = False, description: str = "", least: float = 0.0) -> Markup:
    """The picture as an element of a page, or as the whole of a file with its styles and a background."""
    box = f'viewBox="0 0 {picture.width:g} {picture.height:g}"'
    described = f'role="{"group" if picture.name == "scatter" else "img"}" aria-label="{escape(picture.label)}"'
    inside = "".join(map(_element, picture.marks))
    if file:
        used = {"paper", *(one.style for one in every(picture.marks, Shape))}
        used |= {one.style for one in every(picture.marks, Words)} | {one.style for one in every(picture.marks, Group)}
        size = f'width="{picture.width:g}" height="{picture.height:g}"'
        about = f'<metadata><dc:description xmlns:dc="http://purl.org/dc/elements/1.1/">{escape(description)}</dc:description></metadata>'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {box} {FONT} {described}>{about if description else ""}'
        back = f'<path class="paper" d="M0 0H{picture.width:g}V{picture.height:g}H0Z"/>'
        return Markup(f"{head}<style>{css(used)}</style>{back}{inside}</svg>\n")
    data = "".join(f' data-{key}="{escape(value)}"' for key, value in picture.data.items())
    width = max(least, picture.width * 1.25)
    focus = ' tabindex="0"' if picture.focusable else ""
    return Markup(
        f'<svg class="{picture.name}" {box} style="max-width:{width:g}px" {described}{focus}{data}>{inside}</svg>'
    )


def _element(mark: Mark) -> str:
    match mark:
        case Shape(path, style):
            return f'<path{_class(style)} d="{path}"/>'
        case Words(x, y, text, style, anchor, turned):
            place = f'transform="translate({x:g} {y:g}) rotate(-90)"' if turned else f'x="{x:g}" y="{y:g}"'
            side = f' text-anchor="{anchor}"' if anchor else ""
            return f"<text{_class(style)} {place}{side}>{escape(text)}</text>"
        case Group(marks, at, title, style, name, anchor, focusable):
            moved = f' transform="translate({at[0]:g} {at[1]:g})"' if at != (0.0, 0.0) else ""
            focus = f' tabindex="0" role="img" aria-label="{escape(title)}"' if focusable else ""
            side = f' text-anchor="{anchor}"' if anchor else ""
            said = f"<title>{escape(title)}</title>" if title else ""
            return (
                f"<g{_class(f'{style} {name}'.strip())}{moved}{side}{focus}>{said}{''.join(map(_element, marks))}</g>"
            )


def _class(style: str) -> str:
    return f' class="{style}"' if style else ""


def titled(picture: Picture, title: str, room: float = 22.0) -> Picture:
    """The picture below a line that says what it is, cut off where it would be wider than the picture."""
    most = int(picture.width / (0.62 * 12.5))
    line = Words(picture.width / 2, 15, shortened(title, most), "title", "middle")
    below = Group(picture.marks, (0.0, room))
    return replace(picture, height=picture.height + room, marks=(line, below))


def beside(pictures: Sequence[Picture], label: str, columns: int = 2, gap: float = 24.0) -> Picture:
    """Pictures in a grid, as many in a row as `columns` says."""
    wide, high = max(one.width for one in pictures), max(one.height for one in pictures)
    columns = min(columns, len(pictures))
    rows = math.ceil(len(pictures) / columns)
    marks = tuple(
        Group(one.marks, ((n % columns) * (wide + gap), (n // columns) * (high + gap)))
        for n, one in enumerate(pictures)
    )
    return Picture(columns * (wide + gap) - gap, rows * (high + gap) - gap, label, marks)


def text_width(text: str, size: float = 11.5) -> float:
    """About as many pixels as the text is wide, in the widest of the fonts."""
    return 0.6 * size * len(text)


def shortened(text: str, most: int) -> str:
    """The text, or its beginning and an ellipsis.

    >>> shortened("a long name", 6)
    'a lon…'
    """
    return text if len(text) <= most else text[: max(1, most - 1)] + "…"


def every(marks: "Iterable[Mark]", kind: type[Kind]) -> Iterator[Kind]:
    """All marks of a kind, those inside groups too."""
    for mark in marks:
        if isinstance(mark, kind):
            yield mark
        if isinstance(mark, Group):
            yield from every(mark.marks, kind)


def legend(names: Sequence[tuple[str, str, str]], width: float, top: float) -> tuple[tuple[Mark, ...], float]:
    """(sign, style, name) in as many columns as fit, and the height that takes."""
    longest = max(text_width(name) for _, _, name in names) + 30
    columns = max(1, min(len(names), int(width // longest)))
    rows = math.ceil(len(names) / columns)
    marks: list[Mark] = []
    for n, (sign, style, name) in enumerate(names):
        x, y = (n // rows) * (width / columns) + 10, top + (n % rows) * 17 + 12
        most = int((width / columns - 26) / (0.6 * 11.5))
        marks += [Group((Shape(sign, style),), (x, y - 4)), Words(x + 12, y, shortened(name, most), "name")]
    return tuple(marks), rows * 17 + 4


def footnotes(notes: Sequence[str], width: float, top: float) -> tuple[tuple[Mark, ...], float]:
    """Lines of small print below a picture, broken at blanks, and the height they take."""
    most = int(width / (0.6 * 10.5))
    lines = [line for note in notes for line in textwrap.wrap(note, most)]
    marks = tuple(Words(0, top + 14 + 14 * n, line, "axis") for n, line in enumerate(lines))
    return marks, 14.0 * len(lines) + (6 if lines else 0)
