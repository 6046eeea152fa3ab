"""Optimizers that train none of the updates are warned of; those that would break `form="sgd"` are refused."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks as hooks

import ness
from helpers import low_rank, named, train


def constrained(form: Any = "any", **options: Any) -> tuple[nn.Module, ness.NullSpace]:
    torch.manual_seed(0)
    model = named(trunk=nn.Linear(32, 16), head=nn.Linear(16, 4))
    guard = ness.NullSpace(model, exclude=["head"])
    guard.observe(low_rank(100, 32))
    guard.constrain(form=form, **options)
    return model, guard


def step(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    model(torch.randn(4, 32)).square().mean().backward()
    optimizer.step()


def made_before(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


@pytest.mark.parametrize("form", ["any", "sgd"])
def test_an_optimizer_that_holds_no_update_warns_once_at_its_first_step(form: str) -> None:
    torch.manual_seed(0)
    model = named(trunk=nn.Linear(32, 16), head=nn.Linear(16, 4))
    optimizer = made_before(model)
    guard = ness.NullSpace(model, exclude=["head"])
    guard.observe(low_rank(100, 32))
    guard.constrain(form=form)  # type: ignore[arg-type]
    with pytest.warns(ness.NessWarning) as caught:
        step(optimizer, model)
    (found,) = caught
    assert found.filename == __file__  # the line of the caller's own step
    said = str(found.message)
    assert "AdamW holds trunk.weight, trunk.bias, head.weight, head.bias" in said
    assert "none of the guard's updates, so that it does not train trunk" in said
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(optimizer, model)  # once
    with pytest.warns(ness.NessWarning, match="SGD holds head.weight"):
        step(torch.optim.SGD(model.head.parameters(), lr=0.1), model)  # another one, which holds the head alone
    guard.merge()


def test_the_warning_does_not_take_the_step_away() -> None:
    model, guard = constrained()
    optimizer, before = torch.optim.SGD(model.head.parameters(), lr=0.1), model.head.weight.clone()
    with pytest.warns(ness.NessWarning):
        step(optimizer, model)
    assert not torch.equal(model.head.weight, before)
    guard.discard()


def test_optimizers_that_train_the_updates_or_something_else_are_left_alone() -> None:
    model, guard = constrained()
    other = nn.Linear(32, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(torch.optim.AdamW(guard.parameters()), model)
        step(torch.optim.AdamW([model.trunk.ness_weight]), model)
        step(torch.optim.AdamW([{"params": model.head.parameters()}, {"params": [model.trunk.ness_weight]}]), model)
        step(torch.optim.SGD(other.parameters(), lr=0.1), other)
        guard.merge()
        step(made_before(model), model)


def test_parameters_that_come_later_are_seen() -> None:
    model, guard = constrained()
    other = nn.Linear(32, 2)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    step(optimizer, other)
    optimizer.add_param_group({"params": list(model.head.parameters())})
    with pytest.warns(ness.NessWarning, match=r"holds head\.weight"):
        step(optimizer, other)
    optimizer.add_param_group({"params": [model.trunk.ness_weight]})
    step(optimizer, other)
    guard.discard()


def test_each_task_warns_anew() -> None:
    model, guard = constrained()
    optimizer = torch.optim.AdamW(guard.parameters())
    step(optimizer, model)
    guard.merge()
    guard.observe(torch.randn(100, 32))
    with pytest.warns(ness.NessWarning, match="no direction is free"):
        guard.constrain()
    guard.discard()
    _, again = constrained()
    with pytest.warns(ness.NessWarning, match=r"AdamW holds head\.weight"):
        step(torch.optim.AdamW(again.model.head.parameters()), again.model)
    again.discard()


@pytest.mark.parametrize("end", ["merge", "discard"])
def test_no_hook_is_left_behind(end: str) -> None:
    gc.collect()  # other tests' models
    before = dict(hooks)
    _, guard = constrained()
    assert len(hooks) == len(before) + 1
    getattr(guard, end)()
    assert dict(hooks) == before


def test_the_hook_ends_with_the_model() -> None:
    gc.collect()  # other tests' models
    before = dict(hooks)
    model, guard = constrained("sgd")
    with pytest.warns(ness.NessWarning, match="a guard was dropped"):  # noqa: PT031
        del guard
        gc.collect()
    with pytest.raises(ness.NessError, match=r"exact for torch\.optim\.SGD alone"):  # the model still needs it
        step(torch.optim.AdamW([model.trunk.ness_weight]), model)
    del model
    gc.collect()
    assert dict(hooks) == before


@pytest.mark.parametrize("form", ["any", "sgd"])
@pytest.mark.parametrize("way", [copy.deepcopy, lambda guard: pickle.loads(pickle.dumps(guard))])
def test_a_guard_can_be_copied_and_pickled(form: str, way: Any) -> None:
    model, guard = constrained(form)
    train(model, torch.optim.SGD(guard.parameters(), lr=0.1), torch.randn(8, 32), steps=2)
    gc.collect()
    count = len(hooks)
    twin = way(guard)
    assert len(hooks) == count + 1
    x = torch.randn(5, 32)
    assert torch.equal(twin.model(x), model(x))
    if form == "sgd":
        with pytest.raises(ness.NessError, match=r"exact for torch\.optim\.SGD alone"):
            step(torch.optim.AdamW(twin.parameters()), twin.model)
    with pytest.warns(ness.NessWarning, match=r"holds head\.weight"):
        step(torch.optim.SGD(twin.model.head.parameters(), lr=0.1), twin.model)
    twin.merge()
    assert twin.certificate().holds
    guard.merge()
    assert len(hooks) == count - 1
    plain = way(guard)
    plain.observe(x)
