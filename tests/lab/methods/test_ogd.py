"""OGD against its definition."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny
from ness import NessError
from ness.lab.methods._project import Removal
from ness.lab.methods.ogd import extended, logit_gradients


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_a_linear_models_stored_outputs_do_not_move() -> None:
    """OG1: f = w·x; the gradient of f is x."""
    weight, stored, new = normal(8), normal(3, 8, seed=1), normal(20, 8, seed=2)
    basis = extended(torch.zeros(0, 8, dtype=torch.float64), stored)
    remove, before = Removal((basis.mT, basis)), stored @ weight
    for x in new:
        gradient = (weight @ x - 1) * x
        weight = weight - 0.05 * remove(gradient.unsqueeze(0))[0]
    assert (stored @ weight - before).abs().max() < 1e-12
    assert (new @ weight - new @ normal(8)).abs().max() > 1e-2


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), width=st.integers(1, 30), first=st.integers(0, 8), more=st.integers(1, 12))
def test_directions_stay_orthonormal_and_projected_gradients_orthogonal_to_all(seed, width, first, more) -> None:
    """OG2."""
    start = normal(first, width, seed=seed)
    basis = extended(torch.zeros(0, width, dtype=torch.float64), start)
    vectors = normal(more, width, seed=seed + 1)
    grown = extended(basis, vectors)
    assert (grown @ grown.mT - torch.eye(len(grown))).abs().max() < 1e-9
    assert torch.equal(grown[: len(basis)], basis)
    left = Removal((grown.mT, grown))(normal(1, width, seed=seed + 2))
    for vector in torch.cat([start, vectors]):
        assert float((left @ vector).abs()) <= 2e-3 * float(left.norm() * vector.norm()) + 1e-9


def test_a_sample_twice_adds_no_direction() -> None:
    """OG3."""
    basis = extended(torch.zeros(0, 9), normal(3, 9).float())
    assert len(basis) == 3
    assert torch.equal(extended(basis, 5 * basis[1:2]), basis)
    assert torch.equal(extended(basis, torch.zeros(1, 9)), basis)


def test_gradients_of_the_true_classes_logits() -> None:
    one = tiny.trainer("ogd")
    model = one.context.model.eval()
    batch = one.data["train"][0].take(torch.arange(6))
    found = logit_gradients(model, one.method.shared, batch)
    assert found.shape == (6, 4 * 9 + 16 * 36 + 16)
    logits = model(batch.images, 0)
    expected = torch.autograd.grad(logits[4, batch.labels[4]], model.fc.bias)[0]
    assert torch.allclose(found[4, -16:], expected)


def test_a_later_task_moves_stored_logits_far_less_than_without() -> None:
    """The method as a whole: every direction is orthogonal to the way the shared weights went."""
    one = tiny.trainer("ogd")
    while one.at < 1:
        one.advance()
    basis = one.method.basis
    assert one.notes[0]["directions"] == len(basis) > 10
    before = torch.cat([p.detach().flatten().clone() for p in one.method.shared])
    while one.at < 2:
        one.advance()
    way = torch.cat([p.detach().flatten() for p in one.method.shared]) - before
    assert way.norm() > 1e-2
    assert (basis @ way).norm() < 1e-4 * way.norm()
    assert len(one.method.basis) > len(basis)


def test_bad_settings_are_refused() -> None:
    for changes, message in (
        ({"samples": 1}, "samples is 1, expected at least 2"),
        ({"weight_decay": 0.1}, "weight_decay is 0.1, expected 0"),
        ({"optimizer": "adamw"}, "ogd does not go with adamw"),
    ):
        with pytest.raises(NessError, match=message):
            tiny.job("ogd", **changes)
    with pytest.raises(NessError, match="samples is 57, but task 1 has 56"):
        tiny.trainer("ogd", samples=57).advance()
