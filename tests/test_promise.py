"""The promise: on everything observed, a layer's output moves at most `bound`, and `rms_drift` is what it moved."""

from __future__ import annotations

import tempfile

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import ness
from helpers import OPTIMIZERS, ZOO, Witness, check_promise, layers, low_rank, named, plain_state, train

pytestmark = pytest.mark.filterwarnings("ignore::ness.NessWarning")

RULES = [
    ness.Nuclear(1e-3),
    ness.Nuclear(0.05),
    ness.Frobenius(0.1),
    ness.Energy(0.95),
    ness.Rank(5),
    ness.Budget(300),
    ness.Soft(ness.Nuclear(0.02)),
    ness.Soft(ness.Energy(0.9)),
    ness.Within(0.1),
]


@given(
    layer=layers(),
    rule=st.sampled_from(RULES),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    sgd_form=st.booleans(),
    double=st.booleans(),
    tasks=st.integers(1, 3),
    saved=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_promise_over_layer_kinds_rules_optimizers_tasks_saves(
    layer: tuple[nn.Module, tuple[int, ...]],
    rule: ness.Rule,
    optimizer: str,
    sgd_form: bool,
    double: bool,
    tasks: int,
    saved: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    module, shape = layer
    dtype = torch.float64 if double else torch.float32
    model = named(layer=module).to(dtype)
    form = "sgd" if sgd_form and optimizer in ("sgd", "momentum") else "any"
    guard = ness.NullSpace(model, rule=rule)
    witness = Witness(model)
    for _ in range(tasks):
        witness.observe(guard, [low_rank(7, *shape, rank=2, dtype=dtype), low_rank(5, *shape, rank=3, dtype=dtype)])
        guard.constrain(form=form)  # type: ignore[arg-type]
        if guard.parameters():
            train(model, OPTIMIZERS[optimizer](guard.parameters()), torch.randn(6, *shape, dtype=dtype), steps=4)
        if saved:  # half-way through the task
            with tempfile.TemporaryDirectory() as folder:
                guard.save(folder)
                guard.discard()
                guard = ness.NullSpace.load(folder, model)
        check_promise(guard, witness, torch.finfo(dtype).eps)
        guard.merge()
        check_promise(guard, witness, torch.finfo(dtype).eps)


@pytest.mark.parametrize("name", sorted(ZOO))
@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
def test_promise_in_whole_models_under_every_optimizer(name: str, optimizer: str) -> None:
    torch.manual_seed(1)
    model, old, new = ZOO[name]()
    guard = ness.NullSpace(model, rule=ness.Nuclear(5e-3), exclude=["head"])
    witness = Witness(model)
    for _ in range(2):
        witness.observe(guard, [old])
        guard.constrain()
        train(model, OPTIMIZERS[optimizer](guard.parameters()), new)
        check_promise(guard, witness, torch.finfo(torch.float32).eps)
        guard.merge()
        check_promise(guard, witness, torch.finfo(torch.float32).eps)
        old, new = new, old


@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
@pytest.mark.parametrize("rule", [ness.Nuclear(0.05), ness.Soft(ness.Nuclear(0.05))], ids=str)
def test_max_drift_holds_after_every_single_step(optimizer: str, rule: ness.Rule) -> None:
    torch.manual_seed(2)
    model, old, new = ZOO["resnet"]()
    limit = 0.002
    guard = ness.NullSpace(model, rule=rule, exclude=["head"])
    largest = 0.0

    def check() -> None:
        nonlocal largest
        for row in guard.certificate().rows:
            assert row.relative_drift <= limit * (1 + 1e-6), row
            largest = max(largest, row.relative_drift)

    for _ in range(2):  # earlier tasks' drift counts too
        guard.observe(old)
        guard.constrain(max_drift=limit)
        train(model, OPTIMIZERS[optimizer](guard.parameters()), new, steps=10, after_step=check)
        guard.merge()
        check()
    assert largest > 0.9 * limit  # the limit was reached, so it was the limit that held it


@given(seed=st.integers(0, 10_000), eps=st.floats(1e-4, 0.3))
@settings(max_examples=30, deadline=None)
def test_soft_keeps_the_same_bound(seed: int, eps: float) -> None:
    torch.manual_seed(seed)
    rows = torch.randn(50, 12, dtype=torch.float64) * torch.logspace(0, -4, 12, dtype=torch.float64)
    model = named(layer=nn.Linear(12, 5, bias=False)).double()
    ranks = []
    for rule in (ness.Nuclear(eps), ness.Soft(ness.Nuclear(eps))):
        guard = ness.NullSpace(model, rule=rule)
        guard.observe(rows)
        guard.constrain()
        row = guard.certificate().rows[0]
        ranks.append(row.rank)
        if row.rank:
            (update,) = guard.parameters()
            torch.nn.init.normal_(update)
            before = rows @ model.state_dict()["layer.weight"].T
            moved = (model(rows) - before).norm(dim=-1)
            norm = torch.linalg.matrix_norm(update[0], ord=2)
            assert float(moved.detach().max()) <= row.tau * float(norm.detach()) * (1 + 1e-9)
        guard.discard()
    assert ranks[1] >= ranks[0]


@pytest.mark.parametrize("target", ["conv1", "conv2", "shortcut"])
def test_holds_turns_false_when_a_weight_is_changed_behind_its_back(target: str) -> None:
    torch.manual_seed(3)
    model, old, new = ZOO["resnet"]()
    guard = ness.NullSpace(model, rule=ness.Nuclear(5e-3), exclude=["head"])
    guard.observe(old)
    guard.constrain()
    train(model, torch.optim.AdamW(guard.parameters(), lr=1e-3), new)
    guard.merge()
    assert guard.certificate().holds
    with torch.no_grad():
        model.get_submodule(target).weight.add_(0.05)
    certificate = guard.certificate()
    assert not certificate.holds
    assert [row.name for row in certificate.rows if not row.holds] == [target]
    assert "BROKEN" in str(certificate)
    assert target in str(certificate)


def test_batchnorm_in_train_mode_changes_nothing_for_old_inputs() -> None:
    torch.manual_seed(4)
    model, old, new = ZOO["resnet"]()
    train(model, torch.optim.SGD(model.parameters(), lr=0.01), old)  # statistics that are not 0 and 1
    guard = ness.NullSpace(model, rule=ness.Rank(0), exclude=["head"])
    guard.observe(old)
    guard.constrain()
    before = model(old)
    statistics = {k: v.clone() for k, v in model.state_dict().items() if "bn" in k}
    model.train()
    model(new)
    assert torch.equal(model(old), before)  # train mode normalises with the stored statistics too
    guard.merge()
    assert all(torch.equal(model.state_dict()[key], value) for key, value in statistics.items())
    assert type(model.bn1) is nn.BatchNorm2d
    model.train()
    model(new)
    assert not torch.equal(model.bn1.running_mean, statistics["bn1.running_mean"])  # an ordinary BatchNorm again


def test_groups_have_grams_of_their_own_and_averaging_them_breaks_the_promise() -> None:
    torch.manual_seed(5)
    conv = nn.Conv1d(8, 6, 1, groups=2, bias=False).double()
    x = torch.randn(40, 8, 5, dtype=torch.float64)
    x[:, :4] *= torch.tensor([1.0, 1.0, 0.0, 0.0]).unsqueeze(-1)  # group 0 uses inputs 0 and 1
    x[:, 4:] *= torch.tensor([0.0, 0.0, 1.0, 1.0]).unsqueeze(-1)  # group 1 uses inputs 2 and 3
    model = named(conv=conv)
    guard = ness.NullSpace(model, rule=ness.Nuclear(1e-6))
    witness = Witness(model)
    witness.observe(guard, [x])
    gram = guard.grams["conv"]
    assert gram.matrix.shape == (2, 4, 4)
    guard.constrain()
    assert guard.certificate().rows[0].rank == 4  # two free directions in each group
    torch.nn.init.normal_(guard.parameters()[0])
    check_promise(guard, witness, 1e-16)
    assert float(witness.changes("conv").abs().max()) < 1e-12
    averaged = gram.matrix.mean(0)
    assert int((torch.linalg.eigvalsh(averaged) < 1e-9).sum()) == 0  # the average frees nothing here,
    swapped = ness.statistics.spectrum.decompose(
        gram.matrix.flip(0)
    )  # and one group's free space moves the other's rows
    free = swapped.directions[0, :, :2]
    assert float((x[:, :4].transpose(1, 2).reshape(-1, 4) @ free).abs().max()) > 0.1


@pytest.mark.parametrize("name", sorted(ZOO))
@pytest.mark.parametrize("form", ["any", "sgd"])
def test_bit_equal_after_constrain_and_close_after_merge(name: str, form: str) -> None:
    torch.manual_seed(6)
    model, old, new = ZOO[name]()
    model.eval()
    keys, classes = list(model.state_dict()), [type(module) for module in model.modules()]
    flags = [p.requires_grad for p in model.parameters()]
    with torch.no_grad():
        before = model(new)
    guard = ness.NullSpace(model, rule=ness.Nuclear(0.02), exclude=["head"])
    guard.observe(old)
    guard.constrain(form=form)  # type: ignore[arg-type]
    with torch.no_grad():
        assert torch.equal(model(new), before)
    assert list(plain_state(model)) == keys
    train(model, OPTIMIZERS["momentum"](guard.parameters()), new)
    with torch.no_grad():
        trained = model(new)
        guard.merge()
        merged = model(new)
    assert not torch.allclose(trained, before, rtol=1e-3)
    assert float((merged - trained).norm() / trained.norm()) < 1e-5
    assert list(model.state_dict()) == keys
    assert [type(module) for module in model.modules()] == classes
    assert [p.requires_grad for p in model.parameters()] == flags
    guard.merge()  # again: nothing happens
    with torch.no_grad():
        assert torch.equal(model(new), merged)


@pytest.mark.parametrize("name", ["mlp", "twice", "resnet", "transformer", "gpt2", "conv1d", "conv3d"])
def test_it_does_learn(name: str) -> None:
    torch.manual_seed(7)
    model, old, new = ZOO[name]()
    guard = ness.NullSpace(model, rule=ness.Nuclear(0.05 if "conv" in name else 5e-3), exclude=["head"])
    guard.observe(old)
    guard.constrain()
    ranks = {row.name: row.rank for row in guard.certificate().rows}
    before = plain_state(model)
    train(model, torch.optim.AdamW(guard.parameters(), lr=1e-2), new)
    guard.merge()
    moved = [key for key, value in model.state_dict().items() if not torch.equal(value, before[key])]
    assert any(rank > 0 for rank in ranks.values())
    for row in guard.certificate().rows:
        if row.fan_in >= 64 and row.name in ("trunk.0", "layer"):
            assert row.rank > 0
            assert f"{row.name}.weight" in moved


def test_sgd_form_equals_the_definition_and_projected_gradients() -> None:
    """SGD with momentum on A is SGD on ΔW with the gradient G B Bᵀ; decay shrinks the increment."""
    torch.manual_seed(8)
    old, new = low_rank(100, 30, dtype=torch.float64), torch.randn(12, 30, dtype=torch.float64)
    for rule in (ness.Rank(20), ness.Soft(ness.Nuclear(0.1))):
        results = []
        for form in ("any", "sgd"):
            torch.manual_seed(9)
            model = named(trunk=nn.Linear(30, 20), act=nn.ReLU(), last=nn.Linear(20, 9)).double()
            guard = ness.NullSpace(model, rule=rule)
            guard.observe(old)
            guard.constrain(form=form)  # type: ignore[arg-type]
            torch.manual_seed(10)
            optimizer = torch.optim.SGD(guard.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-2, nesterov=True)
            train(model, optimizer, new, steps=50)
            certificate = guard.certificate()
            guard.merge()
            results.append((model.state_dict(), certificate))
        (first, one), (second, two) = results
        for key in first:
            assert torch.allclose(first[key], second[key], rtol=0, atol=1e-10), key
        for a, b in zip(one.rows, two.rows, strict=True):
            assert a.bound == pytest.approx(b.bound, rel=1e-6, abs=1e-9)
            assert a.rank == b.rank


def test_projected_training_by_hand_is_the_same() -> None:
    torch.manual_seed(11)
    old, new = low_rank(100, 24, dtype=torch.float64), torch.randn(12, 24, dtype=torch.float64)
    target = torch.randn(12, 7, dtype=torch.float64)
    model = nn.Linear(24, 7, bias=False).double()
    weight = model.weight.detach().clone()
    guard = ness.NullSpace(named(layer=model), rule=ness.Rank(10))
    guard.observe(old)
    guard.constrain()
    free = torch.linalg.eigh(old.T @ old).eigenvectors[:, :10]
    optimizer = torch.optim.SGD(guard.parameters(), lr=0.05, momentum=0.9)
    buffer = torch.zeros_like(weight)
    for _ in range(50):
        optimizer.zero_grad()
        (model(new) - target).square().mean().backward()
        optimizer.step()
        residual = new @ weight.T - target
        gradient = 2 * residual.T @ new / residual.numel()
        buffer = 0.9 * buffer + gradient @ free @ free.T
        weight = weight - 0.05 * buffer
    guard.merge()
    assert torch.allclose(model.weight, weight, rtol=0, atol=1e-10)


def test_decay_alone_shrinks_the_increment_by_its_factor() -> None:
    torch.manual_seed(12)
    model = named(layer=nn.Linear(20, 5, bias=False)).double()
    guard = ness.NullSpace(model, rule=ness.Rank(8))
    guard.observe(torch.randn(50, 20, dtype=torch.float64))
    guard.constrain()
    (update,) = guard.parameters()
    torch.nn.init.normal_(update)
    before = update.detach().clone()
    update.grad = torch.zeros_like(update)
    torch.optim.SGD([update], lr=0.1, weight_decay=0.3).step()
    assert torch.allclose(update, before * (1 - 0.1 * 0.3))


def test_sam_perturbs_inside_the_free_space_only() -> None:
    """N12: whatever SAM does to A, the weights move inside span(B)."""
    torch.manual_seed(13)
    model, old, new = ZOO["mlp"]()
    guard = ness.NullSpace(model, exclude=["head"])
    witness = Witness(model)
    witness.observe(guard, [old])
    guard.constrain()
    optimizer = OPTIMIZERS["sam"](guard.parameters())
    seen: list[float] = []
    model.trunk[0].register_forward_hook(lambda *_: seen.append(float(witness.changes("trunk.0").abs().max())))
    train(model, optimizer, new, steps=3)
    assert max(seen) < 1e-5  # at the perturbed points too


def test_frozen_parts_stay_bit_identical() -> None:
    """N9: after a task only the updates and the head have changed; base weights, norms and bases are what they were."""
    torch.manual_seed(14)
    model, old, new = ZOO["resnet"]()
    guard = ness.NullSpace(model, rule=ness.Nuclear(5e-3), exclude=["head"])
    guard.observe(old)
    guard.constrain()
    stored = {**dict(model.named_parameters()), **dict(model.named_buffers())}  # the base, not the weights as they run
    before = {key: value.detach().clone() for key, value in stored.items()}
    train(model, torch.optim.AdamW(guard.parameters(), lr=1e-2, weight_decay=0.1), new)
    moved = [key for key in before if not torch.equal(before[key], stored[key])]
    assert [key for key in moved if ".ness_" not in key] == ["head.weight", "head.bias"]


@pytest.mark.parametrize("way", ["matmul", "convolution"])
def test_reduced_precision_of_the_callers_products_does_not_reach_the_update(way: str) -> None:
    """TF32 is a switch of the process; inside the update's own products it is off, and on again afterwards."""
    from ness.updates.update import full_precision

    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    try:
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = True
        with full_precision(torch.zeros(1)):
            inside = {
                "matmul": torch.get_float32_matmul_precision() == "highest",
                "convolution": not torch.backends.cudnn.allow_tf32,
            }
        assert inside[way]
        assert torch.get_float32_matmul_precision() == "high"
        assert torch.backends.cudnn.allow_tf32
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]
