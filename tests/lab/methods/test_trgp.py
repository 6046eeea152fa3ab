"""TRGP against its definition."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import tiny
from ness import NessError
from ness.lab.methods._projection.scales import Scale, identity_scale, rescaled, rescaled_inputs
from ness.lab.methods.trgp import admitted, covering, energies, gated, trusted
from ness.lab.runs.jobs import resolve


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def after_tasks(count: int, **changes):
    one = tiny.trainer("trgp", trust_images=40, **changes)
    while one.at < count:
        one.advance()
    return one


def test_regimes_by_hand() -> None:
    """T1: .6 of the gradient is trusted, .447 is not; the two strongest, strongest first."""
    e1, e2 = torch.tensor([[1.0], [0.0]]), torch.tensor([[0.0], [1.0]])
    assert trusted(torch.tensor([[3.0, 4.0]]), {0: e1}, 0.5, 2) == [0]
    assert trusted(torch.tensor([[3.0, 6.0]]), {0: e1}, 0.5, 2) == []
    assert trusted(torch.tensor([[3.0, 4.0]]), {0: e1, 1: e2, 2: torch.eye(2)}, 0.5, 2) == [2, 1]


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), width=st.integers(1, 12), size=st.integers(1, 12), outputs=st.integers(1, 5))
def test_identity_scales_are_no_scales_and_others_act_inside_the_basis_only(seed, width, size, outputs) -> None:
    """T2, and that W_eff x = W x for x outside the basis."""
    basis = torch.linalg.qr(normal(width, min(size, width), seed=seed))[0]
    weight = normal(outputs, width, seed=seed + 1)
    assert torch.equal(rescaled(weight, [identity_scale(basis), identity_scale(basis)]), weight)
    matrix = nn.Parameter(normal(basis.shape[1], basis.shape[1], seed=seed + 2))
    moved = rescaled(weight, [Scale(basis, matrix)]) - weight
    outside = normal(width, 3, seed=seed + 3)
    outside = outside - basis @ basis.mT @ outside
    assert (moved @ outside).abs().max() < 1e-9
    assert torch.allclose(moved @ basis, weight @ basis @ (matrix - torch.eye(len(matrix))))


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), width=st.integers(1, 12), size=st.integers(1, 12), lenders=st.integers(0, 3))
def test_scaled_inputs_are_scaled_weights(seed, width, size, lenders) -> None:
    """x̃ Wᵀ = x W_effᵀ, and so are its gradients with respect to x, W and every Q."""
    scales = [
        Scale(torch.linalg.qr(normal(width, min(size, width), seed=seed + j))[0], nn.Parameter(matrix))
        for j, matrix in enumerate(normal(lenders, min(size, width), min(size, width), seed=seed))
    ]
    x, weight = normal(4, width, seed=seed + 7).requires_grad_(), normal(5, width, seed=seed + 8).requires_grad_()
    both = rescaled_inputs(x, scales) @ weight.mT, x @ rescaled(weight, scales).mT
    torch.testing.assert_close(*both)
    moving = [x, weight, *(scale.matrix for scale in scales)]
    for mine, theirs in zip(*(torch.autograd.grad(y.sin().sum(), moving) for y in both), strict=True):
        torch.testing.assert_close(mine, theirs)
    untouched = [identity_scale(scale.basis) for scale in scales]
    assert torch.equal(rescaled_inputs(x, untouched), x)


def test_shared_steps_are_orthogonal_to_the_memory_and_scales_are_free() -> None:
    """T3."""
    one = after_tasks(1)
    held = one.method.bases["fc"]
    weight, bias = one.context.model.fc.weight, one.context.model.fc.bias
    before = torch.cat([weight, bias[:, None]], 1).detach().clone()
    while one.at < 2:
        one.advance()
    step = torch.cat([weight, bias[:, None]], 1).detach() - before
    assert (step @ held).norm() <= 1e-5 * step.norm()
    (scale,) = one.method.scales[1]["fc"]
    assert torch.equal(scale.basis, one.method.task_bases[0]["fc"])
    assert (scale.matrix - torch.eye(len(scale.matrix))).norm() > 1e-3
    assert one.notes[1]["trusted"]["fc"] == [0]


def test_a_later_tasks_scales_do_not_touch_earlier_ones() -> None:
    """T4."""
    one = after_tasks(3)
    batches = [samples.take(torch.arange(20)) for samples in one.data["test"]]
    one.context.model.eval()
    with torch.no_grad():
        before = [one.method.logits(batch) for batch in batches]
        for scales in one.method.scales[2].values():
            for scale in scales:
                scale.matrix.add_(1)
        after = [one.method.logits(batch) for batch in batches]
    assert [torch.equal(x, y) for x, y in zip(before, after, strict=True)] == [True, True, False]


def test_the_memory_by_hand() -> None:
    """T5: M = e1, R = diag(1, 3, 2, 0), ε = .97: chosen 1, 2, 0; both new ones enter, the reference keeps one."""
    rows = torch.diag(torch.tensor([1.0, 3.0, 2.0, 0.0], dtype=torch.float64))
    vectors, energy = energies(torch.eye(4, dtype=torch.float64)[:, :1], rows)
    assert energy.tolist() == [1, 9, 4]
    chosen = covering(energy, 14.0, 0.97)
    assert chosen == [1, 2, 0]
    assert torch.equal(vectors[:, chosen].abs(), torch.eye(4, dtype=torch.float64)[:, [1, 2, 0]])
    assert admitted(chosen, 1, strongest=True) == [1, 2]
    assert admitted(chosen, 1, strongest=False) == [2]


def test_every_switch_of_the_reference_changes_the_run() -> None:
    base = {"epochs": 1, "trust": 0.3}
    fixed = tiny.to_the_end(after_tasks(0, **base))
    for change in ({"strongest": "dropped"}, {"third_task": "second"}, {"norms": "free"}, {"reuse": 1}):
        assert not tiny.same(tiny.to_the_end(after_tasks(0, **base, **change)), fixed), change
    weak = tiny.to_the_end(after_tasks(0, epochs=1, strongest="dropped"))
    assert weak.method.bases["fc"].shape[1] < fixed.method.bases["fc"].shape[1]


def test_the_references_gate() -> None:
    names = ["conv1", "layer1.0.conv1", "layer1.0.conv2", "layer2.0.conv1", "layer2.0.conv2", "layer2.0.shortcut.conv"]
    chosen = {name: [0] for name in names}
    assert list(gated(chosen, names)) == names[:-1]
    assert gated({name: [0] for name in names[1:]}, names) == {}
    without = {name: [0] for name in names if name != "layer1.0.conv1"}
    assert list(gated(without, names)) == ["conv1", "layer2.0.conv1", "layer2.0.conv2"]
    one = after_tasks(0, gate="first", trust=0.999)
    tiny.to_the_end(one)
    assert one.method.lenders[1] == {}


def test_presets_and_bad_settings() -> None:
    found = resolve("trgp", "cifar100", "reference").settings
    assert (found.strongest, found.gate, found.norms, found.third_task) == ("dropped", "first", "free", "all")
    assert resolve("trgp", "five-datasets", "reference").settings.third_task == "second"
    fixed = resolve("trgp", "mini-imagenet").settings
    assert (fixed.strongest, fixed.gate, fixed.norms, fixed.growth) == ("kept", "none", "frozen", 0)
    for changes, message in (
        ({"trust": 1.5}, "trust is 1.5, expected a share"),
        ({"reuse": 0}, "reuse is 0, expected at least 1"),
        ({"optimizer": "adamw"}, "trgp does not go with adamw"),
    ):
        with pytest.raises(NessError, match=message):
            tiny.job("trgp", **changes)
    with pytest.raises(NessError, match="trust_images is 99, but task 1 has 56"):
        tiny.trainer("trgp", trust_images=99).advance()
