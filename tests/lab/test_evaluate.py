import torch

import tiny
from ness.lab.evaluate import evaluate
from ness.lab.loader import fixed_order


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
