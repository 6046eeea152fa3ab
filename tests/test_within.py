"""`ness.Within`: a budget for every task's own drift that no number of tasks and no optimizer exceeds."""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import ness
from helpers import OPTIMIZERS, ZOO, Witness, check_promise, layers, low_rank, named, train

pytestmark = pytest.mark.filterwarnings("ignore::ness.NessWarning")

WILD: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=3.0),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9, weight_decay=1e-2),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.5),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1),
    "calm": lambda p: torch.optim.AdamW(p, lr=1e-3),
}


class Tasks:
    """One witness a task: each task's own relative drift, from its own rows."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.witnesses: list[Witness] = []

    def observe(self, guard: ness.NullSpace, batches: list[Tensor]) -> None:
        self.witnesses.append(Witness(self.model))
        self.witnesses[-1].observe(guard, batches)

    def drifts(self, name: str) -> list[float]:
        found = []
        for witness in self.witnesses:
            if witness.kept[name]:
                moved = float(witness.changes(name).square().sum(-1).mean().sqrt())
                size = witness.output_rms(name)
                found.append(moved / size if size > 0 else moved)
        return found


def bounded_training(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor, steps: int) -> None:
    """Training that may be wild, as long as it stays finite."""

    def tame() -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.data.nan_to_num_(0.0, 1e3, -1e3).clamp_(-1e3, 1e3)

    train(model, optimizer, inputs, steps=steps, after_step=tame)


@given(
    layer=layers(),
    drift=st.sampled_from([0.02, 0.1, 0.5]),
    optimizer=st.sampled_from(sorted(WILD)),
    sgd_form=st.booleans(),
    bias=st.sampled_from(["constrain", "freeze"]),
    dtype=st.sampled_from([torch.float64, torch.float32]),
    tasks=st.integers(1, 8),
    saved=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_no_tasks_own_drift_exceeds_the_budget_however_many_follow_and_however_they_train(
    layer: tuple[nn.Module, tuple[int, ...]],
    drift: float,
    optimizer: str,
    sgd_form: bool,
    bias: Any,
    dtype: torch.dtype,
    tasks: int,
    saved: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    module, shape = layer
    model = named(layer=module).to(dtype)
    form: Any = "sgd" if sgd_form and optimizer in ("sgd", "momentum") else "any"
    guard = ness.NullSpace(model, rule=ness.Within(drift), bias=bias)
    witnesses = Tasks(model)
    for task in range(tasks):
        rows = [int(torch.randint(1, 40, ())), 3]
        size = 10.0 ** float(torch.randint(-1, 2, ()))
        witnesses.observe(guard, [size * low_rank(n, *shape, rank=2, dtype=dtype) for n in rows])
        guard.constrain(form=form)
        if guard.parameters():
            bounded_training(model, WILD[optimizer](guard.parameters()), torch.randn(6, *shape, dtype=dtype), steps=4)
        if saved:
            with tempfile.TemporaryDirectory() as folder:
                guard.save(folder)
                guard.discard()
                guard = ness.NullSpace.load(folder, model)
        guard.merge()
        (row,) = guard.certificate().rows
        assert guard.certificate().holds, str(guard.certificate())
        drifts = witnesses.drifts("layer")
        slack = 1e-6 * drift
        assert max(drifts) <= drift + slack, (drifts, row)
        assert row.task_drift is not None
        assert row.task_drift**2 <= drift**2 * (task + 1) / (task + 2) + slack
        assert row.task_drift == pytest.approx(sum(d * d for d in drifts) ** 0.5, rel=1e-4, abs=1e-6)
        assert row.relative_drift <= row.task_drift * (1 + 1e-6) + 1e-7


@pytest.mark.parametrize("name", sorted(ZOO))
@pytest.mark.parametrize("optimizer", ["adamw", "momentum"])
def test_budget_and_promise_in_whole_models(name: str, optimizer: str) -> None:
    torch.manual_seed(1)
    model, old, new = ZOO[name]()
    guard = ness.NullSpace(model, rule=ness.Within(0.05), exclude=["head"])
    witness, tasks = Witness(model), Tasks(model)
    for number in range(4):
        tasks.observe(guard, [old])
        for layer, pieces in tasks.witnesses[-1].kept.items():
            witness.kept[layer].extend(pieces)
        guard.constrain(form="sgd" if optimizer == "momentum" else "any")
        train(model, OPTIMIZERS[optimizer](guard.parameters()), new)
        check_promise(guard, witness, torch.finfo(torch.float32).eps)
        guard.merge()
        check_promise(guard, witness, torch.finfo(torch.float32).eps)
        for row in guard.certificate().rows:
            if row.name in witness.kept:
                assert max(tasks.drifts(row.name)) <= 0.05 * (1 + 1e-5), (number, row)
                assert row.task_drift is not None
                assert row.task_drift <= 0.05
        old, new = new, old


def test_the_budget_is_spent_and_not_left_lying() -> None:
    """A guard that froze everything would keep every budget: most of it is used within a few tasks."""
    torch.manual_seed(2)
    model, _, new = ZOO["mlp"]()
    guard = ness.NullSpace(model, rule=ness.Within(0.1), exclude=["head"])
    for _ in range(5):
        guard.observe(torch.randn(200, 64))
        guard.constrain()
        assert guard.parameters()
        train(model, torch.optim.AdamW(guard.parameters(), lr=1e-2), new, steps=40)
        guard.merge()
    for row in guard.certificate().rows:
        assert row.task_drift is not None
        assert 0.03 < row.task_drift <= 0.1


def test_a_small_task_is_protected_as_much_as_a_large_one() -> None:
    """2000 rows of one kind, 20 of another: counted by rows the small task is weak, counted by tasks it is not."""
    torch.manual_seed(3)
    x = torch.zeros(2000, 40)
    x[:, :20] = torch.randn(2000, 20)
    small = torch.zeros(20, 40)
    small[:, 20:30] = torch.randn(20, 10)
    found = {}
    for rule in (ness.Soft(ness.Nuclear(1e-3)), ness.Within(0.1)):
        torch.manual_seed(4)
        model = named(layer=nn.Linear(40, 10, bias=False))
        guard = ness.NullSpace(model, rule=rule)
        tasks = Tasks(model)
        tasks.observe(guard, [x])
        guard.constrain()
        guard.merge()
        tasks.observe(guard, [small])
        guard.constrain()
        train(model, torch.optim.AdamW(guard.parameters(), lr=1e-2), torch.randn(64, 40), steps=60)
        guard.merge()
        found[rule.name] = tasks.drifts("layer")
    large, little = found["soft"]
    assert little > max(5 * large, 0.1)
    large, little = found["within"]
    assert max(large, little) <= 0.1
    assert 0.2 < little / large < 5


@given(seed=st.integers(0, 1000), exponent=st.integers(-3, 3), bias=st.booleans())
@settings(max_examples=20, deadline=None)
def test_scaling_inputs_or_weights_changes_no_rank(seed: int, exponent: int, bias: bool) -> None:
    factor = 10.0**exponent
    ranks = []
    for inputs, weights, offset in ((1.0, 1.0, 1.0), (factor, 1 / factor, 1.0), (1.0, factor, factor)):
        torch.manual_seed(seed)
        module = nn.Linear(24, 9, bias=bias).double()
        rows = torch.randn(100, 24, dtype=torch.float64) * torch.logspace(0, -3, 24, dtype=torch.float64)
        with torch.no_grad():
            module.weight *= weights
            if module.bias is not None:
                module.bias *= offset
        guard = ness.NullSpace(named(layer=module), rule=ness.Within(0.05))
        guard.observe(rows * inputs)
        guard.constrain()
        ranks.append(guard.certificate().rows[0].rank)
        guard.discard()
    assert len(set(ranks)) == 1
    assert ranks[0] > 0


@pytest.mark.parametrize("name", ["resnet", "mlp"])
@pytest.mark.parametrize(("form", "optimizer"), [("any", "adamw"), ("sgd", "momentum")])
def test_saved_half_way_and_gone_on_equals_never_saved(name: str, form: Any, optimizer: str, tmp_path: Path) -> None:
    def course(saves: bool) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
        torch.manual_seed(5)
        model, old, new = ZOO[name]()
        guard = ness.NullSpace(model, rule=ness.Within(0.05), exclude=["head"])

        def again(moment: str) -> None:
            nonlocal guard
            if saves:
                guard.save(tmp_path / moment)
                if guard.constrained:
                    guard.discard()
                guard = ness.NullSpace.load(tmp_path / moment, model)

        for task in range(3):
            guard.observe(old[:20])
            again(f"observing {task}")
            guard.observe(old[20:])
            guard.constrain(form=form)
            train(model, OPTIMIZERS[optimizer](guard.parameters()), new, steps=3)
            again(f"training {task}")
            guard.merge()
            again(f"merged {task}")
            old, new = new, old
        return model.state_dict(), guard.certificate().to_dicts()

    (weights, rows), (others, other_rows) = course(False), course(True)
    assert rows == other_rows
    for key, value in weights.items():
        assert torch.equal(value, others[key]), key


def test_what_was_discarded_spends_nothing() -> None:
    torch.manual_seed(6)
    model, old, new = ZOO["mlp"]()
    guard = ness.NullSpace(model, rule=ness.Within(0.1), exclude=["head"])
    guard.observe(old)
    guard.constrain()
    ranks = [row.rank for row in guard.certificate().rows]
    train(model, OPTIMIZERS["adamw"](guard.parameters()), new)
    assert all(row.task_drift for row in guard.certificate().rows)
    guard.discard()
    assert all(row.task_drift == 0 for row in guard.certificate().rows)
    guard.constrain()
    assert [row.rank for row in guard.certificate().rows] == ranks


def test_a_copy_has_books_of_its_own() -> None:
    torch.manual_seed(7)
    model, old, new = ZOO["mlp"]()
    guard = ness.NullSpace(model, rule=ness.Within(0.1), exclude=["head"])
    guard.observe(old)
    other = copy.deepcopy(guard)
    guard.constrain()
    train(model, OPTIMIZERS["adamw"](guard.parameters()), new)
    guard.merge()
    other.constrain()
    assert all(row.task_drift == 0 for row in other.certificate().rows)
    assert all(row.task_drift for row in guard.certificate().rows)


def test_max_drift_holds_each_task_at_every_step() -> None:
    torch.manual_seed(8)
    model, old, new = ZOO["resnet"]()
    limit, largest = 0.002, 0.0
    guard = ness.NullSpace(model, rule=ness.Within(0.2), exclude=["head"])

    def check() -> None:
        nonlocal largest
        for row in guard.certificate().rows:
            assert row.task_drift is not None
            assert row.relative_drift <= row.task_drift * (1 + 1e-9), row
            assert row.task_drift <= limit * (1 + 1e-6), row
            largest = max(largest, row.task_drift)

    for _ in range(2):
        guard.observe(old)
        guard.constrain(max_drift=limit)
        train(model, OPTIMIZERS["adamw"](guard.parameters()), new, steps=10, after_step=check)
        guard.merge()
        check()
        assert all(row.shrunk == 1 for row in guard.certificate().rows)
    assert largest > 0.9 * limit


def test_what_exceeds_the_budget_is_taken_back_at_merge_and_said() -> None:
    torch.manual_seed(9)
    model = named(layer=nn.Linear(12, 5)).double()
    guard = ness.NullSpace(model, rule=ness.Within(0.1))
    guard.observe(torch.randn(50, 12, dtype=torch.float64))
    guard.constrain()
    before = model.layer._parameters["weight"].detach().clone()
    nn.init.normal_(guard.parameters()[0], std=3.0)
    wild = guard.certificate()["layer"]
    assert wild.task_drift is not None
    assert wild.task_drift > 0.1
    wanted = model.layer.weight.detach() - before
    guard.merge()
    row = guard.certificate()["layer"]
    assert row.task_drift == pytest.approx(0.1 * 0.5**0.5, rel=1e-6)
    assert 0 < row.shrunk < 1
    assert torch.allclose(model.layer.weight - before, row.shrunk * wanted, rtol=1e-9, atol=1e-12)
    assert row.bound == pytest.approx(wild.bound * row.shrunk)
    assert row.update_norm == pytest.approx(wild.update_norm * row.shrunk)
    heads = str(guard.certificate()).splitlines()[0]
    assert heads.endswith("relative drift  task drift  shrunk")
    assert list(guard.certificate().to_dicts()[0])[-2:] == ["task_drift", "shrunk"]


def test_half_precision_weights_keep_the_budget_after_rounding() -> None:
    torch.manual_seed(10)
    model = named(layer=nn.Linear(32, 16)).to(torch.bfloat16)
    guard = ness.NullSpace(model, rule=ness.Within(0.01))
    tasks = Tasks(model)
    for _ in range(4):
        tasks.observe(guard, [torch.randn(60, 32).to(torch.bfloat16)])
        guard.constrain()
        for p in guard.parameters():
            nn.init.normal_(p, std=0.1)
        guard.merge()
        (row,) = guard.certificate().rows
        assert row.task_drift is not None
        assert row.task_drift <= 0.01
        assert max(tasks.drifts("layer")) <= 0.011  # outputs as they were observed were themselves rounded


def test_the_next_threshold_follows_what_the_last_update_did() -> None:
    """The same task again and again: spends that were overestimated at first come near their allowance."""
    ratios = []
    torch.manual_seed(11)
    model = named(layer=nn.Linear(30, 12, bias=False)).double()
    guard = ness.NullSpace(model, rule=ness.Within(0.2))
    rule, books = guard.rule, []
    for _ in range(3):
        guard.observe(torch.randn(200, 30, dtype=torch.float64))
        guard.constrain()
        found = guard._protected["layer"].budget()
        assert found is not None
        books.append(found)
        update = guard.parameters()[0]
        column = model.layer.weight.detach().square().mean().sqrt() * 12**0.5
        with torch.no_grad():  # every column of A is a third as long as W's mean one
            update.copy_(torch.randn_like(update))
            update *= column / 3 / update.norm(dim=1, keepdim=True)
        allowance = rule.limit(found.task) - found.spent
        spent = guard.certificate()["layer"].task_drift
        assert spent is not None
        ratios.append((spent**2 - found.spent) / allowance)
        guard.merge()
    assert books[0].travel is None
    assert [each.travel for each in books[1:]] == pytest.approx([9 ** -(1 / 2), 9 ** -(3 / 4)], rel=1e-3)
    assert ratios[0] == pytest.approx(1 / 9, rel=0.1)
    assert ratios[0] < 0.7 * ratios[1] < 0.5 * ratios[2]
    assert ratios[2] < 1


def test_a_layer_whose_outputs_are_zero_is_frozen_and_listed() -> None:
    model = named(body=nn.Linear(8, 6), act=nn.ReLU(), zero=nn.Linear(6, 4, bias=False), head=nn.Linear(4, 2))
    nn.init.zeros_(model.zero.weight)
    guard = ness.NullSpace(model, rule=ness.Within(0.1), exclude=["head"])
    guard.observe(torch.randn(40, 8))
    guard.constrain()
    assert list(guard.skipped) == ["zero"]
    assert "no fraction of that" in guard.skipped["zero"]
    nn.init.normal_(guard._protected["body"].constraint.update.parameter, std=0.01)  # type: ignore[union-attr]
    guard.merge()
    assert not bool(model.zero.weight.any())
    assert guard.certificate()["body"].task_drift


@pytest.mark.parametrize("zero", [ness.Within(0.0), ness.Within(0.1)], ids=str)
def test_without_allowance_nothing_is_free(zero: ness.Rule) -> None:
    torch.manual_seed(12)
    model = named(layer=nn.Linear(12, 5))
    guard = ness.NullSpace(model, rule=zero)
    guard.observe(low_rank(50, 12, rank=3))
    if zero != ness.Within(0.0):  # the budget is gone: somebody changed the weights behind the guard's back
        with torch.no_grad():
            model.layer.weight *= 1.5
    with pytest.warns(ness.NessWarning, match="no direction is free"):
        guard.constrain()
    guard.merge()


def test_books_are_kept_only_where_the_rule_asks() -> None:
    model = named(layer=nn.Linear(12, 5))
    plain = ness.NullSpace(model)
    plain.observe(torch.randn(50, 12))
    assert plain._protected["layer"].relative is None
    assert plain.certificate()["layer"].task_drift is None
    assert "task_drift" not in plain.certificate().to_dicts()[0]
    plain.rule = ness.Within()
    with pytest.raises(ness.NessError, match="'layer' was observed under another rule"):
        plain.constrain()


def test_a_guard_saved_under_another_kind_of_rule_is_refused() -> None:
    model = named(layer=nn.Linear(12, 5))
    guards = [ness.NullSpace(model, rule=rule) for rule in (ness.Within(), ness.Nuclear())]
    for guard in guards:
        guard.observe(torch.randn(50, 12))
    for guard, other, message in ((guards[0], guards[1], "keeps each"), (guards[1], guards[0], "keeps no")):
        with pytest.raises(ness.NessError, match=f"{message} task's own drift in layer 'layer'"):
            other.load_state(*guard.state())


def test_a_layer_whose_outputs_overflow_is_frozen_and_said_to_be_unknown() -> None:
    torch.manual_seed(0)
    model = named(a=nn.Linear(8, 4, bias=False).half(), b=nn.Linear(8, 4, bias=False).half())
    with torch.no_grad():
        model.a.weight.mul_(1e3)
    guard = ness.NullSpace(model, rule=ness.Within(0.1))
    x = (torch.randn(100, 8) * 300).half()
    guard.observe(x, forward=lambda model, batch: (model.a(batch), model.b(batch)))
    guard.constrain()
    assert "overflow" in guard.skipped["a"]
    assert [name for name, p in model.named_parameters() if p.requires_grad] == ["b.ness_weight"]
    assert math.isnan(guard.certificate()["a"].relative_drift)
