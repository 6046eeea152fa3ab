"""EWC and HAT move the schedule and choose weights on loss plus penalty, as published, or on the loss alone."""

import math

import pytest
import torch
from torch.nn import functional as F

import tiny
from ness import NessError
from ness.lab import registry
from ness.lab.training.loop import Trainer


def validation_loss(one: Trainer) -> float:
    """Cross-entropy on the task's validation images, in one batch of 20 in eval mode."""
    task = one.learning.lesson.task
    samples = one.data["valid"][task]
    one.context.model.eval()
    with torch.no_grad():
        logits = one.method.logits(samples.take(one.orders["valid"][task]))
    return float(F.cross_entropy(logits.double(), samples.labels[one.orders["valid"][task]]))


@torch.no_grad()
def penalty_of(one: Trainer) -> float:
    """λ/2 Σ F (θ - θ*)², or λ Σ a(1 - m)/Σ(1 - m) with a = σ(smax·e), one tensor at a time."""
    method, own = one.method, one.context.own
    if one.spec.name == "ewc":
        named = dict(one.context.model.named_parameters())
        parts = [(method.fisher[n] * (named[n] - method.anchor[n]) ** 2).double().sum() for n in method.fisher]
        return float(method.weight / 2 * sum(parts))
    opened = torch.sigmoid(own.smax * method.embeddings[one.learning.lesson.task].double())
    free = 1 - method.claimed.double()
    return float(own.sparsity * (opened * free).sum() / free.sum())


def in_second_task(method: str, **changes) -> Trainer:
    one = tiny.trainer(method, epochs=4, **changes)
    while one.at < 1:
        one.advance()
    one.advance()
    return one


@pytest.mark.parametrize("method", ["ewc", "hat"])
@pytest.mark.parametrize("select_on", ["objective", "loss"])
def test_the_schedule_sees_the_objective_or_the_loss_alone(method: str, select_on: str) -> None:
    one = in_second_task(method, select_on=select_on)
    lowest = math.inf
    while not one.learning.over:
        facts = one.advance().facts
        penalty, loss = penalty_of(one), validation_loss(one)
        assert penalty > 0
        assert facts["valid_penalty"] == pytest.approx(penalty, rel=1e-4)
        seen = loss + penalty if select_on == "objective" else loss
        assert facts["valid_loss"] == pytest.approx(seen, rel=1e-4)
        lowest = min(lowest, facts["valid_loss"])
        assert one.learning.schedule.best == lowest


def test_a_growing_pull_lowers_the_rate_although_the_cross_entropy_falls(monkeypatch) -> None:
    """What cross-entropy alone cannot see: the rate stays, and the last weights are the ones that are kept."""
    kept, rates = {}, {}
    for select_on in ("objective", "loss"):
        one = in_second_task("ewc", select_on=select_on)
        first = {name: value.clone() for name, value in one.learning.moving.items()}
        numbers = iter([(1.0, 0.5), (0.9, 5.0), (0.8, 50.0)])
        for loss, penalty in numbers:
            one.close_epoch(1.0, loss, 50.0, penalty)
            with torch.no_grad():
                one.context.model.fc.bias += 1
        rates[select_on] = one.learning.schedule.lr
        one.learning.finish()
        kept[select_on] = one.context.model.fc.bias - first["fc.bias"]
    assert torch.allclose(kept["objective"], torch.zeros(16))
    assert torch.allclose(kept["loss"], torch.full((16,), 2.0))
    assert rates == {"objective": 0.025, "loss": 0.05}


def test_the_first_task_of_ewc_has_no_penalty_and_a_gate_has_its_price_from_the_start() -> None:
    for method, expected in (("ewc", False), ("hat", True), ("finetune", False)):
        one = tiny.trainer(method)
        one.advance()
        assert ("valid_penalty" in one.advance().facts) == expected


@pytest.mark.parametrize("method", ["ewc", "hat"])
def test_a_penalty_that_is_no_number_ends_the_run(method: str) -> None:
    one = in_second_task(method)
    with pytest.raises(NessError, match="training diverged"):
        one.close_epoch(1.0, 1.0, 50.0, math.inf)


def test_only_methods_with_a_penalty_have_the_setting_and_it_is_checked() -> None:
    having = {name for name, spec in registry.all_methods().items() if hasattr(spec.settings(), "select_on")}
    assert having == {"ewc", "hat"}
    for method in sorted(having):
        for preset in ("fixed", "reference"):
            assert tiny.resolve(method, "cifar100", preset).settings.select_on == "objective"
        with pytest.raises(NessError, match="select_on is 'acc', expected one of objective, loss"):
            tiny.job(method, select_on="acc")
        with pytest.raises(NessError, match="select_on was set, but schedule is 'cosine'"):
            tiny.job(method, select_on="loss", schedule="cosine")
    with pytest.raises(NessError, match="no setting is called 'select_on'"):
        tiny.job("finetune", select_on="loss")


@pytest.mark.parametrize("method", ["ewc", "hat"])
def test_what_is_selected_on_names_another_run(method: str) -> None:
    assert tiny.job(method).digest != tiny.job(method, select_on="loss").digest
