"""DFGP and SAM against their definitions."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import tiny
from ness import NessError
from ness.lab import registry
from ness.lab.methods import dfgp
from ness.lab.methods.dfgp import Dfgp, Mixed, ascended, beta_shares, mixed, mixed_loss
from ness.lab.runs.jobs import resolve
from ness.lab.training import optimizers
from ness.lab.training.loader import Batch


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_sam_by_hand() -> None:
    """D1: loss ½·2·w² at w = 1, ρ = .05, lr = .1: the gradient at 1.05 is 2.1, so w becomes .79."""
    weight = nn.Parameter(torch.ones(1, dtype=torch.float64))
    weight.square().sum().backward()
    kept = optimizers.ascend([weight], 0.05)
    weight.grad = None
    weight.square().sum().backward()
    optimizers.restore(kept)
    torch.optim.SGD([weight], lr=0.1).step()
    assert weight.item() == pytest.approx(0.79)


def test_a_step_of_rate_zero_leaves_every_bit() -> None:
    """D2: weights are put back, not subtracted back."""
    one = tiny.trainer("dfgp", norm="batch")
    one.advance()
    before = {name: value.clone() for name, value in one.context.model.state_dict().items()}
    learning = one.learning
    for inputs in one.open_epoch():
        learning.step(type(inputs)(inputs.index, torch.zeros(()), inputs.share, inputs.clock))
    assert all(torch.equal(value, before[name]) for name, value in one.context.model.state_dict().items())


def test_label_weights_follow_the_pixels() -> None:
    """D3: a quarter of x_π puts a quarter on y_π, three quarters in the reference's way."""
    logits = torch.tensor([[2.0, -1.0]])
    batch = Batch(torch.tensor([[[[1.0]]], [[[5.0]]]]), torch.tensor([0, 1]), 0)
    mix = mixed(batch, torch.tensor([1, 0]), torch.tensor([0.25, 0.25]))
    assert mix.images.flatten().tolist() == [2.0, 4.0]
    one = Mixed(mix.images[:1], mix.labels[:1], mix.partner[:1], mix.share[:1])
    own, other = (float(F.cross_entropy(logits, torch.tensor([label]))) for label in (0, 1))
    assert float(mixed_loss(logits, one, "correct")) == pytest.approx(0.75 * own + 0.25 * other)
    assert float(mixed_loss(logits, one, "swapped")) == pytest.approx(0.25 * own + 0.75 * other)


def test_the_loss_is_the_mean_of_each_samples_loss_or_as_the_reference_has_it() -> None:
    """D4."""
    logits, labels, partner = torch.randn(6, 4, generator=generator()), torch.arange(6) % 4, torch.arange(6).flip(0) % 4
    share = torch.rand(6, generator=generator(1))
    mix = Mixed(torch.empty(6, 1, 1, 1), labels, partner, share)
    each = [
        (1 - share[i]) * F.cross_entropy(logits[i : i + 1], labels[i : i + 1])
        + share[i] * F.cross_entropy(logits[i : i + 1], partner[i : i + 1])
        for i in range(6)
    ]
    assert float(mixed_loss(logits, mix, "correct")) == pytest.approx(float(torch.stack(each).mean()), abs=1e-6)
    mean = share.mean()
    reference = mean * F.cross_entropy(logits, labels) + (1 - mean) * F.cross_entropy(logits, partner)
    assert float(mixed_loss(logits, mix, "swapped")) == pytest.approx(float(reference))


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10_000), count=st.integers(1, 64), rho=st.floats(0, 1), scale=st.floats(-8, 8))
def test_shares_move_at_most_rho_and_stay_shares(seed, count, rho, scale) -> None:
    """D5."""
    share = torch.rand(count, generator=generator(seed), dtype=torch.float64)
    gradient = torch.randn(count, generator=generator(seed + 1), dtype=torch.float64) * 10**scale
    moved = ascended(share, gradient, rho)
    assert float((moved - share).norm()) <= rho + 1e-9
    assert bool(((moved >= 0) & (moved <= 1)).all())
    assert torch.equal(ascended(share, torch.zeros_like(share), rho), share)


def test_shares_are_beta_distributed() -> None:
    for a in (1.0, 20.0):
        drawn = beta_shares(20_000, a, generator())
        assert float(drawn.mean()) == pytest.approx(0.5, abs=0.01)
        assert float(drawn.var()) == pytest.approx(1 / (4 * (2 * a + 1)), rel=0.05)


def test_the_step_is_projected_after_the_second_gradient() -> None:
    """D6: with momentum too."""
    for optimizer in ("sam", "sgd", "sgdm"):
        one = tiny.trainer("dfgp", optimizer=optimizer)
        while one.at < 1:
            one.advance()
        weight, bias = one.context.model.fc.weight, one.context.model.fc.bias
        before = torch.cat([weight, bias[:, None]], 1).detach().clone()
        held = one.method.bases["fc"]
        while one.at < 2:
            one.advance()
        step = torch.cat([weight, bias[:, None]], 1).detach() - before
        assert (step @ held).norm() <= 1e-5 * step.norm()


def test_mix_up_and_sam_each_change_the_run() -> None:
    runs = [
        tiny.to_the_end(tiny.trainer("dfgp", epochs=1, **changes))
        for changes in (
            {}, {"mixing": "none"}, {"optimizer": "sgd"}, {"mix_labels": "swapped", "mix_beta": 1.0}, {"mix_rho": 0.0},
        )
    ]  # fmt: skip
    for number, one in enumerate(runs):
        assert not any(tiny.same(one, other) for other in runs[:number])
    without = tiny.to_the_end(tiny.trainer("gpm", epochs=1, optimizer="sam", growth=0.0))
    assert tiny.same(runs[1], without)  # FGP is GPM with SAM


class Penalised(Dfgp):
    def loss(self, batch: Batch) -> Tensor:
        return super().loss(batch) + self.layers["fc"].weight.square().sum()


def both_losses(kind: type[Dfgp] = Dfgp, **changes: Any) -> tuple[list[int], dict[str, Tensor]]:
    """Sizes of the passes that the loss of raw and mixed images takes, then the loss, its gradients and buffers."""
    one = tiny.trainer(replace(registry.all_methods()["dfgp"], build=kind), **changes)
    model, method = one.context.model.train(), one.method
    assert isinstance(model, tiny.TinyNet)
    assert isinstance(method, Dfgp)
    model.dropout.p = 0.0  # masks are drawn for one pass or for two
    batch, sizes = one.data["train"][0].take(torch.arange(16)), []
    model.register_forward_pre_hook(lambda module, inputs: sizes.append(len(inputs[0])))
    share = beta_shares(16, 2.0, generator()).requires_grad_()
    loss = method._both(batch, torch.arange(16).flip(0), share)
    loss.backward()
    found = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    assert share.grad is not None
    return sizes, {"loss": loss.detach(), "share": share.grad, **found, **dict(model.named_buffers())}


@pytest.mark.parametrize("labels", ["correct", "swapped"])
def test_one_pass_of_raw_and_mixed_images_is_two(labels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"norm": "batch", "mix_labels": labels, "mix_weight": 1.0}
    sizes, two = both_losses(**changes)
    assert sizes == [16, 16]
    monkeypatch.setattr(dfgp, "on_gpu", lambda x: True)
    sizes, one = both_losses(**changes)
    assert sizes == [32]
    assert one.keys() == two.keys()
    for name, value in two.items():
        torch.testing.assert_close(one[name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("kind", "norm"), [(Dfgp, "stored"), (Penalised, "batch")])
def test_stored_statistics_and_a_loss_of_its_own_take_two_passes(kind, norm, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, before = both_losses(kind, norm=norm)
    monkeypatch.setattr(dfgp, "on_gpu", lambda x: True)
    again, found = both_losses(kind, norm=norm)
    assert sizes == again == [16, 16]
    assert all(torch.equal(found[name], value) for name, value in before.items())


def test_presets_and_bad_settings() -> None:
    fixed, reference = resolve("dfgp", "five-datasets").settings, resolve("dfgp", "five-datasets", "reference").settings
    assert (fixed.threshold, fixed.growth, fixed.mix_beta, fixed.optimizer) == (0.95, 0, 1, "sam")
    assert (fixed.mix_labels, reference.mix_labels) == ("correct", "swapped")
    for changes, message in (
        ({"mix_weight": 0.0}, "mix_weight is 0, expected above 0; for none set mixing to none"),
        ({"mixing": "none", "mix_rho": 0.1}, "mix_rho was set, but mixing is 'none'"),
        ({"mix_beta": 0.0}, "mix_beta is 0"),
        ({"mixup": 0.2}, "mixes images in its own way"),
        ({"optimizer": "adamw"}, "dfgp does not go with adamw"),
    ):
        with pytest.raises(NessError, match=message):
            tiny.job("dfgp", **changes)
