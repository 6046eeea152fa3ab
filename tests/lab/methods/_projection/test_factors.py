"""Gradients of linear layers as factors, against the gradients themselves."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ness.lab.methods._projection.factors import Factors, factors, products


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def of_tasks(meets: list[bool], count: int, width: int, outputs: int, seed: int) -> tuple[Factors, Tensor]:
    """Factors of a few tasks, and the gradients (m, o, width) by their definition vᵢ = Dᵢᵀ A."""
    kept, expected = None, []
    for number, meet in enumerate(meets):
        inputs = normal(count, width, seed=seed + 2 * number)
        made = normal(count, count, outputs, seed=seed + 2 * number + 1)
        made = made if meet else made * torch.eye(count)[..., None]
        expected += [each.mT @ inputs for each in made]
        found = factors(inputs, made)
        kept = found if kept is None else kept.followed_by(found)
    assert kept is not None
    return kept, torch.stack(expected)


tasks = st.lists(st.booleans(), min_size=1, max_size=4)
small = st.integers(2, 6)


@settings(max_examples=40, deadline=None)
@given(meets=tasks, count=small, width=small, outputs=small, seed=st.integers(0, 10_000))
def test_factors_are_the_gradients_they_stand_for(meets, count, width, outputs, seed) -> None:
    """All of V, V g and Vᵀ c; also where only some tasks' samples meet."""
    kept, expected = of_tasks(meets, count, width, outputs, seed)
    torch.testing.assert_close(kept.dense(), expected)
    gradient, weights = normal(outputs, width, seed=seed), normal(len(expected), seed=seed)
    torch.testing.assert_close(kept.along(kept.rows @ gradient.mT), (expected * gradient).sum((1, 2)))
    mixed = torch.einsum("m,mod->od", weights, expected)
    torch.testing.assert_close(kept.combined(weights).mT @ kept.rows, mixed)


@settings(max_examples=40, deadline=None)
@given(meets=tasks, count=small, width=small, outputs=small, seed=st.integers(0, 10_000))
def test_inner_products_from_factors_are_those_of_the_gradients(meets, count, width, outputs, seed) -> None:
    kept, expected = of_tasks(meets, count, width, outputs, seed)
    flat = expected.flatten(1)
    torch.testing.assert_close(products(kept, count), flat @ flat[-count:].mT)


def test_inner_products_of_float32_factors_are_exact_to_float64() -> None:
    kept, _ = of_tasks([True, True], 5, 40, 30, seed=3)
    single = Factors(kept.inputs.float(), kept.outputs.float())
    wide = Factors(single.inputs.double(), single.outputs.double()).dense().flatten(1)
    torch.testing.assert_close(products(single, 5), wide @ wide[-5:].mT, rtol=1e-12, atol=1e-10)


def test_rows_of_samples_that_do_not_meet_are_not_kept() -> None:
    """n (width + o) numbers instead of n (width + n o), until a task needs them all."""
    apart, _ = of_tasks([False, False], 5, 7, 3, seed=1)
    assert apart.size == 2 * 5 * (7 + 3)
    meet, _ = of_tasks([False, True], 5, 7, 3, seed=1)
    assert meet.size == 2 * 5 * (7 + 5 * 3)
