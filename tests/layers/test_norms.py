"""Norms per task: copies that live with the guard, switched exactly, and never mixed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ness
from helpers import ResNetLike, smooth_images, train

pytestmark = pytest.mark.filterwarnings("ignore::ness.NessWarning")


def learn(guard: ness.NullSpace, model: nn.Module, task: str, data: Tensor) -> None:
    guard.constrain(task=task)
    train(model, torch.optim.SGD(guard.parameters(), lr=0.1), data)
    guard.merge()
    guard.observe(data, task=task)


def norms(model: nn.Module) -> dict[str, Tensor]:
    return {k: v.clone() for k, v in model.state_dict().items() if "bn" in k}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[key], b[key]) for key in a)


def test_each_task_has_its_own_norms(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = ResNetLike()
    data = [smooth_images(32, 3, 8) + i for i in range(3)]
    guard = ness.NullSpace(model, rule=ness.Rank(0), exclude=["head"], norm="per_task")
    guard.observe(data[0], task="zero")
    known = {"zero": norms(model)}
    for i, task in enumerate(["one", "two"], start=1):
        learn(guard, model, task, data[i])
        known[task] = norms(model)
    assert guard.tasks == ["zero", "one", "two"]
    assert not same(known["one"], known["two"])
    keys = list(model.state_dict())
    for task in ("zero", "two", "one", "two", "zero"):
        guard.use(task)
        assert same(norms(model), known[task])
    guard.use("one")
    guard.use(None)
    assert same(norms(model), known["zero"])
    assert list(model.state_dict()) == keys
    kept = guard.certificate().kept
    assert kept == {"one": 2 * (4 * 16 + 1), "two": 2 * (4 * 16 + 1)}
    assert "task 'one' keeps 130 numbers of its own" in str(guard.certificate())
    guard.use("two")
    guard.save(tmp_path / "g")
    again = ness.NullSpace.load(tmp_path / "g", model)
    assert again.tasks == guard.tasks
    for task in ("zero", "one"):
        again.use(task)
        assert same(norms(model), known[task])


def test_with_no_shared_update_an_old_task_is_bit_equal() -> None:
    torch.manual_seed(1)
    model = ResNetLike()
    old, new = smooth_images(32, 3, 8), smooth_images(32, 3, 8) * 2 + 1
    guard = ness.NullSpace(model, rule=ness.Rank(0), exclude=["head"], norm="per_task")
    guard.observe(old)
    model.eval()
    head = {k: v.clone() for k, v in model.head.state_dict().items()}
    before = model(old)
    learn(guard, model, "new", new)
    assert not torch.allclose(model(old), before)
    model.head.load_state_dict(head)
    guard.use("first")
    assert torch.equal(model(old), before)


def test_a_task_of_ones_own_is_an_ordinary_batchnorm_while_constrained() -> None:
    torch.manual_seed(2)
    model = ResNetLike()
    guard = ness.NullSpace(model, rule=ness.Rank(0), exclude=["head"], norm="per_task")
    guard.observe(smooth_images(32, 3, 8))
    guard.constrain(task="b")
    assert {id(p) for p in (model.bn1.weight, model.bn2.bias)} <= {id(p) for p in guard.parameters()}
    before = norms(model)
    train(model, torch.optim.SGD(guard.parameters(), lr=0.1), torch.randn(16, 3, 8, 8))
    assert not torch.equal(before["bn1.running_mean"], model.bn1.running_mean)
    assert not torch.equal(before["bn1.weight"], model.bn1.weight)
    guard.discard()
    assert same(before, norms(model))
    assert guard.tasks == ["first"]


def test_a_task_can_be_resumed_half_way(tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = ResNetLike()
    guard = ness.NullSpace(model, rule=ness.Nuclear(0.02), exclude=["head"], norm="per_task")
    guard.observe(smooth_images(32, 3, 8))
    guard.constrain(task="b")
    train(model, torch.optim.SGD(guard.parameters(), lr=0.1), torch.randn(16, 3, 8, 8), steps=2)
    guard.save(tmp_path)
    live, x = norms(model), torch.randn(4, 3, 8, 8)
    expected = model(x)
    other = ResNetLike()
    other.load_state_dict(model.state_dict(), strict=False)
    again = ness.NullSpace.load(tmp_path, other)
    other.eval()
    assert same(live, norms(other))
    assert torch.equal(other(x), expected)
    again.merge()
    assert again.tasks == ["first", "b"]


def test_layernorm_is_a_norm_too() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    guard = ness.NullSpace(model, norm="per_task", rule=ness.Rank(2))
    guard.observe(torch.randn(30, 8))
    guard.constrain(task="b")
    assert model[1].weight.requires_grad
    guard.merge()
    frozen = ness.NullSpace(model, rule=ness.Rank(2))
    frozen.observe(torch.randn(30, 8))
    frozen.constrain()
    assert not model[1].weight.requires_grad
    assert frozen.skipped == {}
    frozen.merge()
