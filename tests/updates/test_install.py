"""Inside other people's machinery: copies, autocast, scalers, accumulation, compilation, state dicts, devices."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ness
from helpers import ZOO, ResNetLike, low_rank, named, train
from ness.updates.layer_state import LayerState

pytestmark = pytest.mark.filterwarnings("ignore::ness.NessWarning")


def constrained(name: str, form: str = "any", **options: Any) -> tuple[nn.Module, ness.NullSpace, torch.Tensor]:
    torch.manual_seed(0)
    model, old, new = ZOO[name]()
    guard = ness.NullSpace(model, rule=ness.Nuclear(0.02), exclude=["head"], **options)
    guard.observe(old)
    guard.constrain(form=form)  # type: ignore[arg-type]
    return model, guard, new


@pytest.mark.parametrize("name", sorted(ZOO))
@pytest.mark.parametrize("form", ["any", "sgd"])
def test_deepcopy_carries_its_own_updates(name: str, form: str) -> None:
    model, guard, new = constrained(name, form)
    train(model, torch.optim.SGD(guard.parameters(), lr=0.1), new, steps=2)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        expected = model(new)
        assert torch.equal(twin(new), expected)
    train(twin, torch.optim.SGD([p for p in twin.parameters() if p.requires_grad], lr=0.1), new, steps=2)
    with torch.no_grad():
        assert torch.equal(model(new), expected)
        assert not torch.equal(twin(new), expected)


def test_deepcopy_of_model_and_guard_together_stays_a_guard() -> None:
    model, guard, new = constrained("mlp")
    twin, twin_guard = copy.deepcopy((model, guard))
    train(twin, torch.optim.AdamW(twin_guard.parameters(), lr=0.01), new)
    assert twin_guard.certificate().holds
    twin_guard.merge()
    assert guard.constrained
    assert not twin_guard.constrained
    assert type(twin.head) is nn.Linear


@pytest.mark.parametrize("form", ["any", "sgd"])
def test_autocast_does_not_leak_into_protected_directions(form: str) -> None:
    torch.manual_seed(1)
    model = named(trunk=nn.Linear(64, 32), head=nn.Linear(32, 4))
    old, new = low_rank(200, 64), torch.randn(32, 64)
    guard = ness.NullSpace(model, exclude=["head"])
    guard.observe(old)
    guard.constrain(form=form)  # type: ignore[arg-type]
    before = model.trunk(old).detach()
    optimizer = torch.optim.SGD(guard.parameters(), lr=0.5, momentum=0.9)
    for _ in range(10):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(new).float().square().mean()
        loss.backward()
        optimizer.step()
    base = nn.functional.linear(new, model.trunk._parameters["weight"], model.trunk._parameters["bias"])
    assert float((model.trunk(new) - base).detach().abs().max()) > 1e-3  # it learnt
    assert guard.certificate().holds
    assert float((model.trunk(old).detach() - before).abs().max()) < 1e-4


@pytest.mark.parametrize("form", ["any", "sgd"])
def test_gradient_accumulation_is_the_sum(form: str) -> None:
    model, guard, new = constrained("mlp", form)
    whole = torch.autograd.grad(model(new).square().sum(), guard.parameters())
    for part in new.split(8):
        model(part).square().sum().backward()
    for p, expected in zip(guard.parameters(), whole, strict=True):
        assert p.grad is not None
        assert torch.allclose(p.grad, expected, rtol=1e-4, atol=1e-4)


def test_grad_scaler() -> None:
    model, guard, new = constrained("mlp")
    scaler = torch.amp.GradScaler("cpu")
    optimizer = torch.optim.AdamW(guard.parameters(), lr=1e-2)
    before = [p.detach().clone() for p in guard.parameters()]
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(new).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert any(not torch.equal(p, b) for p, b in zip(guard.parameters(), before, strict=True))
    assert guard.certificate().holds


@pytest.mark.parametrize("name", ["mlp", "resnet", "conv1d", "gpt2"])
@pytest.mark.parametrize("form", ["any", "sgd"])
def test_torch_compile_gives_the_same(name: str, form: str) -> None:
    torch._dynamo.reset()
    model, guard, new = constrained(name, form)
    train(model, torch.optim.SGD(guard.parameters(), lr=0.1), new, steps=2)
    compiled = torch.compile(model, backend="aot_eager")
    expected = torch.autograd.grad(model(new).square().sum(), guard.parameters())
    got = torch.autograd.grad(compiled(new).square().sum(), guard.parameters())
    assert torch.allclose(compiled(new), model(new), atol=1e-5)
    for a, b in zip(got, expected, strict=True):
        assert torch.allclose(a, b, rtol=1e-3, atol=1e-4)
    guard.merge()


def test_wrappers_are_refused_by_name() -> None:
    compiled = torch.compile(nn.Sequential(nn.Linear(4, 4)), backend="eager")
    with pytest.raises(ness.NessError, match="OptimizedModule; guard the plain model, and wrap it after constrain"):
        ness.NullSpace(compiled)  # type: ignore[arg-type]


def test_moving_a_constrained_model_keeps_updates_in_float32() -> None:
    model, guard, new = constrained("mlp")
    model.to("cpu")
    model.double()  # weights change their dtype, updates and bases do not
    update = [p for p in guard.parameters() if p.ndim == 3]
    assert {p.dtype for p in update} == {torch.float32}
    assert model(new.double()).dtype == torch.float64


def test_user_hooks_see_the_layer_as_before() -> None:
    model, guard, new = constrained("mlp")
    calls: list[tuple[int, ...]] = []
    model.trunk[0].register_forward_hook(lambda _m, args, out: calls.append(tuple(out.shape)))
    model(new)
    assert calls == [(32, 80)]
    guard.merge()
    model(new)
    assert len(calls) == 2


def test_attention_fast_path_sees_the_update() -> None:
    """In eval mode without gradients torch reads weights past the layers; the update must be in them."""
    model, guard, new = constrained("transformer")
    train(model, torch.optim.AdamW(guard.parameters(), lr=0.02), new, steps=5)
    with torch.no_grad():
        fast = model(new)
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            slow = model(new)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
    guard.merge()
    with torch.no_grad():
        merged = model(new)
    assert torch.allclose(fast, slow, atol=1e-5)
    assert torch.allclose(fast, merged, atol=1e-5)


def test_batchnorm_without_statistics_is_left_as_it_is_and_named() -> None:
    torch.manual_seed(2)
    model = ResNetLike(track_running_stats=False)
    guard = ness.NullSpace(model, exclude=["head"])
    guard.observe(torch.randn(16, 3, 8, 8))
    guard.constrain()
    assert guard.certificate().outside == ("bn1", "bn2")
    assert "outside the promise (batch statistics): bn1, bn2" in str(guard.certificate())
    assert not model.bn1.weight.requires_grad
    guard.merge()


def test_a_constrained_model_can_be_pickled(tmp_path: Path) -> None:
    model, guard, new = constrained("resnet")
    train(model, torch.optim.SGD(guard.parameters(), lr=0.1), new, steps=2)
    torch.save(model, tmp_path / "model.pt")
    twin = torch.load(tmp_path / "model.pt", weights_only=False)
    with torch.no_grad():
        assert torch.equal(twin(new), model(new))
    assert twin.state_dict().keys() == model.state_dict().keys()


def test_a_copy_of_a_guard_refuses_optimizers_too() -> None:
    _, guard, new = constrained("mlp", "sgd")
    twin = copy.deepcopy(guard)
    twin.model(new).square().mean().backward()
    with pytest.raises(ness.NessError, match=r"exact for torch\.optim\.SGD alone"):
        torch.optim.AdamW(twin.parameters()).step()
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    twin.merge()
    twin.observe(new)


def test_autocast_around_backward_does_not_leak() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 32), nn.ReLU(), nn.Linear(32, 5))
    guard = ness.NullSpace(model, exclude="2")
    guard.observe(low_rank(400, 40))
    guard.constrain(form="sgd")
    optimizer = torch.optim.SGD(guard.parameters(), lr=0.3, momentum=0.9)
    x, y = torch.randn(64, 40), torch.randint(0, 5, (64,))
    for _ in range(20):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert guard.certificate().holds
    assert guard.certificate()["0"].relative_drift < 1e-5


def test_a_merge_that_broke_off_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    model, guard, new = constrained("mlp")
    train(model, torch.optim.SGD(guard.parameters(), lr=0.1), new, steps=2)
    with torch.no_grad():
        trained = model(new)
    finish, calls = LayerState.finish, []

    def out_of_memory(self: LayerState, *args: Any, **kwargs: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise MemoryError
        finish(self, *args, **kwargs)

    monkeypatch.setattr(LayerState, "finish", out_of_memory)
    with pytest.raises(MemoryError):
        guard.merge()
    guard.merge()
    assert not guard.constrained
    assert torch.allclose(model(new), trained, atol=1e-5)


class Plain(nn.Module):
    """A Conv1D that prints itself, as that of transformers does."""

    def __init__(self) -> None:
        super().__init__()
        self.nf, self.nx = 5, 32
        self.weight, self.bias = nn.Parameter(torch.randn(32, 5)), nn.Parameter(torch.zeros(5))

    def __repr__(self) -> str:
        return "Conv1D(nf={nf}, nx={nx})".format(**self.__dict__)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + self.bias


Plain.__name__ = "Conv1D"


@pytest.mark.parametrize("name", sorted(ZOO))
def test_printing_a_constrained_model_shows_layers_and_ranks(name: str) -> None:
    torch.manual_seed(0)
    model, old, _ = ZOO[name]()
    plain = str(model)
    guard = ness.NullSpace(model, rule=ness.Nuclear(0.02), exclude=["head"])
    guard.observe(old)
    guard.constrain()
    ranks = {row.name: row.rank for row in guard.certificate().rows}
    for module_name, module in model.named_modules():
        shown = str(module)
        parts = [ranks.get(f"{module_name}.in_proj.{letter}", 0) for letter in "qkv"]
        if any(parts):
            assert shown.startswith(f"ConstrainedMultiheadAttention(\n  rank={tuple(parts)}\n  (out_proj): Constrained")
        elif ranks.get(module_name):
            kind = type(module)._ness_base.__name__
            assert shown.startswith(f"Constrained{kind}(")
            assert shown.endswith(f"rank={ranks[module_name]})")
            assert "in_features=" in shown or kind != "Linear"
    guard.merge()
    assert str(model) == plain


def test_what_is_printed() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), Plain())
    guard = ness.NullSpace(model, rule=ness.Rank(7))
    guard.observe(torch.randn(100, 32))
    guard.constrain(task="new", private=2)
    assert str(model[0]) == "ConstrainedLinear(in_features=32, out_features=32, bias=True, rank=7, private=2)"
    assert str(model[1]) == "ConstrainedConv1D(nf=5, nx=32, rank=7, private=2)"
    guard.discard()
    guard.constrain(rank=3)
    assert str(model[0]) == "ConstrainedLinear(in_features=32, out_features=32, bias=True, rank=3)"
    guard.merge()
    assert str(model[1]) == "Conv1D(nf=5, nx=32)"
