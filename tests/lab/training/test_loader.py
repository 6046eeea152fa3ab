import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Generator

import tiny
from ness.lab.benchmarks.base import Request, Split
from ness.lab.training.loader import epoch_order, fixed_order, mixed_up, on_device, passes, together

CPU = torch.device("cpu")
TASKS = tiny.load(Request(1)).tasks


def test_uint8_is_normalised_on_the_device_and_float_is_not() -> None:
    task = TASKS[2]
    samples = on_device(task.train, task, 2, CPU)
    batch = samples.take(torch.tensor([3, 1]))
    expected = (task.train.images[[3, 1]].float() / 255 - 0.4) / 0.3
    assert torch.allclose(batch.images, expected)
    assert samples.images.dtype == torch.uint8
    assert batch.task == 2
    floats = Split(torch.randn(4, 1, 6, 6, generator=Generator().manual_seed(0)), torch.zeros(4, dtype=torch.int64))
    assert torch.equal(on_device(floats, task, 0, CPU).take(torch.arange(4)).images, floats.images)


def test_together_keeps_each_sample_with_its_task_and_constants() -> None:
    parts = [on_device(task.train, task, i, CPU) for i, task in enumerate(TASKS)]
    every = together(parts)
    assert len(every) == 168
    batch = every.take(torch.tensor([0, 60, 167]))
    assert batch.tasks is not None
    assert batch.tasks.tolist() == [0, 1, 2]
    for row, (part, index) in enumerate([(0, 0), (1, 4), (2, 55)]):
        assert torch.equal(batch.images[row], parts[part].take(torch.tensor([index])).images[0])
    assert together(parts[:1]) is parts[0]


@given(count=st.integers(0, 2000), size=st.integers(1, 600), at_once=st.integers(1, 9))
def test_passes_cut_batches_as_they_would_be_alone(count: int, size: int, at_once: int) -> None:
    cut = passes(count, size, at_once)
    batches = [samples // parts for samples, parts in cut for _ in range(parts)]
    assert batches == [size] * (count // size) + [count % size] * (count % size > 0)
    assert all(samples % parts == 0 and parts <= at_once for samples, parts in cut)
    assert len(cut) <= count // size // at_once + 2


def test_batches_at_once_are_the_batches_in_their_order() -> None:
    samples = on_device(TASKS[1].train, TASKS[1], 1, CPU)
    order = fixed_order(len(samples), 1, "train", CPU)
    alone, at_once = list(samples.batches(order, 9)), list(samples.batches(order, 9, 4))
    assert [(len(batch.labels), batch.parts) for batch in at_once] == [(36, 4), (18, 2), (2, 1)]
    for values in ("images", "labels"):
        assert torch.equal(*(torch.cat([getattr(each, values) for each in some]) for some in (alone, at_once)))


def test_an_epoch_sees_every_sample_once() -> None:
    samples = on_device(TASKS[0].train, TASKS[0], 0, CPU)
    chunks = epoch_order(samples, 16, Generator().manual_seed(1), mixed=True, drop_last=False)
    assert [len(chunk) for chunk in chunks] == [16, 16, 16, 8]
    assert sorted(torch.cat(chunks).tolist()) == list(range(56))
    assert [len(c) for c in epoch_order(samples, 16, Generator(), mixed=True, drop_last=True)] == [16, 16, 16]


@pytest.mark.parametrize("mixed", [True, False])
def test_several_tasks_mixed_or_one_a_batch(mixed: bool) -> None:
    every = together([on_device(task.train, task, i, CPU) for i, task in enumerate(TASKS)])
    chunks = epoch_order(every, 16, Generator().manual_seed(1), mixed=mixed, drop_last=False)
    assert sorted(torch.cat(chunks).tolist()) == list(range(168))
    assert every.tasks is not None
    pure = [len(set(every.tasks[chunk].tolist())) == 1 for chunk in chunks]
    assert any(not each for each in pure) if mixed else all(pure)
    if not mixed:
        firsts = [int(every.tasks[chunk[0]]) for chunk in chunks]
        assert firsts != sorted(firsts)  # tasks take turns


def test_evaluation_order_is_fixed_random_and_its_own_for_each_split() -> None:
    one = fixed_order(50, 3, "test", CPU)
    assert torch.equal(one, fixed_order(50, 3, "test", CPU))
    assert sorted(one.tolist()) == list(range(50))
    assert one.tolist() != list(range(50))
    assert not torch.equal(one, fixed_order(50, 2, "test", CPU))
    assert not torch.equal(one, fixed_order(50, 3, "valid", CPU))


def test_mix_up_mixes_images_and_labels_alike() -> None:
    batch = on_device(TASKS[0].train, TASKS[0], 0, CPU).take(torch.arange(9))
    mixed = mixed_up(batch, torch.tensor(0.75), Generator().manual_seed(5))
    partner = torch.rand(9, generator=Generator().manual_seed(5)).argsort()
    assert mixed.partner is not None
    assert torch.equal(mixed.partner, batch.labels[partner])
    assert torch.allclose(mixed.images, 0.75 * batch.images + 0.25 * batch.images[partner])
