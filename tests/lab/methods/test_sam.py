"""SAM in projecting methods: the ascent is over all parameters that have a gradient, frozen norms included."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import tiny
from ness.lab.methods.base import clear
from ness.lab.runs.jobs import resolve
from ness.lab.training.loop import Trainer

PROJECTING = ("codecl", "cuber", "dfgp", "gpm", "ogd", "owm", "sd", "sgp", "trgp")
RHO = 0.05


def in_the_second_task(method: str, **changes: Any) -> Trainer:
    one = tiny.trainer(method, optimizer="sam", rho=RHO, epochs=1, **changes)
    while one.at < 1:
        one.advance()
    one.advance()
    one.open_epoch()
    one.context.model.dropout.p = 0.0
    return one


@contextmanager
def passes(one: Trainer) -> Iterator[list[dict[str, Tensor]]]:
    """The parameters as every forward pass of the network inside finds them."""
    model, seen = one.context.model, []
    handle = model.register_forward_pre_hook(
        lambda *_: seen.append({name: value.detach().clone() for name, value in model.named_parameters()})
    )
    try:
        yield seen
    finally:
        handle.remove()


@pytest.mark.parametrize("method", PROJECTING)
def test_the_ascent_moves_frozen_norms_too_and_puts_them_back(method: str) -> None:
    one = in_the_second_task(method)
    model, trained = one.context.model, one.learning.trained
    batch = one.data["train"][1].take(torch.arange(16))
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    clear(trained)
    with passes(one) as seen, one.method.watching():
        one.method.gradients(batch, trained, sam=True)
    ascent = {name: seen[-1][name] - value for name, value in before.items()}
    length = torch.stack([each.norm() for each in ascent.values()]).norm()
    scales = one.method.scales.get(1, {}) if hasattr(one.method, "scales") else {}
    assert float(length) == pytest.approx(RHO, rel=1e-4) or scales  # what a task recombines with takes its share
    for name in ("norm.weight", "norm.bias", "conv.weight", "fc.weight", "heads.1.weight"):
        assert ascent[name].norm() > 1e-4, name
    for name in ("heads.0.weight", "heads.2.weight"):
        assert ascent[name].norm() == 0, name
    for name, value in model.named_parameters():
        assert torch.equal(value, before[name]), name
    for parameter in (model.norm.weight, model.norm.bias):
        assert parameter.grad is None
        assert not parameter.requires_grad


def test_the_ascent_is_along_the_gradient_of_all_that_has_one() -> None:
    """e = ρ g/‖g‖ over layers, norms and the task's head together, then the gradient at w + e."""
    one = in_the_second_task("gpm")
    model, trained = one.context.model, one.learning.trained
    batch = one.data["train"][1].take(torch.arange(16))
    weights = {name: value.detach().clone() for name, value in model.named_parameters() if "heads" not in name}
    weights["heads.1.weight"] = model.heads[1].weight.detach().clone()

    def gradient(at: dict[str, Tensor]) -> dict[str, Tensor]:
        leaves = {name: value.clone().requires_grad_() for name, value in at.items()}
        logits = torch.func.functional_call(model, leaves, (batch.images, 1))
        found = torch.autograd.grad(F.cross_entropy(logits, batch.labels), list(leaves.values()))
        return dict(zip(leaves, found, strict=True))

    first = gradient(weights)
    length = torch.cat([each.flatten() for each in first.values()]).norm()
    expected = gradient({name: value + RHO / length * first[name] for name, value in weights.items()})
    clear(trained)
    one.method.gradients(batch, trained, sam=True)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-3, atol=1e-6)
    without = torch.cat([each.flatten() for name, each in first.items() if "norm" not in name]).norm()
    assert without < 0.999 * length  # or the norms were worth nothing


@pytest.mark.parametrize("method", ["gpm", "dfgp"])
def test_a_pass_that_fails_leaves_the_weights_where_they_were(method: str) -> None:
    one = in_the_second_task(method)
    model, trained = one.context.model, one.learning.trained
    batch = one.data["train"][1].take(torch.arange(16))
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    passes_before = 2 if method == "dfgp" else 1

    def fails(*_: object) -> None:
        nonlocal passes_before
        if passes_before == 0:
            raise KeyboardInterrupt
        passes_before -= 1

    handle = model.register_forward_pre_hook(fails)
    clear(trained)
    with pytest.raises(KeyboardInterrupt):
        one.method.gradients(batch, trained, sam=True)
    handle.remove()
    for name, value in model.named_parameters():
        assert torch.equal(value, before[name]), name
    assert not model.norm.weight.requires_grad
    assert model.norm.weight.grad is None


@pytest.mark.parametrize("norm", ["batch", "stored"])
@pytest.mark.parametrize("method", PROJECTING)
def test_norms_stand_still_from_the_second_task_on(method: str, norm: str) -> None:
    one = tiny.trainer(method, optimizer="sam", epochs=1, norm=norm)
    while one.at < 1:
        one.advance()
    held = {name: value.clone() for name, value in one.context.model.norm.state_dict().items()}
    tiny.to_the_end(one)
    for name, value in one.context.model.norm.state_dict().items():
        assert torch.equal(value, held[name]), name


def test_runs_of_sam_without_the_norms_are_not_taken_for_runs_with_them() -> None:
    for method in PROJECTING:
        assert tiny.job(method, optimizer="sam").revision == 2
    assert tiny.job("gpm", optimizer="sgdm").revision == 1
    assert tiny.job("gpm", optimizer="sam", sam_tasks="first").revision == 1
    assert tiny.job("trgp", optimizer="sam", norms="free").revision == 1  # they trained, so the ascent had them
    assert resolve("finetune", "digits", changes={"optimizer": "sam"}).revision == 1
