"""The method `ness` against the definition: projected gradients, what is frozen, where its statistics come from."""

import pytest
import torch

import ness
import tiny
from ness import NessError, NessWarning
from ness.lab.methods.base import sizes_of
from ness.lab.methods.ness import observed
from ness.lab.networks import norms
from ness.lab.runs.jobs import resolve
from ness.lab.training.seeds import derive


def until_task(one, task: int):
    while one.at < task:
        one.advance()
    return one


def test_only_allowed_directions_the_head_and_nothing_else_move() -> None:
    one = until_task(tiny.trainer("ness", norm="stored"), 1)
    model = one.context.model
    gram = one.method.guard.grams["fc"].matrix[0].clone()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    until_task(one, 2)
    after = model.state_dict()
    moved = {name for name in after if not torch.equal(after[name], before[name])}
    assert {"fc.weight", "heads.1.weight"} <= moved <= {"fc.weight", "fc.bias", "conv.weight", "heads.1.weight"}
    step = torch.cat([after["fc.weight"] - before["fc.weight"], (after["fc.bias"] - before["fc.bias"])[:, None]], 1)
    step = step.double()
    rows = one.notes[1]["certificate"]
    fc = next(row for row in rows if row["name"] == "fc")
    assert 0 < fc["rank"] <= 37
    drift = torch.sqrt(torch.trace(step @ gram @ step.T) / one.method.guard.grams["fc"].count * 2)
    free = torch.sqrt(step.square().sum() * gram.diagonal().mean())  # what such a step would do unconstrained
    assert float(drift) < 0.2 * float(free)


def test_forgets_less_than_finetune_on_real_digits() -> None:
    from ness.lab import registry
    from ness.lab.training.loop import Trainer

    found = {}
    for method in ("finetune", "ness"):
        job = resolve(method, "digits", changes={"epochs": 3})
        one = Trainer(job.method, registry.all_networks()["digits"], job.load(1, None), job.settings, 1)
        while one.at < 2:
            one.advance()
        found[method] = one.matrix[1][0] - one.matrix[0][0]
    assert found["ness"] > -3
    assert found["finetune"] < found["ness"] - 10


@pytest.mark.parametrize(
    "changes",
    [{"optimizer": "sgd"}, {"optimizer": "sam", "rho": 0.3, "weight_decay": 0.01, "network": tiny.WITHOUT_BIAS}],
    ids=["sgd", "sam"],
)
def test_sgd_form_equals_any_form(changes) -> None:
    """F15: on the increment, SGD in the null space is SGD with a projected gradient; and SAM's ascent is as long."""
    one = until_task(tiny.trainer("ness", norm="stored", **changes), 1)
    other = until_task(tiny.trainer("ness", norm="stored", **changes), 1)
    original = other.method.guard.constrain
    other.method.guard.constrain = lambda form, progress: original(form="any", progress=progress)
    until_task(one, 2)
    until_task(other, 2)
    mine, theirs = one.context.model.state_dict(), other.context.model.state_dict()
    assert all(torch.allclose(mine[name], theirs[name], atol=1e-5) for name in mine)


@pytest.mark.parametrize(
    ("changes", "form"),
    [
        ({"optimizer": "sgd"}, "sgd"),
        ({"optimizer": "sgdm"}, "sgd"),
        ({"optimizer": "sam"}, "any"),  # a bias
        ({"optimizer": "sam", "network": tiny.WITHOUT_BIAS}, "sgd"),
        ({"optimizer": "sam", "network": tiny.WITHOUT_BIAS, "rule": "soft"}, "any"),
        ({"optimizer": "sam", "sam_tasks": "first"}, "sgd"),
        ({"optimizer": "adamw", "lr": 0.01}, "any"),
    ],
)
def test_the_form_follows_the_optimizer(changes: dict, form: str, monkeypatch) -> None:
    asked = []
    original = ness.NullSpace.constrain

    def constrain(self, form, progress):
        asked.append(form)
        original(self, form, progress=progress)

    monkeypatch.setattr(ness.NullSpace, "constrain", constrain)
    tiny.to_the_end(tiny.trainer("ness", epochs=1, **changes))
    assert asked == [form, form]


def test_recomputed_statistics_see_all_old_data_and_kept_ones_only_the_last_task(monkeypatch) -> None:
    counts = []
    observe = ness.NullSpace.observe

    def counting(self, batches, forward):
        seen = list(batches)
        counts.append([len(batch.images) for batch in seen])
        return observe(self, seen, forward=forward)

    monkeypatch.setattr(ness.NullSpace, "observe", counting)
    tiny.to_the_end(tiny.trainer("ness", epochs=1))
    assert counts == [[16, 16, 16, 8], [16, 16, 16, 8]]  # not after the last task: nobody needs it
    counts.clear()
    tiny.to_the_end(tiny.trainer("ness", epochs=1, statistics="recomputed"))
    assert counts == [[16, 16, 16, 8], [16, 16, 16, 8] * 2]
    counts.clear()
    tiny.to_the_end(tiny.trainer("ness", epochs=1, statistics="recomputed", borders="mixed"))
    assert counts == [[16, 16, 16, 8], [16] * 7]
    counts.clear()
    tiny.to_the_end(tiny.trainer("ness", epochs=1, statistics="recomputed", history="first"))
    assert counts == [[16, 16, 16, 8], [16, 16, 16, 8]]


def test_recomputed_statistics_taken_up_in_a_task() -> None:
    whole = tiny.trainer("ness", statistics="recomputed")
    for _ in range(8):
        whole.advance()
    tensors, manifest = whole.state()
    held = {name: value.clone() for name, value in tensors.items()}
    tiny.to_the_end(whole)
    later = tiny.trainer("ness", statistics="recomputed")
    later.load_state(held, manifest)
    assert tiny.same(tiny.to_the_end(later), whole)


def test_observed_order_is_fixed_and_random() -> None:
    one = tiny.trainer("ness")
    samples = one.data["train"][1]
    batches = observed(one.context.model, (samples,), one.context.training, mixed=False)
    order = torch.randperm(56, generator=torch.Generator().manual_seed(derive(20_001, 0)))
    assert torch.equal(torch.cat([batch.images for batch in batches]), samples.take(order).images)


@pytest.mark.parametrize("borders", ["apart", "mixed"])
def test_batches_observed_in_one_pass_give_the_statistics_of_one_by_one(borders: str, monkeypatch) -> None:
    one = until_task(tiny.trainer("ness", epochs=1, norm="batch", statistics="recomputed", borders=borders), 2)
    model, parts, grams = one.context.model, [], []
    model.norm.register_forward_hook(lambda norm, inputs, y: parts.append(norm.parts))
    for on_gpu, expected in ((False, [1] * (8 if borders == "apart" else 7)), (True, [3, 1] * 2)):
        monkeypatch.setattr(norms, "on_gpu", lambda network, on_gpu=on_gpu: on_gpu)
        parts.clear()
        one.method.guard = one.method._new_guard()
        one.method._observe(tuple(one.data["train"][:2]))
        assert model.norm.parts == 1  # nothing is held open across a pause
        assert parts == (expected if borders == "apart" or not on_gpu else [7])
        grams.append(one.method.guard.grams)
    for alone, together in zip(*(found.values() for found in grams), strict=True):
        assert alone.count == together.count
        size = alone.matrix.abs().max()
        assert float((alone.matrix - together.matrix).abs().max()) <= 1e-6 * float(size)


def test_the_papers_text_warns_when_nothing_but_the_head_trains() -> None:
    with pytest.warns(NessWarning, match="no direction is free in any layer"):
        tiny.to_the_end(tiny.trainer("ness", epochs=1, rule="frobenius", eps=1e-6))


def test_presets() -> None:
    fixed, reference = resolve("ness", "digits"), resolve("ness", "digits", "reference")
    paper = resolve("ness", "digits", "paper")
    assert (fixed.settings.statistics, fixed.settings.sam_tasks, fixed.settings.rule) == ("kept", "all", "nuclear")
    found = reference.settings
    assert (found.statistics, found.borders, found.sam_tasks, found.rule) == ("recomputed", "mixed", "first", "nuclear")
    assert paper.settings.rule == "frobenius"
    assert len({fixed.digest, reference.digest, paper.digest}) == 3


def test_a_drift_budget_is_kept_task_after_task_and_recorded() -> None:
    one = tiny.to_the_end(tiny.trainer("ness", rule="within", drift=0.05))
    assert one.method.guard.rule == ness.Within(0.05)
    for notes in one.notes[1:]:
        assert all(0 <= row["task_drift"] <= 0.05 and 0 <= row["shrunk"] <= 1 for row in notes["certificate"])
    assert any(row["task_drift"] > 0 for row in one.notes[-1]["certificate"])
    assert "task_drift" not in tiny.to_the_end(tiny.trainer("ness", epochs=1)).notes[-1]["certificate"][0]


def test_what_a_drift_budget_keeps_is_at_most_what_is_listed() -> None:
    one = until_task(tiny.trainer("ness", epochs=1, rule="within"), 2)  # observed, not constrained: books at their most
    held = sum(value.numel() * value.element_size() for value in one.method.state()[0].values())
    listed = one.spec.kept_at_most(sizes_of(one.context.model, 3, (1, 6, 6)), one.context.own)
    assert 0.9 * listed < held <= listed + 16 * 2 * 2  # and two sums a layer


def test_a_drift_budget_taken_up_in_a_task() -> None:
    whole = tiny.trainer("ness", rule="within")
    for _ in range(8):
        whole.advance()
    tensors, manifest = whole.state()
    held = {name: value.clone() for name, value in tensors.items()}
    tiny.to_the_end(whole)
    later = tiny.trainer("ness", rule="within")
    later.load_state(held, manifest)
    assert tiny.same(tiny.to_the_end(later), whole)


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(NessError, match="drift was set, but rule is 'nuclear'"):
        tiny.job("ness", drift=0.2)
    with pytest.raises(NessError, match="eps was set, but rule is 'within'"):
        tiny.job("ness", rule="within", eps=1e-3)
    with pytest.raises(NessError, match="drift is 2"):
        tiny.job("ness", rule="within", drift=2.0)
    with pytest.raises(NessError, match="needs statistics kept"):
        tiny.job("ness", rule="within", statistics="recomputed")
    with pytest.raises(NessError, match="eps is 2"):
        tiny.job("ness", eps=2.0)
    with pytest.raises(NessError, match="borders was set, but statistics is 'kept'"):
        tiny.job("ness", borders="mixed")
