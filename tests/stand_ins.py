"""What the snippets of the documents take for granted: small models and data under the names that a page uses."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import ness


class Reader(nn.Module):
    """A body and a head; or, with several heads, one per task."""

    def __init__(self, heads: int = 0) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 24), nn.LayerNorm(24), nn.ReLU(), nn.Linear(24, 12), nn.ReLU())
        if heads:
            self.heads = nn.ModuleList(nn.Linear(12, 3) for _ in range(heads))
        else:
            self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out


def inputs(rows: int = 200) -> Tensor:
    """Inputs that use 10 of 16 directions."""
    return torch.randn(rows, 10) @ torch.randn(10, 16)


def labelled(batches: int = 4, rows: int = 64) -> list[tuple[Tensor, Tensor]]:
    return [(inputs(rows), torch.randint(3, (rows,))) for _ in range(batches)]


def common() -> dict[str, Any]:
    """What most pages begin with: a model that was trained, and old and new data."""
    torch.manual_seed(0)
    model = Reader()
    base = copy.deepcopy(model)
    tuned = copy.deepcopy(base)
    with torch.no_grad():
        for weight in tuned.parameters():
            weight.add_(0.02 * torch.randn_like(weight))
    return {
        "torch": torch,
        "nn": nn,
        "ness": ness,
        "model": model,
        "base": base,
        "tuned": tuned,
        "old_inputs": inputs(),
        "new_inputs": inputs(),
        "old_batches": [inputs() for _ in range(2)],
        "new_batches": [inputs() for _ in range(2)],
    }


def index() -> dict[str, Any]:
    return {**common(), "new_batches": labelled()}


def many_tasks() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"model": Reader(heads=3), "tasks": {name: labelled(6) for name in ("upright", "turned", "mirrored")}}


class Encoder(nn.Module):
    """Token vectors of a tiny encoder, called as one of transformers is."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(40, 16)
        self.layer = nn.Linear(16, 32)
        self.out = nn.Linear(32, 16)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.tokens(input_ids)
        out: Tensor = x + self.out(torch.relu(self.layer(x)))
        return out


def texts(batches: int = 4) -> list[dict[str, Tensor]]:
    made = []
    for _ in range(batches):
        mask = torch.ones(16, 8, dtype=torch.long)
        mask[::2, 5:] = 0
        made.append({"input_ids": torch.randint(40, (16, 8)), "attention_mask": mask})
    return made


def embeddings() -> dict[str, Any]:
    torch.manual_seed(0)
    pairs = list(zip(texts(3), texts(3), strict=True))
    return {"encoder": Encoder(), "old_batches": texts(), "held_out_batches": texts(2), "new_pairs": pairs}


def which_data() -> dict[str, Any]:
    known = common()
    text = nn.Sequential(nn.Embedding(40, 16), nn.Linear(16, 8))
    batches = [(batch["input_ids"], batch["attention_mask"]) for batch in texts()]
    return {**known, "text_guard": ness.NullSpace(text), "token_batches": batches}


def own_data() -> dict[str, Any]:
    def some(count: int) -> tuple[Tensor, Tensor]:
        return torch.randint(255, (count, 1, 8, 8), dtype=torch.uint8), torch.arange(count) % 2

    return {"seasons": [(name, *some(600), *some(16)) for name in ("winter", "summer")], "torch": torch}


def own_method() -> dict[str, Any]:
    from dataclasses import dataclass

    from ness.lab.runs.settings import setting

    return {"dataclass": dataclass, "setting": setting}


def saving() -> dict[str, Any]:
    known = common()
    guard = ness.NullSpace(known["model"], exclude=["head"])
    guard.observe(known["old_inputs"])
    guard.constrain()
    return {**known, "guard": guard, "build": Reader}


def ness_plus() -> dict[str, Any]:
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU())
    model = nn.Sequential()
    model.add_module("body", body)
    model.add_module("heads", nn.Linear(64, 8))
    known = {"model": model, "first_inputs": torch.randn(300, 64), "second_inputs": torch.randn(300, 64)}
    return {"ness": ness, **known}


def language_model() -> dict[str, Any]:
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    from trainers import llama

    torch.manual_seed(0)
    words = ["<s>", "</s>", *(f"w{number}" for number in range(38))]
    vocabulary = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="w0"))
    vocabulary.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=vocabulary, bos_token="<s>", eos_token="</s>", pad_token="</s>", unk_token="w0"
    )
    folder = Path("path/to/model")
    llama().save_pretrained(folder)
    tokenizer.save_pretrained(folder)

    def sentences(count: int) -> list[str]:
        return [" ".join(f"w{int(number)}" for number in torch.randint(38, (10,))) for _ in range(count)]

    rows = [{"input_ids": torch.randint(2, 40, (10,))} for _ in range(16)]
    data = [{**row, "labels": row["input_ids"]} for row in rows]
    return {"old_texts": sentences(40), "held_out_texts": sentences(8), "new_data": data}


def transformers_page() -> dict[str, Any]:
    import transformers

    known = language_model()
    sizes = {"vocab_size": 40, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    wide = transformers.LlamaConfig(**sizes, num_attention_heads=2, tie_word_embeddings=True)
    transformers.LlamaForCausalLM(wide).save_pretrained("path/to/model")
    old = [f"w{number % 4} w{number % 3}" for number in range(80)]  # few words: much is free at the strict default
    held_out = [{"input_ids": torch.randint(4, (2, 5))}]
    data = known["new_data"]
    return {"name": "path/to/model", "old_texts": old, "new": data, "test": data[:4], "held_out": held_out}


PAGES: dict[str, Callable[[], dict[str, Any]]] = {
    "docs/index.md": index,
    "docs/ness-plus.md": ness_plus,
    "docs/saving.md": saving,
    "docs/your-own-method.md": own_method,
    "docs/transformers.md": transformers_page,
    "docs/tutorials/embeddings.md": embeddings,
    "docs/tutorials/language-model.md": language_model,
    "docs/tutorials/many-tasks.md": many_tasks,
    "docs/tutorials/your-own-data.md": own_data,
    "docs/guides/which-data.md": which_data,
}
TRANSFORMERS = {"docs/tutorials/language-model.md", "docs/transformers.md", "docs/language-models.md"}
