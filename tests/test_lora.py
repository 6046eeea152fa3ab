"""`export_lora`: the files as PEFT reads them, checked here without it and in `test_peft.py` with it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import ness
from helpers import Conv1D, ResNetLike, Transformer, low_rank, named, smooth_images, train

pytestmark = pytest.mark.filterwarnings("ignore::ness.NessWarning")

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    return json.loads((folder / CONFIG).read_text()), safetensors.torch.load_file(folder / WEIGHTS)


def delta(tensors: dict[str, Tensor], name: str, groups: int = 1) -> Tensor:
    """ΔW as PEFT computes it, in the layout of a Linear or a convolution."""
    a, b = tensors[f"base_model.model.{name}.lora_A.weight"], tensors[f"base_model.model.{name}.lora_B.weight"]
    if a.ndim == 2:
        return b @ a
    per = b.shape[1]
    channels = a.shape[1] // groups
    parts = []
    for g, rows in enumerate(b.flatten(1).chunk(groups)):
        own = a[g * per : (g + 1) * per, g * channels : (g + 1) * channels]
        assert int((a[g * per : (g + 1) * per] != 0).sum()) == int((own != 0).sum())
        parts.append((rows @ own.flatten(1)).reshape(-1, *own.shape[1:]))
    return torch.cat(parts)


def trained(
    model: nn.Module, old: Tensor, new: Tensor, rank: int | None = 3, **options: Any
) -> tuple[ness.NullSpace, dict[str, Tensor]]:
    guard = ness.NullSpace(model, rule=ness.Nuclear(0.05), **({"exclude": ["head"]} | options))
    guard.observe(old)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    guard.constrain(rank=rank)
    train(model, torch.optim.AdamW(guard.parameters(), lr=0.02), new)
    return guard, before


def mlp() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = named(trunk=nn.Sequential(nn.Linear(64, 80), nn.ReLU(), nn.Linear(80, 64)), head=nn.Linear(64, 4))
    return model, low_rank(300, 64), torch.randn(32, 64)


def test_the_files_hold_the_update_before_and_after_the_merge(tmp_path: Path) -> None:
    model, old, new = mlp()
    guard, before = trained(model, old, new)
    assert guard.export_lora(tmp_path / "before") == {"trunk.0": 0.0, "trunk.2": 0.0}
    guard.merge()
    guard.export_lora(tmp_path / "after")
    for folder in ("before", "after"):
        config, tensors = read(tmp_path / folder)
        assert config["peft_type"] == "LORA"
        assert (config["r"], config["lora_alpha"], config["rank_pattern"], config["alpha_pattern"]) == (3, 3, {}, {})
        assert config["target_modules"] == ["trunk.0", "trunk.2"]
        assert (config["lora_dropout"], config["bias"], config["fan_in_fan_out"]) == (0, "none", False)
        assert (config["init_lora_weights"], config["use_rslora"], config["use_dora"]) == (True, False, False)
        assert config["inference_mode"] is True
        assert config["modules_to_save"] == ["head"]
        for name in ("trunk.0", "trunk.2"):
            assert tensors[f"base_model.model.{name}.lora_A.weight"].shape[0] == 3
            merged = model.get_parameter(f"{name}.weight").detach()
            assert torch.allclose(before[f"{name}.weight"] + delta(tensors, name), merged, atol=1e-6)
            assert not torch.allclose(before[f"{name}.weight"], merged, atol=1e-3)
        assert torch.equal(tensors["base_model.model.head.weight"], model.head.weight)  # type: ignore[union-attr]
    about = json.loads((tmp_path / "after" / "ness.json").read_text())
    assert about["base"]["tasks_merged_before"] == 0
    assert [row["name"] for row in about["certificate"]] == ["trunk.0", "trunk.2"]


@pytest.mark.parametrize("form", ["any", "sgd"])
def test_a_full_width_update_is_exported_whole_or_cut(form: str, tmp_path: Path) -> None:
    model, _, new = mlp()
    old = torch.randn(300, 64) * torch.logspace(0, -3, 64)
    guard = ness.NullSpace(model, rule=ness.Nuclear(0.05), exclude=["head"], bias="freeze")
    guard.observe(old)
    before = model.trunk[0].weight.detach().clone()  # type: ignore[union-attr, index]
    guard.constrain(form=form)  # type: ignore[arg-type]
    train(model, torch.optim.SGD(guard.parameters(), lr=0.5), new)
    assert set(guard.export_lora(tmp_path / "whole").values()) == {0.0}
    extra = guard.export_lora(tmp_path / "cut", rank=2)
    rows = model.trunk[0].weight.detach() - before  # type: ignore[union-attr, index]
    guard.merge()
    config, tensors = read(tmp_path / "whole")
    assert config["r"] <= 64
    assert torch.allclose(delta(tensors, "trunk.0"), rows, atol=1e-5)
    config, tensors = read(tmp_path / "cut")
    assert config["r"] == 2
    cut, best = delta(tensors, "trunk.0"), torch.linalg.svd(rows)
    assert torch.allclose(cut, best.U[:, :2] @ torch.diag(best.S[:2]) @ best.Vh[:2], atol=1e-4)
    moved = ((cut - rows).double() @ old.double().T).square().sum(0).mean().sqrt()
    assert extra["trunk.0"] == pytest.approx(float(moved), rel=1e-2, abs=1e-8)
    assert all(value > 0 for value in extra.values())


def test_a_truncated_update_stays_in_the_free_directions(tmp_path: Path) -> None:
    model, old, new = mlp()
    guard = ness.NullSpace(model, rule=ness.Rank(50), exclude=["head"], bias="freeze")
    guard.observe(old)
    guard.constrain(rank=8)
    train(model, torch.optim.AdamW(guard.parameters(), lr=0.05), new)
    guard.export_lora(tmp_path, rank=2)
    _, tensors = read(tmp_path)
    moved = old @ delta(tensors, "trunk.0").T
    assert float(moved.norm()) < 1e-4 * float((new @ delta(tensors, "trunk.0").T).norm())


def test_convolutions_groups_and_ranks_of_their_own(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = ResNetLike()
    guard, before = trained(model, smooth_images(64, 3, 8), torch.randn(32, 3, 8, 8), rank=5)
    guard.export_lora(tmp_path)
    guard.merge()
    config, tensors = read(tmp_path)
    for name, groups in (("conv1", 1), ("conv2", 4), ("shortcut", 1)):
        if f"base_model.model.{name}.lora_A.weight" not in tensors:
            continue
        merged = model.get_parameter(f"{name}.weight").detach()
        assert torch.allclose(before[f"{name}.weight"] + delta(tensors, name, groups), merged, atol=1e-5)
        rank = config["rank_pattern"].get(name, config["r"])
        assert rank == tensors[f"base_model.model.{name}.lora_A.weight"].shape[0]
    assert "conv2" in config["target_modules"]
    assert config["rank_pattern"] == config["alpha_pattern"] != {}


def test_conv1d_is_transposed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = named(up=Conv1D(24, 40), head=nn.Linear(24, 4))
    guard, before = trained(model, low_rank(100, 40), torch.randn(32, 40))
    guard.export_lora(tmp_path)
    guard.merge()
    config, tensors = read(tmp_path)
    assert config["fan_in_fan_out"] is True
    assert torch.allclose(before["up.weight"] + delta(tensors, "up").T, model.up.weight, atol=1e-6)  # type: ignore[union-attr]


def test_attention_is_one_module_of_stacked_factors(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = named(encoder=Transformer().encoder, head=nn.Linear(32, 4))
    old, new = low_rank(32, 6, 32), torch.randn(16, 6, 32)
    guard, before = trained(model, old, new, include=["*in_proj*", "*linear?"])
    guard.export_lora(tmp_path)
    guard.merge()
    config, tensors = read(tmp_path)
    assert "encoder.self_attn" in config["target_modules"]
    whole = delta(tensors, "encoder.self_attn")
    key = "encoder.self_attn.in_proj_weight"
    assert torch.allclose(before[key] + whole, model.get_parameter(key), atol=1e-5)
    assert float(delta(tensors, "encoder.self_attn.base_layer.out_proj").abs().max()) == 0
    guard, _ = trained(named(encoder=Transformer().encoder, head=nn.Linear(32, 4)), old, new)
    with pytest.raises(ness.NessError, match=r"out-projection .* twice; leave it out with NullSpace"):
        guard.export_lora(tmp_path)


def test_names_that_end_alike_are_told_apart(tmp_path: Path) -> None:
    """PEFT takes a target for every module whose name ends with it, and a rank for the first that fits."""
    torch.manual_seed(0)
    inner = named(up=nn.Linear(32, 32), down=nn.Linear(32, 32))
    model = named(up=nn.Linear(32, 32), down=nn.Linear(32, 32), block=inner, head=nn.Linear(32, 4))
    guard, _ = trained(model, low_rank(100, 32), torch.randn(32, 32), include=["up", "block.down"])
    guard.export_lora(tmp_path)
    config, _ = read(tmp_path)
    assert config["target_modules"] == r"up|block\.down"
    model = named(up=nn.Linear(32, 32), block=named(up=nn.Linear(32, 12)), head=nn.Linear(12, 4))
    guard = ness.NullSpace(model, rule=ness.Within(0.1), exclude=["head"])
    guard.observe(low_rank(100, 32))
    guard.constrain(rank=3)
    guard._protected["up"].constraint = None
    guard._protected["up"].factors = None
    guard.export_lora(tmp_path / "two")
    assert read(tmp_path / "two")[0]["target_modules"] == r"block\.up" or read(tmp_path / "two")[0][
        "target_modules"
    ] == ["block.up"]


def test_private_parts_go_along(tmp_path: Path) -> None:
    model, old, new = mlp()
    guard = ness.NullSpace(model, rule=ness.Nuclear(0.05), exclude=["head"])
    guard.observe(old)
    before = model.trunk[0].weight.detach().clone()  # type: ignore[union-attr, index]
    guard.constrain(rank=3, task="a", private=2)
    train(model, torch.optim.AdamW(guard.parameters(), lr=0.02), new)
    guard.merge()
    guard.export_lora(tmp_path)
    config, tensors = read(tmp_path)
    assert config["r"] == 5
    assert torch.allclose(before + delta(tensors, "trunk.0"), model.trunk[0].weight, atol=1e-5)  # type: ignore[union-attr, index]


def test_a_loaded_guard_still_has_low_rank_factors(tmp_path: Path) -> None:
    model, old, new = mlp()
    guard, _ = trained(model, old, new)
    guard.merge()
    guard.export_lora(tmp_path / "one")
    guard.save(tmp_path / "guard")
    ness.NullSpace.load(tmp_path / "guard", model).export_lora(tmp_path / "two")
    one, two = read(tmp_path / "one")[1], read(tmp_path / "two")[1]
    assert one.keys() == two.keys()
    assert all(torch.equal(one[key], two[key]) for key in one)


def test_what_shrinks_at_the_merge_is_exported_shrunk(tmp_path: Path) -> None:
    model, _, new = mlp()
    guard = ness.NullSpace(model, rule=ness.Within(0.01), exclude=["head"], bias="freeze")
    guard.observe(torch.randn(300, 64) * torch.logspace(0, -3, 64))
    before = model.trunk[0].weight.detach().clone()  # type: ignore[union-attr, index]
    guard.constrain(rank=3)
    train(model, torch.optim.AdamW(guard.parameters(), lr=0.5), new, steps=20)
    guard.merge()
    assert guard.certificate()["trunk.0"].shrunk < 1
    guard.export_lora(tmp_path)
    weight = model.trunk[0].weight  # type: ignore[union-attr, index]
    assert torch.allclose(before + delta(read(tmp_path)[1], "trunk.0"), weight, atol=1e-5)  # type: ignore[arg-type]


def test_what_cannot_be_exported_is_refused_with_the_way_out(tmp_path: Path) -> None:
    model, old, new = mlp()
    guard = ness.NullSpace(model, rule=ness.Nuclear(0.05), exclude=["head"])
    guard.observe(old)
    with pytest.raises(ness.NessError, match="there is no update; call constrain"):
        guard.export_lora(tmp_path / "x")
    guard.constrain()
    train(model, torch.optim.AdamW(guard.parameters(), lr=0.02), new)
    with pytest.raises(ness.NessError, match=r"moves the biases of trunk\.0, trunk\.2.*bias='freeze'"):
        guard.export_lora(tmp_path / "x")
    guard.merge()
    with pytest.raises(ness.NessError, match="bias='freeze'"):
        guard.export_lora(tmp_path / "x")
    for rank in (0, -1, True, 1.5):
        with pytest.raises(ness.NessError, match="expected a whole number above 0"):
            guard.export_lora(tmp_path / "x", rank=rank)  # type: ignore[arg-type]
    assert not (tmp_path / "x").exists()
    other = named(trunk=Transformer(), head=nn.Linear(4, 4))
    options = {"exclude": ["head", "trunk.head"], "include": ["*in_proj*"]}
    guard, _ = trained(other, low_rank(32, 6, 32), torch.randn(16, 6, 32), **options)
    with pytest.raises(ness.NessError, match=r"cross.*another width"):
        guard.export_lora(tmp_path / "x")
    alone = nn.Linear(32, 8)
    guard = ness.NullSpace(alone, rule=ness.Rank(20))
    guard.observe(low_rank(100, 32))
    guard.constrain(rank=2)
    with pytest.raises(ness.NessError, match="single layer"):
        guard.export_lora(tmp_path / "x")


def test_a_later_tasks_base_is_said(tmp_path: Path) -> None:
    model, old, new = mlp()
    guard, _ = trained(model, old, new)
    guard.merge()
    guard.observe(new)
    guard.constrain(rank=2)
    with pytest.warns(ness.NessWarning, match="1 earlier task"):
        guard.export_lora(tmp_path)
    assert json.loads((tmp_path / "ness.json").read_text())["base"]["tasks_merged_before"] == 1


def test_convolutions_that_peft_runs_otherwise_are_named(tmp_path: Path) -> None:
    def exported(conv: nn.Module) -> None:
        torch.manual_seed(0)
        guard = ness.NullSpace(named(conv=conv, flat=nn.Flatten()), rule=ness.Rank(5))
        guard.observe(torch.randn(40, 4, 8))
        guard.constrain(rank=2)
        guard.export_lora(tmp_path)

    with pytest.warns(ness.NessWarning, match="conv right only once it is merged"):
        exported(nn.Conv1d(4, 4, 3, dilation=2))
    with pytest.warns(ness.NessWarning, match="cannot merge it"):
        exported(nn.Conv1d(4, 4, 3, groups=2))
    with pytest.raises(ness.NessError, match="no update of conv"):
        exported(nn.Conv1d(4, 4, 3, groups=2, dilation=2))


def test_a_full_disk_leaves_the_adapter_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, old, new = mlp()
    guard, _ = trained(model, old, new)
    guard.export_lora(tmp_path)
    names = ("adapter_config.json", "adapter_model.safetensors", "ness.json")
    before = {name: (tmp_path / name).read_bytes() for name in names}
    write, replace, left = os.write, os.replace, [0]

    def full(function: Any) -> Any:
        def broken(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] == -1:
                raise OSError(28, "No space left on device")
            return function(*args, **kwargs)

        return broken

    monkeypatch.setattr(os, "write", full(write))
    monkeypatch.setattr(os, "replace", full(replace))
    for fail_at in range(9):  # three files are written, and each takes two renames: out of the way, and in
        left[0] = fail_at
        with pytest.raises(ness.NessError, match="No space left"):
            guard.export_lora(tmp_path, rank=1)
        assert {name: (tmp_path / name).read_bytes() for name in names} == before, fail_at
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    left[0] = 1000
    guard.export_lora(tmp_path, rank=1)
    assert read(tmp_path)[0]["r"] == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
