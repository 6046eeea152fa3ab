"""Runs that differ in nothing but the seed: a setting, its mean accuracy matrix, and its name among others."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ness.lab.runs.metrics import Matrix, mean_and_deviation
from ness.report.records import Record

RECIPE = ("epochs", "drop_last", "schedule", "mixup", "norm", "batch", "valid_order")  # what methods can share
WORDS = {  # (setting, value), or (setting, "") for any value
    ("epochs", ""): "{} epochs",
    ("drop_last", "True"): "whole batches",
    ("schedule", "cosine"): "cosine",
    ("schedule", "plateau"): "plateau",
    ("mixup", "0.0"): "no mix-up",
    ("mixup", ""): "mix-up {}",
    ("norm", "task"): "statistics per task",
    ("norm", "batch"): "batch statistics",
    ("norm", "stored"): "stored statistics",
    ("norms", "frozen"): "norms frozen",
    ("batch", ""): "batches of {}",
    ("valid_order", ""): "validation order {}",
    ("optimizer", "sgdm"): "momentum",
    ("optimizer", "sam"): "SAM",
    ("optimizer", "sgd"): "SGD",
    ("optimizer", "adamw"): "AdamW",
    ("weight_decay", "0.0"): "no decay",
    ("private", ""): "{} private",
    ("private", "0"): "none private",
    ("rule", "none"): "no shared update",
    ("rule", ""): "rule {}",
    ("basis", "own"): "basis per task",
    ("fast", "True"): "fast",
    ("fast", "False"): "not fast",
}
CEILINGS = ("joint", "alone")  # they do not learn task after task with one network: what others are held against


@dataclass(frozen=True)
class Setting:
    """A method under one setting on one benchmark: its runs in the order of their seeds."""

    records: tuple[Record, ...]

    @property
    def first(self) -> Record:
        """The run that speaks for what all share."""
        return self.records[0]

    @property
    def seeds(self) -> tuple[int, ...]:
        """In order."""
        return tuple(record.seed for record in self.records)

    @property
    def accuracy(self) -> Matrix:
        """The mean accuracy matrix over the seeds."""
        return mean_matrix([record.accuracy for record in self.records])

    @property
    def lessons(self) -> tuple[str, ...]:
        """What was learnt one after another: the tasks, or all of them at once."""
        tasks = self.first.tasks
        return tasks if len(self.first.accuracy) == len(tasks) else ("all tasks",)

    @property
    def device(self) -> str:
        """What its runs ran on, in words: "H200", "1 CPU thread"; "" where no run says."""
        return " and ".join(dict.fromkeys(name for record in self.records if (name := device_of(record))))

    @property
    def is_ceiling(self) -> bool:
        """Whether this is no continual learner but the ceiling of one."""
        return self.first.method in CEILINGS


def settings(records: Iterable[Record]) -> list[Setting]:
    """One for each benchmark, method, digest of the settings, and tasks, in the order of their first record."""
    groups: dict[tuple[str, str, str, tuple[str, ...]], list[Record]] = {}
    for record in records:
        groups.setdefault((record.benchmark, record.method, record.digest, record.tasks), []).append(record)
    return [Setting(tuple(sorted(group, key=lambda record: record.seed))) for group in groups.values()]


def device_of(record: Record) -> str:
    """The device of a run as people call it.

    >>> from types import SimpleNamespace as Run
    >>> device_of(Run(environment={"device": "cuda", "gpu": "NVIDIA H200"}))
    'H200'
    >>> device_of(Run(environment={"device": "cpu", "threads": 2}))
    '2 CPU threads'
    """
    facts = record.environment
    if gpu := facts.get("gpu"):
        return str(gpu).removeprefix("NVIDIA ")
    if facts.get("device") != "cpu":
        return str(facts.get("device", ""))
    threads = facts.get("threads")
    return "CPU" if not isinstance(threads, int) else f"{threads} CPU thread{'s' if threads != 1 else ''}"


def mean_matrix(matrices: Sequence[Matrix]) -> Matrix:
    """The mean of matrices of one shape, entry by entry; None where nothing was measured.

    >>> mean_matrix([[[90.0, None], [80.0, 70.0]], [[92.0, None], [70.0, 60.0]]])
    [[91.0, None], [75.0, 65.0]]
    """

    def mean(values: tuple[float | None, ...]) -> float | None:
        known = [value for value in values if value is not None]
        return mean_and_deviation(known)[0] if len(known) == len(values) else None

    return [[mean(values) for values in zip(*rows, strict=True)] for rows in zip(*matrices, strict=True)]


def labels(found: Sequence[Setting]) -> list[str]:
    """The method's name; with what sets it apart, in words, where a benchmark has several settings of it."""
    return [name for name, _ in _named(found)]


def recipes(found: Sequence[Setting]) -> list[str]:
    """What the letters in `labels` stand for: "recipe A: 50 epochs, cosine, mix-up 0.2"."""
    return list(dict.fromkeys(note for _, note in _named(found) if note))


def _named(found: Sequence[Setting]) -> list[tuple[str, str]]:
    """(label, what its letter stands for) of each setting; a recipe that several methods share has a letter."""
    several = Counter((one.first.benchmark, one.first.method) for one in found)
    parts = [_parts(one.first) for one in found]
    shared: dict[tuple[str, ...], set[str]] = {}
    for one, (_, recipe) in zip(found, parts, strict=True):
        if len(recipe) > 1 and several[one.first.benchmark, one.first.method] > 1:
            shared.setdefault(recipe, set()).add(one.first.method)
    letters = {recipe: chr(ord("A") + n) for n, recipe in enumerate(r for r in shared if len(shared[r]) > 1)}
    names: list[tuple[str, str]] = []
    for one, (own, recipe) in zip(found, parts, strict=True):
        if several[one.first.benchmark, one.first.method] == 1:
            names.append((one.first.method, ""))
            continue
        letter = letters.get(recipe)
        said = [f"recipe {letter}"] if letter else list(recipe)
        words = [*own, *said]
        if one.first.preset not in ("fixed", "") or not words:
            words = [one.first.preset, *words]
        note = f"recipe {letter}: {', '.join(recipe)}" if letter else ""
        names.append((f"{one.first.method} ({', '.join(words)})", note))
    places: dict[tuple[str, str], list[int]] = {}
    for n, (one, (name, _)) in enumerate(zip(found, names, strict=True)):
        places.setdefault((one.first.benchmark, name), []).append(n)
    for (_, name), alike in places.items():
        if len(alike) > 1:
            for n, told in zip(alike, differences([found[n].first for n in alike]), strict=True):
                names[n] = (f"{name}, {told}", names[n][1])
    return names


def _parts(record: Record) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """In words, what was set by hand: what is the method's own (its rate too), and the recipe of training."""
    changes = re.findall(r"(\w+)=(\S+)", record.setting)
    words = [(key in RECIPE, in_words(key, value)) for key, value in changes]
    return tuple(word for shared, word in words if not shared), tuple(word for shared, word in words if shared)


def in_words(key: str, value: str) -> str:
    """A setting as people say it.

    >>> in_words("epochs", "50"), in_words("mixup", "0.0"), in_words("fashion", "true")
    ('50 epochs', 'no mix-up', 'fashion true')
    """
    if said := WORDS.get((key, value)):
        return said
    if (key, "") in WORDS:
        return WORDS[key, ""].format(value)
    return f"{key.replace('_', ' ')} {value}"


def differences(alike: Sequence[Record]) -> list[str]:
    """What tells records apart that are called alike: the values that differ, else in which order they came.

    A setting that a record does not have yet is not named for it.
    """
    facts = [
        {**one.settings, "fast": one.fast, "revision": one.revision, "version": one.version, "tasks": len(one.tasks)}
        for one in alike
    ]
    keys = dict.fromkeys(key for fact in facts for key in fact)
    told = [key for key in keys if len({repr(fact.get(key)) for fact in facts}) > 1]
    words = [
        ", ".join(in_words(key, str(fact[key])) for key in told if key in fact) or "an earlier version" * bool(told)
        for fact in facts
    ]
    alike_still = Counter(words)
    seen: Counter[str] = Counter()
    for n, word in enumerate(words):
        seen[word] += 1
        if alike_still[word] > 1:
            words[n] = f"{word} no. {seen[word]}".strip()
    return words


def stems(found: Sequence[Setting]) -> list[str]:
    """A file name for each setting, without odd characters, no two alike.

    Two that would be alike, on a file system that does not tell capitals either, are numbered.
    """
    seen: Counter[str] = Counter()
    names = []
    for one in found:
        stem = file_name(f"{one.first.benchmark}-{one.first.method}-{one.first.digest}")
        seen[stem.lower()] += 1
        names.append(stem if seen[stem.lower()] == 1 else f"{stem}-{seen[stem.lower()]}")
    return names


def file_name(text: str) -> str:
    """The text with every character that a file name should not have made an underscore.

    >>> file_name("a/b method")
    'a_b_method'
    """
    return re.sub(r"[^\w.-]", "_", text)[:120]
