"""A study: one model, one new domain, many ways to get there; what each learns, and what it forgets.

A plan (TOML) names the model, the texts and the rows. Every row and seed becomes one record, written once it is
measured; a record that is there is not measured again.
"""

import dataclasses
import importlib.metadata
import json
import math
import platform
import re
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ness import _files
from ness._version import __version__
from ness.errors import NessError
from ness.lab.language import methods, models, texts
from ness.lab.language.measure import loss_and_change
from ness.lab.language.models import LanguageModel

SCHEMA = 1
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
    """What is studied: the top of a plan's file. `general="self"` means that the model's own text is the old text."""

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


def read(path: Path) -> Plan:
    """The plan in a TOML file.

    Raises:
        NessError: it cannot be read, or says something that is not known; the message names the place.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise NessError(f"{path}: is not a readable TOML file ({_files.reason(error)})") from error
    rows = values.pop("row", [])
    if not rows:
        raise NessError(f"{path}: has no [[row]]; expected one for each method")
    known = {field.name for field in dataclasses.fields(Row)} - {"options"}
    made = []
    for number, row in enumerate(rows, start=1):
        missing = {"name", "method", "rate"} - row.keys()
        if missing:
            raise NessError(f"{path}: row {number} has no {', '.join(sorted(missing))}")
        if row["method"] not in methods.METHODS:
            raise NessError(
                f"{path}: row {number}: no method is called {row['method']!r}; there are {', '.join(methods.METHODS)}"
            )
        own = {key: _tuple(value) for key, value in row.items() if key in known}
        own["rate"] = own["rate"] if isinstance(own["rate"], tuple) else (own["rate"],)
        made.append(Row(**own, options={key: value for key, value in row.items() if key not in known}))
    fields = {field.name for field in dataclasses.fields(Plan)} - {"rows"}
    if unknown := values.keys() - fields:
        raise NessError(f"{path}: unknown {', '.join(sorted(unknown))}; expected {', '.join(sorted(fields))} and row")
    if missing := {"title", "model", "domain", "general", "held_out", "seeds"} - values.keys():
        raise NessError(f"{path}: has no {', '.join(sorted(missing))}")
    return Plan(rows=tuple(made), **{key: _tuple(value) for key, value in values.items()})


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
    known = [row.name for row in plan.rows]
    if unknown := [one for one in only if one not in known]:
        raise NessError(f"no row is called {', '.join(unknown)}; there are {'; '.join(known)}")
    rows = [row for row in plan.rows if not only or row.name in only]
    wanted = [
        (seed, row, out / name / f"{_slug(row.name)}-seed{seed}.json") for seed in seeds or plan.seeds for row in rows
    ]
    todo = [one for one in wanted if not one[2].exists()]
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
            _files.write_bytes(path, (json.dumps(record, indent=1, allow_nan=False) + "\n").encode())
            report(f"{row.name}, seed {seed}: {len(points)} points in {record['seconds']:.0f} s")
    return [path for _, _, path in wanted]


def measured(material: Material, model: torch.nn.Module, test: bool = True) -> dict[str, dict[str, list[float]]]:
    """{part: {text: [loss, KL(base ‖ model)]}} on validation text and, if asked for, on test text."""
    parts = {_VALIDATION: material.valid, **({_TEST: material.test} if test else {})}
    base = material.language.model
    return {
        part: {
            name: [_finite(value) for value in loss_and_change(model, None if name == "new" else base, blocks)]
            for name, blocks in held.items()
        }
        for part, held in parts.items()
    }


def _finite(value: float) -> float:
    return round(value, 5) if math.isfinite(value) else 1e9  # a run that diverged; JSON has no infinity


def _points(plan: Plan, row: Row, seed: int, material: Material) -> Iterator[dict[str, Any]]:
    base = material.language.model
    old = material.own if row.statistics == "self" else material.old
    setup = methods.Setup(base, material.new, old, plan.batch, plan.steps, seed)
    for rate in row.rate:
        began = time.perf_counter()
        adapted = methods.METHODS[row.method](setup, rate, **row.options)
        seconds = time.perf_counter() - began
        common = {"rate": rate, "trained": adapted.trained}
        tuned = adapted.model
        yield {**common, "after": "", "train_seconds": round(seconds, 2), **measured(material, tuned)}
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
            began = time.perf_counter()
            at = methods.repairer(base, tuned, old_text, new_text)
            cost = {"seconds": round(time.perf_counter() - began, 2)}
            for strength in strengths:
                kept = {**common, "after": after, "strength": strength, **cost}
                yield {**kept, **measured(material, at(strength))}
            for strength, share in pairs:
                model = methods.interpolated(base, at(strength), share)
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
