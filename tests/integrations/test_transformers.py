"""Text that a model writes itself: masked, repeatable, and refused where a model cannot write."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ness
from ness.integrations.transformers import self_text


class Writer(nn.Module):
    """A language model without memory: the next token depends on the last alone."""

    def __init__(self, vocabulary: int = 12) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, vocabulary)
        self.config = SimpleNamespace(bos_token_id=0, eos_token_id=1, max_position_embeddings=20)
        self.modes: list[bool] = []

    def forward(self, input_ids: Tensor, **_: Any) -> Any:
        self.modes.append(self.training)
        return SimpleNamespace(logits=self.table(input_ids))


def seeded(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def test_it_is_enough_text_masked_after_its_end_and_repeatable() -> None:
    torch.manual_seed(0)
    model = Writer().train()
    batches = self_text(model, tokens=300, length=15, batch_size=4, generator=seeded(0))
    assert model.training
    assert not any(model.modes)
    assert sum(int(batch["attention_mask"].sum()) - len(batch["input_ids"]) for batch in batches) >= 300
    for batch in batches:
        ids, mask = batch["input_ids"], batch["attention_mask"]
        assert ids.shape == mask.shape
        assert ids.shape[1] <= 15
        assert bool((ids[:, 0] == 0).all())
        for row, real in zip(ids.tolist(), mask.tolist(), strict=True):
            ends = row.index(1) + 1 if 1 in row else len(row)
            assert real == [1] * ends + [0] * (len(row) - ends)
    again = self_text(model, tokens=300, length=15, batch_size=4, generator=seeded(0))
    assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(batches, again, strict=True))
    other = self_text(model, tokens=300, length=15, batch_size=4, generator=seeded(1))
    assert not all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(batches, other, strict=False))


def test_it_follows_the_model_s_own_distribution() -> None:
    model = Writer(3)
    model.config.eos_token_id = None
    with torch.no_grad():
        model.table.weight.copy_(torch.tensor([0.2, 0.5, 0.3]).log().expand(3, 3))
    batches = self_text(model, tokens=20_000, length=20, batch_size=64, generator=seeded(0))
    written = torch.cat([batch["input_ids"][:, 1:].flatten() for batch in batches])
    shares = torch.bincount(written, minlength=3) / len(written)
    assert torch.allclose(shares, torch.tensor([0.2, 0.5, 0.3]), atol=0.02)


def test_mistakes() -> None:
    class Silent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.config = SimpleNamespace(bos_token_id=0)

        def forward(self, input_ids: Tensor, **_: Any) -> Any:
            return SimpleNamespace()

    model = Writer()
    with pytest.raises(ness.NessError, match="no logits"):
        self_text(Silent())
    for wrong in ({"tokens": 0}, {"length": 1.5}, {"batch_size": True}, {"temperature": 0}, {"prompt": "a"}):
        with pytest.raises(ness.NessError, match=next(iter(wrong))):
            self_text(model, **wrong)  # type: ignore[arg-type]
    model.config = SimpleNamespace()
    with pytest.raises(ness.NessError, match="begins a text"):
        self_text(model)


@pytest.mark.transformers
def test_a_real_model_writes_what_its_cache_free_passes_would() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32, bos_token_id=0, eos_token_id=None,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    batch = self_text(model, tokens=60, length=16, batch_size=4, generator=seeded(0))[0]

    class Whole(nn.Module):
        """The same model without a cache: the whole text at every step."""

        def __init__(self) -> None:
            super().__init__()
            self.inner, self.config, self.text = model, model.config, torch.empty(4, 0, dtype=torch.long)

        def forward(self, input_ids: Tensor, **_: Any) -> Any:
            self.text = torch.cat([self.text, input_ids], 1)
            return SimpleNamespace(logits=self.inner(input_ids=self.text).logits, past_key_values=1)

    again = self_text(Whole(), tokens=60, length=16, batch_size=4, generator=seeded(0))[0]
    assert torch.equal(batch["input_ids"], again["input_ids"])
