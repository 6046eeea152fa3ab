"""The real transformers package: GPT-2's Conv1D, and a whole small GPT-2 and BERT (run by `make test-transformers`)."""

from __future__ import annotations

import pytest
import torch

import ness
from helpers import GPT2Like, Witness, check_promise, train

pytestmark = [pytest.mark.transformers, pytest.mark.filterwarnings("ignore::ness.NessWarning")]

transformers = pytest.importorskip("transformers", reason="the transformers package is not installed")


def test_a_block_with_the_real_conv1d() -> None:
    from transformers.pytorch_utils import Conv1D

    torch.manual_seed(0)
    model = GPT2Like(Conv1D)
    guard, witness = ness.NullSpace(model, rule=ness.Nuclear(5e-3), exclude=["head"]), Witness(model)
    assert guard.layers == ("attend", "project", "up", "down")
    witness.observe(guard, [torch.randint(0, 6, (60, 5))])
    guard.constrain()
    train(model, torch.optim.AdamW(guard.parameters(), lr=1e-2), torch.randint(6, 50, (16, 5)))
    check_promise(guard, witness, torch.finfo(torch.float32).eps)
    guard.merge()
    check_promise(guard, witness, torch.finfo(torch.float32).eps)


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_a_whole_model(name: str) -> None:
    torch.manual_seed(1)
    if name == "gpt2":
        config = transformers.GPT2Config(vocab_size=60, n_positions=16, n_embd=32, n_layer=2, n_head=2)
        model = transformers.GPT2LMHeadModel(config).eval()
        excluded = ["lm_head"]
    else:
        config = transformers.BertConfig(
            vocab_size=60, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48
        )
        model = transformers.BertForSequenceClassification(config).eval()
        excluded = ["classifier"]
    old, new = torch.randint(0, 8, (40, 12)), torch.randint(8, 60, (16, 12))
    guard = ness.NullSpace(model, rule=ness.Nuclear(5e-3), exclude=excluded)
    guard.observe([{"input_ids": old}])
    before = model(input_ids=new).logits.detach()
    guard.constrain()
    with torch.no_grad():
        assert torch.equal(model(input_ids=new).logits, before)
    optimizer = torch.optim.AdamW(guard.parameters(), lr=1e-2)
    for _ in range(5):
        optimizer.zero_grad()
        model(input_ids=new).logits.square().mean().backward()
        optimizer.step()
    assert guard.certificate().holds
    assert sum(row.rank for row in guard.certificate().rows) > 0
    guard.merge()
    assert guard.certificate().holds
    assert not torch.allclose(model(input_ids=new).logits, before, atol=1e-3)
