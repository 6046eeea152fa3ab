"""FS-DGPM against its definition."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny
from ness import NessError
from ness.lab.methods._projection.project import removal
from ness.lab.methods._reservoir import Reservoir, slots
from ness.lab.methods.fsdgpm import clipped, halves, rewrapped, uphill
from ness.lab.runs.jobs import resolve
from ness.lab.training.loader import Batch
from ness.lab.training.losses import cross_entropy_of_many


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(("second_order", "expected"), [(True, 2.88), (False, 2.4)])
def test_one_ascent_by_hand(second_order: bool, expected: float) -> None:
    """F1: loss ½·2·w² at w = 1, η₁ = .1: the fast weight is 1.2."""
    weight = torch.ones((), dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(weight.square(), weight, create_graph=second_order)
    fast = uphill({"w": weight}, {"w": gradient}, 0.1)["w"]
    assert fast.item() == pytest.approx(1.2)
    assert torch.autograd.grad(fast.square(), weight)[0].item() == pytest.approx(expected)
    assert uphill({"w": weight}, {"w": 100 * gradient}, 0.1)["w"].item() == pytest.approx(1.2)  # clamped at 2


def test_importance_one_is_a_projection_and_zero_is_none() -> None:
    """F2."""
    held = torch.linalg.qr(torch.randn(6, 2, generator=generator(), dtype=torch.float64))[0]
    gradient = torch.randn(3, 6, generator=generator(1), dtype=torch.float64)
    ones = torch.ones(2, dtype=torch.float64)
    assert (removal(held, ones)(gradient) @ held).norm() < 1e-12
    assert torch.equal(removal(held, 0 * ones)(gradient), gradient)


def in_second_task(**changes):
    one = tiny.trainer("fsdgpm", **changes)
    while one.at < 1:
        one.advance()
    one.advance()
    return one


def test_the_importances_that_are_learnt_are_the_ones_in_use() -> None:
    """F3: the reference's optimizer moves objects that nobody reads any more; ours moves λ, and the step follows it."""
    one = in_second_task(importance_lr=50.0)
    theta = one.method.theta["fc"]
    seen = [theta.clone()]
    for inputs in one.open_epoch()[:3]:
        one.learning.step(inputs)
        assert one.method.theta["fc"] is theta
        seen.append(theta.clone())
    assert all(not torch.equal(a, b) for a, b in pairwise(seen))
    held, gradient = one.method.bases["fc"], torch.randn(16, 37)
    fc = one.context.model.fc
    fc.weight.grad, fc.bias.grad = gradient[:, :-1].clone(), gradient[:, -1].clone()
    one.method.after_backward(None)
    left = torch.cat([fc.weight.grad, fc.bias.grad[:, None]], 1) @ held
    assert torch.allclose(left, (gradient @ held) * (1 - torch.sigmoid(10 * theta)), atol=1e-5)


def test_the_references_importances_end_at_a_constant() -> None:
    """F4."""
    for start in (0.0, 0.3, 1.0):
        value = torch.tensor(start, dtype=torch.float64)
        for _ in range(50):
            value = rewrapped(value)
        assert float(value) == pytest.approx(0.9999546, abs=1e-7)
    one = in_second_task(importances="rewrapped")
    for inputs in one.open_epoch() * 4:
        one.learning.step(inputs)
    assert all(torch.allclose(theta, torch.tensor(0.9999546), atol=1e-6) for theta in one.method.theta.values())


@settings(max_examples=30, deadline=None)
@given(size=st.integers(1, 12), pieces=st.lists(st.integers(1, 9), min_size=1, max_size=8), seed=st.integers(0, 999))
def test_the_memory_fills_up_and_holds_what_was_offered(size, pieces, seed) -> None:
    """F5: min(n, m) different samples, each with its own label and task."""
    memory, random, offered = Reservoir(size, (1,), torch.device("cpu")), generator(seed), 0
    for task, count in enumerate(pieces):
        numbers = torch.arange(offered, offered + count)
        memory.offer(Batch(numbers.float()[:, None], numbers, task), torch.tensor(True), random)
        memory.offer(Batch(numbers.float()[:, None] - 999, numbers, task), torch.tensor(False), random)
        offered += count
    held = int(memory.filled)
    assert held == min(offered, size)
    labels = memory.labels[:held]
    assert len(set(labels.tolist())) == held
    assert torch.equal(memory.images[:held, 0], labels.float())
    borders = torch.tensor(pieces).cumsum(0)
    assert torch.equal(memory.tasks[:held], torch.bucketize(labels, borders, right=True))
    index, real = memory.draw(min(size, 4), random)
    assert int(real.sum()) == min(held, size, 4)
    assert len(set(index.tolist())) == len(index)


def test_every_sample_has_the_same_chance_to_stay() -> None:
    """F5: inclusion m/n within three standard deviations, first, middle and last samples alike."""
    size, total, trials = 10, 50, 2000
    counts = torch.zeros(total)
    for seed in range(trials):
        place, random = torch.full((size + 1,), -1), generator(seed)
        for start in range(0, total, 5):
            draws = torch.rand(5, generator=random, dtype=torch.float64)
            place.index_copy_(0, slots(torch.tensor(start), 5, size, draws), torch.arange(start, start + 5))
        counts[place[:size]] += 1
    share = size / total
    deviation = math.sqrt(share * (1 - share) / trials)
    assert float((counts / trials - share).abs().max()) < 3.9 * deviation  # fifty of them: 3.9 for 3


def test_the_memory_is_filled_in_the_first_epoch_only() -> None:
    one = tiny.trainer("fsdgpm", memory=100)
    seen = []
    for _ in range(5):
        one.advance()
        seen.append(int(one.method.memory.seen))
    assert seen == [0, 56, 56, 56, 56]  # begun, three epochs, finished
    tiny.to_the_end(one)
    assert int(one.method.memory.seen) == 3 * 56
    assert set(one.method.memory.tasks[:100].tolist()) == {0, 1, 2}


def test_replayed_samples_count_under_their_own_head_and_empty_places_not_at_all() -> None:
    logits = [torch.tensor([[3.0, 0.0]] * 3), torch.tensor([[0.0, 1.0]] * 3)]
    batch = Batch(torch.empty(3), torch.tensor([0, 1, 0]), 1, torch.tensor([0, 1, 1]))
    losses = [math.log(1 + math.exp(-3)), math.log(1 + math.exp(-1)), math.log(1 + math.exp(1))]
    assert float(cross_entropy_of_many(logits, batch)) == pytest.approx(sum(losses) / 3)
    weights = torch.tensor([1.0, 1.0, 0.0])
    assert float(cross_entropy_of_many(logits, batch, weights)) == pytest.approx(sum(losses[:2]) / 2)
    one = tiny.trainer("fsdgpm")
    one.advance()
    everyone, certain = one.method.memory.beside(one.data["train"][0].take(torch.arange(8)), 64, generator())
    assert certain.tolist() == [1.0] * 8 + [0.0] * 64
    assert torch.equal(everyone.images[8:16], everyone.images[:8])  # stand-ins until the memory holds something


def test_a_short_batch_has_as_few_replayed_samples_beside_it() -> None:
    """As published: min(n, what the memory holds); 64 of them beside 14 would drown the task."""
    one = in_second_task(batch=16, replay=12)  # 56 = 3·16 + 8
    seen = []
    beside = one.method.memory.beside
    one.method.memory.beside = lambda batch, count, random: (
        seen.append((len(batch.labels), count)) or beside(batch, count, random)
    )
    one.advance()
    assert seen == [(16, 12)] * 3 + [(8, 8)]


@pytest.mark.parametrize(("count", "parts"), [(2, [2]), (3, [3]), (4, [2, 2]), (14, [7, 7]), (15, [8, 7])])
def test_no_half_of_a_short_batch_is_a_single_sample(count: int, parts: list[int]) -> None:
    batch = Batch(torch.arange(count), torch.arange(count), 0)
    assert [len(half.labels) for half in halves(batch)] == parts
    assert torch.equal(torch.cat([half.images for half in halves(batch)]), batch.images)


def test_a_last_batch_of_two_is_learnt_from() -> None:
    one = tiny.trainer("fsdgpm", batch=27, epochs=1)  # 56 = 2·27 + 2
    tiny.to_the_end(one)
    assert one.done


@pytest.mark.parametrize("norm", ["batch", "stored"])
def test_bases_see_a_task_as_it_is_tested(norm: str) -> None:
    """Each remembered image's rows are those of a pass of its own task's images, whatever other tasks are like."""
    one = in_second_task(norm=norm, memory=100, samples=40)
    method, model = one.method, one.context.model.eval()
    memory = method.memory
    order = torch.randperm(int(memory.filled), generator=generator())[:40]
    tasks = memory.tasks.clone()
    memory.tasks[: len(memory.tasks) // 3] = 1  # as if there had been a second task
    rows = method._rows(order)
    at = 0
    for task in (0, 1):
        wanted = order[memory.tasks[order] == task]
        others = [n for n in range(int(memory.filled)) if memory.tasks[n] == task and n not in wanted.tolist()]
        images = memory.images[[*wanted.tolist(), *others[: 64 - len(wanted)]]]
        x = model.norm(model.conv(images)).relu()
        expected = model.pool(x).flatten(1)[: len(wanted)]
        found = rows["fc"][at : at + len(wanted)]
        torch.testing.assert_close(found[:, :-1].float(), expected.detach(), rtol=1e-5, atol=1e-6)
        at += len(wanted)
    assert at == len(rows["fc"]) == 40
    before = {name: value.clone() for name, value in rows.items()}
    memory.images[(memory.tasks == 1).nonzero().flatten()] *= 5
    after = method._rows(order)
    first = int((memory.tasks[order] == 0).sum())
    assert torch.equal(after["fc"][:first], before["fc"][:first])
    assert not torch.equal(after["fc"][first:], before["fc"][first:])
    memory.tasks.copy_(tasks)


def test_a_task_with_one_remembered_image_has_rows_too() -> None:
    one = in_second_task(memory=20, samples=20, replay=10)
    memory = one.method.memory
    memory.tasks[0] = 1
    one.context.model.eval()
    rows = one.method._rows(torch.arange(20))
    assert len(rows["fc"]) == 20
    assert all(bool(value.isfinite().all()) for value in rows.values())


def test_old_heads_learn_through_replay_and_gradients_are_clipped() -> None:
    one = in_second_task()
    before = [head.weight.clone() for head in one.context.model.heads]
    one.advance()
    moved = [not torch.equal(head.weight, old) for head, old in zip(one.context.model.heads, before, strict=True)]
    assert moved == [True, True, False]
    big = [torch.full((3,), 10.0), torch.full((2,), -10.0)]
    assert float(torch.cat(clipped(big, 2.0)).norm()) == pytest.approx(2.0, abs=1e-5)
    small = [torch.full((3,), 0.1)]
    assert torch.equal(clipped(small, 2.0)[0], small[0])


def test_every_switch_changes_the_run() -> None:
    base = {"epochs": 1, "ascent": 0.05}
    fixed = tiny.to_the_end(tiny.trainer("fsdgpm", **base))
    for change in ({"second_order": False}, {"importances": "rewrapped"}, {"ascent": 0.0}, {"norms": "free"}):
        assert not tiny.same(tiny.to_the_end(tiny.trainer("fsdgpm", **{**base, **change})), fixed), change


def test_presets_and_bad_settings() -> None:
    fixed, reference = (resolve("fsdgpm", "cifar100", name).settings for name in ("fixed", "reference"))
    assert (fixed.importances, reference.importances) == ("learnt", "rewrapped")
    assert (fixed.optimizer, fixed.lr, fixed.epochs, fixed.memory) == ("sgdm", 0.01, 50, 1000)
    for changes, message in (
        ({"threshold": 1.0}, "threshold is 1, expected a share"),
        ({"samples": 2000}, "samples is 2000, expected at least 2 and at most memory"),
        ({"batch": 3}, "batch is 3, expected at least 4"),
        ({"optimizer": "sam"}, "fsdgpm does not go with sam"),
        ({"optimizer": "adamw"}, "fsdgpm does not go with adamw"),
        ({"mixup": 0.3}, "fsdgpm does not go with mixup"),
    ):
        with pytest.raises(NessError, match=message):
            tiny.job("fsdgpm", **changes)
    with pytest.raises(NessError, match=r"growth is 0.5: the threshold"):
        tiny.trainer("fsdgpm", growth=0.5)
    with pytest.raises(NessError, match="samples is 57, but task 1 has 56"):
        tiny.trainer("fsdgpm", samples=57).advance()
