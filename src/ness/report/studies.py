"""Records of studies of language models: what each way of adapting costs in change of old predictions.

A family is a row of the plan, or what was made of its results afterwards (interpolated, repaired). Rows whose names
differ in what stands in parentheses are one family. Its points differ in learning rate, steps, strength or share. A
point is chosen on validation text alone; what is shown is of test text.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ness._files import reason
from ness._sealed import read_json
from ness.errors import NessError
from ness.lab.language import study
from ness.lab.runs.metrics import mean_and_deviation
from ness.report.formats import NOT_RUN, pipes
from ness.report.number_format import number

LEVELS = (0.5, 0.7, 0.8, 0.9)  # shares of the largest gain on new text that any point reached
OWN = ("null-space", "weighed")  # methods that are this project's
AFTER = {
    "": "",
    "wise": ", interpolated",
    "repair": ", repaired",
    "repair, old text alone": ", repaired with old text alone",
    "repair, own text": ", repaired with the model's own text",
    "repair and wise": ", repaired and interpolated",
}


@dataclass(frozen=True)
class Measured:
    """One point, a value per seed: losses on new and on old text, and KL(base ‖ model) on old text."""

    new: tuple[float, ...]
    old: tuple[float, ...]
    change: tuple[float, ...]


@dataclass(frozen=True)
class Point:
    """One setting of a family, over the seeds that have it."""

    family: str
    ours: bool
    setting: str
    seeds: tuple[int, ...]
    trained: int
    seconds: float  # CPU seconds: of training and of what came after
    valid: Measured
    test: Measured


@dataclass(frozen=True)
class Found:
    """A study's points, and what the base predicts: (loss on new text, loss on old text) of each part."""

    title: str
    seeds: tuple[int, ...]
    asked: tuple[int, ...]
    base: Mapping[str, tuple[float, float]]
    points: tuple[Point, ...]
    missing: tuple[str, ...]  # rows that no seed has

    @property
    def families(self) -> list[str]:
        """In the order of the plan."""
        return list(dict.fromkeys(point.family for point in self.points))


def read(plan: Path, results: Path) -> Found:
    """A plan's records below `results`; rows and seeds that have none are missing.

    Raises:
        NessError: a file there is no record of this plan.
    """
    asked = study.read(plan)
    records = [_record(path, plan.stem) for path in sorted((results / plan.stem).glob("*.json"))]
    shared = [{key: value for key, value in one["plan"].items() if key != "seeds"} for one in records]
    if any(one != shared[0] for one in shared):
        raise NessError(f"{results / plan.stem}: holds records of different sizes or texts; keep those of one plan")
    names = [row.name for row in asked.rows]
    if unknown := sorted({one["row"]["name"] for one in records} - set(names)):
        raise NessError(f"{results / plan.stem}: {', '.join(unknown)} is no row of {plan.name}; remove its records")
    points = [point for name in names for point in _points([one for one in records if one["row"]["name"] == name])]
    there = {one["row"]["name"] for one in records}
    seeds = tuple(sorted({one["seed"] for one in records}))
    missing = tuple(name for name in names if name not in there)
    return Found(asked.title, seeds, asked.seeds, _base(records), tuple(points), missing)


def _record(path: Path, name: str) -> dict[str, Any]:
    try:
        found = read_json(path)
        if found["schema"] != study.SCHEMA or found["study"] != name:
            raise ValueError(f"it is of {found['study']}, schema {found['schema']}")
        for part in ("row", "seed", "base", "points", "plan"):
            found[part]
    except (ValueError, KeyError, TypeError) as error:
        raise NessError(f"{path}: is no record of the study {name} ({reason(error)}); remove it") from error
    return found


def _base(records: Sequence[Mapping[str, Any]]) -> dict[str, tuple[float, float]]:
    return {part: _losses(texts)[:2] for part, texts in records[0]["base"].items()} if records else {}


def _losses(texts: Mapping[str, Sequence[float]]) -> tuple[float, float, float]:
    """Loss on new text; loss and change on old text, the mean over its kinds."""
    old = [value for name, value in texts.items() if name != "new"]
    return texts["new"][0], sum(loss for loss, _ in old) / len(old), sum(change for _, change in old) / len(old)


def _points(records: Sequence[Mapping[str, Any]]) -> list[Point]:
    """The points of one row; one that not every seed of the row has is an error of the records."""
    held: dict[tuple[Any, ...], list[tuple[int, Mapping[str, Any]]]] = {}
    for record in records:
        for point in record["points"]:
            key = tuple(point.get(name) for name in ("rate", "step", "after", "strength", "share"))
            held.setdefault(key, []).append((record["seed"], point))
    if not records:
        return []
    row = records[0]["row"]
    training = {
        key[0]: mean([p["cpu_seconds"] for _, p in found])
        for key, found in held.items()
        if key[2] == "" and "cpu_seconds" in found[0][1]
    }
    afterwards = {
        (key[0], key[2]): mean([p["cpu_seconds"] for _, p in found])
        for key, found in held.items()
        if key[2] and "cpu_seconds" in found[0][1]
    }
    points = []
    for key, found in held.items():
        rate, step, after, strength, share = key
        words = [f"rate {rate:g}"]
        words += [f"{step} steps"] if step else []
        words += [f"strength {strength:g}"] if strength is not None else []
        words += [f"share {share:g}"] if share is not None else []
        spent = training[rate] * (step / records[0]["plan"]["steps"] if step else 1.0)
        spent += afterwards.get((rate, after.removesuffix(" and wise")), 0.0) if after else 0.0
        points.append(
            Point(
                family=row["name"].partition(" (")[0] + AFTER[after],
                ours=row["method"] in OWN or "repair" in after,
                setting=", ".join(words),
                seeds=tuple(seed for seed, _ in found),
                trained=found[0][1]["trained"],
                seconds=round(spent, 1),
                valid=_measured([point["valid"] for _, point in found]),
                test=_measured([point["test"] for _, point in found]),
            )
        )
    return points


def _measured(parts: Sequence[Mapping[str, Sequence[float]]]) -> Measured:
    new, old, change = zip(*map(_losses, parts), strict=True)
    return Measured(new, old, change)


def mean(values: Sequence[float]) -> float:
    """Of at least one value."""
    return sum(values) / len(values)


def level(found: Found, share: float) -> float:
    """The validation loss on new text at which so much of the largest gain is there."""
    base = found.base["valid"][0]
    return base - share * (base - min(mean(point.valid.new) for point in _whole(found.points)))


def _whole(points: Sequence[Point]) -> list[Point]:
    """Those with the most seeds: means over other seeds are of other runs, and not to be compared."""
    most = max((len(point.seeds) for point in points), default=0)
    return [point for point in points if len(point.seeds) == most]


def chosen(found: Found, families: Sequence[str], share: float) -> Point | None:
    """The point of these families that changes old predictions least, among those that reach a level of gain.

    Both are judged on validation text. None where no point reaches it.
    """
    bound = level(found, share) + 1e-9
    enough = [p for p in _whole([p for p in found.points if p.family in families]) if mean(p.valid.new) <= bound]
    return min(enough, key=lambda point: mean(point.valid.change), default=None)


def table(found: Found, plan: str) -> str:
    """What stands in a document: a line a family, the change of old predictions at each level of gain."""
    if not found.points:
        return f"\n*{found.title}: {NOT_RUN}*\n\n"
    head = ["", "numbers trained", "CPU s", *(f"{share:.0%}".replace("%", " %") for share in LEVELS)]
    lines = [head, ["---", *["---:"] * (len(head) - 1)]]
    best = [chosen(found, found.families, share) for share in LEVELS]
    for family in found.families:
        at = [chosen(found, [family], share) for share in LEVELS]
        mine = [point for point in found.points if point.family == family]
        cells = [_cell(point, other) for point, other in zip(at, best, strict=True)]
        lines.append([family, f"{mine[0].trained / 1e6:.2f} M", f"{mean([p.seconds for p in mine]):.0f}", *cells])
    base = found.base["test"]
    said = [
        f"{found.title}: KL(base ‖ model) on held-out old text, in thousandths of a nat a token, at four shares of the "
        "largest gain on new text; less is better, bold: what validation text chooses, –: not reached. Mean ± sample "
        f"deviation over seeds {', '.join(map(str, found.seeds))}; the base's loss is {base[0]:.3f} on new and "
        f"{base[1]:.3f} on old text. Settings are chosen on validation text. CPU seconds are the mean over settings."
    ]
    leads: dict[str, list[str]] = {}
    for share in LEVELS:
        leads.setdefault(_lead(found, share), []).append(f"{100 * share:.0f}")
    said += [f"At {', '.join(shares)} % {lead}" for lead, shares in leads.items() if lead]
    said += [f"Rows not run: {', '.join(found.missing)}."] if found.missing else []
    short = sorted({p.family for p in found.points if len(p.seeds) < len(found.asked)})
    said += [f"Fewer than {len(found.asked)} seeds: {'; '.join(short)}."] if short else []
    said.append(f"All of it: `ness study {plan}`.")
    return f"\n{pipes(lines)}\n{' '.join(one for one in said if one)}\n\n"


def brief(found: Found, plan: str, share: float = 0.8) -> str:
    """A short table: each family at one level of gain, the one that changes least first."""
    if not found.points:
        return f"\n*{found.title}: {NOT_RUN}*\n\n"
    at = [point for family in found.families if (point := chosen(found, [family], share)) is not None]
    lines = [["", "loss on new text", "change on old text"], ["---", "---:", "---:"]]
    for point in sorted(at, key=lambda one: mean(one.test.change)):
        lines.append([point.family, _three(point.test.new), _three(point.test.change)])
    said = (
        f"{found.title} (loss {found.base['test'][0]:.3f} before): each way at the setting that changes validation "
        f"text least among those with {100 * share:.0f} % of the largest gain; KL(base ‖ model) on held-out text, nats "
        f"a token; mean ± sample deviation over seeds {', '.join(map(str, found.seeds))}. `ness study {plan}`."
    )
    return f"\n{pipes(lines)}\n{said}\n\n"


def _three(values: Sequence[float]) -> str:
    middle, deviation = mean_and_deviation(values)
    return f"{middle:.3f}" if deviation is None else f"{middle:.3f} ± {deviation:.3f}"


def _cell(point: Point | None, best: Point | None) -> str:
    if point is None:
        return "–"
    text = number(mean_and_deviation([1000 * value for value in point.test.change]))
    return f"**{text}**" if point is best else text


def _lead(found: Found, share: float) -> str:
    """What the best of this project is ahead of the best of the others at a level, or behind; per seed as well."""
    ours = chosen(found, [p.family for p in found.points if p.ours], share)
    theirs = chosen(found, [p.family for p in found.points if not p.ours], share)
    if ours is None or theirs is None:
        return ""
    common = [seed for seed in ours.seeds if seed in theirs.seeds]
    ratios = [_of(theirs, seed) / _of(ours, seed) for seed in common if _of(ours, seed) > 0]
    if not ratios or not all(map(math.isfinite, ratios)):
        return ""
    spread = f" ({min(ratios):.2f} to {max(ratios):.2f} by seed)" if len(ratios) > 1 else ""
    ahead = mean(theirs.test.change) / mean(ours.test.change)
    return (
        f"{theirs.family} ({theirs.setting}; new loss {mean(theirs.test.new):.3f}) changes "
        f"{ahead:.2f} times as much{spread} as {ours.family} ({ours.setting}; {mean(ours.test.new):.3f})."
    )


def _of(point: Point, seed: int) -> float:
    return point.test.change[point.seeds.index(seed)]
