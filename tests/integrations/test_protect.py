"""`protect`: from texts, data sets or batches to a constrained model in one call; and which rows and layers count."""

from __future__ import annotations

import functools
import operator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ness
from ness.integrations.transformers import protect

pytestmark = pytest.mark.filterwarnings("ignore:fewer rows:ness.NessWarning")


class Reader(nn.Module):
    """Reads tokens as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 8)
        self.fc = nn.Linear(8, 4)
        self.seen: list[tuple[int, ...]] = []

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        self.seen.append(tuple(input_ids.shape))
        return self.fc(self.table(input_ids))


class Tokens:
    """A tokenizer of letters."""

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) % 12 for letter in text], "attention_mask": [1] * len(text)}


def padded(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    longest = max(len(sample["input_ids"]) for sample in samples)
    return {
        key: torch.tensor([list(sample[key]) + [0] * (longest - len(sample[key])) for sample in samples])
        for key in ("input_ids", "attention_mask")
    }


def seeded() -> Reader:
    torch.manual_seed(0)
    return Reader()


TEXTS = ["some", "old", "words", "that", "must", "not", "be", "forgotten"]


def test_texts_samples_loaders_and_batches_protect_the_same() -> None:
    tokens = Tokens()
    samples = [{**tokens(text), "label": 1, "title": text} for text in TEXTS]  # columns that the model does not read
    plain = [{key: sample[key] for key in ("input_ids", "attention_mask")} for sample in samples]
    loader = torch.utils.data.DataLoader(plain, batch_size=3, collate_fn=padded)  # type: ignore[arg-type]
    batches = [padded(plain[:3]), padded(plain[3:6]), padded(plain[6:])]
    grams = []
    for data, options in (
        (TEXTS, {"processing_class": tokens, "collate": padded, "batch_size": 3}),
        (samples, {"collate": padded, "batch_size": 3}),
        (loader, {}),
        (batches, {}),
        (iter(batches), {}),
    ):
        model = seeded()
        guard = protect(model, data, rank=2, rule=ness.Rank(4), **options)  # type: ignore[arg-type]
        assert guard.constrained
        assert model.fc.ness_weight.shape == (1, 4, 2)
        grams.append(guard.grams["fc"])
        guard.discard()
    assert {gram.count for gram in grams} == {sum(map(len, TEXTS))}  # padding is no row
    for gram in grams[1:]:
        assert torch.allclose(gram.matrix, grams[0].matrix, atol=1e-10)


def test_it_stops_after_so_many_tokens() -> None:
    model = seeded()
    batches = [{"input_ids": torch.randint(12, (2, 5)), "attention_mask": torch.ones(2, 5)} for _ in range(9)]
    guard = protect(model, batches, tokens=25, rule=ness.Rank(4), rank=None)
    assert guard.grams["fc"].count == 30
    guard.discard()


def test_padding_on_the_left_and_on_the_right_and_packed_sequences_are_the_same_rows() -> None:
    ids = [[1, 2, 3, 4], [5, 6], [7, 8, 9]]
    right, left = torch.zeros(3, 4, dtype=torch.long), torch.zeros(3, 4, dtype=torch.long)
    for row, tokens in enumerate(ids):
        right[row, : len(tokens)] = left[row, 4 - len(tokens) :] = torch.tensor(tokens)
    packed = {"input_ids": torch.tensor([functools.reduce(operator.iadd, ids, [])])}
    grams = []
    for batch in (
        {"input_ids": right, "attention_mask": right != 0},
        {"input_ids": left, "attention_mask": left != 0},
        packed,
    ):
        guard = protect(seeded(), [batch], rule=ness.Rank(4), rank=None)
        grams.append(guard.grams["fc"])
        guard.discard()
    assert {gram.count for gram in grams} == {9}
    assert all(torch.allclose(gram.matrix, grams[0].matrix, atol=1e-12) for gram in grams)


def test_what_is_no_data_is_refused_and_the_model_is_left_alone() -> None:
    model = seeded()
    for data, options, message in (
        ("a text", {}, "found a str, expected texts"),
        (7, {}, "found a int"),
        (TEXTS, {}, "expected processing_class=tokenizer"),
        ([{"text": "raw"}], {}, "tokenize them first"),
        ([], {}, "there was no batch"),
        (
            [{"input_ids": [1, 2]}, {"input_ids": [1]}],
            {"collate": torch.utils.data.default_collate},
            "do not make a batch",
        ),
        (TEXTS, {"batch_size": 0}, r"batch_size=0\): expected a whole number"),
        (TEXTS, {"tokens": -1}, r"tokens=-1\): expected a whole number"),
        ([torch.zeros(2, dtype=torch.long)], {"tokens": 3, "batch_size": 1}, "no input_ids to count"),
        ([{"input_ids": torch.ones(2, 3, dtype=torch.long)}], {"rank": 0}, "rank=0"),
    ):
        with pytest.raises(ness.NessError, match=message):
            protect(model, data, **options)  # type: ignore[arg-type]
        assert type(model.fc) is nn.Linear
        assert model.fc.weight.requires_grad


class Linear4bit(nn.Linear):
    """Named as the one of bitsandbytes: its weight is packed bytes."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        packed = torch.zeros(inputs * outputs // 2, 1, dtype=torch.uint8)
        self.weight = nn.Parameter(packed, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x.new_ones(*x.shape[:-1], self.out_features)


class QuantLinear(nn.Module):
    """Named as the one of GPTQ: it has buffers alone."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.register_buffer("qweight", torch.zeros(inputs // 8, outputs, dtype=torch.int32))

    def forward(self, x: Tensor) -> Tensor:
        return x.new_ones(*x.shape[:-1], self.qweight.shape[1])


@pytest.mark.parametrize("kind", [Linear4bit, QuantLinear])
def test_quantised_layers_stay_frozen_and_are_named(kind: type[nn.Module]) -> None:
    model = nn.Sequential(kind(8, 6), nn.Linear(6, 4))
    guard = ness.NullSpace(model, rule=ness.Rank(3))
    assert guard.layers == ("1",)
    assert f"{kind.__name__} has quantised weights" in guard.skipped["0"]
    guard.observe([torch.randn(20, 8)])
    guard.constrain(rank=2)
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {"1.ness_weight", "1.ness_weight_down"}
    guard.merge()
    with pytest.raises(ness.NessError, match=r"nothing to protect.*quantised weights"):
        ness.NullSpace(nn.Sequential(kind(8, 6)))
