"""The dominant part of a spectrum: what a rule chooses from it is what it chooses from all of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ness
from helpers import named
from ness.statistics import dominant as module
from ness.statistics.dominant import dominant, nothing_above
from ness.statistics.spectrum import decompose
from ness.updates.low_rank import LowRankUpdate

pytestmark = pytest.mark.filterwarnings("ignore::ness.NessWarning")
D = 520


def gram_of(sigma: Tensor, seed: int = 0) -> Tensor:
    """C = Q diag(σ²) Qᵀ (1, d, d) for a random Q."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.linalg.qr(torch.randn(len(sigma), len(sigma), generator=generator, dtype=torch.float64)).Q
    return ((q * sigma.square()) @ q.T).unsqueeze(0)


def falling(power: float) -> Tensor:
    return torch.arange(1, D + 1, dtype=torch.float64).pow(-power)


def settled_by(rule: ness.Rule) -> Any:
    return lambda spectrum: rule.select({"x": spectrum})["x"].settled_by(spectrum)


RULES = [
    ness.Energy(0.9),
    ness.Energy(0.99),
    ness.Frobenius(0.05),
    ness.Rank(D - 20),
    ness.Soft(ness.Energy(0.9)),
    ness.Soft(ness.Frobenius(0.1)),
    ness.Soft(ness.Rank(D - 20)),
]


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("sigma", [falling(1.5), falling(3), torch.where(torch.arange(D) < 25, 1.0, 0.01).double()])
def test_a_rule_chooses_the_same_from_it(rule: ness.Rule, sigma: Tensor) -> None:
    gram = gram_of(sigma)
    found, whole = dominant(gram, 1, settled_by(rule)), decompose(gram)
    if found is None:  # σ that are equal are not told apart by few vectors; then all are computed
        return
    ours, theirs = (rule.select({"x": spectrum})["x"] for spectrum in (found, whole))
    assert ours.rank == theirs.rank
    torch.testing.assert_close(ours.threshold, theirs.threshold, rtol=1e-6, atol=1e-12)
    k = found.directions.shape[-1]
    torch.testing.assert_close(ours.weights[:, -k:], theirs.weights[:, -k:], rtol=1e-6, atol=1e-9)
    assert found.rest is not None
    assert float(found.rest) >= float(whole.sigma[0, D - k - 1])  # nothing that was left out is larger
    assert float(found.rest) <= float(found.sigma[0, D - k]) * (1 + 1e-4) + 10 * float(whole.noise)
    torch.testing.assert_close(found.sigma.square().sum(), whole.sigma.square().sum())

    def projector(directions: Tensor, weights: Tensor) -> Tensor:
        return (directions * (1 - weights[:, -directions.shape[-1] :]).unsqueeze(-2)) @ directions.mT

    ours_free, theirs_free = projector(found.directions, ours.weights), projector(whole.directions, theirs.weights)
    assert float((ours_free - theirs_free).norm()) < 1e-4
    full = found.complete().directions
    assert float((full.mT @ full - torch.eye(D)).abs().max()) < 1e-10


def test_which_of_these_it_is_used_for() -> None:
    gram = gram_of(falling(1.5))
    assert [dominant(gram, 1, settled_by(rule)) is not None for rule in RULES].count(True) >= 5
    assert all(rule.strongest for rule in (*RULES, ness.Within(0.1)))
    assert not any(rule.strongest for rule in (ness.Nuclear(), ness.Soft(ness.Nuclear()), ness.Budget(9)))


def test_a_flat_spectrum_a_narrow_gram_and_groups_are_left_to_the_full_decomposition() -> None:
    rule = ness.Energy(0.9)
    assert dominant(gram_of(falling(0.1)), 1, settled_by(rule)) is None
    assert dominant(gram_of(falling(2)[:100]), 1, settled_by(rule)) is None
    assert dominant(gram_of(falling(2)).expand(2, -1, -1), 1, settled_by(rule)) is None


def test_an_eigenvalue_that_was_missed_is_noticed() -> None:
    gram = gram_of(falling(1.5))
    whole = decompose(gram)
    values, vectors = whole.sigma[0, -10:].square(), whole.directions[0][:, -10:]
    assert nothing_above(gram[0], values, vectors, float(values[0]) * (1 + 1e-9))
    kept = torch.arange(10) != 4
    assert not nothing_above(gram[0], values[kept], vectors[:, kept], float(values[0]) * (1 + 1e-9))


def test_many_equal_eigenvalues_are_not_missed() -> None:
    """A Krylov space sees of one eigenvalue as many directions as its blocks are wide, and no more."""
    sigma = torch.where(torch.arange(D) < 40, 1.0, 0.001).double()
    rule = ness.Rank(D - 10)  # cuts through them
    found = dominant(gram_of(sigma), 1, settled_by(rule))
    assert found is None or float(found.rest if found.rest is not None else 0) >= 1


def test_what_is_not_finite_is_refused() -> None:
    with pytest.raises(ness.NessError, match=r"'fc'.*NaN or Inf"):
        dominant(torch.full((1, D, D), torch.nan, dtype=torch.float64), 1, settled_by(ness.Energy(0.9)), "fc")


def rows(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.linalg.qr(torch.randn(D, D, generator=generator)).Q
    return torch.randn(700, D, generator=generator) * falling(1.2).float() @ mixing


@pytest.mark.parametrize("rank", [None, 4])
@pytest.mark.parametrize("rule", [ness.Energy(0.95), ness.Soft(ness.Frobenius(0.1)), ness.Within(0.1)], ids=str)
def test_a_guard_keeps_its_promise_on_the_dominant_part(
    rule: ness.Rule, rank: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures, used = [], []
    for narrowest in (512, 10**6):  # with the dominant part, and with all of it
        monkeypatch.setattr(module, "NARROWEST", narrowest)
        torch.manual_seed(1)
        model = named(fc=nn.Linear(D, 6))
        guard, old, start = ness.NullSpace(model, rule=rule), rows(2), model.fc.weight.detach().clone()  # type: ignore
        for _ in range(2):
            guard.observe(old)
            guard.constrain(rank=rank, task=None)
            (update,) = [held.constraint.update for held in guard._protected.values() if held.constraint is not None]
            if isinstance(update, LowRankUpdate) and narrowest == 512:
                used.append(update.free.how == "complement" and update.free.matrix.shape[-1] < D // 4)
            optimizer = torch.optim.AdamW(guard.parameters(), lr=1e-2, weight_decay=0.1)
            for _ in range(5):
                optimizer.zero_grad()
                model(torch.randn(20, D)).square().sum().backward()
                optimizer.step()
            row = guard.certificate().rows[0]
            guard.merge()
        moved = old.double() @ (model.fc.weight.detach() - start).double().T  # type: ignore[union-attr, operator]
        certificate = guard.certificate()
        assert certificate.holds
        assert rank is None or float(moved.norm(dim=-1).max()) <= certificate.rows[0].bound * (1 + 1e-5)
        figures.append((row.rank, row.tau))
    (ours, tau), (theirs, whole_tau) = figures
    assert ours == theirs
    assert tau == pytest.approx(whole_tau, rel=1e-5)
    assert all(used)
