"""The verbs: what they take, what they refuse, and that a refusal leaves the model untouched."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ness
from helpers import OPTIMIZERS, ZOO, GPT2Like, ResNetLike, Twice, low_rank, named, plain_state, smooth_images, train

pytestmark = pytest.mark.filterwarnings("ignore::ness.NessWarning")


def mlp() -> nn.Module:
    return named(trunk=nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 16)), head=nn.Linear(16, 3))


def ready(model: nn.Module | None = None, **options: Any) -> ness.NullSpace:
    guard = ness.NullSpace(model or mlp(), **options)
    guard.observe(low_rank(80, 16, rank=4))
    return guard


def test_constrain_reports_progress_and_leaves_the_model_alone_until_the_last_layer() -> None:
    torch.manual_seed(0)
    model = mlp()
    guard, other = ready(model), ready(copy.deepcopy(model))
    told = []

    def progress(*what: Any) -> None:
        told.append(what)
        assert not guard.constrained
        assert all(parameter.requires_grad for parameter in model.parameters())

    guard.constrain(progress=progress)
    assert told == [(1, 3, "trunk.0"), (2, 3, "trunk.2"), (3, 3, "head")]
    other.constrain()
    assert guard.constrained
    ours, theirs = ([*each.parameters()] for each in (guard, other))
    assert [parameter.shape for parameter in ours] == [parameter.shape for parameter in theirs]


BETWEEN = {
    "another constrain": (lambda guard: guard.constrain(), "already constrained"),
    "rows observed": (lambda guard: guard.observe(low_rank(80, 16, rank=4)), "changed while it was at work"),
    "a weight written": (lambda guard: guard.model.head.weight.detach().mul_(2), "changed while it was at work"),
    "a bias written": (lambda guard: guard.model.head.bias.detach().mul_(2), "changed while it was at work"),
}


@pytest.mark.parametrize("what", BETWEEN)
def test_constrain_refuses_what_changed_meanwhile(what: str) -> None:
    meanwhile, message = BETWEEN[what]
    guard = ready()
    with pytest.raises(ness.NessError, match=message):
        guard.constrain(progress=lambda done, total, name: meanwhile(guard) if done == 1 else None)
    if guard.constrained:
        assert what == "another constrain"
        guard.discard()
    guard.constrain()
    assert guard.constrained


def test_a_constrain_that_is_abandoned_begins_no_task() -> None:
    guard = ready(rule=ness.Within(0.1))

    def no_more(*_: Any) -> None:
        raise KeyError("enough")

    with pytest.raises(KeyError, match="enough"):
        guard.constrain(progress=no_more)
    guard.observe(low_rank(80, 16, rank=4))
    fresh = {held.relative.fresh.gram.count for held in guard._protected.values()}
    assert fresh == {160}


@pytest.mark.filterwarnings("default::ness.NessWarning")
@pytest.mark.parametrize("inference", [False, True])
def test_a_doubt_about_few_rows_points_at_the_callers_line(inference: bool) -> None:
    guard = ness.NullSpace(mlp())
    guard.observe(low_rank(4, 16, rank=4))
    with pytest.warns(ness.NessWarning, match="fewer rows than inputs") as caught, torch.inference_mode(inference):
        guard.constrain()
    assert {record.filename for record in caught} == {__file__}


@pytest.mark.parametrize("name", sorted(ZOO))
def test_the_three_verbs_as_the_readme_has_them(name: str, tmp_path: Any) -> None:
    torch.manual_seed(0)
    model, old_inputs, new_inputs = ZOO[name]()
    guard = ness.NullSpace(model, rule=ness.Nuclear(1e-3), exclude=["head"])
    guard.observe(old_inputs)
    guard.constrain()
    optimizer = torch.optim.AdamW(guard.parameters(), lr=1e-3)
    train(model, optimizer, new_inputs)
    assert "within its bounds" in str(guard.certificate())
    guard.merge()
    guard.observe(new_inputs)
    guard.save(tmp_path / "guard")
    again = ness.NullSpace.load(tmp_path / "guard", model)
    again.constrain()
    assert again.certificate().holds


# -- observing ------------------------------------------------------------------------------------------------------


def test_batches_in_every_form_give_the_same_grams() -> None:
    x, y = torch.randn(40, 16), torch.zeros(40)
    model = mlp()
    forms: list[Callable[[ness.NullSpace], None]] = [
        lambda g: g.observe(x),
        lambda g: g.observe([x]),
        lambda g: g.observe([(x, y)]),
        lambda g: g.observe([[x, y]]),
        lambda g: g.observe([{"input": x}]),
        lambda g: g.observe({"input": x}),
        lambda g: g.observe(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=7)),
        lambda g: g.observe(x.split(9)),
        lambda g: g.observe([(x, y, "weights")], forward=lambda m, b: m(b[0])),
        lambda g: _by_hand(g, model, x),
    ]
    grams = []
    for form in forms:
        guard = ness.NullSpace(model)
        form(guard)
        grams.append(guard.grams)
    for other in grams[1:]:
        for name, gram in grams[0].items():
            assert other[name].count == gram.count
            assert torch.allclose(other[name].matrix, gram.matrix, rtol=1e-10, atol=1e-10)


def _by_hand(guard: ness.NullSpace, model: nn.Module, x: Tensor) -> None:
    with guard.observing():
        model(x[:10])
        model(x[10:])


def test_one_pass_gives_what_a_pass_per_layer_gives() -> None:
    """N8, N13: all layers at once equal layer by layer, and traces add up over tasks."""
    torch.manual_seed(1)
    model, old, _ = ZOO["resnet"]()
    together = ness.NullSpace(model, exclude=["head"])
    together.observe(old)
    for name, gram in together.grams.items():
        alone = ness.NullSpace(model, include=[name], exclude=["head"])
        alone.observe(old)
        assert list(alone.grams) == [name]
        assert torch.allclose(alone.grams[name].matrix, gram.matrix, rtol=1e-10)
    traces = {name: float(gram.matrix.diagonal(dim1=1, dim2=2).sum()) for name, gram in together.grams.items()}
    together.observe(old)
    for name, gram in together.grams.items():
        assert float(gram.matrix.diagonal(dim1=1, dim2=2).sum()) == pytest.approx(2 * traces[name], rel=1e-12)


def test_a_layer_called_twice_contributes_both_calls() -> None:
    model = Twice()
    guard = ness.NullSpace(model, exclude=["head"])
    x = torch.randn(30, 64)
    guard.observe(x)
    rows = torch.cat([x, model.layer(x).relu().detach()])
    expected = ness.Gram.of(torch.cat([rows, torch.ones(60, 1)], dim=1))
    assert guard.grams["layer"].count == 60
    assert torch.allclose(guard.grams["layer"].matrix, expected.matrix, rtol=1e-6)


def test_observing_leaves_modes_gradients_and_hooks_alone() -> None:
    model = ResNetLike()
    model.train()
    model.bn1.eval()
    statistics = model.bn2.running_mean.clone()
    guard = ness.NullSpace(model)
    guard.observe(torch.randn(8, 3, 8, 8))
    assert model.training
    assert not model.bn1.training
    assert model.bn2.training
    assert torch.equal(model.bn2.running_mean, statistics)
    assert all(p.grad is None for p in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())
    assert torch.backends.mha.get_fastpath_enabled()


def test_a_pass_that_breaks_off_counts_for_nothing() -> None:
    model = mlp()
    guard = ness.NullSpace(model)

    def breaks(_: nn.Module, batch: Tensor) -> None:
        model.trunk(batch)
        raise ValueError("the user's own error")

    with pytest.raises(ValueError, match="own error"):
        guard.observe(torch.randn(5, 16), forward=breaks)
    assert guard.grams == {}
    with guard.observing():
        with pytest.raises(RuntimeError, match="shape"):
            model(torch.randn(5, 17))
        model(torch.randn(6, 16))
    assert {gram.count for gram in guard.grams.values()} == {6}


def test_statistics_can_live_elsewhere() -> None:
    guard = ready(statistics_device="cpu")
    assert all(gram.matrix.device.type == "cpu" for gram in guard.grams.values())


def test_a_batch_of_unknown_form_is_refused() -> None:
    guard = ness.NullSpace(mlp())
    with pytest.raises(ness.NessError, match=r"tuple of 3.*forward=lambda"):
        guard.observe([(torch.randn(2, 16), 1, 2)])
    with pytest.raises(ness.NessError, match="found int"):
        guard.observe(3)


# -- bad input ------------------------------------------------------------------------------------------------------


def _constrained() -> ness.NullSpace:
    guard = ready()
    guard.constrain()
    return guard


def _merged() -> ness.NullSpace:
    guard = _constrained()
    guard.merge()
    return guard


BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "nothing to protect": (lambda: ness.NullSpace(nn.Sequential(nn.ReLU())), "nothing to protect"),
    "all excluded": (lambda: ness.NullSpace(mlp(), exclude=["trunk", "head"]), "nothing to protect"),
    "pattern without match": (lambda: ness.NullSpace(mlp(), exclude=["haed"]), "exclude='haed' matches no.*'head'"),
    "include without match": (lambda: ness.NullSpace(mlp(), include=["trunk.7"]), "include='trunk.7' matches no"),
    "pattern not text": (lambda: ness.NullSpace(mlp(), exclude=[3]), "expected module names"),  # type: ignore[list-item]
    "not a module": (lambda: ness.NullSpace(3), "found int"),  # type: ignore[arg-type]
    "not a rule": (lambda: ness.NullSpace(mlp(), rule=1e-3), "expected a rule"),  # type: ignore[arg-type]
    "bias": (lambda: ness.NullSpace(mlp(), bias="drop"), "bias='drop'"),  # type: ignore[arg-type]
    "norm": (lambda: ness.NullSpace(mlp(), norm="batch"), "norm='batch'"),  # type: ignore[arg-type]
    "dtype": (lambda: ness.NullSpace(mlp(), statistics_dtype=torch.float16), "expected torch.float64"),
    "merge before constrain": (lambda: ready().merge(), "merge.*not constrained.*observe"),
    "discard before constrain": (lambda: ready().discard(), "not constrained"),
    "parameters before constrain": (lambda: ready().parameters(), "not constrained"),
    "constrain before observe": (lambda: ness.NullSpace(mlp()).constrain(), "nothing was observed"),
    "certificate before observe": (lambda: ness.NullSpace(mlp()).certificate(), "nothing was observed"),
    "compare before observe": (lambda: ness.NullSpace(mlp()).compare(torch.randn(2, 16)), "nothing was observed"),
    "constrain twice": (lambda: _constrained().constrain(), "already constrained; call merge"),
    "observe while constrained": (lambda: _constrained().observe(torch.randn(2, 16)), "is constrained"),
    "use while constrained": (lambda: _constrained().use(None), "is constrained"),
    "unknown task": (lambda: ready().use("cats"), r"no such task; tasks: first"),
    "name taken": (lambda: ready().constrain(task="first"), "the name is taken"),
    "name empty": (lambda: ready().constrain(task=""), "expected a name"),
    "private": (lambda: ready().constrain(private=3), "private"),
    "form": (lambda: ready().constrain(form="adam"), "expected 'any' or 'sgd'"),  # type: ignore[arg-type]
    "max_drift": (lambda: ready().constrain(max_drift=-1), "expected a number above 0"),
    "max_drift with sgd": (lambda: ready().constrain("sgd", max_drift=0.1), "use form='any'"),
    "per_task without task": (lambda: ready(norm="per_task").constrain(), "needs the name of the task"),
    "discard after merge": (lambda: _merged().discard(), "not constrained"),
    "wrong task observed": (lambda: _merged_task().observe(torch.randn(2, 16), task="x"), "the task in use is 'b'"),
}


def _merged_task() -> ness.NullSpace:
    guard = ready()
    guard.constrain(task="b")
    guard.merge()
    return guard


@pytest.mark.parametrize("case", sorted(BAD))
def test_bad_input_is_refused_with_what_to_do(case: str) -> None:
    action, message = BAD[case]
    with pytest.raises(ness.NessError, match=f"(?s){message}"):
        action()


@pytest.mark.parametrize("arguments", [{"private": 2}, {"form": "x"}, {"max_drift": 0.0}, {"task": "first"}], ids=str)
def test_a_refused_constrain_leaves_the_model_untouched(arguments: dict[str, Any]) -> None:
    model = mlp()
    guard = ready(model)
    state, classes = copy.deepcopy(model.state_dict()), [type(m) for m in model.modules()]
    with pytest.raises(ness.NessError):
        guard.constrain(**arguments)
    assert [type(m) for m in model.modules()] == classes
    assert all(torch.equal(model.state_dict()[key], value) for key, value in state.items())
    assert all(p.requires_grad for p in model.parameters())
    guard.constrain()  # and the guard is as good as before
    guard.merge()


# -- who is constrained ---------------------------------------------------------------------------------------------


def test_what_is_neither_constrained_nor_excluded_is_frozen() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(16))
            self.lstm = nn.LSTM(16, 16, batch_first=True)
            self.fc, self.unused, self.head = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.fc(self.lstm(x)[0] * self.scale))

    model = Odd()
    guard = ness.NullSpace(model, exclude=["head"])
    guard.observe(torch.randn(30, 4, 16))
    guard.constrain()
    trainable = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trainable == ["head.weight", "head.bias"] or trainable == ["fc.ness_weight", "head.weight", "head.bias"]
    assert sorted(guard.skipped) == ["", "lstm", "unused"]
    assert guard.skipped["unused"] == "saw no input row: frozen"
    assert "LSTM is not a supported kind" in guard.skipped["lstm"]
    assert "bare parameters (scale)" in guard.skipped[""]
    guard.merge()
    assert all(p.requires_grad for p in model.parameters())


def test_include_and_exclude_by_name_prefix_and_pattern() -> None:
    model = ResNetLike()
    assert ness.NullSpace(model, include="conv?").layers == ("conv1", "conv2")
    assert ness.NullSpace(model, exclude="conv?").layers == ("shortcut", "head")
    assert ness.NullSpace(mlp(), include=["trunk."]).layers == ("trunk.0", "trunk.2")
    assert ness.NullSpace(mlp(), exclude=["trunk.0", "head"]).layers == ("trunk.2",)
    assert ness.NullSpace(nn.Linear(3, 3)).layers == ("",)


def test_excluded_parameters_keep_the_callers_flags() -> None:
    model = mlp()
    model.head.bias.requires_grad_(False)
    guard = ready(model, exclude=["head"])
    guard.constrain()
    assert [p.requires_grad for p in model.head.parameters()] == [True, False]
    guard.merge()
    assert [p.requires_grad for p in model.parameters()] == [True] * 5 + [False]


def test_tied_layers_are_one_layer() -> None:
    model = named(a=nn.Linear(16, 16), act=nn.ReLU(), b=nn.Linear(16, 16), head=nn.Linear(16, 2))
    model.b.weight, model.b.bias = model.a.weight, model.a.bias
    guard = ness.NullSpace(model, rule=ness.Rank(5), exclude=["head"])
    assert guard.layers == ("a",)
    x = torch.randn(40, 16)
    guard.observe(x)
    assert guard.grams["a"].count == 80
    guard.constrain()
    train(model, torch.optim.SGD(guard.parameters(), lr=0.1), torch.randn(8, 16))
    before = model(x)
    guard.merge()
    assert model.a.weight is model.b.weight
    assert torch.allclose(model(x), before, atol=1e-6)


def test_a_frozen_bias_does_not_move() -> None:
    model = mlp()
    guard = ready(model, bias="freeze", rule=ness.Rank(6))
    for form in ("any", "sgd"):
        guard.constrain(form=form)  # type: ignore[arg-type]
        assert all(row.rank <= row.fan_in for row in guard.certificate().rows)
        before = plain_state(model)
        train(model, OPTIMIZERS["momentum"](guard.parameters()), torch.randn(8, 16))
        guard.merge()
        after = model.state_dict()
        assert all(torch.equal(before[k], after[k]) == k.endswith("bias") for k in before)
        assert guard.certificate().holds


def test_two_guards_on_one_model_but_one_at_a_time() -> None:
    model = mlp()
    first, second = ready(model), ready(model)
    first.constrain()
    with pytest.raises(ness.NessError, match="another guard holds this model"):
        second.constrain()
    with pytest.raises(ness.NessError, match="is constrained"):
        second.observe(torch.randn(4, 16))
    first.discard()
    second.constrain()
    second.merge()


def test_discard_is_as_if_nothing_had_been() -> None:
    model, x = mlp(), torch.randn(5, 16)
    guard = ready(model, rule=ness.Rank(5))
    before = model(x)
    guard.constrain()
    train(model, torch.optim.AdamW(guard.parameters(), lr=0.1), torch.randn(8, 16))
    assert not torch.allclose(model(x), before)
    guard.discard()
    assert torch.equal(model(x), before)
    assert guard.certificate().rows[0].bound == 0
    guard.constrain()
    guard.merge()


def test_nothing_free_is_a_warning() -> None:
    guard = ready(rule=ness.Nuclear(0.0), exclude=["head"], bias="freeze", include=["trunk.2"])
    with pytest.warns(ness.NessWarning, match="no direction is free"):
        guard.constrain()
    assert [tuple(p.shape) for p in guard.parameters()] == [(3, 16), (3,)]


@pytest.mark.parametrize(
    "rule",
    [
        ness.Nuclear(1e-7),
        ness.Frobenius(1e-7),
        ness.Energy(1.0),
        ness.Rank(0),
        ness.Budget(1),
        ness.Soft(ness.Nuclear(1e-7)),
        ness.Soft(ness.Rank(0)),
        ness.Within(0.0),
    ],
    ids=str,
)
def test_a_rule_that_frees_nothing_names_the_strictest_value_that_does(rule: ness.Rule) -> None:
    torch.manual_seed(0)
    model, old = named(trunk=nn.Linear(8, 6), more=nn.Linear(6, 6)), torch.randn(80, 8)

    def ready_with(rule: ness.Rule) -> ness.NullSpace:
        guard = ness.NullSpace(model, rule=rule)
        guard.observe(old)
        return guard

    guard = ready_with(rule)
    with pytest.warns(ness.NessWarning) as found:
        guard.constrain()
    (message,) = {str(each.message) for each in found}
    assert message.startswith(f"no direction is free in any layer under {rule!r}: no layer will train. ")
    assert guard.parameters() == []
    guard.discard()
    named_rule = eval(message.partition("The strictest of its kind that frees one is ")[2], vars(ness))
    assert type(named_rule) is type(rule)
    other = ready_with(named_rule)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other.constrain()
    assert sum(row.rank for row in other.certificate()) >= 1
    assert other.parameters()


def test_rank_zero_is_taken_at_its_word_where_something_else_trains() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ready(rule=ness.Rank(0), exclude=["head"]).constrain()
    model = named(fc=nn.Linear(16, 16), norm=nn.LayerNorm(16))
    guard = ness.NullSpace(model, rule=ness.Rank(0), norm="per_task")
    guard.observe(torch.randn(40, 16))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        guard.constrain(task="b")
    frozen = mlp()
    frozen.head.requires_grad_(False)
    with pytest.warns(ness.NessWarning, match=r"under Rank\(r=0\).*frees one is Rank\(r=1\)"):
        ready(frozen, rule=ness.Rank(0), exclude=["head"]).constrain()


def test_where_every_layer_is_frozen_the_rule_is_not_blamed() -> None:
    model = mlp()
    model.requires_grad_(False)
    guard = ready(model)
    with pytest.warns(ness.NessWarning, match="no layer will train: each is frozen, and `skipped` says why"):
        guard.constrain()


# -- optimizers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["adamw", "rmsprop", "sam"])
def test_sgd_form_raises_on_the_first_step_of_any_other_optimizer(name: str) -> None:
    model = mlp()
    guard = ready(model, rule=ness.Rank(5))
    guard.constrain(form="sgd")
    optimizer = OPTIMIZERS[name](guard.parameters())
    with pytest.raises(ness.NessError, match=r"exact for torch\.optim\.SGD alone"):
        train(model, optimizer, torch.randn(8, 16), steps=1)
    train(model, torch.optim.SGD(guard.parameters(), lr=0.1), torch.randn(8, 16), steps=1)
    guard.merge()
    train(model, torch.optim.AdamW(model.parameters()), torch.randn(8, 16), steps=1)  # free again


def test_other_models_optimizers_are_left_alone() -> None:
    guard = ready(rule=ness.Rank(5))
    guard.constrain(form="sgd")
    other = mlp()
    before = other.head.weight.detach().clone()
    train(other, torch.optim.AdamW(other.parameters()), torch.randn(8, 16), steps=1)
    assert not torch.equal(other.head.weight, before)
    guard.discard()


def test_projected_gradients_under_adam_break_the_promise() -> None:
    """Why `form="sgd"` refuses Adam: the figure is measured here."""
    torch.manual_seed(3)
    old, new = low_rank(200, 64, rank=8), torch.randn(32, 64)
    target = torch.randn(32, 8)
    free = torch.linalg.eigh(old.double().T @ old.double()).eigenvectors[:, :56].float()
    moved = {}
    for kind in ("projected gradient", "form='any'"):
        torch.manual_seed(4)
        layer = nn.Linear(64, 8, bias=False)
        before = layer(old).detach()
        guard = ness.NullSpace(named(layer=layer), rule=ness.Rank(56))
        guard.observe(old)
        parameters: list[nn.Parameter] = [layer.weight]
        if kind != "projected gradient":
            guard.constrain()
            parameters = guard.parameters()
        optimizer = torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.0)
        for _ in range(50):
            optimizer.zero_grad()
            (layer(new) - target).square().mean().backward()
            if kind == "projected gradient":
                assert layer.weight.grad is not None
                layer.weight.grad = layer.weight.grad @ free @ free.T
            optimizer.step()
        moved[kind] = float((layer(old) - before).detach().norm() / before.norm())
    assert moved["projected gradient"] > 0.05
    assert moved["form='any'"] < 1e-5


# -- other ----------------------------------------------------------------------------------------------------------


def test_n2_bound_by_hand() -> None:
    """U = [e1, e3], A = [[1, 5], [2, 6]], x = (3, 0, 0): ΔW x = (3, 6), and the bound is 3 · 8.10905."""
    model = named(layer=nn.Linear(3, 2, bias=False).double())
    x = torch.tensor([[3.0, 0, 0], [0, 4.0, 0]], dtype=torch.float64)
    guard = ness.NullSpace(model, rule=ness.Nuclear(0.5))
    guard.observe(x)
    guard.constrain()
    before = model(x).detach()
    (update,) = guard.parameters()
    free = guard._protected["layer"].constraint.update.basis[0]  # type: ignore[union-attr]  # columns ±e3, ±e1
    with torch.no_grad():
        update.copy_((torch.tensor([[1.0, 0, 5], [2, 0, 6]], dtype=torch.float64) @ free).unsqueeze(0))
    moved = (model(x).detach() - before)[0]
    assert torch.allclose(moved, torch.tensor([3.0, 6.0], dtype=torch.float64))
    row = guard.certificate().rows[0]
    assert row.update_norm == pytest.approx(8.10905, abs=1e-5)
    assert row.bound == pytest.approx(24.327, abs=1e-3)
    assert row.tau == pytest.approx(3.5)
    assert (row.fan_in, row.rank) == (3, 2)


def test_n14_upstream_drift_goes_to_zero_with_the_update() -> None:
    torch.manual_seed(5)
    model = named(a=nn.Linear(20, 20), act=nn.Tanh(), b=nn.Linear(20, 5)).double()
    x = torch.randn(60, 20, dtype=torch.float64)
    guard = ness.NullSpace(model, rule=ness.Rank(8))
    guard.observe(x)
    guard.constrain()
    for p in guard.parameters():
        torch.nn.init.normal_(p)
    changes = []
    for scale in (1e-3, 1e-4, 1e-5):
        held = [p.detach().clone() for p in guard.parameters()]
        with torch.no_grad():
            for p in guard.parameters():
                p.mul_(scale)
        changes.append(guard.compare(x).rms_change)
        with torch.no_grad():
            for p, before in zip(guard.parameters(), held, strict=True):
                p.copy_(before)
    assert changes[0] / changes[1] == pytest.approx(10, rel=0.05)
    assert changes[1] / changes[2] == pytest.approx(10, rel=0.05)


def test_the_guard_keeps_no_sample() -> None:
    model = mlp()
    guard = ness.NullSpace(model)
    x = torch.randn(5000, 16)
    guard.observe(x.split(100))
    small = sum(t.numel() for t in guard.state()[0].values())
    guard.observe(x.split(100))
    assert sum(t.numel() for t in guard.state()[0].values()) == small


def test_embedding_models_and_repr() -> None:
    guard = ness.NullSpace(GPT2Like(), exclude=["head"])
    assert guard.layers == ("attend", "project", "up", "down")
    assert re.fullmatch(r"NullSpace\(4 layers, rule=Nuclear\(eps=0.001\), open, tasks=\['first'\]\)", repr(guard))
    assert guard.skipped == {"embed": "Embedding is not a supported kind"}


def test_the_resnet_example_prints_a_certificate() -> None:
    torch.manual_seed(6)
    model = ResNetLike()
    guard = ness.NullSpace(model, rule=ness.Nuclear(5e-3), exclude=["head"])
    guard.observe(smooth_images(64, 3, 8))
    guard.constrain()
    text = str(guard.certificate())
    assert text.splitlines()[0].split()[:4] == ["name", "fan", "in", "rank"]
    assert "conv1" in text
    assert "within its bounds" in text


def test_a_second_name_for_what_was_observed_says_how_a_task_begins() -> None:
    guard = ready()
    guard.observe(low_rank(80, 16, rank=4), task="a")
    with pytest.raises(ness.NessError, match=r"the task in use is 'a'; 'b' begins with constrain\(task='b'\)"):
        guard.observe(low_rank(80, 16, rank=4), task="b")
