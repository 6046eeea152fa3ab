"""Numerics: deficient, constant, dead and duplicate inputs, extreme scales, half precision, NaN and Inf."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import ness
from helpers import Witness, check_promise, low_rank, named, train


def guarded(model: nn.Module, rows: Tensor, rule: ness.Rule | None = None) -> ness.NullSpace:
    guard = ness.NullSpace(model, rule=rule or ness.Nuclear(1e-3))
    guard.observe(rows)
    return guard


@given(power=st.integers(-8, 8), bias=st.booleans(), seed=st.integers(0, 99), soft=st.booleans(), conv=st.booleans())
@settings(max_examples=60, deadline=None)
def test_ranks_do_not_change_when_inputs_are_scaled(power: int, bias: bool, seed: int, soft: bool, conv: bool) -> None:
    torch.manual_seed(seed)
    rows = torch.randn(80, 24, dtype=torch.float64) * torch.logspace(0, -5, 24, dtype=torch.float64)
    rule: ness.Rule = ness.Nuclear(1e-2)
    rule = ness.Soft(rule) if soft else rule
    ranks = []
    for scale in (1.0, 10.0**power):
        module = nn.Conv1d(4, 3, 3, bias=bias) if conv else nn.Linear(24, 3, bias=bias)
        x = rows.reshape(80, 4, 6) if conv else rows
        guard = guarded(named(layer=module.double()), x * scale, rule)
        guard.constrain()
        ranks.append(guard.certificate().rows[0].rank)
    assert ranks[0] == ranks[1] > 0


@pytest.mark.parametrize("scale", [1e-8, 1.0, 1e8])
def test_exact_null_space_moves_nothing_at_any_scale(scale: float) -> None:
    """N10: rank-deficient inputs, eps 0: X ΔWᵀ = 0 to 1e-10 of the inputs' size."""
    torch.manual_seed(0)
    rows = low_rank(100, 30, rank=7, dtype=torch.float64) * scale
    model = named(layer=nn.Linear(30, 6, bias=False).double())
    guard = guarded(model, rows, ness.Nuclear(0.0))
    guard.constrain()
    assert guard.certificate().rows[0].rank == 23
    before = model(rows).detach()
    torch.nn.init.normal_(guard.parameters()[0])
    assert float((model(rows).detach() - before).abs().max()) < 1e-10 * scale
    assert guard.certificate().holds


def test_fewer_rows_than_columns_warns_and_holds() -> None:
    torch.manual_seed(1)
    model = named(layer=nn.Linear(64, 8))
    guard, witness = ness.NullSpace(model), Witness(model)
    witness.observe(guard, [torch.randn(10, 64)])
    with pytest.warns(ness.NessWarning, match=r"'layer' \(10 rows, fan-in 64\).*Observe more"):
        guard.constrain()
    assert guard.certificate().rows[0].rank >= 64 - 10
    train(model, torch.optim.AdamW(guard.parameters(), lr=0.01), torch.randn(16, 64))
    check_promise(guard, witness, torch.finfo(torch.float32).eps)


@pytest.mark.parametrize("bias", [True, False])
def test_constant_dead_and_duplicate_features(bias: bool) -> None:
    torch.manual_seed(2)
    rows = torch.randn(200, 12)
    rows[:, 3] = 5.0  # constant
    rows[:, 4] = 0.0  # dead
    rows[:, 5] = rows[:, 6]  # duplicate
    model = named(layer=nn.Linear(12, 4, bias=bias))
    guard, witness = ness.NullSpace(model), Witness(model)
    witness.observe(guard, [rows])
    guard.constrain()
    # free: the dead feature, the difference of the duplicates, and the constant against the bias
    assert guard.certificate().rows[0].rank == (3 if bias else 2)
    train(model, torch.optim.AdamW(guard.parameters(), lr=0.01), torch.randn(32, 12))
    check_promise(guard, witness, torch.finfo(torch.float32).eps)
    guard.merge()
    check_promise(guard, witness, torch.finfo(torch.float32).eps)


def test_a_layer_that_saw_only_zeros_is_frozen_and_listed() -> None:
    model = named(dead=nn.Linear(8, 8), alive=nn.Linear(8, 8))
    guard = ness.NullSpace(model)
    with guard.observing():
        model.dead(torch.zeros(50, 8))
        model.alive(low_rank(50, 8, rank=3))
    guard.constrain()
    assert guard.skipped == {"dead": "saw only zeros: frozen"}
    assert model.dead.weight.requires_grad is False
    assert "frozen: dead" in str(guard.certificate())


def test_a_group_that_saw_only_zeros_is_not_free() -> None:
    model = named(conv=nn.Conv1d(4, 4, 1, groups=2, bias=False))
    x = torch.randn(30, 4, 5)
    x[:, 2:] = 0
    x[:, 1] = x[:, 0]
    guard = guarded(model, x, ness.Nuclear(1e-6))
    guard.constrain()
    assert guard.certificate().rows[0].rank == 1
    weight = model.conv.weight.detach().clone()
    train(model, torch.optim.SGD(guard.parameters(), lr=0.1), torch.randn(8, 4, 5))
    moved = (model.conv.weight - weight).abs().sum((1, 2))
    assert bool((moved[:2] > 0).all())
    assert bool((moved[2:] == 0).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_half_precision_models(dtype: torch.dtype, bias: bool) -> None:
    torch.manual_seed(3)
    model = named(layer=nn.Linear(64, 16, bias=bias), head=nn.Linear(16, 2)).to(dtype)
    rows = low_rank(200, 64, rank=5).to(dtype)
    guard = ness.NullSpace(model, rule=ness.Nuclear(5e-3), exclude=["head"])
    guard.observe(rows)
    before = model(rows)
    layer_before = model.layer(rows).detach().float()
    guard.constrain()
    assert torch.equal(model(rows), before)
    update = [p for p in guard.parameters() if p.ndim == 3]
    assert all(p.dtype == torch.float32 for p in update)
    optimizer = torch.optim.SGD(update, lr=0.5)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(16, 64, dtype=dtype)).float().square().mean().backward()
        optimizer.step()
    assert guard.certificate().holds
    trained = model.layer(torch.randn(8, 64, dtype=dtype)).dtype
    guard.merge()
    assert trained == model.layer.weight.dtype == dtype
    assert guard.certificate().holds
    change = (model.layer(rows).detach().float() - layer_before).abs().max()
    assert float(change) <= 30 * torch.finfo(dtype).eps * float(layer_before.abs().max())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_inf_are_refused_and_leave_the_statistics(value: float) -> None:
    torch.manual_seed(4)
    model = named(first=nn.Linear(6, 6), second=nn.Linear(6, 6))
    good, bad = torch.randn(50, 6), torch.randn(50, 6)
    bad[7, 3] = value
    guard = ness.NullSpace(model)
    with pytest.raises(ness.NessError, match=r"layer 'first': NaN or Inf in its input \(batch 1\)"):
        guard.observe([good, bad, good])
    assert {name: gram.count for name, gram in guard.grams.items()} == {"first": 50, "second": 50}
    reference = ness.NullSpace(model)
    reference.observe(good)
    for name, gram in guard.grams.items():
        assert torch.equal(gram.matrix, reference.grams[name].matrix)


def test_nan_deep_inside_leaves_earlier_layers_as_they_were() -> None:
    class Breaks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.nan

    model = named(first=nn.Linear(6, 6), middle=Breaks(), second=nn.Linear(6, 6))
    guard = ness.NullSpace(model)
    with pytest.raises(ness.NessError, match="layer 'second'"):
        guard.observe(torch.randn(50, 6))
    assert guard.grams == {}


def test_an_update_that_diverged_is_not_merged() -> None:
    model = named(layer=nn.Linear(12, 6))
    guard = guarded(model, low_rank(40, 12, rank=3))
    guard.constrain()
    before = model.state_dict()["layer.weight"].clone()
    with torch.no_grad():
        guard.parameters()[0].fill_(float("nan"))
    with pytest.raises(ness.NessError, match="layer 'layer' holds NaN or Inf"):
        guard.merge()
    guard.discard()
    assert torch.equal(model.layer.weight, before)


def test_float32_blocks_give_the_same_ranks() -> None:
    torch.manual_seed(5)
    rows = torch.randn(500, 40) * torch.logspace(0, -2, 40)
    ranks = []
    for dtype in (torch.float64, torch.float32):
        guard = ness.NullSpace(named(layer=nn.Linear(40, 4)), rule=ness.Nuclear(5e-3), statistics_dtype=dtype)
        guard.observe(rows)
        guard.constrain()
        ranks.append(guard.certificate().rows[0].rank)
    assert ranks[0] == ranks[1] > 0


def test_a_group_that_saw_only_zeros_leaves_a_drift_limit_and_a_budget_to_the_others() -> None:
    model = nn.Sequential(nn.Conv2d(2, 2, 3, groups=2, bias=False))
    x = torch.rand(50, 2, 1, 1).expand(50, 2, 6, 6).clone()
    x[:, 1] = 0
    guard = ness.NullSpace(model)
    guard.observe(x)
    guard.constrain(max_drift=0.1)
    optimizer = torch.optim.SGD(guard.parameters(), lr=10.0)
    for _ in range(5):
        optimizer.zero_grad()
        (model(torch.rand(8, 2, 6, 6)) - 1).square().mean().backward()
        optimizer.step()
    assert guard.certificate()["0"].relative_drift <= 0.1
    guard.merge()
    frugal = ness.NullSpace(nn.Sequential(nn.Conv2d(2, 2, 3, groups=2, bias=False)), rule=ness.Budget(5))
    frugal.observe(x)
    frugal.constrain()
    assert frugal.certificate()["0"].rank == 5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [2, 4000])  # the factored way and the way that rounds in every forward
def test_a_merge_that_rounds_an_update_away_says_so(dtype: torch.dtype, rows: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8)).to(dtype)
    guard = ness.NullSpace(model, rule=ness.Rank(20))
    guard.observe([torch.randn(rows, 64).to(dtype)] * (200 // rows + 1))
    guard.constrain()
    fine, coarse = guard.parameters()
    fine.data.normal_(std=torch.finfo(dtype).eps / 100)  # finer than what the weights can hold
    coarse.data.normal_(std=1.0)
    twin, guard_of_twin = copy.deepcopy((model, guard))
    float_before = twin.float()(torch.ones(1, 64))
    with pytest.warns(
        ness.NessWarning, match=r"merge: rounding to b?float16 took away \d+% of the update of '0'"
    ) as said:
        guard.merge()
    assert len(said) == 1
    assert "model.float() before merge()" in str(said[0].message)
    assert "'2'" not in str(said[0].message)
    assert said[0].filename == __file__
    assert not guard.constrained
    assert type(model[0]) is nn.Linear
    lost = guard._protected["0"].last.rounded
    assert 0.05 < lost <= 1.5
    guard_of_twin.merge()  # in float32 nothing is lost, and nothing is said
    assert guard_of_twin._protected["0"].last.rounded == 0
    assert torch.allclose(twin(torch.ones(1, 64)), float_before, atol=1e-4)


def test_a_merge_that_keeps_the_update_says_nothing() -> None:
    torch.manual_seed(0)
    model = nn.Linear(64, 32).bfloat16()
    guard = ness.NullSpace(model, rule=ness.Rank(20))
    guard.observe(torch.randn(200, 64).bfloat16())
    guard.constrain()
    guard.parameters()[0].data.normal_(std=3.0)
    before, change = model._parameters["weight"].double(), guard._protected[""].constraint.change()[0, :, :64]
    guard.merge()
    lost = (model.weight.double() - before - change).norm() / change.norm()
    assert abs(float(lost.detach()) - guard._protected[""].last.rounded) < 1e-3
    assert lost < 0.05
