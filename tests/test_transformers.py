"""The real transformers package: GPT-2's Conv1D, and a whole small GPT-2 and BERT (run by `make test-transformers`)."""

from __future__ import annotations

from pathlib import Path

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
        excluded = []  # the head is tied to the embedding: both stay frozen
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


def whole(name: str) -> torch.nn.Module:
    """Whole models in small, as their classes make them."""
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
    llama = {**small, "vocab_size": 60, "max_position_embeddings": 32}
    if name == "gpt2":
        config = transformers.GPT2Config(vocab_size=60, n_positions=16, n_embd=32, n_layer=1, n_head=2)
        return transformers.GPT2LMHeadModel(config)
    if name == "bert":
        return transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=60, **small))
    if name == "t5":
        config = transformers.T5Config(
            vocab_size=60, d_model=32, d_kv=16, d_ff=48, num_layers=1, num_heads=2, decoder_start_token_id=0
        )
        return transformers.T5ForConditionalGeneration(config)
    if name == "gemma":
        config = transformers.GemmaConfig(**llama, num_key_value_heads=2, head_dim=16)
        return transformers.GemmaForCausalLM(config)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**llama, tie_word_embeddings=True))


TIED = {
    "gpt2": ("transformer.wte", "lm_head"),
    "bert": ("bert.embeddings.word_embeddings", "cls.predictions.decoder"),
    "t5": ("shared", "lm_head"),
    "gemma": ("model.embed_tokens", "lm_head"),
    "llama": ("model.embed_tokens", "lm_head"),
}


@pytest.mark.parametrize("name", TIED)
def test_tied_models_need_no_options_and_their_pair_stays_frozen(name: str) -> None:
    torch.manual_seed(0)
    model, (embedding, head) = whole(name).eval(), TIED[name]
    table = model.get_parameter(f"{embedding}.weight")
    assert model.get_parameter(f"{head}.weight") is table
    old, new = torch.randint(1, 8, (20, 8)), torch.randint(8, 60, (8, 8))
    inputs = {"input_ids": old} | ({"decoder_input_ids": old} if name == "t5" else {})
    guard = ness.NullSpace(model, rule=ness.Rank(8))
    assert head not in guard.layers
    assert "tied" in guard.skipped[head]
    assert "tied" in guard.skipped[embedding]
    guard.observe([inputs])
    start = table.detach().clone()
    guard.constrain()
    assert guard.unprotected == {}
    optimizer = torch.optim.AdamW(guard.parameters(), lr=1e-2)
    more = {"decoder_input_ids": new} if name == "t5" else {}
    model(input_ids=new, **more).logits.square().mean().backward()
    optimizer.step()
    assert guard.certificate().holds
    guard.merge()
    assert torch.equal(table, start)
    with pytest.raises(ness.NessError, match="both stay frozen") as error:
        ness.NullSpace(model, exclude=[head])
    assert "exclude both" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "kind"), [("llama", "LlamaRMSNorm"), ("t5", "T5LayerNorm"), ("gemma", "GemmaRMSNorm")]
)
def test_norms_with_classes_of_their_own_train_with_their_task(name: str, kind: str) -> None:
    torch.manual_seed(0)
    model, old = whole(name), torch.randint(1, 8, (20, 8))
    norms = {n: m for n, m in model.named_modules() if type(m).__name__ == kind}
    assert norms
    more = {"decoder_input_ids": old} if name == "t5" else {}
    guard = ness.NullSpace(model, rule=ness.Rank(8), norm="per_task")
    assert not norms.keys() & guard.skipped.keys()
    guard.observe([{"input_ids": old, **more}])
    guard.constrain(task="b")
    before = {n: m.weight.detach().clone() for n, m in norms.items()}
    assert set(guard.unprotected) == {f"{n}.weight" for n in norms}
    optimizer = torch.optim.AdamW(guard.parameters(), lr=1e-2)
    model(input_ids=old, **more).logits.square().mean().backward()
    optimizer.step()
    guard.merge()
    assert all(not torch.equal(m.weight, before[n]) for n, m in norms.items())
    guard.use("first")
    assert all(torch.equal(m.weight, before[n]) for n, m in norms.items())


def test_a_peft_model_is_refused_by_name_and_merged_it_is_guarded() -> None:
    peft = pytest.importorskip("peft", reason="the peft package is not installed")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(whole("llama"), config)
    with pytest.raises(ness.NessError, match=r"found a PeftModelForCausalLM.*merge_and_unload"):
        ness.NullSpace(model)
    with pytest.raises(
        ness.NessError, match=r"found 'model.layers.0.self_attn.q_proj' \(Linear\), which trains a PEFT"
    ):
        ness.NullSpace(model.base_model.model)
    guard = ness.NullSpace(model.merge_and_unload())
    assert "model.layers.0.self_attn.q_proj" in guard.layers
    assert not any("lora" in name for name in guard.layers)


def small_bert(kind: type[torch.nn.Module]) -> torch.nn.Module:
    config = transformers.BertConfig(
        vocab_size=60, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48
    )
    return kind(config)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_guard_of_bert_loads_for_its_classifier(dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    body, tokens = small_bert(transformers.BertModel).eval(), torch.randint(1, 8, (40, 12))
    guard = ness.NullSpace(body, rule=ness.Nuclear(1e-2))
    guard.observe([{"input_ids": tokens}])
    guard.save(tmp_path)
    model = small_bert(transformers.BertForSequenceClassification)
    model.bert.load_state_dict(body.state_dict())
    model = model.to(dtype).eval()
    again = ness.NullSpace.load(tmp_path, model)
    assert again.layers == tuple(f"bert.{name}" for name in guard.layers)
    again.constrain()
    assert again.unprotected == {"classifier.weight": 64, "classifier.bias": 2}
    optimizer = torch.optim.AdamW(again.parameters(), lr=1e-2)
    model(input_ids=torch.randint(8, 60, (8, 12))).logits.square().mean().backward()
    optimizer.step()
    assert again.certificate().holds
    again.merge()
    assert again.certificate().holds


def test_guards_of_bodies_load_for_language_models_whose_head_is_tied(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = whole("gpt2")
    guard = ness.NullSpace(model.transformer)
    guard.observe([{"input_ids": torch.randint(1, 8, (20, 8))}])
    guard.save(tmp_path)
    again = ness.NullSpace.load(tmp_path, model)
    assert again.layers == tuple(f"transformer.{name}" for name in guard.layers)
    again.constrain()
    assert again.unprotected == {}
    assert "tied" in again.skipped["lm_head"]
    again.merge()
    bert = small_bert(transformers.BertModel)
    guard = ness.NullSpace(bert)
    guard.observe([{"input_ids": torch.randint(1, 8, (20, 8))}])
    guard.save(tmp_path)
    with pytest.raises(ness.NessError, match=r"'bert' has its layers, but not pooler.dense"):
        ness.NullSpace.load(tmp_path, whole("bert"))
