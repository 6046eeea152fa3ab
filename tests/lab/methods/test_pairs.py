"""The rows behind a gradient: Σ gᵀ x is the gradient, and projecting them is projecting it."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call

import tiny
from ness import NessError
from ness.lab import registry
from ness.lab.methods._pairs import Pairs
from ness.lab.methods._projection.project import Projecting, gradient_of, project_gradients, removal
from ness.lab.methods._projection.rows import Layers
from ness.lab.methods.base import TaskData, clear
from ness.lab.training.loader import Batch
from ness.lab.training.loop import Trainer
from ness.layers import LinearLayer


def layer(inputs: int, outputs: int, *, bias: bool, seed: int) -> LinearLayer:
    torch.manual_seed(seed)
    module = nn.Linear(inputs, outputs, bias=bias).double()
    return LinearLayer("fc", module)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    bias=st.booleans(),
    passes=st.integers(1, 3),
    together=st.booleans(),
    inputs=st.integers(2, 9),
)
def test_projecting_rows_is_projecting_the_gradient(seed, bias, passes, together, inputs) -> None:
    """Whether the passes are of one backward call or of several that add up."""
    held = layer(inputs, 20, bias=bias, seed=seed)
    pairs = Pairs({"fc": held})
    with pairs.watching():
        losses = [held.module(normal(3, 2, inputs, seed=seed + n)[:, 0]).square().sum() for n in range(passes)]
        for loss in [torch.stack(losses).sum()] if together else losses:
            loss.backward()
    known = pairs.of("fc")
    assert known is not None
    torch.testing.assert_close(known[1].mT @ known[0], gradient_of(held))
    basis, _ = torch.linalg.qr(normal(held.width, 1 + seed % held.width, seed=seed))
    expected = removal(basis)(gradient_of(held))
    project_gradients({"fc": held}, {"fc": removal(basis)}, pairs)
    torch.testing.assert_close(gradient_of(held), expected)


def test_a_gradient_that_is_cleared_begins_anew() -> None:
    held = layer(4, 20, bias=False, seed=1)
    pairs = Pairs({"fc": held})
    with pairs.watching():
        held.module(normal(3, 4, seed=1)).sum().backward()
        held.weight.grad = None
        (held.module(normal(3, 4, seed=2)).sum() + held.module(normal(3, 4, seed=3)).square().sum()).backward()
    rows, outer = pairs.of("fc")
    assert len(rows) == 6
    torch.testing.assert_close(outer.mT @ rows, held.weight.grad)


def test_many_rows_and_passes_without_gradient_are_left_to_the_gradient() -> None:
    held = layer(4, 5, bias=False, seed=1)
    pairs = Pairs({"fc": held})
    with pairs.watching():
        with torch.no_grad():
            held.module(normal(3, 4, seed=1))
        assert pairs.of("fc") is None
        held.module(normal(5, 4, seed=1)).sum().backward()
    assert pairs.of("fc") is None
    pairs.clear()
    assert not pairs.held
    assert not held.module._forward_hooks


OWN_CHANGES = {
    "gpm": {"optimizer": "sam"},
    "dfgp": {"batch": 4},
    "trgp": {"network": tiny.WITHOUT_BIAS},
    "codecl": {"network": tiny.WITHOUT_BIAS, "overlap": 0.0, "shared": 5},
}


@pytest.mark.parametrize("method", ["gpm", "sgp", "dfgp", "sd", "owm", "ogd", "trgp", "codecl"])
def test_a_run_by_rows_ends_where_one_by_gradients_does(method: str, monkeypatch) -> None:
    changes = {"batch": 8} | OWN_CHANGES.get(method, {})
    one = tiny.to_the_end(tiny.trainer(method, epochs=1, **changes))
    asked = []
    kept = Pairs.of
    monkeypatch.setattr(Pairs, "of", lambda self, name: asked.append(kept(self, name)))  # None: by gradients
    other = tiny.to_the_end(tiny.trainer(method, epochs=1, **changes))
    assert any(found is not None for found in asked)  # or nothing was compared
    assert method not in ("trgp", "codecl") or "fc" in one.method.scales[2]  # whose inputs are scaled
    mine, theirs = one.context.model.state_dict(), other.context.model.state_dict()
    for name in mine:
        torch.testing.assert_close(mine[name], theirs[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "paired"),
    [
        pytest.param({}, [], id="bias"),
        pytest.param({"network": tiny.WITHOUT_BIAS}, ["fc"], id="inputs are scaled"),
        pytest.param({"network": tiny.WITHOUT_BIAS, "subtracted": "detached"}, [], id="detached"),
    ],
)
def test_layers_whose_weights_are_scaled_have_no_pairs(changes, paired) -> None:
    """They multiply by other weights than those that train."""
    held = tiny.trainer("codecl", **changes).method
    assert isinstance(held, Projecting)
    assert list(held.pairs.layers) == paired


def clip(layers: Layers) -> None:
    torch.nn.utils.clip_grad_norm_([p for layer in layers.values() for p in (layer.weight,)], 1e-3)


def pull(layers: Layers) -> None:
    """Adds to every .grad: a penalty on weights by hand."""
    for held in layers.values():
        held.weight.grad += 0.1 * held.weight.detach()


class ClipsBefore:
    def after_backward(self, batch: Batch) -> None:
        clip(self.layers)
        super().after_backward(batch)


class ClipsItsData:
    def after_backward(self, batch: Batch) -> None:
        for held in self.layers.values():
            held.weight.grad.data.clamp_(-1e-4, 1e-4)  # no version counter sees it
        super().after_backward(batch)


class ClipsAfter:
    def after_backward(self, batch: Batch) -> None:
        super().after_backward(batch)
        clip(self.layers)


class Replaces:
    def after_backward(self, batch: Batch) -> None:
        for held in self.layers.values():
            held.weight.grad = held.weight.grad.sign()
        super().after_backward(batch)


class AddsToGradients:
    def gradients(self, batch: Batch, trained: Any, *, sam: bool) -> Tensor:
        loss = super().gradients(batch, trained, sam=sam)
        pull(self.layers)
        return loss


class TakesASecondPass:
    def gradients(self, batch: Batch, trained: Any, *, sam: bool) -> Tensor:
        loss = super().gradients(batch, trained, sam=sam)
        sum(held.weight.square().sum() for held in self.layers.values()).backward()
        return loss


class Penalises:
    def loss(self, batch: Batch) -> Tensor:
        return super().loss(batch) + 0.1 * sum(held.weight.square().sum() for held in self.layers.values())


class UsesOtherWeights:
    def logits(self, batch: Batch) -> Tensor:
        other = {f"{name}.weight": 2 * held.weight for name, held in self.layers.items()}
        return functional_call(self.model, other, (batch.images, batch.task))


class Watches:
    @contextmanager
    def watching(self) -> Iterator[None]:
        with super().watching():
            yield
        pull(self.layers)


class HooksOnWeights:
    def before_task(self, lesson: TaskData) -> None:
        super().before_task(lesson)
        for held in self.layers.values():
            held.weight.register_hook(lambda gradient: gradient.clamp(-1e-4, 1e-4))


class HooksAfterAccumulation:
    def before_task(self, lesson: TaskData) -> None:
        super().before_task(lesson)
        for held in self.layers.values():
            held.weight.register_post_accumulate_grad_hook(self._halved)

    def _halved(self, weight: Tensor) -> None:
        weight.grad.mul_(0.5)


class GatesOutputs:
    def before_task(self, lesson: TaskData) -> None:
        super().before_task(lesson)
        for held in self.layers.values():
            held.module.register_forward_hook(lambda module, inputs, y: y * 0.5)


class ClipsOutputGradients:
    def before_task(self, lesson: TaskData) -> None:
        super().before_task(lesson)
        for held in self.layers.values():
            held.module.register_forward_hook(self._clipped)

    def _clipped(self, module: nn.Module, inputs: tuple[Tensor, ...], y: Tensor) -> None:
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))


class ScalesInputs:
    def before_task(self, lesson: TaskData) -> None:
        super().before_task(lesson)
        for held in self.layers.values():
            held.module.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 3,))


class LeavesLayersOut:
    def parameters(self, lesson: TaskData) -> list[nn.Parameter]:
        out = {id(p) for p in self.layers["fc"].module.parameters()} if lesson.task == 1 else set()
        out |= {id(self.layers["conv"].weight)} if lesson.task == 2 else set()
        return [p for p in super().parameters(lesson) if id(p) not in out]


class LeavesTheBiasOut:
    def parameters(self, lesson: TaskData) -> list[nn.Parameter]:
        return [p for p in super().parameters(lesson) if p is not self.layers["fc"].bias]


class LeavesTheWeightOut:
    def parameters(self, lesson: TaskData) -> list[nn.Parameter]:
        return [p for p in super().parameters(lesson) if p is not self.layers["fc"].weight]


CHANGED = [
    ClipsBefore,
    ClipsItsData,
    ClipsAfter,
    Replaces,
    AddsToGradients,
    TakesASecondPass,
    Penalises,
    UsesOtherWeights,
    Watches,
    HooksOnWeights,
    HooksAfterAccumulation,
    GatesOutputs,
    ClipsOutputGradients,
    ScalesInputs,
    LeavesLayersOut,
]


def of_kind(method: str, *mixins: type, by_rows: bool | None = None) -> Any:
    """A run whose method is derived from the registered one; `by_rows` is said by the derived class, or not at all."""
    spec = registry.all_methods()[method]
    parent = spec.build
    said = {} if by_rows is None else {"by_rows": by_rows}
    derived = type("Derived", (*mixins, parent), said)
    changes = {"batch": 8, "epochs": 1, **OWN_CHANGES.get(method, {})}
    network = changes.pop("network", tiny.NETWORK)
    job = tiny.job(dataclasses.replace(spec, build=derived), **changes)
    return Trainer(job.method, network, job.load(1, None), job.settings, 1)


def second_task(one: Trainer) -> Any:
    while one.at < 1:
        one.advance()
    one.advance()
    return one


OTHERS = ("sgp", "sd", "dfgp", "owm", "ogd", "trgp", "codecl")


@cache
def plain_run(method: str) -> Any:
    return tiny.to_the_end(of_kind(method, by_rows=False))


@pytest.mark.parametrize(
    ("method", "changed"),
    [("gpm", each) for each in CHANGED]
    + [(method, each) for method in OTHERS for each in (ClipsItsData, AddsToGradients, Penalises)],
    ids=lambda each: each if isinstance(each, str) else each.__name__,
)
def test_what_a_derived_method_does_in_any_hook_is_what_it_gets(method: str, changed: type) -> None:
    """Linear layers and convolutions alike: a run ends where one that never looks at rows does."""
    one, other = (tiny.to_the_end(of_kind(method, changed, by_rows=said)) for said in (None, False))
    assert tiny.same(one, other)
    mine, theirs = one.context.model.state_dict(), plain_run(method).context.model.state_dict()
    apart = {name: not torch.allclose(mine[name], theirs[name], atol=1e-4) for name in ("conv.weight", "fc.weight")}
    assert all(apart.values()), apart  # it did something, in both


HONEST = {ClipsAfter, HooksOnWeights, HooksAfterAccumulation, GatesOutputs, ClipsOutputGradients, ScalesInputs}


@pytest.mark.parametrize("changed", [*sorted(HONEST, key=lambda each: each.__name__), ClipsBefore, Replaces])
def test_a_class_that_says_rows_are_right_is_checked_where_that_can_be_seen(changed: type) -> None:
    """Hooks of torch's own, and gradients that were changed or put in place after the passes, are noticed as well."""
    one, other = (second_task(of_kind("gpm", changed, by_rows=said)) for said in (True, False))
    for run in (one, other):
        for inputs in run.open_epoch():
            run.learning.step(inputs)
    mine, theirs = one.context.model.state_dict(), other.context.model.state_dict()
    for name in mine:
        torch.testing.assert_close(mine[name], theirs[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["fc", "conv"])
@pytest.mark.parametrize(
    "changed", [None, *CHANGED[:-1]], ids=lambda each: "nothing" if each is None else each.__name__
)
def test_the_gradient_that_is_stepped_is_the_projection_of_the_one_asked_for(name: str, changed: type | None) -> None:
    """G ← G - G M Mᵀ of the very .grad that the hooks before the projection left, and what comes after it on top."""
    one = second_task(of_kind("gpm", *([] if changed is None else [changed])))
    method, trained = one.method, one.learning.trained
    held, batch = method.layers[name], one.data["train"][1].take(torch.arange(8))
    asked: dict[str, Tensor] = {}
    projected = Projecting.after_backward

    def seen(self: Any, batch: Batch) -> None:
        asked["G"] = joint_gradient(held)
        projected(self, batch)

    clear(trained)
    with method.watching():
        method.gradients(batch, trained, sam=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Projecting, "after_backward", seen)
        method.after_backward(batch)
    basis = method.bases[name].double()
    expected = asked["G"] - asked["G"] @ basis @ basis.mT
    found = joint_gradient(held)
    if changed is ClipsAfter:
        assert torch.linalg.vector_norm(torch.stack([h.weight.grad.norm() for h in method.layers.values()])) <= 1.001e-3
        expected *= found.norm() / expected.norm()
        expected, found = expected[:, : held.fan_in], found[:, : held.fan_in]
        expected *= found.norm() / expected.norm()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-7)


def joint_gradient(held: Any) -> Tensor:
    """[∂W ∂b] (o, width) in float64."""
    weight = held.weight.grad.flatten(1).double()
    return weight if held.bias is None else torch.cat([weight, held.bias.grad.double().unsqueeze(1)], 1)


@pytest.mark.parametrize(("changed", "part"), [(LeavesTheBiasOut, "bias"), (LeavesTheWeightOut, "weight")])
def test_half_of_a_layer_cannot_be_projected(changed: type, part: str) -> None:
    one = second_task(of_kind("gpm", changed))
    with pytest.raises(NessError, match=f"layer 'fc': its {part} has no gradient"):
        one.advance()


def test_a_hook_of_one_object_alone_is_noticed_too() -> None:
    one, other = (second_task(tiny.trainer("gpm", batch=8)) for _ in range(2))
    plain = one.method.loss
    one.method.loss = lambda batch: plain(batch) + 0.1 * one.method.layers["fc"].weight.square().sum()
    with one.method.watching():
        one.method.gradients(one.data["train"][1].take(torch.arange(8)), one.learning.trained, sam=False)
    assert not one.method.pairs.held
    with other.method.watching():
        other.method.gradients(other.data["train"][1].take(torch.arange(8)), other.learning.trained, sam=False)
    assert other.method.pairs.held


def test_every_projecting_method_of_ours_says_it_of_itself() -> None:
    for name in ("gpm", "sgp", "sd", "dfgp", "owm", "ogd", "trgp", "codecl"):
        assert vars(registry.all_methods()[name].build)["by_rows"], name
