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


def tiny(name: str) -> torch.nn.Module:
    small = {"vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(2)
    if name == "bert":
        return transformers.BertModel(transformers.BertConfig(**small, intermediate_size=24)).double().eval()
    if name == "llama":
        config = transformers.LlamaConfig(**small, intermediate_size=24, num_key_value_heads=1)
        return transformers.LlamaModel(config).double().eval()
    if name == "gpt2":
        config = transformers.GPT2Config(vocab_size=60, n_positions=16, n_embd=16, n_layer=2, n_head=2)
        return transformers.GPT2Model(config).double().eval()
    config = transformers.T5Config(
        vocab_size=60, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, feed_forward_proj="gated-gelu"
    )
    return transformers.T5Model(config).double().eval()


@pytest.mark.parametrize("lengths", [[3, 1, 2], [5, 2, 4]])
@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "t5"])
def test_padding_is_no_row(name: str, left: bool, lengths: list[int]) -> None:
    def batch(sequences: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        most = max(len(one) for one in sequences)
        ids, mask = torch.zeros(len(sequences), most, dtype=torch.long), torch.zeros(len(sequences), most).long()
        for row, one in enumerate(sequences):
            place = slice(most - len(one), None) if left else slice(len(one))
            ids[row, place], mask[row, place] = one, 1
        found = {"input_ids": ids, "attention_mask": mask}
        if name in ("gpt2", "llama", "bert"):
            found["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
        return found

    def both(sources: list[torch.Tensor], targets: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        found = batch(sources)
        if name == "t5":
            found |= {f"decoder_{key}": value for key, value in batch(targets).items()}
        return found

    model = tiny(name)
    sources = [torch.randint(1, 60, (length,)) for length in lengths]
    targets = [torch.randint(1, 60, (length,)) for length in reversed(lengths)]  # as many tokens at most as the sources
    padded, alone = ness.NullSpace(model), ness.NullSpace(model)
    padded.observe([transformers.BatchEncoding(both(sources, targets))])
    alone.observe([both([one], [other]) for one, other in zip(sources, targets, strict=True)])
    assert not padded.unmasked
    assert padded.grams.keys() == alone.grams.keys()
    for key, gram in padded.grams.items():
        assert gram.count == alone.grams[key].count == (3 if "pooler" in key else sum(lengths)), key
        if not (left and "pooler" in key):  # BERT pools what stands first, and that is padding there
            assert torch.allclose(gram.matrix, alone.grams[key].matrix, rtol=1e-9, atol=1e-9), key
    ranks = []
    for guard in (padded, alone):
        guard.constrain()
        ranks.append([row.rank for row in guard.certificate().rows if not (left and "pooler" in row.name)])
        guard.discard()
    assert ranks[0] == ranks[1]
