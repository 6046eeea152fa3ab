"""LoRA adapters: the factors A are repaired, the rank stays, and no bias comes in."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ness
from ness.repairing.algebra import repaired_change


class LoraLinear(nn.Module):
    """A stand-in for PEFT's layer: found by its attributes, as the real one is."""

    def __init__(self, base_layer: nn.Module, rank: int, scaling: float = 2.0) -> None:
        super().__init__()
        self.base_layer = base_layer
        width, outputs = base_layer.in_features, base_layer.out_features
        self.lora_A = nn.ModuleDict({"default": nn.Linear(width, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, outputs, bias=False)})
        self.scaling, self.active_adapters, self.merged = {"default": scaling}, ["default"], False

    def forward(self, x: Tensor) -> Tensor:
        added = self.lora_B["default"](self.lora_A["default"](x))
        return self.base_layer(x) + self.scaling["default"] * added


def adapted() -> tuple[nn.Module, nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(12, 10), nn.ReLU(), nn.Linear(10, 4)).double()
    model = copy.deepcopy(base)
    model[0], model[2] = LoraLinear(model[0], 2).double(), LoraLinear(model[2], 3).double()
    with torch.no_grad():
        for layer in (model[0], model[2]):
            layer.lora_B["default"].weight.normal_()
    return base, model, torch.randn(50, 12, dtype=torch.float64), torch.randn(60, 12, dtype=torch.float64)


@pytest.mark.parametrize("given", [True, False])
def test_the_factor_is_reshaped_and_nothing_else_changes(given: bool) -> None:
    base, model, old, new = adapted()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    done = ness.repair(model, base if given else None, old=old, new=new, strength=3.0)
    assert [row.name for row in done.rows] == ["0", "2"]
    changed = [n for n, v in done.model.state_dict().items() if not torch.equal(v, before[n])]
    assert changed == ["0.lora_A.default.weight", "2.lora_A.default.weight"]
    grams = [(x.mT @ x / len(x))[None] for x in (new, old)]
    expected = repaired_change(before[changed[0]][None], *grams, 3.0)[0]
    assert torch.allclose(done.model.state_dict()[changed[0]], expected, atol=1e-9)
    plain = done["0"].old_before
    with torch.no_grad():
        moved = (model[0](old) - base[0](old)).norm() / base[0](old).norm()
    assert plain == pytest.approx(float(moved))
    assert done.on_old is not None
    assert done.on_old.after < done.on_old.before


def test_it_is_what_repairing_the_merged_model_gives() -> None:
    base, model, old, new = adapted()
    merged = copy.deepcopy(base)
    with torch.no_grad():
        for index in (0, 2):
            layer: Any = model[index]
            merged[index].weight.add_(2.0 * layer.lora_B["default"].weight @ layer.lora_A["default"].weight)
    adapter = ness.repair(model, None, old=old, new=new, new_under=1.0).model
    dense = ness.repair(merged, base, old=old, new=new, new_under=1.0).model
    assert torch.allclose(adapter(new), dense(new), atol=1e-8)


def test_mistakes() -> None:
    base, model, old, new = adapted()
    with torch.no_grad():
        base[0].weight.add_(1)
    with pytest.raises(ness.NessError, match="not what lies under the adapters"):
        ness.repair(model, base, old=old, new=new)
    with pytest.raises(ness.NessError, match="passes"):
        ness.repair(model, None, old=old, new=new, passes=2)
    model[0].merged = True
    with pytest.raises(ness.NessError, match="unmerge"):
        ness.repair(model, None, old=old, new=new)
    del model[0].lora_A
    with pytest.raises(ness.NessError, match="LoRA alone"):
        ness.repair(model, None, old=old, new=new)


@pytest.mark.transformers
def test_a_real_peft_model(tmp_path: Any) -> None:
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    base = transformers.LlamaForCausalLM(config).eval()
    wanted = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(copy.deepcopy(base), wanted)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    old, new = torch.randint(0, 20, (16, 12)), torch.randint(20, 64, (16, 12))
    batches = [[{"input_ids": x, "attention_mask": torch.ones_like(x)}] for x in (old, new)]
    done = ness.repair(model, base, old=batches[0], new=batches[1], strength=3.0)
    assert len(done.rows) == 6
    assert done.on_old is not None
    assert done.on_old.after < done.on_old.before
    done.model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path)
    assert torch.allclose(again(old).logits, done.model(old).logits, atol=1e-5)
    assert again.peft_config["default"].r == 4
