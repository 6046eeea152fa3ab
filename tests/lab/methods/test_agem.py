"""A-GEM against figures worked out by hand: the rule, and what it is applied to."""

import pytest
import torch
from torch import Generator
from torch.nn import functional as F

import tiny
from ness import NessError
from ness.lab.methods.agem import half_space, inner, portions


def drawn(seed: int, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def in_second_task(**changes):
    one = tiny.trainer("agem", **changes)
    while one.at < 1:
        one.advance()
    one.advance()
    return one


def test_a1_the_conflict_is_removed_and_nothing_else() -> None:
    (found,) = half_space([torch.tensor([1.0, -1.0])], [torch.tensor([0.0, 1.0])])
    assert found.tolist() == [1.0, 0.0]


def test_a2_without_conflict_the_gradient_is_bitwise_itself() -> None:
    g = drawn(1, (3, 4), (5,))
    r = [value + 0.1 * other for value, other in zip(g, drawn(2, (3, 4), (5,)), strict=True)]
    assert inner(g, r) > 0
    assert all(torch.equal(found, value) for found, value in zip(half_space(g, r), g, strict=True))


@pytest.mark.parametrize("seed", range(20))
def test_a3_no_conflict_is_left(seed: int) -> None:
    g, r = drawn(seed, (3, 4), (50,)), drawn(seed + 100, (3, 4), (50,))
    found = half_space(g, r)
    assert inner(found, r) >= -1e-9 * (inner(g, g) * inner(r, r)).sqrt()


def test_a5_a_zero_memory_gradient_changes_nothing() -> None:
    g = drawn(1, (4,))
    assert torch.equal(half_space(g, [torch.zeros(4, dtype=torch.float64)])[0], g[0])


def test_a4_the_current_head_trains_as_if_there_were_no_memory_and_old_heads_learn_through_it(monkeypatch) -> None:
    one = in_second_task()
    model, method, trained = one.context.model, one.method, one.learning.trained
    batch = one.learning.lesson.train.take(torch.arange(16))
    method.loss(batch).backward()
    plain = model.heads[1].weight.grad.clone()

    def opposed() -> torch.Tensor:
        """A memory that wants the opposite in the backbone, knows the first head, and not the second."""
        features = model.features(batch.images)
        against = F.cross_entropy(F.linear(features, model.heads[1].weight.detach()), batch.labels)
        return 1e-3 * F.cross_entropy(model.heads[0](features), batch.labels) - against

    monkeypatch.setattr(method, "remembered", opposed)
    for parameter in trained:
        parameter.grad = None
    method.gradients(batch, trained, sam=False)
    assert torch.equal(model.heads[1].weight.grad, plain)
    assert model.heads[0].weight.grad.any()
    assert all(parameter.grad is not None for parameter in trained)
    assert not any(parameter is model.heads[2].weight for parameter in trained)


def test_the_memory_gradient_is_the_mean_over_samples_of_all_tasks_each_under_its_head() -> None:
    one = tiny.trainer("agem", memory=5, memory_batch=10, norm="stored", epochs=1)
    while one.at < 2:
        one.advance()
    one.context.model.eval()
    assert [len(part) for part in one.method.memory] == [5, 5]
    found = float(one.method.remembered().detach())
    losses = []
    for part in one.method.memory:
        logits = one.context.model(part.take(part.stored_order()).images, part.task)
        losses.append(torch.nn.functional.cross_entropy(logits, part.labels, reduction="none"))
    assert found == pytest.approx(float(torch.cat(losses).mean().detach()), rel=1e-6)


def test_portions_are_even_and_never_one() -> None:
    assert portions(64, 19) == [4] * 7 + [3] * 12
    assert portions(3, 4) == [2, 2, 2, 2]


def test_the_memory_is_a_sample_without_repetition_from_the_methods_generator() -> None:
    one, two = in_second_task(memory=20), in_second_task(memory=20)
    (mine,), (theirs,) = one.method.memory, two.method.memory
    assert torch.equal(mine.images, theirs.images)
    assert len({bytes(image.flatten().tolist()) for image in mine.images}) == 20


@pytest.mark.parametrize("changes", [{"optimizer": "sgdm"}, {"optimizer": "adamw"}, {"memory": 1}])
def test_what_does_not_go(changes: dict) -> None:
    with pytest.raises(NessError, match=r"use --optimizer sgd|at least 2"):
        tiny.job("agem", **changes)
