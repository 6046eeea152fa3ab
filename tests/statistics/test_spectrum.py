"""The decomposition: never NaN, right to float64, with a way out when a solver fails."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ness
from ness.statistics.spectrum import decompose, restricted_sigma, selected_sigma, spectral_norm


@given(d=st.integers(1, 30), n=st.integers(0, 40), groups=st.integers(1, 3), seed=st.integers(0, 999))
@settings(max_examples=50, deadline=None)
def test_decomposition_rebuilds_the_gram(d: int, n: int, groups: int, seed: int) -> None:
    torch.manual_seed(seed)
    rows = torch.randn(groups, n, d, dtype=torch.float64)
    gram = rows.mT @ rows
    spectrum = decompose(gram)
    q, sigma = spectrum.directions, spectrum.sigma
    identity = torch.eye(d, dtype=torch.float64).expand(groups, d, d)
    assert torch.allclose(q.mT @ q, identity, atol=1e-12)
    assert torch.allclose(q @ torch.diag_embed(sigma.square()) @ q.mT, gram, atol=1e-9)
    assert bool((sigma.diff(dim=-1) >= 0).all())
    assert int((sigma == 0).sum()) >= groups * max(0, d - n)  # what no row uses is exactly 0


def test_one_negative_eigenvalue_does_not_freeze_the_layer() -> None:
    """N3: 20 duplicated features. The paper's code gets NaN from √(−1e-9) and rank 0."""
    torch.manual_seed(0)
    x = torch.randn(2000, 300).relu()
    x[:, 20:40] = x[:, :20]
    x[:, 299] = 0
    float32_gram = (x.T @ x).unsqueeze(0)
    assert float(torch.linalg.eigvalsh(float32_gram).min()) < 0  # the trap is really there
    assert bool(torch.linalg.eigvalsh(float32_gram).sqrt().isnan().any())
    for gram in (float32_gram.double(), ness.Gram.of(x).matrix):
        spectrum = decompose(gram)
        assert bool(spectrum.sigma.isfinite().all())
        assert ness.Nuclear(1e-3).select({"x": spectrum})["x"].rank >= 21


@pytest.mark.parametrize("broken", [["torch"], ["torch", "numpy"]])
def test_a_solver_that_fails_is_replaced(monkeypatch: pytest.MonkeyPatch, broken: list[str]) -> None:
    rows = torch.randn(1, 40, 8, dtype=torch.float64)
    gram = rows.mT @ rows
    expected = decompose(gram).sigma

    def fails(*_: object, **__: object) -> None:
        raise torch.linalg.LinAlgError("failed to converge")

    def fails_too(*_: object) -> None:
        raise np.linalg.LinAlgError("failed to converge")

    monkeypatch.setattr(torch.linalg, "eigh", fails)
    if "numpy" in broken:
        monkeypatch.setattr(np.linalg, "eigh", fails_too)
    spectrum = decompose(gram)
    assert torch.allclose(spectrum.sigma, expected, atol=1e-9)
    rebuilt = spectrum.directions @ torch.diag_embed(spectrum.sigma.square()) @ spectrum.directions.mT
    assert torch.allclose(rebuilt, gram, atol=1e-9)


def test_a_solver_that_gives_nan_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    gram = torch.eye(4, dtype=torch.float64).unsqueeze(0)
    monkeypatch.setattr(torch.linalg, "eigh", lambda m: (m[..., 0] * torch.nan, m * torch.nan))
    assert torch.allclose(decompose(gram).sigma, torch.ones(1, 4, dtype=torch.float64))


def test_when_all_solvers_fail_the_error_names_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise np.linalg.LinAlgError("no")

    for owner, name in ((torch.linalg, "eigh"), (torch.linalg, "svd"), (np.linalg, "eigh")):
        monkeypatch.setattr(owner, name, fails)
    with pytest.raises(ness.NessError, match=r"layer 'fc': no eigen-solver converged"):
        decompose(torch.eye(3, dtype=torch.float64).unsqueeze(0), name="fc")


def test_a_gram_with_nan_is_refused() -> None:
    with pytest.raises(ness.NessError, match="NaN or Inf"):
        decompose(torch.full((1, 2, 2), torch.nan, dtype=torch.float64))


@given(o=st.integers(0, 12), r=st.integers(0, 12), seed=st.integers(0, 999))
@settings(max_examples=40, deadline=None)
def test_spectral_norm_is_the_largest_singular_value(o: int, r: int, seed: int) -> None:
    torch.manual_seed(seed)
    matrix = torch.randn(2, o, r)
    expected = torch.linalg.matrix_norm(matrix.double(), ord=2) if o and r else torch.zeros(2).double()
    assert torch.allclose(spectral_norm(matrix), expected, atol=1e-9)


def test_the_bound_is_never_below_what_float64_can_resolve() -> None:
    spectrum = decompose(torch.diag(torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64)).unsqueeze(0))
    free = torch.tensor([[1.0, 0.0, 0.0]], dtype=torch.float64)
    assert 0 < float(selected_sigma(spectrum, free)) < 1e-6
    assert float(selected_sigma(spectrum, torch.zeros(1, 3, dtype=torch.float64))) == 0


@given(d=st.integers(1, 20), n=st.integers(1, 40), groups=st.integers(1, 3), seed=st.integers(0, 999))
@settings(max_examples=50, deadline=None)
def test_reach_bounds_every_row_on_the_eigenvectors_of_another_gram(d: int, n: int, groups: int, seed: int) -> None:
    torch.manual_seed(seed)
    rows, others = (torch.randn(groups, n, d, dtype=torch.float64) for _ in range(2))
    spectrum = decompose(others.mT @ others)
    weights = torch.rand(groups, d, dtype=torch.float64) * (torch.rand(groups, d) < 0.7)
    basis, update = spectrum.directions * weights.unsqueeze(-2), torch.randn(groups, 4, d, dtype=torch.float64)
    sigma = restricted_sigma(rows.mT @ rows, basis)
    moved = (rows @ basis @ update.mT).norm(dim=-1)
    assert bool((moved <= (sigma * spectral_norm(update)).unsqueeze(-1) * (1 + 1e-9)).all())
    assert torch.allclose(sigma, torch.linalg.matrix_norm(rows @ basis, ord=2), atol=1e-6)  # and no looser than that


def test_reach_is_the_selected_sigma_where_the_basis_is_the_grams_own() -> None:
    torch.manual_seed(1)
    rows = torch.randn(2, 30, 8, dtype=torch.float64)
    spectrum = decompose(rows.mT @ rows)
    weights = torch.rand(2, 8, dtype=torch.float64)
    weights[1] = 0
    basis = spectrum.directions * weights.unsqueeze(-2)
    assert torch.allclose(restricted_sigma(rows.mT @ rows, basis), selected_sigma(spectrum, weights))
    assert restricted_sigma(rows.mT @ rows, basis[..., :0]).tolist() == [0, 0]
    null = torch.zeros(1, 3, 1, dtype=torch.float64)
    null[0, 2] = 1
    assert (
        0
        < float(restricted_sigma(torch.diag(torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64)).unsqueeze(0), null))
        < 1e-6
    )
