"""Space Decoupling, our reading of it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny
from ness import NessError
from ness.lab.methods._projection.basis import span
from ness.lab.methods._projection.project import removal
from ness.lab.methods.sd import common, plastic

EYE = torch.eye(3, dtype=torch.float64)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_the_intersection_by_hand() -> None:
    """SD1: span(e1, e2) and span(e2, e3) share e2."""
    shared = common(EYE[:, :2], EYE[:, 1:], 0.9)
    assert torch.allclose(shared @ shared.mT, torch.diag(EYE.new_tensor([0, 1, 0])))
    assert common(EYE[:, :1], EYE[:, 1:], 0.9).shape == (3, 0)
    assert common(EYE[:, :0], EYE, 0.9).shape == (3, 0)


def test_kappa_one_is_gpm_and_zero_leaves_what_single_tasks_use() -> None:
    """SD2."""
    basis, gradient = torch.linalg.qr(normal(7, 4))[0], normal(3, 7, seed=1)
    stable = basis[:, :2]
    rest = plastic(basis, stable)
    for kappa in (1.0, 0.0):
        weights = torch.tensor([1, 1, kappa, kappa], dtype=torch.float64)
        found = removal(torch.cat([stable, rest], 1), weights)(gradient)
        if kappa:
            assert torch.allclose(found, removal(basis)(gradient), atol=1e-12)
        else:
            assert torch.allclose(found @ rest, gradient @ rest, atol=1e-12)
            assert (found @ stable).norm() < 1e-12


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), width=st.integers(2, 15), rank=st.integers(1, 15), held=st.integers(0, 15))
def test_stable_and_plastic_make_up_the_memory(seed, width, rank, held) -> None:
    """SD3: J ⊥ R, and span(J, R) = span(M)."""
    basis = torch.linalg.qr(normal(width, min(rank, width), seed=seed))[0]
    stable = span(basis @ normal(basis.shape[1], min(held, basis.shape[1]), seed=seed + 1))
    rest = plastic(basis, stable)
    assert (stable.mT @ rest).norm() < 1e-9
    together = torch.cat([stable, rest], 1)
    assert torch.allclose(together @ together.mT, basis @ basis.mT, atol=1e-6)


def test_a_direction_met_again_enters_the_stable_space_once() -> None:
    stable = basis = torch.linalg.qr(normal(12, 5))[0].float().double()
    for _ in range(5):
        stable = span(torch.cat([stable, common(basis, basis, 0.9)], 1)).float().double()
    assert stable.shape == (12, 5)


def test_the_method_closes_shared_directions_and_nearly_closes_the_rest() -> None:
    one = tiny.trainer("sd", kappa=0.8, tau=0.7)
    while one.at < 2:
        one.advance()
    basis, stable = one.method.bases["fc"], one.method.stable["fc"]
    assert 0 < stable.shape[1] < basis.shape[1]
    gradient = torch.randn(16, 37, generator=torch.Generator().manual_seed(0))
    found = one.method.removals["fc"](gradient)
    assert (found @ stable).norm() < 1e-4 * gradient.norm()
    rest = plastic(basis.double(), stable.double()).float()
    assert torch.allclose(found @ rest, 0.2 * gradient @ rest, atol=1e-4)


def test_kappa_one_is_gpm_from_the_first_step_to_the_last() -> None:
    one, other = tiny.to_the_end(tiny.trainer("sd", kappa=1.0)), tiny.to_the_end(tiny.trainer("gpm"))
    mine, theirs = one.context.model.state_dict(), other.context.model.state_dict()
    assert all(torch.allclose(mine[name], theirs[name], atol=1e-4) for name in mine)
    assert not tiny.same(tiny.to_the_end(tiny.trainer("sd")), other)


def test_bad_settings_are_refused() -> None:
    for changes, message in (
        ({"tau": 1.1}, "tau is 1.1, expected a number from 0 to 1"),
        ({"kappa": -0.1}, "kappa is -0.1"),
        ({"threshold": 0.0}, "threshold is 0, expected a share"),
        ({"optimizer": "adamw"}, "sd does not go with adamw"),
    ):
        with pytest.raises(NessError, match=message):
            tiny.job("sd", **changes)
