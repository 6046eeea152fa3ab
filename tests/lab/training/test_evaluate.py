import pytest
import torch
from torch import Generator, nn

import tiny
from ness.lab.networks import norms
from ness.lab.training.evaluate import evaluate
from ness.lab.training.loader import Samples, fixed_order


def test_repeats_exactly_and_draws_nothing() -> None:
    one = tiny.trainer("finetune")
    samples = one.data["test"][0]
    order = fixed_order(len(samples), 0, "test", one.device)
    before = one.random.step.get_state()
    first, second = evaluate(one.method, samples, order), evaluate(one.method, samples, order)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert torch.equal(one.random.step.get_state(), before)


def test_batch_statistics_make_the_order_matter_and_stored_ones_do_not() -> None:
    """Class-sorted batches must never be evaluated with batch statistics."""
    for norm, differs in (("batch", True), ("stored", False)):
        one = tiny.trainer("finetune", norm=norm, epochs=1)
        while one.at < 1:
            one.advance()
        samples = one.data["train"][0]
        by_class = samples.labels.argsort()
        mixed = evaluate(one.method, samples, fixed_order(len(samples), 0, "train", one.device))
        one_class = [evaluate(one.method, samples, chunk) for chunk in by_class.split(19)]
        loss = (
            sum(float(loss) * len(chunk) for (loss, _), chunk in zip(one_class, by_class.split(19), strict=True)) / 56
        )
        assert (abs(loss - float(mixed[0])) > 1e-3) is differs


def test_counts_right_answers() -> None:
    one = tiny.trainer("finetune")
    samples = one.data["test"][1]
    order = fixed_order(len(samples), 1, "test", one.device)
    loss, accuracy = evaluate(one.method, samples, order)
    logits = one.context.model(samples.take(order).images, 1)
    assert float(accuracy) == 100 * float((logits.argmax(1) == samples.labels[order]).double().mean())
    assert abs(float(loss) - float(torch.nn.functional.cross_entropy(logits, samples.labels[order]).detach())) < 1e-6


def many(count: int, like: Samples) -> Samples:
    generator = Generator().manual_seed(count)
    images = torch.randint(0, 256, (count, 1, 6, 6), generator=generator, dtype=torch.uint8)
    return Samples(images, torch.randint(0, 3, (count,), generator=generator), 0, like.mean, like.std)


@pytest.mark.parametrize("count", [1000, 640, 250, 64, 50])
def test_batches_in_one_pass_are_judged_as_one_by_one(count: int, monkeypatch) -> None:
    one = tiny.trainer("finetune", norm="batch")
    samples = many(count, one.data["test"][0])
    order = fixed_order(count, 0, "test", one.device)
    loss, accuracy = evaluate(one.method, samples, order)
    sizes = []
    monkeypatch.setattr(norms, "on_gpu", lambda network: True)
    one.context.model.norm.register_forward_hook(lambda norm, inputs, y: sizes.append((len(y), norm.parts)))
    together = evaluate(one.method, samples, order)
    assert float(together[0]) == pytest.approx(float(loss), abs=1e-5)
    assert torch.equal(together[1], accuracy)
    assert len(sizes) <= -(-count // 512) + 1
    assert all(size == 64 * parts or (size == count % 64 and parts == 1) for size, parts in sizes)
    assert one.context.model.norm.parts == 1


def test_a_norm_of_ones_own_sees_batch_after_batch_on_a_gpu_too(monkeypatch) -> None:
    one = tiny.trainer("finetune", norm="batch")
    model = one.context.model
    monkeypatch.setattr(norms, "on_gpu", lambda network: True)
    samples, sizes = many(250, one.data["test"][0]), []
    for norm, expected in ((model.norm, [192, 58]), (nn.BatchNorm2d(4, track_running_stats=False), [64, 64, 64, 58])):
        sizes.clear()
        model.norm = norm
        model.norm.register_forward_hook(lambda norm, inputs, y: sizes.append(len(y)))
        evaluate(one.method, samples, samples.stored_order())
        assert sizes == expected
