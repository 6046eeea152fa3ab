"""SGP against its definition."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny
from ness import NessError
from ness.lab.methods._projection.project import removal
from ness.lab.methods.sgp import accumulated, importance, usage
from ness.lab.runs.jobs import resolve


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_importance_by_hand() -> None:
    """S1."""
    values = torch.tensor([2.0, 1.0], dtype=torch.float64)
    assert importance(values, 1.0).tolist() == pytest.approx([1, 2 / 3])
    assert importance(values, 10.0).tolist() == pytest.approx([1, 11 / 12])
    assert importance(values[:0], 10.0).tolist() == []  # the reference fails on an empty set
    assert importance(torch.zeros(3), 10.0).tolist() == [0, 0, 0]


def test_all_important_is_gpm_and_none_is_sgd() -> None:
    """S2."""
    held, gradient = torch.linalg.qr(normal(7, 3))[0], normal(2, 7, seed=1)
    assert torch.allclose(removal(held, torch.ones(3, dtype=torch.float64))(gradient), removal(held)(gradient))
    assert torch.equal(removal(held, torch.zeros(3, dtype=torch.float64))(gradient), gradient)


@settings(max_examples=50, deadline=None)
@given(
    old=st.lists(st.floats(0, 1), max_size=6),
    more=st.lists(st.floats(0, 1e3), min_size=0, max_size=6),
    alpha=st.floats(0, 100),
)
def test_importances_stay_shares_and_old_ones_never_fall(old, more, alpha) -> None:
    """S3."""
    before = torch.tensor(old, dtype=torch.float64)
    values = torch.tensor([1.0] * len(old) + more, dtype=torch.float64)
    after = accumulated(before, values, alpha)
    assert len(after) == len(values)
    assert bool(((after >= 0) & (after <= 1)).all())
    assert bool((after[: len(old)] >= before).all())


def test_usage_is_what_the_references_svd_gives() -> None:
    """S4: the row norms of MᵀR are what the SVD of M MᵀR leads to."""
    held, rows = torch.linalg.qr(normal(6, 3))[0], normal(20, 6, seed=1)
    inside = held @ held.mT @ rows.mT
    left, sigma, _ = torch.linalg.svd(inside, full_matrices=False)
    through = (held.mT @ left[:, :3]).square() @ sigma[:3].square()
    assert torch.allclose(usage(held, rows), through.sqrt())


def test_the_method_scales_steps_along_stored_directions() -> None:
    one = tiny.trainer("sgp", alpha=1.0)
    while one.at < 1:
        one.advance()
    held, shares = one.method.bases["fc"], one.method.importances["fc"]
    assert held.shape[1] == len(shares) > 2
    assert float(shares.max()) == 1
    assert float(shares.min()) < 1
    gradient = torch.randn(16, 37, generator=torch.Generator().manual_seed(0))
    left = one.method.removals["fc"](gradient) @ held
    assert torch.allclose(left, (gradient @ held) * (1 - shares), atol=1e-5)


def test_presets_and_bad_settings() -> None:
    reference = resolve("sgp", "mini-imagenet", "reference").settings
    assert (reference.threshold, reference.growth, reference.alpha, reference.full) == (0.97, 0.003, 10, "fill")
    assert resolve("sgp", "cifar100", "reference").settings.split_seed == 0
    assert resolve("sgp", "cifar100").settings.split_seed is None
    with pytest.raises(NessError, match="alpha is -1"):
        tiny.job("sgp", alpha=-1.0)
    with pytest.raises(NessError, match="sgp does not go with adamw"):
        tiny.job("sgp", optimizer="adamw")
