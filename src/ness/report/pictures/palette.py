"""Colours and styles, once, for the page, for its script and for files; every one in light and in dark."""

from bisect import bisect_left
from collections.abc import Collection
from dataclasses import dataclass

from ness.lab.runs.metrics import Matrix

STEPS = (0.5, 2.0, 5.0, 10.0, 20.0)  # points of accuracy above which a step begins
HUES = 10

METHODS = (  # each has its colour in every figure; others follow as they come
    "finetune", "ness", "ness-plus", "gpm", "sgp", "trgp", "hat", "ewc", "wsn", "codecl", "frozen", "dfgp", "fsdgpm",
    "owm", "ogd", "sd", "cuber", "agem", "repair", "replay", "lora", "osf", "wise",
)  # fmt: skip

# class -> (field, letters); "d" learnt just now, "n" about the same, g1 … g5 gained, l1 … l5 lost
LIGHT = {
    "d": ("#a9cef0", "#0c1b2b"), "n": ("#eff1f4", "#1d2127"),
    "g1": ("#dcf2e2", "#12301c"), "g2": ("#b5e1c0", "#0f2b18"), "g3": ("#85cb97", "#0a2312"),
    "g4": ("#4fb06c", "#04170a"), "g5": ("#1c7a40", "#ffffff"),
    "l1": ("#fde5de", "#3d1711"), "l2": ("#f8c3b4", "#37130d"), "l3": ("#f09a86", "#2b0d08"),
    "l4": ("#e06a57", "#1d0704"), "l5": ("#ad231b", "#ffffff"),
}  # fmt: skip
DARK = {
    "d": ("#1d5386", "#ffffff"), "n": ("#2a2f37", "#dfe3e8"),
    "g1": ("#1e3527", "#d9f0e0"), "g2": ("#204c31", "#e2f5e8"), "g3": ("#22683f", "#ffffff"),
    "g4": ("#2f9455", "#000000"), "g5": ("#4fd07f", "#04170a"),
    "l1": ("#3b2523", "#f6ddd8"), "l2": ("#5c2d27", "#fbe6e1"), "l3": ("#85372d", "#ffffff"),
    "l4": ("#c2453a", "#ffffff"), "l5": ("#ff6b57", "#1d0704"),
}  # fmt: skip

# name -> (light, dark)
COLOURS = {
    "back": ("#ffffff", "#14171b"), "ink": ("#1a1f26", "#e6e9ed"), "soft": ("#59636f", "#a3adb8"),
    "line": ("#d8dde3", "#363d46"), "bar": ("#2f6ea8", "#5a9ad6"), "bar2": ("#8fbbe3", "#2c5a86"),
    "h0": ("#14568f", "#7db7ec"), "h1": ("#c2410c", "#f5a265"), "h2": ("#15803d", "#6fd39b"),
    "h3": ("#9d1fae", "#dd8cf0"), "h4": ("#b91c1c", "#f58a8a"), "h5": ("#0e7490", "#5cc6d2"),
    "h6": ("#854d0e", "#d8b25a"), "h7": ("#be185d", "#f591c0"), "h8": ("#4d7c0f", "#b3d465"),
    "h9": ("#4338ca", "#a5a1f5"),
    "k0": ("#45207a", "#b79bea"), "k1": ("#3d5c9e", "#8aa9f0"), "k2": ("#20808d", "#5cc6d2"),
    "k3": ("#2a8f5a", "#6fd39b"), "k4": ("#8a7a10", "#d8c65a"), "k5": ("#b5531c", "#f0a070"),
    **{f"f{shade}": (LIGHT[shade][0], DARK[shade][0]) for shade in LIGHT},
    **{f"t{shade}": (LIGHT[shade][1], DARK[shade][1]) for shade in LIGHT},
}  # fmt: skip


@dataclass(frozen=True)
class Style:
    """How a shape or a word looks; colours are names in COLOURS, "" is none."""

    fill: str = ""
    stroke: str = ""
    width: float = 1.0
    dash: tuple[float, ...] = ()
    opacity: float = 1.0
    size: float = 11.0
    bold: bool = False
    italic: bool = False


_SERIES = [f"k{n}" for n in range(6)] + [f"h{n}" for n in range(HUES)]


def _of_series(colour: str) -> dict[str, Style]:
    """How what has this colour looks: lines, signs, and words at the end of a line."""
    return {
        "line": Style(stroke=colour, width=1.6),
        "dashed": Style(stroke=colour, width=1.2, dash=(4, 3)),
        "dot": Style(fill=colour),
        "hollow": Style(stroke=colour, width=1.5),
        "end": Style(fill=colour, size=10.5, bold=True),
    }


STYLES = {
    "paper": Style(fill="back"),
    "ink": Style(fill="ink"),
    "axis": Style(fill="soft", size=10.5),
    "title": Style(fill="ink", size=12.5, bold=True),
    "name": Style(fill="ink", size=11.5),
    "best": Style(fill="ink", size=11.5, bold=True),
    "grid": Style(stroke="line"),
    "frame": Style(stroke="soft", dash=(3, 3)),
    "leader": Style(stroke="soft", width=0.8),
    "front": Style(stroke="soft", width=1.5, dash=(2, 4)),
    "ceiling": Style(stroke="soft", dash=(7, 4)),
    "corner": Style(fill="ink", opacity=0.62),
    "hatch": Style(fill="ink", opacity=0.25),
    "odd": Style(fill="bar"),
    "even": Style(fill="bar2"),
    **{f"f{shade}": Style(fill=f"f{shade}") for shade in LIGHT},
    **{f"t{shade}": Style(fill=f"t{shade}", bold=shade == "d", italic=shade[0] == "l") for shade in LIGHT},
    **{f"{kind}-{name}": style for name in _SERIES for kind, style in _of_series(name).items()},
}


def css(used: Collection[str] = STYLES) -> str:
    """The styles that are used as rules; colours in light, and those of dark screens behind them."""
    chosen = {name: style for name, style in STYLES.items() if name in used}
    light = "".join(f"svg .{name}{{{_look(style)}{_colours(style, 0)}}}" for name, style in chosen.items())
    dark = "".join(f"svg .{name}{{{_colours(style, 1)}}}" for name, style in chosen.items())
    return f"{light}@media screen and (prefers-color-scheme:dark){{{dark}}}"


def _look(style: Style) -> str:
    look = f"font-size:{style.size:g}px;"
    look += f"stroke-width:{style.width:g};" if style.stroke else ""
    look += f"stroke-dasharray:{' '.join(f'{part:g}' for part in style.dash)};" if style.dash else ""
    look += f"fill-opacity:{style.opacity:g};" if style.opacity < 1 else ""
    look += "font-weight:700;" if style.bold else ""
    return look + ("font-style:italic;" if style.italic else "")


def _colours(style: Style, dark: int) -> str:
    fill = COLOURS[style.fill][dark] if style.fill else "none"
    return f"fill:{fill};" + (f"stroke:{COLOURS[style.stroke][dark]};" if style.stroke else "")


def shade(change: float) -> str:
    """The class of a change in points since the task was learnt.

    >>> shade(0.2), shade(1.0), shade(-3.0), shade(-50.0)
    ('n', 'g1', 'l2', 'l5')
    """
    step = bisect_left(STEPS, abs(round(change, 2)))
    return "n" if step == 0 else f"{'g' if change > 0 else 'l'}{step}"


def shades(matrix: Matrix) -> list[list[str]]:
    """The class of every field; "" where nothing was measured. Tasks learnt at once are all just learnt."""
    if len(matrix) == 1:
        return [["" if value is None else "d" for value in matrix[0]]]
    learnt = [matrix[task][task] for task in range(len(matrix))]
    return [[_class(value, learnt[i], t == i) for i, value in enumerate(row)] for t, row in enumerate(matrix)]


def _class(value: float | None, learnt: float | None, is_new: bool) -> str:
    if value is None or learnt is None:
        return ""
    return "d" if is_new else shade(value - learnt)


def looks(methods: list[str], signs: tuple[str, ...]) -> list[tuple[str, str]]:
    """A colour and a sign for each; a method has one colour everywhere, and no two of up to 80 look alike.

    >>> looks(["gpm", "gpm", "ness"], ("o", "s"))
    [('h3', 's'), ('h3', 'o'), ('h1', 's')]
    """
    present = list(dict.fromkeys(methods))
    order = [*METHODS, *(name for name in present if name not in METHODS)]
    own = {name: order.index(name) % HUES for name in present}
    taken: set[tuple[str, str]] = set()
    found = []
    for method in methods:
        at = order.index(method)
        free = [hue for hue in range(HUES) if hue not in own.values()]
        hues = [own[method], *free, *(set(own.values()) - {own[method]})]
        tries = ((f"h{hue}", signs[(at + n) % len(signs)]) for hue in hues for n in range(len(signs)))
        look = next((one for one in tries if one not in taken), (f"h{own[method]}", signs[at % len(signs)]))
        taken.add(look)
        found.append(look)
    return found
