"""Norms per task: copies that live with the guard, switched exactly, and never mixed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ness
from helpers import ResNetLike, named, smooth_images, train
from ness.layers.norms import is_norm

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


# -- norms are recognised by what they compute ----------------------------------------------------------------------


class Rms(nn.Module):
    """As Llama, T5 and Gemma have it: their own classes, with a gain or an offset of 1."""

    def __init__(self, width: int, eps: float = 1e-6, offset: float = 0.0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((width,), 1 - offset))
        self.eps, self.offset, self.inside = eps, offset, dtype

    def forward(self, x: Tensor) -> Tensor:
        h = x.to(self.inside)
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
        return (self.offset + self.weight) * h.to(x.dtype)


class Lucid(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma, self.scale = nn.Parameter(torch.zeros(width)), width**0.5

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.normalize(x, dim=-1) * self.scale * (self.gamma + 1)


class ByHand(nn.Module):
    """A LayerNorm with a class of its own, as many small GPTs have it; its parameters stand the other way round."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.b, self.w = nn.Parameter(torch.zeros(width)), nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        _, _, width = x.shape  # three dimensions or none
        return nn.functional.layer_norm(x, (width,), self.w, self.b, 1e-5)


class ChannelsFirst(nn.Module):
    """The LayerNorm of images, as ConvNeXt has it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(1, keepdim=True)
        x = (x - mean) / torch.sqrt((x - mean).pow(2).mean(1, keepdim=True) + 1e-6)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


class Bare(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape))


class Scale(Bare):
    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class SumNorm(Bare):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x / x.abs().mean(-1, keepdim=True)


class Gated(Bare):
    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return self.weight * x / x.square().mean(-1, keepdim=True).sqrt() * gate


class Shaped(nn.Module):
    """An RMSNorm over one dimension, whose weight has the shape that is multiplied with."""

    def __init__(self, dim: int, *shape: int) -> None:
        super().__init__()
        self.dim, self.gain = dim, nn.Parameter(torch.ones(shape))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * nn.functional.normalize(x, dim=self.dim) * x.shape[self.dim] ** 0.5


class Fails(Bare):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("not here")


class Half(Bare):
    def forward(self, x: Tensor) -> Tensor:
        y = self.weight * x / x.square().mean(-1, keepdim=True).sqrt()
        return y[..., : x.shape[-1] // 2]


class Forgetful(Bare):
    def forward(self, x: Tensor) -> Tensor:
        return x / x.square().mean(-1, keepdim=True).sqrt()


NORMS = {
    "llama": lambda: Rms(16),
    "gemma": lambda: Rms(16, offset=1.0),
    "a large ε": lambda: Rms(16, eps=1e-3),
    "half inside": lambda: Rms(16, dtype=torch.float16),
    "bfloat16 inside": lambda: Rms(16, dtype=torch.bfloat16),
    "bfloat16": lambda: Rms(16).bfloat16(),
    "double": lambda: Rms(16).double(),
    "two wide": lambda: Rms(2),
    "lucid": lambda: Lucid(16),
    "by hand": lambda: ByHand(16),
    "channels first": lambda: ChannelsFirst(16),
    "a weight (1, 1, d)": lambda: Shaped(-1, 1, 1, 16),
    "a weight (1, d, 1, 1)": lambda: Shaped(1, 1, 16, 1, 1),
    "torch's": lambda: nn.RMSNorm(16),
}
OTHERS = {
    "a scale": lambda: Scale(16),
    "by the sum": lambda: SumNorm(16),
    "two inputs": lambda: Gated(16),
    "an error": lambda: Fails(16),
    "half its input": lambda: Half(16),
    "without its weight": lambda: Forgetful(16),
    "without a forward": lambda: Bare(16),
    "a matrix": lambda: Scale(16, 16),
    "one number": lambda: Scale(1),
    "prelu": lambda: nn.PReLU(16),
    "embedding": lambda: nn.Embedding(4, 16),
}


@pytest.mark.parametrize("name", NORMS)
def test_a_norm_is_recognised_by_what_it_computes(name: str) -> None:
    module = NORMS[name]()
    before = {key: value.clone() for key, value in module.state_dict().items()}
    seeds = torch.random.get_rng_state()
    assert is_norm(module)
    assert torch.equal(torch.random.get_rng_state(), seeds)
    assert module.training
    assert all(torch.equal(module.state_dict()[key], value) for key, value in before.items())
    model = named(fc=nn.Linear(16, 16), norm=module)
    assert set(ness.NullSpace(model).skipped) == set()


@pytest.mark.parametrize("name", OTHERS)
def test_what_computes_something_else_is_no_norm(name: str) -> None:
    module = OTHERS[name]()
    assert not is_norm(module)
    assert set(ness.NullSpace(named(fc=nn.Linear(16, 16), other=module)).skipped) == {"other"}


def test_the_look_at_a_norm_calls_no_hook_and_writes_nothing() -> None:
    class Counting(Rms):
        def __init__(self) -> None:
            super().__init__(8)
            self.calls = 0
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.seen += 1
            torch.rand(3)
            return super().forward(x)

    module, called = Counting(), []
    module.register_forward_hook(lambda *_: called.append(1))
    module.register_forward_pre_hook(lambda *_: called.append(1))
    seeds = torch.random.get_rng_state()
    assert is_norm(module)
    assert (module.calls, float(module.seen), called) == (0, 0.0, [])
    assert torch.equal(torch.random.get_rng_state(), seeds)


def test_a_norm_on_the_meta_device_is_recognised() -> None:
    with torch.device("meta"):
        assert is_norm(Rms(16))
        assert not is_norm(Scale(16))


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_norms_with_a_class_of_their_own_train_with_their_task(offset: float) -> None:
    torch.manual_seed(0)
    model = named(fc=nn.Linear(16, 16), norm=Rms(16, offset=offset), head=nn.Linear(16, 3))
    x = torch.randn(60, 16)
    guard = ness.NullSpace(model, rule=ness.Rank(4), exclude="head", norm="per_task")
    guard.observe(x)
    guard.constrain(task="b")
    assert model.norm.weight.requires_grad
    assert any(parameter is model.norm.weight for parameter in guard.parameters())
    before = model.norm.weight.detach().clone()
    train(model, torch.optim.AdamW(guard.parameters(), lr=0.1), torch.randn(30, 16))
    guard.merge()
    learnt = model.norm.weight.detach().clone()
    assert not torch.equal(learnt, before)
    assert guard.certificate().kept == {"b": 16}
    guard.use("first")
    assert torch.equal(model.norm.weight, before)
    guard.use("b")
    assert torch.equal(model.norm.weight, learnt)
    frozen = ness.NullSpace(model, rule=ness.Rank(4), exclude="head")
    frozen.observe(x)
    frozen.constrain()
    assert not model.norm.weight.requires_grad
    frozen.merge()
