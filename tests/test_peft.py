"""The real PEFT package reads what `export_lora` writes (run by `make test-transformers`)."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ness
from helpers import GPT2Like, ResNetLike, Transformer, low_rank, named, smooth_images, train

pytestmark = [pytest.mark.transformers, pytest.mark.filterwarnings("ignore::ness.NessWarning")]

transformers = pytest.importorskip("transformers", reason="the transformers package is not installed")
peft = pytest.importorskip("peft", reason="the peft package is not installed")


def round_trip(model: nn.Module, old: Any, new: Tensor, folder: Path, rank: int, **options: Any) -> tuple[Any, Any]:
    """Train under a guard, export, load into a copy of the base with PEFT: (the merged model, PEFT's)."""
    base = copy.deepcopy(model)
    guard = ness.NullSpace(model, rule=ness.Nuclear(0.05), **({"exclude": ["head"]} | options))
    guard.observe(old)
    guard.constrain(rank=rank)
    train(model, torch.optim.AdamW(guard.parameters(), lr=0.02), new)
    guard.export_lora(folder)
    guard.merge()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(issing|nexpected|not initialized).*")
        loaded = peft.PeftModel.from_pretrained(base, folder)
    return model, loaded


def check(model: nn.Module, loaded: Any, x: Any, merge: bool = True) -> None:
    model.eval(), loaded.eval()
    with torch.no_grad():
        assert torch.allclose(loaded(x), model(x), atol=1e-4)
        if not merge:
            return
        merged = loaded.merge_and_unload()
        assert merged.state_dict().keys() == model.state_dict().keys()
        for key, value in merged.state_dict().items():
            assert torch.allclose(value, model.state_dict()[key], atol=1e-5), key


def test_linear_layers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = named(trunk=nn.Sequential(nn.Linear(64, 80), nn.ReLU(), nn.Linear(80, 64)), head=nn.Linear(64, 4))
    new = torch.randn(32, 64)
    check(*round_trip(model, low_rank(300, 64), new, tmp_path, rank=3), new)


def test_the_real_conv1d(tmp_path: Path) -> None:
    from transformers.pytorch_utils import Conv1D

    torch.manual_seed(0)
    new = torch.randint(6, 50, (16, 5))
    check(*round_trip(GPT2Like(Conv1D), [torch.randint(0, 6, (60, 5))], new, tmp_path, rank=3), new)


def test_convolutions(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = ResNetLike()
    model.conv2 = nn.Conv2d(16, 16, 3, padding=1, bias=False)
    new = torch.randn(32, 3, 8, 8)
    check(*round_trip(model, smooth_images(64, 3, 8), new, tmp_path, rank=3), new)


def test_grouped_convolutions_run_though_peft_cannot_merge_them(tmp_path: Path) -> None:
    torch.manual_seed(0)
    new = torch.randn(32, 3, 8, 8)
    check(*round_trip(ResNetLike(), smooth_images(64, 3, 8), new, tmp_path, rank=5), new, merge=False)


def test_attention(tmp_path: Path) -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
            self.head = nn.Linear(32, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))

    torch.manual_seed(0)
    new = torch.randn(16, 6, 32)
    check(*round_trip(Attends(), low_rank(32, 6, 32), new, tmp_path, rank=3, include=["*in_proj*"]), new)


def test_an_encoder_layer(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = named(encoder=Transformer().encoder, head=nn.Linear(32, 4))
    new = torch.randn(16, 6, 32)
    merged, loaded = round_trip(model, low_rank(32, 6, 32), new, tmp_path, rank=3, include=["*in_proj*", "*linear?"])
    unloaded = loaded.merge_and_unload()
    for key, value in unloaded.state_dict().items():
        assert torch.allclose(value, merged.state_dict()[key], atol=1e-5), key


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
def test_whole_models(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    if kind == "llama":
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=60,
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=1,
            )
        )
        exclude, task = ["lm_head"], "CAUSAL_LM"
    elif kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=60, n_positions=16, n_embd=32, n_layer=2, n_head=2, tie_word_embeddings=False
        )
        model, exclude, task = transformers.GPT2LMHeadModel(config), ["lm_head"], "CAUSAL_LM"
    else:
        config = transformers.BertConfig(
            vocab_size=60, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48
        )
        model, exclude, task = transformers.BertForSequenceClassification(config), ["classifier"], "SEQ_CLS"
    model.eval()
    base, old, new = copy.deepcopy(model), torch.randint(0, 8, (40, 12)), torch.randint(8, 60, (16, 12))
    guard = ness.NullSpace(model, rule=ness.Nuclear(0.02), exclude=exclude)
    guard.observe([{"input_ids": old}])
    guard.constrain(rank=4)
    optimizer = torch.optim.AdamW(guard.parameters(), lr=1e-2)
    for _ in range(5):
        optimizer.zero_grad()
        model(input_ids=new).logits.square().mean().backward()
        optimizer.step()
    guard.merge()
    guard.export_lora(tmp_path)
    loaded = peft.PeftModel.from_pretrained(base, tmp_path).eval()
    assert loaded.peft_config["default"].task_type == task
    with torch.no_grad():
        assert torch.allclose(loaded(input_ids=new).logits, model(input_ids=new).logits, atol=1e-4)
    merged = loaded.merge_and_unload()
    for key, value in merged.state_dict().items():
        assert torch.allclose(value, model.state_dict()[key], atol=1e-5), key
