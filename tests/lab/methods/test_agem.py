"""A-GEM against figures worked out by hand: the rule, and what it is applied to."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Generator
from torch.nn import functional as F

import tiny
from ness import NessError
from ness.lab.methods.agem import balanced, drawn, half_space, inner, portion
from ness.lab.training.loader import Samples, together


def pieces(seed: int, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
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
    g = pieces(1, (3, 4), (5,))
    r = [value + 0.1 * other for value, other in zip(g, pieces(2, (3, 4), (5,)), strict=True)]
    assert inner(g, r) > 0
    assert all(torch.equal(found, value) for found, value in zip(half_space(g, r), g, strict=True))


@pytest.mark.parametrize("seed", range(20))
def test_a3_no_conflict_is_left(seed: int) -> None:
    g, r = pieces(seed, (3, 4), (50,)), pieces(seed + 100, (3, 4), (50,))
    found = half_space(g, r)
    assert inner(found, r) >= -1e-9 * (inner(g, g) * inner(r, r)).sqrt()


def test_a5_a_zero_memory_gradient_changes_nothing() -> None:
    g = pieces(1, (4,))
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
    assert [portion(64, tasks) for tasks in (1, 9, 19)] == [64, 7, 3]
    assert portion(3, 4) == 2


@given(counts=st.lists(st.integers(1, 9), min_size=1, max_size=5), wanted=st.integers(2, 6), seed=st.integers(0, 99))
def test_as_many_different_samples_of_each_task_are_drawn(counts: list[int], wanted: int, seed: int) -> None:
    one = torch.ones(1, 1, 1)
    memory = [
        Samples(torch.zeros(count, 1, 2, 2), torch.zeros(count, dtype=torch.int64), task, one, one)
        for task, count in enumerate(counts)
    ]
    index, sizes = drawn(together(memory), wanted, Generator().manual_seed(seed))
    assert sizes == [min(wanted, count) for count in counts]
    starts = [sum(counts[:task]) for task in range(len(counts))]
    for part, start, count in zip(index.split(sizes), starts, counts, strict=True):
        assert len(set(part.tolist())) == len(part)
        assert all(start <= each < start + count for each in part.tolist())


def test_every_sample_of_a_task_is_drawn_alike_often() -> None:
    generator, count = Generator().manual_seed(1), torch.zeros(5)
    one = torch.ones(1, 1, 1)
    samples = Samples(torch.zeros(5, 1, 2, 2), torch.zeros(5, dtype=torch.int64), 0, one, one)
    for _ in range(2000):
        count[drawn(samples, 2, generator)[0]] += 1
    assert torch.allclose(count / 2000, torch.tensor(0.4), atol=0.05)


@pytest.mark.parametrize("norm", ["batch", "stored"])
@pytest.mark.parametrize("own", [True, False])
def test_the_memory_passes_as_if_task_by_task_in_one_pass_if_the_norms_are_ours(norm: str, own: bool) -> None:
    one = tiny.trainer("agem", memory=9, memory_batch=9, norm=norm, epochs=1)
    while one.at < 2:
        one.advance()
    model, method, random = one.context.model.train(), one.method, one.random.step
    model.dropout.p = 0.0
    if not own:
        model.norm = torch.nn.BatchNorm2d(4, track_running_stats=norm == "stored")
    before, place = {name: value.clone() for name, value in model.state_dict().items()}, random.get_state()
    passes: list[int] = []
    handle = model.conv.register_forward_hook(lambda module, inputs, y: passes.append(len(y)))
    found = method.remembered()
    handle.remove()
    assert passes == ([8] if own else [4, 4])
    moved = {name: value.clone() for name, value in model.named_buffers()}
    gradients = torch.autograd.grad(found, [*model.conv.parameters(), model.heads[0].weight, model.heads[1].weight])

    model.load_state_dict(before)
    index, _ = drawn(together(method.memory), 4, random.set_state(place))
    losses = []
    for part, chosen in zip(method.memory, (index[:4], index[4:] - 9), strict=True):
        batch = part.take(chosen)
        losses.append(F.cross_entropy(model(batch.images, part.task), batch.labels))
    expected = torch.stack(losses).mean()
    theirs = torch.autograd.grad(expected, [*model.conv.parameters(), model.heads[0].weight, model.heads[1].weight])
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(gradients, theirs, strict=True))
    assert all(torch.allclose(value, moved[name], atol=1e-6) for name, value in model.named_buffers())


@given(
    counts=st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any),
    wanted=st.integers(1, 30),
    seed=st.integers(0, 99),
)
def test_the_memory_is_balanced_over_classes(counts: list[int], wanted: int, seed: int) -> None:
    """No class has more than one more than another, unless that has no more to give."""
    labels = torch.cat([torch.full((count,), label) for label, count in enumerate(counts)])
    labels = labels[torch.randperm(len(labels), generator=Generator().manual_seed(seed))]
    found = balanced(labels, wanted, Generator().manual_seed(seed))
    assert len(found) == len(set(found.tolist())) == min(wanted, len(labels))
    held = labels[found].bincount(minlength=len(counts)).tolist()
    for mine, all_of_it in zip(held, counts, strict=True):
        assert mine == all_of_it or mine >= max(held) - 1


def test_every_sample_of_a_class_is_kept_alike_often() -> None:
    generator, count = Generator().manual_seed(1), torch.zeros(9)
    labels = torch.tensor([0] * 6 + [1] * 3)
    for _ in range(3000):
        count[balanced(labels, 4, generator)] += 1
    assert torch.allclose(count / 3000, torch.tensor([2 / 6] * 6 + [2 / 3] * 3), atol=0.05)


def test_a_run_keeps_equally_many_of_each_class() -> None:
    one = in_second_task(memory=21)
    assert one.method.memory[0].labels.bincount().tolist() == [7, 7, 7]


def test_the_memory_passes_without_dropout_and_the_batch_with_it() -> None:
    one = in_second_task(memory=20)
    model, method, random = one.context.model, one.method, one.random.step
    model.train()
    dropped: list[bool] = []
    model.dropout.register_forward_hook(lambda module, inputs, y: dropped.append(not torch.equal(inputs[0], y)))
    method.gradients(one.learning.lesson.train.take(torch.arange(16)), one.learning.trained, sam=False)
    assert dropped == [True, False]
    assert model.dropout.training
    place = random.get_state()
    first = method.remembered()
    random.set_state(place)
    model.dropout.p = 0.9  # not drawn, not used
    assert torch.equal(method.remembered(), first)


def test_the_memory_is_a_sample_without_repetition_from_the_methods_generator() -> None:
    one, two = in_second_task(memory=20), in_second_task(memory=20)
    (mine,), (theirs,) = one.method.memory, two.method.memory
    assert torch.equal(mine.images, theirs.images)
    assert len({bytes(image.flatten().tolist()) for image in mine.images}) == 20


@pytest.mark.parametrize("changes", [{"optimizer": "sgdm"}, {"optimizer": "adamw"}, {"memory": 1}])
def test_what_does_not_go(changes: dict) -> None:
    with pytest.raises(NessError, match=r"use --optimizer sgd|at least 2"):
        tiny.job("agem", **changes)
