"""Rules, by hand and by property."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import ness
from ness.rules import rule_from_dict, rule_to_dict
from ness.statistics.spectrum import Spectrum, decompose


def spectrum_of(*sigma: float, outputs: int = 1) -> Spectrum:
    values = torch.tensor(sorted(sigma), dtype=torch.float64).unsqueeze(0)
    return decompose(torch.diag_embed(values.square()), outputs)


def free(rule: ness.Rule, *sigma: float) -> list[float]:
    return rule.select({"x": spectrum_of(*sigma)})["x"].weights[0].tolist()


sigmas = st.lists(st.floats(0, 1e3), min_size=1, max_size=40)


def test_n1_by_hand() -> None:
    """σ = (4, 3, 0): Frobenius norm 5, nuclear norm 7."""
    assert free(ness.Frobenius(0.5), 4, 3, 0) == [1, 0, 0]
    assert free(ness.Nuclear(0.5), 4, 3, 0) == [1, 1, 0]
    assert free(ness.Frobenius(0.6), 4, 3, 0) == [1, 1, 0]  # a tie, 3 ≤ 3.0, counts as small
    assert free(ness.Nuclear(0.6), 4, 3, 0) == [1, 1, 1]


@given(sigma=sigmas, eps=st.floats(1e-3, 1))
@settings(max_examples=100, deadline=None)
def test_n4_nuclear_frees_at_least_all_but_one_over_eps(sigma: list[float], eps: float) -> None:
    rank = ness.Nuclear(eps).select({"x": spectrum_of(*sigma)})["x"].rank
    assert rank >= len(sigma) - (math.ceil(1 / eps) - 1)


def test_n10_limits() -> None:
    assert free(ness.Nuclear(1.0), 4, 3, 2) == [1, 1, 1]
    assert free(ness.Nuclear(0.0), 4, 3, 0) == [1, 0, 0]


def test_energy_by_hand() -> None:
    """σ² = (16, 9, 1) of 26: protecting 0.6 takes the first alone (16/26 = .615), 0.7 takes two."""
    assert free(ness.Energy(0.6), 4, 3, 1) == [1, 1, 0]
    assert free(ness.Energy(0.7), 4, 3, 1) == [1, 0, 0]
    assert free(ness.Energy(1.0), 4, 3, 0) == [1, 0, 0]
    assert free(ness.Energy(0.0), 4, 3, 0) == [1, 1, 1]


@given(sigma=sigmas, keep=st.floats(0, 1))
@settings(max_examples=100, deadline=None)
def test_energy_protects_what_it_says(sigma: list[float], keep: float) -> None:
    spectrum = spectrum_of(*sigma)
    weights = ness.Energy(keep).select({"x": spectrum})["x"].weights
    energy = spectrum.sigma.square()
    assert float((energy * (1 - weights)).sum()) >= keep * float(energy.sum()) * (1 - 1e-9)


def test_rank_by_hand() -> None:
    assert free(ness.Rank(2), 4, 3, 1) == [1, 1, 0]
    assert free(ness.Rank(0), 4, 3, 0) == [0, 0, 0]
    assert free(ness.Rank(9), 4, 3, 0) == [1, 1, 1]


@given(data=st.data(), budget=st.integers(0, 300))
@settings(max_examples=60, deadline=None)
def test_budget_is_kept_and_spent_on_the_weakest(data: st.DataObject, budget: int) -> None:
    spectra = {name: spectrum_of(*data.draw(sigmas), outputs=data.draw(st.integers(1, 9))) for name in ("a", "b", "c")}
    chosen = ness.Budget(budget).select(spectra)
    spent = sum(chosen[name].rank * spectra[name].outputs for name in spectra)
    assert spent <= budget
    norms = {k: s.sigma.norm() for k, s in spectra.items()}  # what saw nothing comes last
    relative = {
        k: s.sigma / norms[k] if norms[k] > 0 else torch.full_like(s.sigma, math.inf) for k, s in spectra.items()
    }
    taken = [float(relative[k][chosen[k].weights > 0].max()) for k in spectra if chosen[k].rank]
    left = [float(relative[k][chosen[k].weights == 0].min()) for k in spectra if (chosen[k].weights == 0).any()]
    if taken and left:
        assert max(taken) <= min(left)
    if left:  # the next direction would not have fitted
        assert spent + max(s.outputs for s in spectra.values()) > budget


@given(sigma=sigmas, eps=st.floats(1e-4, 1))
@settings(max_examples=100, deadline=None)
def test_soft_keeps_max_sigma_s_under_tau(sigma: list[float], eps: float) -> None:
    for base in (ness.Nuclear(eps), ness.Energy(1 - eps), ness.Rank(2)):
        spectrum = spectrum_of(*sigma)
        hard = base.select({"x": spectrum})["x"]
        soft = ness.Soft(base).select({"x": spectrum})["x"]
        assert torch.equal(soft.threshold, hard.threshold)
        assert bool((spectrum.sigma * soft.weights <= soft.threshold * (1 + 1e-9) + 1e-300).all())
        assert bool((soft.weights >= hard.weights).all())
        assert not bool(((soft.weights > 0) & (soft.weights < 0.02)).any())


def test_soft_by_hand() -> None:
    weights = free(ness.Soft(ness.Nuclear(0.1)), 6, 3, 1, 0)  # τ = 1
    assert weights == pytest.approx([1, 1, 1 / 3, 1 / 6])
    assert free(ness.Soft(ness.Nuclear(0.01)), 50, 49, 1, 0) == pytest.approx([1, 1, 1 / 49, 1 / 50], abs=1e-9)
    assert free(ness.Soft(ness.Nuclear(0.001)), 50, 49, 1, 0)[2:] == [0, 0]  # s < 0.02 is dropped


# -- what to advise where nothing is free ----------------------------------------------------------------------------

FREES_NOTHING = [
    ness.Nuclear(1e-9),
    ness.Frobenius(1e-9),
    ness.Energy(1.0),
    ness.Rank(0),
    ness.Budget(0),
    ness.Budget(2),
    ness.Soft(ness.Nuclear(1e-9)),
    ness.Soft(ness.Frobenius(1e-9)),
    ness.Soft(ness.Energy(1.0)),
    ness.Soft(ness.Rank(0)),
    ness.Soft(ness.Budget(1)),
]


def stricter(rule: ness.Rule) -> ness.Rule:
    """The next step back."""
    match rule:
        case ness.Soft():
            return ness.Soft(stricter(rule.rule))
        case ness.Nuclear() | ness.Frobenius():
            return type(rule)(rule.eps * 0.989)
        case ness.Energy():
            return ness.Energy(1 - (1 - rule.keep) * 0.989)
        case ness.Rank():
            return ness.Rank(rule.r - 1)
        case ness.Budget():
            return ness.Budget(rule.parameters - 1)
    raise AssertionError(rule)


@pytest.mark.parametrize("rule", FREES_NOTHING, ids=str)
def test_the_strictest_value_that_frees_something_is_found(rule: ness.Rule) -> None:
    spectra = {"a": spectrum_of(4, 3, 1, outputs=3), "b": spectrum_of(9, 8, 7, 6, outputs=2)}

    def frees(one: ness.Rule) -> bool:
        return any(chosen.rank for chosen in one.select(spectra).values())

    assert not frees(rule)
    found = rule.looser(frees)
    assert found is not None
    assert frees(found)
    assert not frees(stricter(found))
    assert rule_from_dict(rule_to_dict(found)) == found


@given(sigma=st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=20))
@settings(max_examples=40, deadline=None)
def test_advice_frees_something_whatever_the_spectrum(sigma: list[float]) -> None:
    spectra = {"x": spectrum_of(*sigma)}
    for rule in FREES_NOTHING:
        found = rule.looser(lambda one: one.select(spectra)["x"].rank > 0)
        assert found is not None
        assert found.select(spectra)["x"].rank > 0


def test_where_no_value_frees_anything_none_is_advised() -> None:
    assert all(rule.looser(lambda _: False) is None for rule in FREES_NOTHING)
    assert ness.Rule().looser(lambda _: True) is None


def test_soft_of_rank_zero_frees_nothing() -> None:
    assert free(ness.Soft(ness.Rank(0)), 4, 3, 0) == [0, 0, 0]


def test_groups_choose_for_themselves() -> None:
    sigma = torch.tensor([[0.0, 1.0, 1.0], [0.0, 0.0, 1.0]], dtype=torch.float64)
    spectrum = decompose(torch.diag_embed(sigma.square()))
    weights: Tensor = ness.Nuclear(1e-3).select({"x": spectrum})["x"].weights
    assert weights.tolist() == [[1, 0, 0], [1, 1, 0]]


@pytest.mark.parametrize(
    "build",
    [
        lambda: ness.Nuclear(-1e-3),
        lambda: ness.Nuclear(1.5),
        lambda: ness.Nuclear(float("nan")),
        lambda: ness.Nuclear("1e-3"),  # type: ignore[arg-type]
        lambda: ness.Frobenius(2),
        lambda: ness.Energy(-0.1),
        lambda: ness.Rank(-1),
        lambda: ness.Rank(2.5),  # type: ignore[arg-type]
        lambda: ness.Budget(-5),
        lambda: ness.Soft(1e-3),  # type: ignore[arg-type]
        lambda: ness.Soft(ness.Soft(ness.Nuclear(1e-3))),
        lambda: ness.Soft(ness.Within(0.1)),
        lambda: ness.Within(-0.1),
        lambda: ness.Within(0.1, strength=0),
        lambda: ness.Within(0.1).select({"x": spectrum_of(1, 2)}),  # no books
    ],
)
def test_out_of_range_is_refused(build: object) -> None:
    with pytest.raises(ness.NessError, match="expected"):
        build()  # type: ignore[operator]


@pytest.mark.parametrize(
    "rule",
    [
        ness.Nuclear(2e-3),
        ness.Frobenius(0.1),
        ness.Energy(0.9),
        ness.Rank(3),
        ness.Budget(9),
        ness.Soft(ness.Rank(2)),
        ness.Within(0.2, 0.5),
    ],
    ids=str,
)
def test_rules_survive_json(rule: ness.Rule) -> None:
    assert rule_from_dict(rule_to_dict(rule)) == rule


def test_an_unknown_rule_is_refused() -> None:
    with pytest.raises(ness.NessError, match="unknown rule 'magic'; known: budget"):
        rule_from_dict({"name": "magic"})


def test_a_rule_that_is_no_dataclass_is_not_saved_and_damage_is_told() -> None:
    class Loose(ness.Rule):
        name = "loose"

    try:
        with pytest.raises(ness.NessError, match="a rule is a frozen dataclass"):
            rule_to_dict(Loose())
    finally:
        del ness.Rule.registry["loose"]
    with pytest.raises(ness.NessError, match="unknown rule 'x'"):
        rule_from_dict("x")  # type: ignore[arg-type]
