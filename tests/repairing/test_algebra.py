"""The closed form is the minimiser it claims to be, whatever the scale, the strength and the rank of the rows."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import ness
from ness.repairing.algebra import Reshaper, repaired_change


def rows(seed: int, count: int, width: int, rank: int | None = None, groups: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(groups, count, width, generator=generator, dtype=torch.float64)
    if rank is not None:
        x = x[..., :rank] @ torch.randn(groups, rank, width, generator=generator, dtype=torch.float64)
    return x


def mean(x: Tensor) -> Tensor:
    return x.mT @ x / x.shape[1]


def by_least_squares(change: Tensor, new: Tensor, old: Tensor, strength: float, ridge: float) -> Tensor:
    """The same minimum by stacking rows: (D' − D) X_n, √s D' X_o and √λ (D' − D) as one least-squares problem."""
    solved = []
    for d, n, o in zip(change, new, old, strict=True):
        size = (mean(n[None]).diagonal(dim1=1, dim2=2).mean() + mean(o[None]).diagonal(dim1=1, dim2=2).mean()) / 2
        a = n / math.sqrt(len(n))
        b = o * math.sqrt(strength / len(o))
        e = torch.eye(n.shape[1], dtype=torch.float64) * (ridge * size).sqrt()
        left = torch.cat([a, b, e])
        right = torch.cat([a @ d.mT, torch.zeros(len(b), len(d), dtype=torch.float64), e @ d.mT])
        solved.append(torch.linalg.lstsq(left, right, driver="gelsd").solution.mT)
    return torch.stack(solved)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    width=st.integers(1, 12),
    groups=st.integers(1, 3),
    rank=st.integers(1, 12),
    strength=st.floats(1e-3, 1e3),
)
def test_minimiser_against_brute_force(seed: int, width: int, groups: int, rank: int, strength: float) -> None:
    new, old = rows(seed, 30, width, groups=groups), rows(seed + 1, 25, width, min(rank, width), groups)
    change = rows(seed + 2, 5, width, groups=groups)
    found = repaired_change(change, mean(new), mean(old), strength, ridge=1e-8)
    expected = by_least_squares(change, new, old, strength, 1e-8)
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5 * float(change.abs().max()))

    def objective(d: Tensor) -> float:
        return float(((d - change) @ new.mT).square().sum() / 30 + strength * (d @ old.mT).square().sum() / 25)

    best = objective(found)
    for nudge in rows(seed + 3, 4 * 5, width, groups=groups).split(5, dim=1):
        assert best <= objective(found + 1e-2 * nudge) * (1 + 1e-6)


@given(seed=st.integers(0, 10**6), width=st.integers(1, 10))
def test_strength_0_changes_nothing_bit_for_bit(seed: int, width: int) -> None:
    change = rows(seed, 3, width)
    assert torch.equal(repaired_change(change, None, mean(rows(seed + 1, 9, width)), 0.0), change)


@settings(deadline=None)
@given(seed=st.integers(0, 10**6), rank=st.integers(1, 7), strength=st.sampled_from([1e6, 1e10, 1e15]))
def test_large_strength_gives_the_base_on_old_rows_and_keeps_what_they_never_reach(
    seed: int, rank: int, strength: float
) -> None:
    old = rows(seed, 40, 8, rank)
    basis = torch.linalg.svd(old[0]).Vh
    beside = rows(seed + 1, 40, 8) @ (basis[rank:].mT @ basis[rank:])  # new rows that use other directions alone
    change = rows(seed + 2, 3, 8)
    found = repaired_change(change, mean(beside), mean(old), strength, ridge=1e-8)
    assert (found @ old.mT).norm() <= 1e-5 * (change @ old.mT).norm()
    assert torch.allclose(found @ beside.mT, change @ beside.mT, atol=1e-6 * float((change @ beside.mT).abs().max()))


@settings(deadline=None)
@given(seed=st.integers(0, 10**6), power=st.integers(-8, 8), strength=st.floats(1e-2, 1e2))
def test_scaling_old_and_new_inputs_together_does_not_matter(seed: int, power: int, strength: float) -> None:
    new, old, change = mean(rows(seed, 20, 6)), mean(rows(seed + 1, 20, 6, 4)), rows(seed + 2, 3, 6)
    scale = 10.0 ** (2 * power)
    first = repaired_change(change, new, old, strength)
    assert torch.allclose(repaired_change(change, new * scale, old * scale, strength), first, rtol=1e-7, atol=1e-9)
    soft = repaired_change(change, None, old, strength)
    assert torch.allclose(repaired_change(change, None, old * scale, strength), soft, rtol=1e-7, atol=1e-9)


def test_without_new_rows_it_is_the_soft_null_space() -> None:
    old, change = mean(rows(0, 50, 6)), rows(1, 4, 6)
    even = old.diagonal(dim1=1, dim2=2).mean() * torch.eye(6, dtype=torch.float64)
    expected = change @ even @ torch.linalg.inv(even + 3.0 * old)
    assert torch.allclose(repaired_change(change, None, old, 3.0), expected, rtol=1e-4)


def test_a_factor_keeps_the_rank_of_its_product() -> None:
    factor, other = rows(0, 2, 9), rows(1, 7, 2)
    old, new = mean(rows(2, 40, 9)), mean(rows(3, 40, 9))
    product = repaired_change(other @ factor, new, old, 2.0)
    assert torch.allclose(other @ repaired_change(factor, new, old, 2.0), product, atol=1e-9)
    assert int(torch.linalg.matrix_rank(product[0], rtol=1e-9)) == 2


def test_a_group_that_no_row_reached_keeps_its_change() -> None:
    old, new = mean(rows(0, 40, 4, groups=2)), mean(rows(1, 40, 4, groups=2))
    old[1], new[1] = 0, 0
    change = rows(2, 3, 4, groups=2)
    found = repaired_change(change, new, old, 100.0)
    assert torch.allclose(found[1], change[1])
    assert not torch.allclose(found[0], change[0])


def test_energies_are_those_of_the_rows() -> None:
    old, new, change = rows(0, 40, 5, 3, groups=2), rows(1, 30, 5, groups=2), rows(2, 3, 5, groups=2)
    reshaper = Reshaper.of(mean(new), mean(old), 1e-8, "layer")
    assert float(reshaper.old_energy(change)) == pytest.approx(float((change @ old.mT).square().sum() / 40))
    assert float(reshaper.new_energy(change)) == pytest.approx(float((change @ new.mT).square().sum() / 30))


def test_a_gram_with_nan_is_refused() -> None:
    gram = mean(rows(0, 9, 3))
    gram[0, 0, 0] = torch.nan
    with pytest.raises(ness.NessError, match="NaN or Inf"):
        repaired_change(rows(1, 2, 3), None, gram, 1.0)


def test_hard_systems_are_solved_or_refused() -> None:
    spread = torch.diag(torch.logspace(-15, 15, 8, dtype=torch.float64))[None]
    change = rows(0, 3, 8)
    found = repaired_change(change, spread.flip(-1).flip(-2), spread, 1e4, ridge=1e-14)
    assert torch.isfinite(found).all()
    assert float(found.abs().max()) <= 2 * float(change.abs().max())
