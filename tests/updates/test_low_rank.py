"""`constrain(rank=r)`: ΔW = A B M as small as LoRA, confined to the free directions under any optimizer."""

from __future__ import annotations

import copy
import tempfile
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import ness
from helpers import OPTIMIZERS, ZOO, Witness, check_promise, layers, low_rank, named, train
from ness.updates.low_rank import LowRankUpdate

pytestmark = pytest.mark.filterwarnings("ignore::ness.NessWarning")

RULES = [
    ness.Nuclear(0.05),
    ness.Frobenius(0.1),
    ness.Energy(0.95),
    ness.Rank(5),
    ness.Budget(300),
    ness.Soft(ness.Nuclear(0.02)),
    ness.Soft(ness.Energy(0.9)),
    ness.Within(0.1),
]


def update_of(guard: ness.NullSpace, name: str) -> LowRankUpdate:
    constraint = guard._protected[name].constraint
    assert constraint is not None
    assert isinstance(constraint.update, LowRankUpdate)
    return constraint.update


def mlp(rule: ness.Rule | None = None, **options: Any) -> tuple[nn.Module, ness.NullSpace, Tensor, Tensor]:
    torch.manual_seed(0)
    model, old, new = ZOO["mlp"]()
    guard = ness.NullSpace(model, rule=rule or ness.Nuclear(5e-3), exclude=["head"], **options)
    guard.observe(old)
    return model, guard, old, new


@given(
    layer=layers(),
    rule=st.sampled_from(RULES),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    rank=st.integers(1, 6),
    double=st.booleans(),
    tasks=st.integers(1, 3),
    saved=st.booleans(),
    private=st.sampled_from([0, 0, 2]),
    full_width_between=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_promise_over_layer_kinds_rules_optimizers_tasks_saves(
    layer: tuple[nn.Module, tuple[int, ...]],
    rule: ness.Rule,
    optimizer: str,
    rank: int,
    double: bool,
    tasks: int,
    saved: bool,
    private: int,
    full_width_between: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    module, shape = layer
    dtype = torch.float64 if double else torch.float32
    model = named(layer=module).to(dtype)
    guard, witness = ness.NullSpace(model, rule=rule), Witness(model)
    private = min(private, guard._found.layers["layer"].fan_in // 3)
    for task in range(tasks):
        witness.observe(guard, [low_rank(7, *shape, rank=2, dtype=dtype), low_rank(5, *shape, rank=3, dtype=dtype)])
        wide = full_width_between and task == 1
        guard.constrain(rank=None if wide else rank, task=f"task {task}", private=private)
        before = None if module.bias is None else module._parameters["bias"].clone()  # type: ignore[union-attr]
        if guard.parameters():
            train(model, OPTIMIZERS[optimizer](guard.parameters()), torch.randn(6, *shape, dtype=dtype), steps=4)
        if saved:  # half-way through the task
            with tempfile.TemporaryDirectory() as folder:
                parameters = [p.detach().clone() for p in guard.parameters()]
                guard.save(folder)
                guard.discard()
                guard = ness.NullSpace.load(folder, model)
                for p, was in zip(guard.parameters(), parameters, strict=True):
                    assert torch.equal(p, was)
        if not private:
            check_promise(guard, witness, torch.finfo(dtype).eps)
        guard.merge()
        guard.use(None)
        assert guard.certificate().holds
        if not private:
            check_promise(guard, witness, torch.finfo(dtype).eps)
        if before is not None and not wide:
            assert torch.equal(module.bias, before)  # type: ignore[arg-type]
        guard.use(f"task {task}")


@pytest.mark.parametrize("name", sorted(ZOO))
@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
def test_promise_in_whole_models_under_every_optimizer(name: str, optimizer: str) -> None:
    torch.manual_seed(1)
    model, old, new = ZOO[name]()
    guard = ness.NullSpace(model, rule=ness.Nuclear(0.05), exclude=["head"])
    witness = Witness(model)
    for task in range(2):
        witness.observe(guard, [old])
        guard.constrain(rank=3)
        train(model, OPTIMIZERS[optimizer](guard.parameters()), new)
        check_promise(guard, witness, torch.finfo(torch.float32).eps)
        assert task or max(row.update_norm for row in guard.certificate()) > 0  # something was learnt
        guard.merge()
        check_promise(guard, witness, torch.finfo(torch.float32).eps)
        old, new = new, old


@pytest.mark.parametrize("free", [4, 30, 60])
@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
def test_old_outputs_do_not_move_wherever_b_goes(optimizer: str, free: int) -> None:
    """Hard: B itself leaves the free directions (decay, Adam, whatever), and no old output moves."""
    torch.manual_seed(2)
    model = named(layer=nn.Linear(64, 20)).double()
    old = low_rank(200, 64, rank=64 - free, dtype=torch.float64)
    guard = ness.NullSpace(model, rule=ness.Rank(free))
    guard.observe(old)
    before = model(old).detach()
    guard.constrain(rank=4)
    update = update_of(guard, "layer")
    assert update.free.matrix.shape[-1] == min(free, 64 - free)  # the thinner of P and the free directions
    with torch.no_grad():
        update.down.add_(0.3 * torch.randn_like(update.down))
    train(model, OPTIMIZERS[optimizer](guard.parameters()), torch.randn(32, 64).double(), steps=10)
    assert float(update.parameter.detach().abs().max()) > 1e-3
    assert float((model(old) - before).detach().abs().max()) < 1e-9
    assert guard.certificate().holds
    guard.merge()
    assert float((model(old) - before).detach().abs().max()) < 1e-9


@pytest.mark.parametrize("rule", [ness.Rank(20), ness.Soft(ness.Nuclear(0.02))], ids=["hard", "soft"])
def test_it_is_a_b_m_for_the_m_of_the_definition(rule: ness.Rule) -> None:
    torch.manual_seed(3)
    model = named(layer=nn.Linear(32, 9, bias=False)).double()
    rows = torch.randn(100, 32, dtype=torch.float64) * torch.logspace(0, -4, 32, dtype=torch.float64)
    guard = ness.NullSpace(model, rule=rule)
    guard.observe(rows)
    weight = model.layer.weight.detach().clone()  # type: ignore[union-attr, operator]
    guard.constrain(rank=3)
    update = update_of(guard, "layer")
    for p in guard.parameters():
        nn.init.normal_(p)
    sigma, q = torch.linalg.eigh(rows.T @ rows)
    sigma = sigma.clamp(min=0).sqrt()
    if isinstance(rule, ness.Soft):
        s = (0.02 * sigma.sum() / sigma).clamp(max=1)
        s = torch.where(s >= 0.02, s, 0.0)
    else:
        s = (torch.arange(32) < 20).double()
    m = q @ torch.diag(s) @ q.T
    expected = update.parameter[0] @ update.down[0] @ m
    assert torch.allclose(model.layer.weight - weight, expected, atol=1e-10)  # type: ignore[union-attr, operator]
    x = torch.randn(7, 32, dtype=torch.float64)
    assert torch.allclose(model(x), x @ (weight + expected).T, atol=1e-10)
    row = guard.certificate().rows[0]
    product = (update.parameter[0] @ update.down[0]).detach()
    assert row.update_norm == pytest.approx(float(torch.linalg.matrix_norm(product, ord=2)), rel=1e-9)
    assert row.bound == pytest.approx(float((sigma * s).max()) * row.update_norm, rel=1e-6)
    assert row.rms_bound == pytest.approx(float((sigma * s).max() * product.norm()) / 10, rel=1e-6)
    moved = rows @ expected.detach().T
    assert row.rms_drift == pytest.approx(float(moved.square().sum(-1).mean().sqrt()), rel=1e-6)
    assert float(moved.norm(dim=-1).max()) <= row.bound


@pytest.mark.parametrize("name", sorted(ZOO))
def test_it_starts_bit_equal_and_the_first_gradient_reaches_a(name: str) -> None:
    torch.manual_seed(4)
    model, old, new = ZOO[name]()
    guard = ness.NullSpace(model, rule=ness.Nuclear(0.05), exclude=["head"])
    guard.observe(old)
    with torch.no_grad():
        before = model.eval()(new)
    guard.constrain(rank=2)
    with torch.no_grad():
        assert torch.equal(model(new), before)
    model(new).square().sum().backward()
    moved = []
    for held in guard._protected.values():
        if held.constraint is not None and held.constraint.update is not None:
            update = update_of(guard, held.layer.name)
            assert float(update.down.detach().norm()) > 0
            assert update.down.grad is not None
            assert float(update.down.grad.abs().max()) == 0  # A is zero
            assert update.parameter.grad is not None
            moved.append(float(update.parameter.grad.abs().max()) > 0)
    assert any(moved)


def test_b_starts_in_the_free_directions_as_long_as_lora_draws_it() -> None:
    _, guard, _, _ = mlp()
    guard.constrain(rank=8, generator=torch.Generator().manual_seed(7))
    update = update_of(guard, "trunk.0")
    down = update.down.detach()
    assert torch.allclose(update.rows().detach(), down, atol=1e-6)
    expected = 1 / 3**0.5  # of a row of 64 entries uniform in ±1/8
    assert float(down.norm(dim=-1).mean()) == pytest.approx(expected, rel=0.15)


def test_generator_draws_the_same_start_and_leaves_torchs_alone() -> None:
    starts = []
    for seed in (1, 1, 2):
        _, guard, _, _ = mlp()
        torch.manual_seed(99)
        state = torch.get_rng_state()
        guard.constrain(rank=4, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(torch.get_rng_state(), state)
        starts.append(update_of(guard, "trunk.0").down.detach().clone())
    assert torch.equal(starts[0], starts[1])
    assert not torch.equal(starts[0], starts[2])


def test_parameters_are_loras_two_factors_and_nothing_else() -> None:
    model, guard, _, _ = mlp()
    biases = {name: p.detach().clone() for name, p in model.named_parameters() if name.endswith("bias")}
    guard.constrain(rank=4)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad and "head" not in name}
    assert shapes == {
        "trunk.0.ness_weight": (1, 80, 4),
        "trunk.0.ness_weight_down": (1, 4, 64),
        "trunk.2.ness_weight": (1, 64, 4),
        "trunk.2.ness_weight_down": (1, 4, 80),
    }
    train(model, torch.optim.AdamW(guard.parameters(), lr=0.01), torch.randn(32, 64))
    guard.merge()
    for name, value in biases.items():
        if "head" not in name:
            assert torch.equal(model.get_parameter(name), value)


def test_a_rank_above_the_free_directions_is_capped_with_a_word() -> None:
    _, guard, _, _ = mlp(ness.Rank(3))
    with pytest.warns(ness.NessWarning, match=r"constrain\(rank=16\): fewer directions are free in 'trunk.0' \(3\)"):
        guard.constrain(rank=16)
    assert update_of(guard, "trunk.0").down.shape == (1, 3, 64)
    guard.discard()
    guard.constrain(rank=3)
    assert update_of(guard, "trunk.0").down.shape == (1, 3, 64)


def test_nothing_free_trains_nothing() -> None:
    _, guard, _, _ = mlp(ness.Rank(0))
    guard.constrain(rank=4)
    assert all(p is q for p, q in zip(guard.parameters(), guard.model.head.parameters(), strict=True))  # type: ignore[union-attr]
    guard.merge()


@pytest.mark.parametrize("rank", [0, -1, 1.5, True, "16"])
def test_a_rank_that_is_none_is_refused(rank: Any) -> None:
    _, guard, _, _ = mlp()
    with pytest.raises(ness.NessError, match=r"constrain\(rank=.*expected a whole number above 0"):
        guard.constrain(rank=rank)
    assert not guard.constrained


def test_form_sgd_and_stray_generators_are_refused() -> None:
    _, guard, _, _ = mlp()
    with pytest.raises(ness.NessError, match=r"form='sgd'.*use form='any'"):
        guard.constrain(rank=4, form="sgd")
    with pytest.raises(ness.NessError, match=r"only an update of low rank is drawn"):
        guard.constrain(generator=torch.Generator())
    with pytest.raises(ness.NessError, match=r"expected a torch\.Generator"):
        guard.constrain(rank=4, generator=5)  # type: ignore[arg-type]
    assert not guard.constrained


@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
@pytest.mark.parametrize("rule", [ness.Nuclear(0.05), ness.Soft(ness.Nuclear(0.05)), ness.Within(0.1)], ids=str)
def test_max_drift_holds_after_every_single_step(optimizer: str, rule: ness.Rule) -> None:
    torch.manual_seed(2)
    model, old, new = ZOO["resnet"]()
    limit, largest = 0.002, 0.0
    guard = ness.NullSpace(model, rule=rule, exclude=["head"])

    def check() -> None:
        nonlocal largest
        for row in guard.certificate().rows:
            assert row.relative_drift <= limit * (1 + 1e-6), row
            largest = max(largest, row.relative_drift)

    for _ in range(2):  # earlier tasks' drift counts too
        guard.observe(old)
        guard.constrain(max_drift=limit, rank=3)
        train(model, OPTIMIZERS[optimizer](guard.parameters()), new, steps=10, after_step=check)
        guard.merge()
        check()
    assert "sgd" in optimizer or optimizer == "momentum" or largest > 0.9 * limit  # it was the limit that held it


@pytest.mark.parametrize("private", [0, 4])
def test_within_keeps_its_budget_at_low_rank(private: int) -> None:
    torch.manual_seed(5)
    model, old, new = ZOO["mlp"]()
    guard = ness.NullSpace(model, rule=ness.Within(0.05), exclude=["head"])
    guard.observe(old)
    for task in range(3):
        guard.constrain(task=f"{task}", rank=4, private=private)
        train(model, torch.optim.AdamW(guard.parameters(), lr=0.05), new, steps=10)
        guard.merge()
        for row in guard.certificate():
            assert row.task_drift is not None
            assert row.task_drift <= 0.05
        guard.observe(new)


def test_private_parts_are_switched_exactly_and_move_nobody_else() -> None:
    model, guard, _, new = mlp()
    guard.constrain(task="a", rank=4, private=3)
    train(model, torch.optim.AdamW(guard.parameters(), lr=0.05), new)
    with torch.no_grad():
        training = model(new)
    guard.merge()
    with torch.no_grad():
        assert torch.allclose(model(new), training, atol=1e-4)
        first = model(new)
        guard.use(None)
        assert not torch.equal(model(new), first)
        guard.use("a")
        assert torch.equal(model(new), first)
    assert guard.certificate().holds


def test_private_directions_that_move_a_bias_stay_with_full_width_tasks() -> None:
    """A task with biases frozen cannot use directions with a bias in them: it keeps its own."""
    model, guard, _, new = mlp()
    for task, rank in (("wide", None), ("low", 4), ("wide again", None)):
        guard.constrain(task=task, rank=rank, private=3)
        train(model, torch.optim.AdamW(guard.parameters(), lr=0.05), new)
        biases = [layer.bias.detach().clone() for layer in guard._found.layers.values() if layer.bias is not None]
        with torch.no_grad():
            training = model(new)
        guard.merge()
        with torch.no_grad():
            assert torch.allclose(model(new), training, atol=1e-4), task
        if task == "low":
            for layer, before in zip(guard._found.layers.values(), biases, strict=True):
                assert torch.equal(layer.bias, before)  # type: ignore[arg-type]
        assert guard.certificate().holds


def test_copies_and_moves_and_pickles_carry_both_factors() -> None:
    model, guard, _, new = mlp()
    guard.constrain(rank=4)
    train(model, torch.optim.AdamW(guard.parameters(), lr=0.05), new)
    twin, twin_guard = copy.deepcopy((model, guard))
    with torch.no_grad():
        assert torch.equal(twin(new), model(new))
    before = [p.detach().clone() for p in guard.parameters()]
    train(twin, torch.optim.AdamW(twin_guard.parameters(), lr=0.05), new)
    assert all(torch.equal(p, was) for p, was in zip(guard.parameters(), before, strict=True))
    model.double()
    assert {p.dtype for p in guard.parameters() if p.ndim == 3} == {torch.float32}


def test_half_precision_models_train_in_float32_and_merge_once() -> None:
    torch.manual_seed(6)
    model = named(layer=nn.Linear(64, 32)).bfloat16()
    old, new = low_rank(200, 64).bfloat16(), torch.randn(32, 64).bfloat16()
    guard = ness.NullSpace(model, rule=ness.Rank(40))
    guard.observe(old)
    guard.constrain(rank=4)
    assert {p.dtype for p in guard.parameters()} == {torch.float32}
    train(model, torch.optim.AdamW(guard.parameters(), lr=0.02), new)
    assert guard.certificate().holds
    guard.merge()
    assert model.layer.weight.dtype == torch.bfloat16  # type: ignore[union-attr]
    assert guard.certificate().holds


# -- the start that looks at the new task's inputs ---------------------------------------------------------------------


@pytest.mark.parametrize("rule", [ness.Rank(20), ness.Soft(ness.Nuclear(0.05))], ids=["hard", "soft"])
def test_b_can_start_along_the_free_directions_that_new_inputs_use_most(rule: ness.Rule) -> None:
    torch.manual_seed(7)
    model = named(layer=nn.Linear(32, 9)).double()
    old = torch.randn(100, 32).double() * torch.logspace(0, -4, 32).double()
    new = torch.randn(50, 32).double() * torch.linspace(0.1, 3, 32).double()
    guard = ness.NullSpace(model, rule=rule)
    guard.observe(old)
    before, count = model(new), guard.grams["layer"].count
    guard.constrain(rank=3, new=[new[:20], new[20:]])
    assert torch.equal(model(new), before)
    assert guard.grams["layer"].count == count  # the new task is not observed by it
    update = update_of(guard, "layer")
    m = update.directions()[0, :32, :32]
    seen = m @ new.T @ new @ m
    best = torch.linalg.eigvalsh(seen)[-3:].sum()
    rows = update.down.detach()[0]
    assert torch.allclose(rows.norm(dim=-1), rows.new_full((3,), 1 / 3**0.5), rtol=0.2)  # as long as LoRA draws them
    unit = rows / rows.norm(dim=-1, keepdim=True)
    assert float((unit @ seen @ unit.T).trace()) > 0.9 * float(best)
    train(model, torch.optim.AdamW(guard.parameters(), lr=0.01), new)
    guard.merge()
    assert guard.certificate().holds


def test_new_inputs_are_for_low_rank_alone_and_what_fails_changes_nothing() -> None:
    _, guard, _, new = mlp()
    with pytest.raises(ness.NessError, match=r"constrain\(new=...\): only an update of low rank"):
        guard.constrain(new=new)
    with pytest.raises(ness.NessError, match="NaN"):
        guard.constrain(rank=4, new=new * torch.nan)
    assert not guard.constrained
    guard.constrain(rank=4, new=new)
    assert isinstance(update_of(guard, "trunk.0"), LowRankUpdate)


def test_layers_that_share_a_gram_are_decomposed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from ness.updates.layer_state import LayerState

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(24, n, bias=False) for n in (8, 6, 24))

        def forward(self, x: Tensor) -> Tensor:
            return self.v(x) + (self.q(x).sum(-1) + self.k(x).sum(-1)).unsqueeze(-1)

    torch.manual_seed(8)
    model, calls, spectrum = named(heads=Heads()), [], LayerState.spectrum

    def counted(self: LayerState, *args: Any) -> Any:
        calls.append(self.layer.name)
        return spectrum(self, *args)

    monkeypatch.setattr(LayerState, "spectrum", counted)
    guard, witness = ness.NullSpace(model, rule=ness.Rank(10)), Witness(model)
    witness.observe(guard, [torch.randn(60, 24)])
    told: list[Any] = []
    guard.constrain(rank=2, progress=lambda *what: told.append(what))
    assert calls == ["heads.q"]
    assert [name for _, _, name in told] == ["heads.q", "heads.k", "heads.v"]
    train(model, torch.optim.AdamW(guard.parameters(), lr=0.02), torch.randn(20, 24))
    check_promise(guard, witness, torch.finfo(torch.float32).eps)
    guard.merge()
    check_promise(guard, witness, torch.finfo(torch.float32).eps)
