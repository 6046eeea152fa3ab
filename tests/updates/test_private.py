"""Private directions: a task's own part of the weights, switched exactly, seen by no other task, bounded by nothing."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn

import ness
from helpers import (
    OPTIMIZERS,
    ZOO,
    ResNetLike,
    Transformer,
    layers,
    low_rank,
    named,
    plain_state,
    recording,
    rows_out,
    smooth_images,
    supported,
    train,
)
from ness.statistics.spectrum import decompose
from ness.updates.private import decompose_beside, orthonormal

pytestmark = pytest.mark.filterwarnings("ignore::ness.NessWarning")

State = dict[str, Tensor]


def state_of(model: nn.Module) -> State:
    return plain_state(model)


def same(a: State, b: State, head: bool = False) -> bool:
    return list(a) == list(b) and all(torch.equal(a[key], b[key]) for key in a if head or not key.startswith("head"))


def learn(
    guard: ness.NullSpace,
    task: str | None,
    inputs: Tensor,
    optimizer: str = "momentum",
    steps: int = 4,
    **options: Any,
) -> None:
    """One task from beginning to end, merged but not observed."""
    guard.constrain(task=task, **options)
    train(guard.model, OPTIMIZERS[optimizer](guard.parameters()), inputs, steps=steps)
    guard.merge()


class Rows:
    """Keeps what the guard does not: every observed row and its output under the task it belongs to."""

    def __init__(self, guard: ness.NullSpace) -> None:
        self.guard = guard
        self.kept: dict[str, dict[str, list[tuple[Tensor, Tensor]]]] = {}

    def observe(self, task: str, inputs: Tensor) -> None:
        with recording(self.guard.model) as seen:
            self.guard.observe(inputs, task=task)
        self.kept[task] = {
            name: [(x, rows_out(self.guard.model.get_submodule(name), x)) for x in found]
            for name, found in seen.items()
        }

    def changes(self, name: str) -> Tensor:
        """How far the output of every row has moved, each under its own task, (n, o)."""
        moved = []
        for task, layers_ in self.kept.items():
            self.guard.use(task)
            module = self.guard.model.get_submodule(name)
            moved += [rows_out(module, x) - y for x, y in layers_[name]]
        return torch.cat(moved)

    def check(self, epsilon: float = torch.finfo(torch.float32).eps) -> None:
        """Bound and exact drift of the certificate against the rows themselves."""
        certificate = self.guard.certificate()
        assert certificate.holds, str(certificate)
        for name in self.kept[next(iter(self.kept))]:
            row, changes = certificate[name], self.changes(name)
            outputs = torch.cat([y for task in self.kept.values() for _, y in task[name]]).norm(dim=-1)
            size, rms = float(outputs.max()), float(outputs.square().mean().sqrt())
            norms, slack = changes.norm(dim=-1), 100 * epsilon * size
            assert float(norms.max()) <= row.bound * (1 + 1e-6) + slack, row
            assert abs(float(norms.square().mean().sqrt()) - row.rms_drift) <= 1e-5 * row.rms_drift + slack, row
            assert row.relative_drift * rms == pytest.approx(row.rms_drift, rel=1e-4), row  # as each task really runs


# -- the promise --------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=25)
@given(layers(), st.integers(1, 3), st.sampled_from(["any", "sgd"]), st.integers(0, 100), st.data())
def test_old_rows_move_by_shared_updates_alone_within_their_bound(
    layer_and_shape: tuple[nn.Module, tuple[int, ...]], private: int, form: str, seed: int, data: st.DataObject
) -> None:
    torch.manual_seed(seed)
    module, shape = layer_and_shape
    fan_in = module.weight[0].numel()
    assume(fan_in >= 3 and private < fan_in)
    rule = data.draw(st.sampled_from([ness.Soft(ness.Nuclear(0.05)), ness.Rank(2), ness.Rank(0), ness.Nuclear(0.1)]))
    basis = data.draw(st.sampled_from(["shared", "per_task"]))
    bias = data.draw(st.sampled_from(["constrain", "freeze"]))
    model = named(layer=module)
    guard = ness.NullSpace(model, rule=rule, private_basis=basis, bias=bias)
    rows = Rows(guard)
    rows.observe("first", torch.randn(24, *shape))
    for number in range(3):
        learn(guard, f"t{number}", 3 * torch.randn(12, *shape), form=form, private=private + number % 2)
        rows.observe(f"t{number}", torch.randn(16, *shape) + number)
    rows.check()
    figures = guard.certificate().to_dicts()
    guard.use("t0")
    assert guard.certificate().to_dicts() == figures  # whatever task is in use


@pytest.mark.parametrize("name", sorted(ZOO))
@pytest.mark.parametrize(("form", "optimizer"), [("any", "adamw"), ("sgd", "momentum")])
def test_certificate_is_exact_with_private_parts_in_place(name: str, form: str, optimizer: str) -> None:
    torch.manual_seed(0)
    model, old, new = ZOO[name]()
    guard = ness.NullSpace(model, rule=ness.Soft(ness.Nuclear(0.02)), exclude=["head"])
    rows = Rows(guard)
    rows.observe("first", old)
    for task in ("a", "b"):
        learn(guard, task, new, optimizer, form=form, private=4)
        rows.observe(task, new)
    rows.check()
    assert max(row.rms_drift for row in guard.certificate()) > 0


def test_in_projections_of_attention_keep_the_promise() -> None:
    torch.manual_seed(1)
    model, old, new = Transformer(), low_rank(32, 6, 32), torch.randn(16, 6, 32)
    guard = ness.NullSpace(model, rule=ness.Soft(ness.Nuclear(0.05)), exclude=["head"])
    attention = model.encoder.self_attn

    def weights() -> Tensor:
        return torch.cat([attention.in_proj_weight, attention.in_proj_bias.unsqueeze(-1)], dim=-1).detach().double()

    kept = {}
    for task, data in (("first", old), ("a", new), ("b", new * 2)):
        if task != "first":
            learn(guard, task, data, private=5)
        guard.observe(data, task=task)
        x = data.reshape(-1, 32).double()
        kept[task] = (torch.cat([x, torch.ones(len(x), 1)], dim=-1), weights())
    for role, letter in enumerate("qkv"):
        part, changes = slice(32 * role, 32 * role + 32), []
        for task, (x, before) in kept.items():
            guard.use(task)
            changes.append(x @ (weights() - before)[part].T)
        norms = torch.cat(changes).norm(dim=-1)
        row = guard.certificate()[f"encoder.self_attn.in_proj.{letter}"]
        assert row.holds
        assert float(norms.max()) <= row.bound * (1 + 1e-6) + 1e-4
        assert float(norms.square().mean().sqrt()) == pytest.approx(row.rms_drift, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("form", ["any", "sgd"])
@pytest.mark.parametrize("name", ["mlp", "resnet", "transformer", "gpt2"])
def test_without_a_shared_update_old_tasks_are_bit_equal(name: str, form: str) -> None:
    torch.manual_seed(2)
    model, old, new = ZOO[name]()
    guard = ness.NullSpace(model, rule=ness.Rank(0), exclude=["head"], norm="per_task")
    guard.observe(old)
    known = {"first": state_of(model)}
    for task in ("a", "b"):
        learn(guard, task, new, form=form, private=3)
        guard.observe(new, task=task)
        known[task] = state_of(model)
        weights = [key for key in known[task] if key.endswith("weight") and "head" not in key]
        assert any(not torch.equal(known[task][key], known["first"][key]) for key in weights)
    for task, state in known.items():
        guard.use(task)
        assert same(state_of(model), state), task
    assert all(row.bound == row.rms_drift == 0 for row in guard.certificate())


def test_private_parts_show_in_no_other_task_and_not_in_none() -> None:
    torch.manual_seed(3)
    model, old, new = ZOO["mlp"]()
    twin_model = copy.deepcopy(model)
    guard = ness.NullSpace(model, rule=ness.Rank(0), exclude=["head"])
    guard.observe(old)
    first = state_of(model)
    learn(guard, "a", new, private=8)
    a = state_of(model)
    guard.use(None)
    assert same(state_of(model), first)
    learn(guard, "b", new, private=8)
    guard.use("a")
    assert same(state_of(model), a)
    other = ness.NullSpace(twin_model, rule=ness.Rank(0), exclude=["head"])
    other.observe(old)
    twin_model.head.load_state_dict(model.head.state_dict())
    other.constrain(task="b", private=8)
    other.merge()
    assert same(state_of(twin_model), first)  # a private part begins at zero


# -- the algebra --------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.integers(1, 3), st.integers(3, 12), st.integers(0, 3), st.integers(0, 2), st.integers(0, 1000))
def test_the_spectrum_beside_k_is_that_of_its_complement(groups: int, d: int, held: int, more: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(groups, 2 * d, d, dtype=torch.float64, generator=generator)
    gram = rows.mT @ rows
    held, k = min(held, d - 1), min(held + more, d - 1)
    before, _ = orthonormal(torch.randn(groups, d, held, dtype=torch.float64, generator=generator))
    spectrum = decompose_beside(gram, before * 3, k, outputs=1)
    assert spectrum.private is not None
    both = torch.cat([spectrum.directions, spectrum.private], dim=-1)
    torch.testing.assert_close(both.mT @ both, torch.eye(d, dtype=torch.float64).expand(groups, d, d))
    torch.testing.assert_close(spectrum.private[..., :held], before)
    squared = spectrum.directions.mT @ gram @ spectrum.directions
    torch.testing.assert_close(squared, torch.diag_embed(spectrum.sigma.square()), atol=1e-9, rtol=1e-9)
    assert bool((spectrum.sigma.diff(dim=-1) >= 0).all())
    torch.testing.assert_close(spectrum.every_sigma, decompose(gram).sigma)
    torch.testing.assert_close(spectrum.noise, decompose(gram).noise)
    if not held:
        torch.testing.assert_close(
            torch.cat([spectrum.sigma, spectrum.every_sigma[..., d - k :]], -1), spectrum.every_sigma
        )


@pytest.mark.parametrize("held", [0, 2])
def test_without_norms_the_directions_are_the_same_and_no_norm_is_made_up(held: int) -> None:
    rows = torch.randn(2, 40, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(held))
    gram = rows.mT @ rows
    with_norms, without = (
        decompose_beside(gram, gram[..., :held].contiguous(), 3, outputs=1, norms=norms) for norms in (True, False)
    )
    torch.testing.assert_close(without.sigma, with_norms.sigma)
    torch.testing.assert_close(without.directions, with_norms.directions)
    assert bool((without.noise >= with_norms.noise).all())
    with pytest.raises(ness.NessError, match="no σ of private directions"):
        ness.Nuclear(1e-3).select({"x": without})


def test_projecting_instead_would_free_k_itself() -> None:
    rows = torch.randn(1, 40, 6, dtype=torch.float64)
    gram = rows.mT @ rows
    spectrum = decompose_beside(gram, gram[..., :0], 2, outputs=1)
    free = ness.Rank(2).select({"x": spectrum})["x"].weights
    chosen = spectrum.directions[0][:, free[0] > 0]
    assert spectrum.private is not None
    assert float((spectrum.private[0].T @ chosen).abs().max()) < 1e-12
    assert chosen.shape[-1] == 2
    p = torch.eye(6, dtype=torch.float64) - spectrum.private[0] @ spectrum.private[0].T
    wrong = decompose(p @ gram @ p).directions[0][:, :2]  # the two zero eigenvalues: K
    assert float((spectrum.private[0].T @ wrong).norm()) > 1


@pytest.mark.parametrize("rule", [ness.Nuclear(0.05), ness.Frobenius(0.1), ness.Energy(0.99), ness.Budget(5)], ids=str)
def test_a_rule_measures_by_all_of_the_inputs(rule: ness.Rule) -> None:
    torch.manual_seed(4)
    rows = torch.randn(1, 50, 12, dtype=torch.float64) * torch.logspace(0, -2, 12, dtype=torch.float64)
    gram = rows.mT @ rows
    whole, beside = decompose(gram), decompose_beside(gram, gram[..., :0], 3, outputs=1)
    full, rest = rule.select({"x": whole})["x"], rule.select({"x": beside})["x"]
    torch.testing.assert_close(rest.threshold, full.threshold)
    assert torch.equal(rest.weights, full.weights[:, :9])  # the three private ones were not free anyway
    assert 0 < rest.rank < 9


@pytest.mark.parametrize("form", ["any", "sgd"])
@pytest.mark.parametrize("name", ["mlp", "resnet"])
def test_the_shared_update_is_orthogonal_to_k(name: str, form: str) -> None:
    torch.manual_seed(5)
    model, old, new = ZOO[name]()
    guard = ness.NullSpace(model, rule=ness.Soft(ness.Nuclear(0.2)), exclude=["head"])
    guard.observe(old)
    shared = {name: p.layer.stored().double() for name, p in guard._protected.items()}
    for task in ("a", "b"):
        scales = {name: p.scale("constrain") for name, p in guard._protected.items()}
        learn(guard, task, new, form=form, private=4)
        guard.use(None)
        moved = 0.0
        for layer, protected in guard._protected.items():
            change = protected.layer.stored().double() - shared[layer]
            shared[layer] = protected.layer.stored().double()
            assert protected.directions is not None
            k, _ = orthonormal(protected.directions / scales[layer].unsqueeze(-1))
            leak = (change / scales[layer]) @ k
            assert float(leak.norm()) <= 1e-5 * float((change / scales[layer]).norm()) + 1e-6
            moved += float(change.norm())
        assert moved > 1e-3
        guard.use(task)
        guard.observe(new * 10, task=task)  # another scale of the constant column


@pytest.mark.parametrize("name", ["mlp", "resnet", "transformer"])
def test_both_forms_agree_under_sgd(name: str) -> None:
    states = []
    for form in ("any", "sgd"):
        torch.manual_seed(6)
        model, old, new = ZOO[name]()
        guard = ness.NullSpace(model, rule=ness.Soft(ness.Nuclear(0.02)), exclude=["head"], norm="per_task")
        guard.observe(old)
        learn(guard, "a", new, form=form, private=4)
        guard.observe(new * 3, task="a")
        learn(guard, "b", new, form=form, private=6)
        states.append([state_of(model), (guard.use(None), state_of(model))[1]])
    for a, b in zip(*states, strict=True):
        for key in a:
            torch.testing.assert_close(a[key], b[key], atol=2e-4, rtol=1e-3)


def test_only_shared_columns_are_limited_by_max_drift() -> None:
    torch.manual_seed(7)
    model, new = named(trunk=nn.Linear(24, 16), head=nn.Linear(16, 4)), torch.randn(32, 24)
    guard = ness.NullSpace(model, rule=ness.Rank(16), exclude=["head"])
    guard.observe(torch.randn(200, 24))
    guard.constrain(task="a", private=6, max_drift=0.01)
    train(model, OPTIMIZERS["adamw"](guard.parameters()), new, steps=30)
    assert guard.certificate()["trunk"].relative_drift == pytest.approx(0.01, rel=1e-2)
    trained = model.trunk.weight.detach().clone()
    guard.merge()
    torch.testing.assert_close(model.trunk.weight.detach(), trained, atol=1e-6, rtol=1e-5)
    assert guard.certificate()["trunk"].relative_drift <= 0.01
    part = guard._tasks.private["a"]["trunk"]
    assert float(part.coefficients.norm()) > 0.1  # far beyond what the limit would have left of it


# -- directions ---------------------------------------------------------------------------------------------------


def test_shared_directions_are_chosen_once_and_grow() -> None:
    torch.manual_seed(8)
    model = named(trunk=nn.Linear(30, 20, bias=False), head=nn.Linear(20, 4))
    guard = ness.NullSpace(model, rule=ness.Rank(3), exclude=["head"])
    guard.observe(torch.randn(100, 30))
    top = decompose(guard.grams["trunk"].matrix).directions[..., -4:].flip(-1)
    held = []
    for task, k in (("a", 4), ("b", 2), ("c", 7), ("d", 3)):
        learn(guard, task, torch.randn(32, 30), private=k)
        guard.observe(torch.randn(100, 30), task=task)
        held.append(guard._protected["trunk"].directions)
    assert [k.shape[-1] for k in held] == [4, 4, 7, 7]
    torch.testing.assert_close(held[0], top)
    assert torch.equal(held[2][..., :4], held[0])
    assert torch.equal(held[3], held[2])
    assert {t: p["trunk"].width for t, p in guard._tasks.private.items()} == {"a": 4, "b": 2, "c": 7, "d": 3}


def test_directions_per_task_are_chosen_anew_and_counted() -> None:
    torch.manual_seed(9)
    model = named(trunk=nn.Linear(30, 20), head=nn.Linear(20, 4))
    guard = ness.NullSpace(model, rule=ness.Rank(3), exclude=["head"], private_basis="per_task")
    guard.observe(torch.randn(100, 30))
    for task in ("a", "b"):
        learn(guard, task, torch.randn(32, 30), private=4)
        guard.observe(torch.randn(300, 30) * torch.linspace(0, 9, 30), task=task)
    a, b = (guard._tasks.private[task]["trunk"].directions for task in "ab")
    assert a is not None
    assert b is not None
    assert float((orthonormal(a)[0].mT @ orthonormal(b)[0]).norm()) < 3.9
    assert guard._protected["trunk"].directions is None
    certificate = guard.certificate()
    assert certificate.kept == {"a": 4 * 20 + 4 * 31, "b": 4 * 20 + 4 * 31}
    assert certificate.shared_directions == 0


def test_a_discarded_task_leaves_no_directions() -> None:
    guard = ready()
    guard.constrain(task="a", private=4)
    guard.discard()
    assert all(protected.directions is None for protected in guard._protected.values())


# -- use ------------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=15)
@given(st.lists(st.sampled_from(["first", "a", "b", "c", None]), min_size=1, max_size=8), st.booleans())
def test_switching_is_exact_however_often(order: list[str | None], own: bool) -> None:
    torch.manual_seed(10)
    model = ResNetLike()
    guard = ness.NullSpace(
        model,
        rule=ness.Soft(ness.Nuclear(0.05)),
        exclude=["head"],
        norm="per_task",
        private_basis="per_task" if own else "shared",
    )
    data = smooth_images(32, 3, 8)
    guard.observe(data)
    for number, (task, k) in enumerate((("a", 3), ("b", 0), ("c", 5)), start=1):
        learn(guard, task, data + number, private=k, steps=2)
        guard.observe(data + number, task=task)
    known = {}
    for task in ("first", "a", "b", "c"):
        guard.use(task)
        known[task] = state_of(model)
    known[None] = known["first"]
    for task in order:
        guard.use(task)
        assert same(state_of(model), known[task], head=True)
    assert guard.tasks == ["first", "a", "b", "c"]


def test_the_finished_task_is_in_use_and_is_what_was_trained() -> None:
    for name in sorted(ZOO):
        for form in ("any", "sgd"):
            torch.manual_seed(11)
            model, old, new = ZOO[name]()
            guard = ness.NullSpace(model, rule=ness.Soft(ness.Nuclear(0.02)), exclude=["head"])
            guard.observe(old)
            keys = list(model.state_dict())
            for task, k in (("a", 4), ("b", 6)):
                guard.constrain(task=task, private=k, form=form)  # type: ignore[arg-type]
                train(model, OPTIMIZERS["momentum"](guard.parameters()), new)
                trained = model(new)
                guard.merge()
                torch.testing.assert_close(model(new), trained, atol=1e-4, rtol=1e-4)
                merged = state_of(model)
                guard.use(task)
                assert same(state_of(model), merged, head=True)
                assert list(merged) == keys
                assert all(not hasattr(module, "_ness_updates") for module in model.modules())
                guard.observe(new if name == "gpt2" else 9 * new, task=task)  # another scale of the constant column


@pytest.mark.parametrize("form", ["any", "sgd"])
def test_bounds_do_not_count_private_parts(form: Any) -> None:
    guard = ready()
    guard.constrain(task="a", private=4, form=form)
    for protected in guard._protected.values():
        update = protected.constraint.update  # type: ignore[union-attr]
        assert update is not None
        private = torch.randn(1, update.layer.outputs, 4)
        with torch.no_grad():
            if form == "any":
                update.parameter[..., -4:] = private
            else:
                update.parameter.copy_(private @ update.basis[..., -4:].mT)
    for row in guard.certificate():
        assert row.rank == 3
        assert max(row.update_norm, row.bound, row.rms_bound, row.rms_drift) < 1e-4
    guard.merge()
    assert guard.certificate().holds
    assert max(row.bound for row in guard.certificate()) < 1e-4


def test_training_starts_from_the_shared_weights_and_discard_puts_the_part_back() -> None:
    torch.manual_seed(12)
    for options in ({"task": "b", "private": 5}, {"task": "b"}, {}):
        model, old, new = ZOO["mlp"]()
        guard = ness.NullSpace(model, rule=ness.Soft(ness.Nuclear(0.02)), exclude=["head"])
        guard.observe(old)
        learn(guard, "a", new, private=8)
        with_part = state_of(model)
        guard.use(None)
        shared, expected = state_of(model), model(new)
        guard.use("a")
        guard.constrain(**options)  # type: ignore[arg-type]
        model.eval()
        assert same(state_of(model), shared)
        assert torch.equal(model(new), expected)
        train(model, OPTIMIZERS["momentum"](guard.parameters()), new, steps=2)
        guard.discard()
        assert same(state_of(model), with_part)
        assert guard.tasks == ["first", "a"]
        guard.use(None)
        assert same(state_of(model), shared)


def test_a_task_without_a_name_is_learnt_on_the_shared_weights() -> None:
    torch.manual_seed(13)
    model, old, new = ZOO["mlp"]()
    guard = ness.NullSpace(model, rule=ness.Rank(20), exclude=["head"])
    guard.observe(old)
    learn(guard, "a", new, private=8)
    learn(guard, None, new)
    merged = state_of(model)
    guard.constrain()
    guard.discard()
    assert same(state_of(model), merged)
    guard.observe(new, task="later")
    guard.use("a")
    assert not same(state_of(model), merged)
    guard.use("later")
    assert same(state_of(model), merged)


def test_compare_knows_the_private_part() -> None:
    torch.manual_seed(14)
    model, old, new = ZOO["mlp"]()
    guard = ness.NullSpace(model, rule=ness.Soft(ness.Nuclear(0.05)), exclude=["head"])
    guard.observe(old)
    learn(guard, "a", new, private=8)
    guard.observe(new, task="a")
    assert guard.compare(new).max_change == 0
    then = copy.deepcopy(model)
    learn(guard, "b", new * 2, private=8)
    guard.use("a")
    expected = float((model(new) - then(new)).detach().abs().max())
    assert expected > 0
    comparison = guard.compare(new)
    assert comparison.max_change == pytest.approx(expected, rel=1e-6)
    guard.constrain(task="c", private=8)
    guard.model.eval()
    expected = float((model(new) - then(new)).detach().abs().max())  # the part of the task in use is out of the weights
    assert guard.compare(new).max_change == pytest.approx(expected, rel=1e-6)
    guard.discard()
    assert guard.compare(new) == comparison


def test_a_weight_changed_behind_the_guards_back_shows() -> None:
    torch.manual_seed(15)
    model, old, new = ZOO["mlp"]()
    guard = ness.NullSpace(model, rule=ness.Soft(ness.Nuclear(0.02)), exclude=["head"])
    guard.observe(old)
    learn(guard, "a", new, private=8)
    assert guard.certificate().holds
    with torch.no_grad():
        model.trunk[0].weight += 0.1
    assert not guard.certificate().holds
    drift = guard.certificate()["trunk.0"].rms_drift
    for task in ("first", "a", None):
        guard.use(task)
        assert guard.certificate()["trunk.0"].rms_drift == pytest.approx(drift, rel=1e-5)


# -- what it costs, what it refuses -----------------------------------------------------------------------------------


def ready(**options: Any) -> ness.NullSpace:
    torch.manual_seed(16)
    model = named(trunk=nn.Sequential(nn.Linear(30, 20), nn.ReLU(), nn.Linear(20, 9)), head=nn.Linear(9, 4))
    guard = ness.NullSpace(model, rule=ness.Rank(3), exclude=["head"], **options)
    guard.observe(torch.randn(100, 30))
    return guard


def test_the_certificate_counts_what_a_task_keeps() -> None:
    guard = ready()
    learn(guard, "a", torch.randn(8, 30), private=8)  # 8 of 30, and 6, a third of 20
    certificate = guard.certificate()
    assert certificate.kept == {"a": 8 * 20 + 6 * 9}
    assert certificate.shared_directions == 8 * 31 + 6 * 21
    assert certificate.protected_weights == 30 * 20 + 20 * 9
    assert certificate.parameters == 31 * 20 + 21 * 9 + 10 * 4
    text = str(certificate)
    assert "task 'a' keeps 214 numbers of its own (25.21% of the model, 27.44% of the protected weights)" in text
    assert "private directions that all tasks share: 374 numbers, kept once" in text
    assert "what a task keeps for itself moves no other" in text


def test_groups_and_norms_are_counted() -> None:
    torch.manual_seed(17)
    model = ResNetLike()
    guard = ness.NullSpace(model, rule=ness.Rank(0), exclude=["head"], norm="per_task")
    guard.observe(smooth_images(32, 3, 8))
    learn(guard, "a", smooth_images(32, 3, 8), private=5)
    private = 16 * 5 + 4 * 4 * 5 + 16 * 1  # conv1 (27 inputs), conv2 (four groups of 36), the shortcut (3)
    assert guard.certificate().kept == {"a": private + 2 * (4 * 16 + 1)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"private": 3}, "a private part belongs to a task"),
        ({"private": 3, "task": "first"}, "the name is taken"),
        ({"private": -1, "task": "a"}, "whole number"),
        ({"private": 2.0, "task": "a"}, "whole number"),
        ({"private": True, "task": "a"}, "whole number"),
        ({"private": 31, "task": "a"}, r"no layer is that wide: the widest, 'trunk.0', has fan-in 30"),
    ],
    ids=str,
)
def test_what_no_task_could_have_is_refused(options: dict[str, Any], message: str) -> None:
    guard = ready()
    with pytest.raises(ness.NessError, match=message):
        guard.constrain(**options)
    assert not guard.constrained
    guard.constrain(private=30, task="a")  # a third of it
    guard.merge()


def test_a_model_of_narrow_layers_has_no_private_directions() -> None:
    guard = ness.NullSpace(named(layer=nn.Linear(2, 3)), rule=ness.Rank(1))
    guard.observe(torch.randn(9, 2))
    with pytest.raises(ness.NessError, match="at most a third"):
        guard.constrain(task="a", private=1)


def test_an_unknown_basis_is_refused() -> None:
    with pytest.raises(ness.NessError, match="private_basis='own'"):
        ready(private_basis="own")


def test_use_and_export_refuse_unknown_tasks_and_constrained_models(tmp_path: Path) -> None:
    guard = ready()
    learn(guard, "a", torch.randn(8, 30), private=4)
    before = state_of(guard.model)
    for call in (lambda: guard.use("b"), lambda: guard.export("b", tmp_path / "b")):
        with pytest.raises(ness.NessError, match=r"'b'\): no such task; tasks: first, a"):
            call()
    assert same(state_of(guard.model), before, head=True)
    guard.constrain(task="b", private=4)
    for call in (lambda: guard.use("a"), lambda: guard.export("a", tmp_path / "a")):
        with pytest.raises(ness.NessError, match="the model is constrained"):
            call()
    guard.discard()
    assert list(tmp_path.iterdir()) == []


def test_a_private_part_that_diverged_is_refused_and_the_model_kept() -> None:
    guard = ready()
    guard.rule = ness.Rank(0)
    guard.constrain(task="a", private=4)
    for parameter in guard.parameters():
        if parameter.ndim == 3:
            parameter.data[..., 0] = torch.nan
    with pytest.raises(ness.NessError, match="NaN or Inf"):
        guard.merge()
    guard.discard()
    assert guard.certificate().holds


def test_half_precision_is_told_that_switches_round() -> None:
    model = named(trunk=nn.Linear(30, 20), head=nn.Linear(20, 4)).to(torch.bfloat16)
    guard = ness.NullSpace(model, rule=ness.Rank(3), exclude=["head"])
    guard.observe(torch.randn(100, 30, dtype=torch.bfloat16))
    with pytest.warns(ness.NessWarning, match="each use.. rounds"):
        guard.constrain(task="a", private=4)
    train(model, OPTIMIZERS["adamw"](guard.parameters()), torch.randn(8, 30, dtype=torch.bfloat16))
    guard.merge()
    a = state_of(model)
    assert model.trunk.weight.dtype is torch.bfloat16
    guard.use(None)
    guard.use("a")
    assert same(state_of(model), a)


# -- export -----------------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """Two layers that hold one weight, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(12, 12), nn.Linear(12, 12)
        self.two.weight, self.two.bias = self.one.weight, self.one.bias
        self.norm = nn.BatchNorm1d(12)
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.two(self.one(x).relu())))


def models() -> Iterator[tuple[nn.Module, Tensor, Tensor]]:
    for name in ("resnet", "transformer", "mlp", "gpt2"):
        yield ZOO[name]()
    yield Tied(), torch.randn(60, 12), torch.randn(16, 12)


def test_export_is_the_state_dict_of_the_task(tmp_path: Path) -> None:
    torch.manual_seed(18)
    for number, (model, old, new) in enumerate(models()):
        guard = ness.NullSpace(model, rule=ness.Soft(ness.Nuclear(0.05)), exclude=["head"], norm="per_task")
        guard.observe(old)
        for task in ("a", "b"):
            learn(guard, task, new, private=4)
            guard.observe(new, task=task)
        with torch.no_grad():
            next(p for key, p in model.named_parameters() if "head" not in key).add_(1e-3)  # and what others changed
        in_use = state_of(model)
        for task in ("first", "a", "b"):
            path = tmp_path / str(number) / f"{task}.safetensors"
            guard.export(task, path)
            assert same(state_of(model), in_use, head=True)
            assert [file.name for file in path.parent.iterdir() if file.name.startswith(".")] == []
        for task in ("first", "a", "b"):
            guard.use(task)
            assert same(load_file(tmp_path / str(number) / f"{task}.safetensors"), state_of(model), head=True)
        model.load_state_dict(load_file(tmp_path / str(number) / "a.safetensors"))
        guard.use("a")
        assert set(supported(model))


# -- saving -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("basis", ["shared", "per_task"])
@pytest.mark.parametrize("name", ["mlp", "resnet", "transformer"])
@pytest.mark.parametrize(("form", "optimizer"), [("any", "adamw"), ("sgd", "momentum")])
def test_saved_half_way_and_going_on_is_bit_equal(
    name: str, form: str, optimizer: str, basis: Any, tmp_path: Path
) -> None:
    torch.manual_seed(19)
    model, old, new = ZOO[name]()
    guard = ness.NullSpace(
        model, rule=ness.Soft(ness.Nuclear(0.02)), exclude=["head"], norm="per_task", private_basis=basis
    )
    guard.observe(old)
    learn(guard, "a", new, private=3)
    guard.observe(new, task="a")
    guard.constrain(task="b", private=5, form=form)  # type: ignore[arg-type]
    train(model, OPTIMIZERS[optimizer](guard.parameters()), new, steps=2)
    guard.save(tmp_path / "guard")
    state = state_of(model)
    other, _, _ = ZOO[name]()
    other.load_state_dict(state)
    again = ness.NullSpace.load(tmp_path / "guard", other)
    assert again.private_basis == basis
    for g in (guard, again):
        torch.manual_seed(20)
        train(g.model, OPTIMIZERS[optimizer](g.parameters()), new, steps=2)
        g.merge()
        g.observe(new, task="b")
        learn(g, "c", new, private=6)
    assert again.certificate().to_dicts() == guard.certificate().to_dicts()
    assert again.certificate().kept == guard.certificate().kept
    for task in ("c", "a", None, "b"):
        guard.use(task)
        again.use(task)
        assert same(state_of(other), state_of(model), head=True), task


def test_saved_with_a_private_part_in_place(tmp_path: Path) -> None:
    torch.manual_seed(21)
    model, old, new = ZOO["resnet"]()
    guard = ness.NullSpace(model, rule=ness.Soft(ness.Nuclear(0.05)), exclude=["head"])
    guard.observe(old)
    for task in ("a", "b"):
        learn(guard, task, new, private=4)
        guard.observe(new, task=task)
    guard.use("a")
    guard.save(tmp_path)
    other = copy.deepcopy(model)
    again = ness.NullSpace.load(tmp_path, other)
    assert again.certificate().to_dicts() == guard.certificate().to_dicts()
    for task in ("b", None, "a"):
        guard.use(task)
        again.use(task)
        assert same(state_of(other), state_of(model), head=True)
    tensors, manifest = guard.state()
    del tensors["layers/conv1/shared"]
    with pytest.raises(ness.NessError, match="no shared weights of layer 'conv1'"):
        ness.NullSpace(model, exclude=["head"]).load_state(tensors, manifest)
    del tensors["layers/conv1/directions"], manifest["layers"]["conv1"]["directions"]
    with pytest.raises(ness.NessError, match="needs 4 directions, found 0"):
        ness.NullSpace(model, exclude=["head"]).load_state(tensors, manifest)
