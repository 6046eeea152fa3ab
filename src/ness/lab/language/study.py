"""A study: one model, one new domain, many ways to get there; what each learns, and what it forgets.

A plan (TOML) names the model, the texts and the rows. Every row and seed becomes one record, written once it is
measured; a record that is there is not measured again.
"""

import dataclasses
import importlib.metadata
import inspect
import math
import platform
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ness import _sealed
from ness._version import __version__
from ness.errors import NessError, printable
from ness.lab.language import methods, models, texts
from ness.lab.language.measure import loss_and_change, predictions
from ness.lab.language.models import LanguageModel
from ness.lab.runs.settings import check_type, read_toml
from ness.lab.training import seeds as training_seeds

SCHEMA = 1
LARGEST = 1 << 24  # of whole numbers in a plan
_VALIDATION, _TEST = "valid", "test"


@dataclass(frozen=True)
class Row:
    """One method at one or more learning rates, and what is tried on each result without training on.

    Attributes:
        wise: shares of the change to keep (WiSE-FT).
        repair: strengths of `ness.repair`, with old text and the new domain's.
        repair_old: strengths with old text alone.
        repair_self: strengths with text that the base wrote itself as the old text.
        both: pairs (strength, share): repaired, then interpolated.
        statistics: "given" text, or text that the model wrote itself ("self"), while training.
    """

    name: str
    method: str
    rate: tuple[float, ...]
    options: Mapping[str, Any]
    wise: tuple[float, ...] = ()
    repair: tuple[float, ...] = ()
    repair_old: tuple[float, ...] = ()
    repair_self: tuple[float, ...] = ()
    both: tuple[tuple[float, float], ...] = ()
    statistics: str = "given"


@dataclass(frozen=True)
class Plan:
    """What is studied: the top of a plan's file.

    Attributes:
        general: the corpus that statistics come from; "self": text that the model wrote itself.
        held_out: corpora that are only measured; "self": other text of the model's own.
        length: tokens a block.
        new, old, seen: blocks to train on, for statistics, and of the new domain for a repair's.
        measured: blocks of every text that is measured, validation and test each; the base's predictions are kept.
        curve: steps after which the model is measured on its way.
    """

    title: str
    model: str
    domain: str
    general: str
    held_out: tuple[str, ...]
    seeds: tuple[int, ...]
    rows: tuple[Row, ...]
    length: int = 128
    new: int = 600
    old: int = 125
    seen: int = 200
    measured: int = 96
    batch: int = 4
    steps: int = 150
    curve: tuple[int, ...] = ()


def read(path: Path) -> Plan:
    """The plan in a TOML file.

    Raises:
        NessError: it cannot be read, or says something that is not known; the message names the place.
    """
    values = read_toml(path)
    rows = values.pop("row", [])
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise NessError(f"{path}: has no [[row]]; expected one for each method")
    known = {field.name for field in dataclasses.fields(Row)} - {"options"}
    made = []
    for number, row in enumerate(rows, start=1):
        missing = {"name", "method", "rate"} - row.keys()
        if missing:
            raise NessError(f"{path}: row {number} has no {', '.join(sorted(missing))}")
        if not isinstance(row["method"], str) or row["method"] not in methods.METHODS:
            raise NessError(
                f"{path}: row {number}: no method is called {row['method']!r:.60}; there are "
                f"{', '.join(methods.METHODS)}"
            )
        own = {key: _tuple(value) for key, value in row.items() if key in known}
        own["rate"] = own["rate"] if isinstance(own["rate"], tuple) else (own["rate"],)
        options = {key: value for key, value in row.items() if key not in known}
        _check_row(own, options, row["method"], f"{path}: row {number}")
        made.append(Row(**own, options=options))
    slugs = [_slug(row.name) for row in made]
    if twice := [row.name for row in made if slugs.count(_slug(row.name)) > 1]:
        raise NessError(f"{path}: the rows {twice} would share their records; give each a name of its own")
    fields = {field.name for field in dataclasses.fields(Plan)} - {"rows"}
    if unknown := values.keys() - fields:
        raise NessError(f"{path}: unknown {', '.join(sorted(unknown))}; expected {', '.join(sorted(fields))} and row")
    if missing := {"title", "model", "domain", "general", "held_out", "seeds"} - values.keys():
        raise NessError(f"{path}: has no {', '.join(sorted(missing))}")
    plan = Plan(rows=tuple(made), **{key: _tuple(value) for key, value in values.items()})
    _check_plan(plan, str(path))
    return plan


def _check_plan(plan: Plan, where: str) -> None:
    for name in ("title", "model", "domain", "general"):
        check_type(name, getattr(plan, name), str, where)
    held = plan.held_out
    if not isinstance(held, tuple) or not held or not all(isinstance(one, str) for one in held):
        raise NessError(f'{where}: held_out is {held!r:.60}, expected a list of texts, e.g. ["self"]')
    if not isinstance(plan.seeds, tuple) or not all(type(seed) is int for seed in plan.seeds):
        raise NessError(f"{where}: seeds is {plan.seeds!r:.60}, expected a list of whole numbers, e.g. [1, 2, 3]")
    try:
        training_seeds.checked(plan.seeds)
    except NessError as error:
        raise NessError(f"{where}: {error}") from error
    for name, least in (
        ("length", 2),
        ("new", 1),
        ("old", 1),
        ("seen", 1),
        ("measured", 1),
        ("batch", 1),
        ("steps", 1),
    ):
        value = getattr(plan, name)
        if type(value) is not int or not least <= value <= LARGEST:
            raise NessError(f"{where}: {name} is {value!r:.60}, expected a whole number from {least} to {LARGEST}")


def _check_row(own: Mapping[str, Any], options: Mapping[str, Any], method: str, where: str) -> None:
    if not isinstance(own["name"], str) or not _slug(own["name"]):
        raise NessError(f"{where}: name is {own['name']!r:.60}, expected text with a letter or digit in it")
    for name, most in (("rate", 1e6), ("wise", 1), ("repair", 1e30), ("repair_old", 1e30), ("repair_self", 1e30)):
        found = own.get(name, ())
        if not isinstance(found, tuple) or not all(_is_number(value, most) for value in found):
            raise NessError(f"{where}: {name} is {found!r:.60}, expected a list of numbers from 0 to {most:g}")
    both = own.get("both", ())
    pairs = isinstance(both, tuple) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in both)
    if not pairs or not all(_is_number(a, 1e30) and _is_number(b, 1) for a, b in both):
        raise NessError(f"{where}: both is {both!r:.60}, expected pairs of a strength and a share from 0 to 1")
    if own.get("statistics", "given") not in ("given", "self"):
        raise NessError(f"{where}: statistics is {own['statistics']!r:.60}, expected 'given' or 'self'")
    expected = [
        one for one in inspect.signature(methods.METHODS[method]).parameters.values() if one.default is not one.empty
    ]
    kinds = {one.name: type(one.default) for one in expected}
    for name, value in options.items():
        if name not in kinds:
            raise NessError(f"{where}: {method} has no option {name!r:.60}; there are {', '.join(kinds) or 'none'}")
        check_type(name, value, kinds[name], where)
        if isinstance(value, int | float) and not _is_number(value, LARGEST):
            raise NessError(f"{where}: {name} is {value!r:.60}, expected a number from 0 to {LARGEST}")


def _is_number(value: Any, most: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= most


def _tuple(value: Any) -> Any:
    return tuple(map(_tuple, value)) if isinstance(value, list) else value


@dataclass(frozen=True)
class Material:
    """The model and every text as blocks of tokens, each from documents of its own."""

    language: LanguageModel
    new: Tensor
    old: Tensor
    own: Tensor
    valid: Mapping[str, Tensor]
    test: Mapping[str, Tensor]
    known: dict[tuple[str, str], list[Tensor]] = dataclasses.field(default_factory=dict)  # the base's predictions

    def of_base(self, part: str, name: str, blocks: Tensor) -> list[Tensor]:
        """What the base predicts on a text, computed once."""
        if (part, name) not in self.known:
            self.known[part, name] = predictions(self.language.model, blocks)
        return self.known[part, name]


def prepare(plan: Plan, data: Path | None, device: torch.device) -> Material:
    """Loads the model, and cuts the texts: 80 % of a corpus's documents to train on, 10 % validation, 10 % test."""
    language = models.load(plan.model, data)
    language.model.to(device)
    draws = torch.Generator(device).manual_seed(0)

    def cut(documents: Sequence[str], count: int) -> Tensor:
        return texts.blocks(documents, language.encode, plan.length, count, language.end).to(device)

    def written(count: int) -> Tensor:
        return sample(language, count, plan.length, draws)

    train, valid, test = texts.split(texts.documents(plan.domain, data), (0.8, 0.1, 0.1))
    held: dict[str, dict[str, Tensor]] = {
        _VALIDATION: {"new": cut(valid, plan.measured)},
        _TEST: {"new": cut(test, plan.measured)},
    }
    own = written(plan.old)
    for part, documents_of in ((_VALIDATION, 1), (_TEST, 2)):
        for name in plan.held_out:
            if name == "self":
                held[part][name] = written(plan.measured)
            else:
                documents = texts.split(texts.documents(name, data), (0.8, 0.1, 0.1))[documents_of]
                held[part][name] = cut(documents, plan.measured)
    old = own if plan.general == "self" else cut(texts.documents(plan.general, data), plan.old)
    return Material(language, cut(train, plan.new), old, own, held[_VALIDATION], held[_TEST])


@torch.no_grad()
def sample(language: LanguageModel, count: int, length: int, draws: torch.Generator) -> Tensor:
    """Text that the model writes itself, from the beginning of a text, at temperature 1: token ids (count, length)."""
    tokens = torch.full((count, 1), language.begin, device=draws.device)
    known = None
    language.model.eval()
    while tokens.shape[1] < length:
        out = language.model(input_ids=tokens[:, -1:] if known else tokens, past_key_values=known, use_cache=True)
        known = out.past_key_values
        chosen = torch.multinomial(out.logits[:, -1].float().softmax(-1), 1, generator=draws)
        tokens = torch.cat([tokens, chosen], dim=1)
    return tokens


Report = Callable[[str], None]


def run(
    plan: Plan,
    name: str,
    material: Callable[[], Material],
    out: Path,
    report: Report = lambda line: None,
    only: Sequence[str] = (),
    seeds: Sequence[int] = (),
) -> list[Path]:
    """Measures every row that has no record yet.

    Args:
        plan: what is studied.
        name: of the plan; its records go to the folder of this name in `out`.
        material: loads the model and the texts; called once, if there is anything to measure.
        out: folder of the records.
        report: called with a line of text for every row that is done.
        only: names of rows; () is all.
        seeds: instead of the plan's.

    Returns:
        The records' paths, new ones and those that were there.

    Raises:
        NessError: a row of that name is not in the plan, or a package is missing.
    """
    rows = rows_of(plan, only)
    wanted = [
        (seed, row, out / name / f"{_slug(row.name)}-seed{seed}.json") for seed in seeds or plan.seeds for row in rows
    ]
    todo = [one for one in wanted if not _is_there(one[2], report)]
    if todo:
        given = material()
        base = measured(given, given.language.model)
        for seed, row, path in todo:
            began = time.perf_counter()
            points = list(_points(plan, row, seed, given))
            shared = (field.name for field in dataclasses.fields(plan) if field.name not in ("rows", "title"))
            record = {
                "schema": SCHEMA,
                "study": name,
                "title": plan.title,
                "plan": {key: getattr(plan, key) for key in shared},
                "row": {**dataclasses.asdict(row), "options": dict(row.options)},
                "seed": seed,
                "base": base,
                "points": points,
                "seconds": round(time.perf_counter() - began, 1),
                "environment": _environment(given.new.device),
            }
            _sealed.write_json(path, record, "make room or rights and start again: what is measured is not repeated")
            report(f"{row.name}, seed {seed}: {len(points)} points in {record['seconds']:.0f} s")
    return [path for _, _, path in wanted]


def rows_of(plan: Plan, names: Sequence[str]) -> list[Row]:
    """The rows of these names, in the plan's order; () is all."""
    known = [row.name for row in plan.rows]
    if unknown := [one for one in names if one not in known]:
        raise NessError(f"no row is called {', '.join(unknown)}; there are {'; '.join(known)}")
    return [row for row in plan.rows if not names or row.name in names]


def _is_there(path: Path, report: Report) -> bool:
    """Whether a row has its record; a damaged one is measured again."""
    try:
        return _sealed.read_json(path).get("schema") == SCHEMA
    except FileNotFoundError:
        if path.is_symlink():
            raise NessError(f"{path}: a link to nothing; remove it") from None
        return False
    except NessError as error:
        if not path.is_file():
            raise
        report(f"{printable(str(error))}; this row is measured again")
        return False


def measured(material: Material, model: torch.nn.Module) -> dict[str, dict[str, list[float]]]:
    """{part: {text: [loss, KL(base ‖ model)]}} on validation text, which settings are chosen on, and on test text."""
    return {
        part: {
            name: [_finite(value) for value in loss_and_change(model, _known(material, part, name, blocks), blocks)]
            for name, blocks in held.items()
        }
        for part, held in ((_VALIDATION, material.valid), (_TEST, material.test))
    }


def _known(material: Material, part: str, name: str, blocks: Tensor) -> list[Tensor] | None:
    return None if name == "new" else material.of_base(part, name, blocks)


def _finite(value: float) -> float:
    return round(value, 5) if math.isfinite(value) else 1e9  # a run that diverged; JSON has no infinity


def _points(plan: Plan, row: Row, seed: int, material: Material) -> Iterator[dict[str, Any]]:
    base = material.language.model
    old = material.own if row.statistics == "self" else material.old
    for rate in row.rate:
        on_the_way: list[dict[str, Any]] = []
        looking = 0.0

        def at(step: int, model: torch.nn.Module, found: list[dict[str, Any]] = on_the_way) -> None:
            nonlocal looking
            began = time.process_time()
            if step in plan.curve:
                found.append({"step": step, **measured(material, model)})
            looking += time.process_time() - began

        setup = methods.Setup(base, material.new, old, plan.batch, plan.steps, seed, at)
        began = time.process_time()
        adapted = methods.METHODS[row.method](setup, rate, **row.options)
        seconds = time.process_time() - began - looking
        common = {"rate": rate, "trained": adapted.trained}
        tuned = adapted.model
        for point in on_the_way:
            yield {**common, "after": "", **point}
        yield {**common, "after": "", "step": plan.steps, "cpu_seconds": round(seconds, 2), **measured(material, tuned)}
        if not any((row.wise, row.repair, row.repair_old, row.repair_self, row.both)):
            continue
        seen = material.new[: plan.seen]
        for share in row.wise:
            model = methods.interpolated(base, tuned, share)
            yield {**common, "after": "wise", "share": share, **measured(material, model)}
        for after, strengths, pairs, old_text, new_text in (
            ("repair", row.repair, row.both, material.old, seen),
            ("repair, old text alone", row.repair_old, (), material.old, None),
            ("repair, own text", row.repair_self, (), material.own, seen),
        ):
            if not strengths and not pairs:
                continue
            began = time.process_time()
            repaired = methods.repairer(base, tuned, old_text, new_text)
            cost = {"cpu_seconds": round(time.process_time() - began, 2)}
            for strength in strengths:
                kept = {**common, "after": after, "strength": strength, **cost}
                yield {**kept, **measured(material, repaired(strength))}
            for strength, share in pairs:
                model = methods.interpolated(base, repaired(strength), share)
                kept = {**common, "after": f"{after} and wise", "strength": strength, "share": share}
                yield {**kept, **measured(material, model)}
        del tuned, adapted


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _environment(device: torch.device) -> dict[str, Any]:
    named = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "ness": __version__,
        "torch": torch.__version__,
        "transformers": _version("transformers"),
        "peft": _version("peft"),
        "python": platform.python_version(),
        "device": named,
        "threads": torch.get_num_threads(),
    }
