"""The method `ness-plus`: what it keeps, what it never mixes, and how it is taken up again."""

from pathlib import Path

import pytest
import torch

import tiny
from ness import NessError
from ness.lab import registry
from ness.lab.methods.base import sizes_of
from ness.lab.methods.ness_plus import directions_within
from ness.lab.networks.base import build
from ness.lab.networks.norms import batch_norms
from ness.lab.runs import checkpoint
from ness.lab.runs.jobs import resolve
from ness.lab.runs.metrics import scores
from ness.lab.training.loop import Trainer


def on_digits(seed: int = 1, method: str = "ness-plus", **changes) -> Trainer:
    job = resolve(method, "digits", changes=changes)
    return Trainer(job.method, registry.all_networks()["digits"], job.load(seed, None), job.settings, seed)


def until_task(one: Trainer, task: int) -> Trainer:
    while one.at < task:
        one.advance()
    return one


def test_without_a_shared_update_no_old_task_changes_at_all() -> None:
    one = tiny.to_the_end(tiny.trainer("ness-plus", rule="none", private=3, norm="stored"))
    for task, row in enumerate(one.matrix[-1]):
        assert row == one.matrix[task][task]


def test_an_old_task_is_bit_equal_whatever_was_used_in_between() -> None:
    one = tiny.to_the_end(tiny.trainer("ness-plus", private=3))
    images = one.data["test"][1].take(torch.arange(16)).images
    model = one.context.model.eval()
    found = []
    for _ in range(3):
        one.method.use(1)
        found.append(model(images, 1))
        for other in (0, 2):
            one.method.use(other)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_each_tasks_drift_stays_within_the_budget() -> None:
    one = tiny.to_the_end(tiny.trainer("ness-plus", drift=0.05, private=3, lr=0.3))
    assert max(row["task_drift"] for row in one.notes[-1]["certificate"]) <= 0.05
    assert any(row["rank"] > 0 for row in one.notes[-1]["certificate"])


@pytest.mark.parametrize("changes", [{}, {"norm": "stored"}, {"basis": "own"}, {"norms": "frozen"}, {"rule": "none"}])
def test_taken_up_in_the_middle_of_a_task(changes: dict, tmp_path: Path) -> None:
    whole = tiny.trainer("ness-plus", private=3, **changes)
    for _ in range(13):  # the third task: the second has a private part by then
        whole.advance()
    assert (whole.at, whole.learning is not None) == (2, True)
    cut = checkpoint.write(tmp_path, *whole.state())
    later = tiny.trainer("ness-plus", private=3, **changes)
    later.load_state(*checkpoint.read(cut))
    assert tiny.same(tiny.to_the_end(later), tiny.to_the_end(whole))


@pytest.mark.parametrize(("network", "side"), [("alexnet", 32), ("resnet18-32", 32), ("resnet18-84", 84)])
def test_a_task_keeps_at_most_five_percent(network: str, side: int) -> None:
    made = {"weights": torch.Generator(), "dropout": torch.Generator(), "device": torch.device("cpu")}
    model = build(registry.all_networks()[network], (3, side, side), [5, 5], "stored", **made)
    layers = sizes_of(model, 2, ()).weights
    norms = sum(values.numel() for norm in batch_norms(model) for values in norm.state_dict().values())
    k = directions_within(layers, norms, 0.05)
    kept = norms + sum(outputs * min(k, fan_in // 3) for outputs, fan_in in layers)
    weights = sum(outputs * fan_in for outputs, fan_in in layers)
    assert 0.045 * weights < kept <= 0.05 * weights
    assert k >= 32


@pytest.mark.parametrize(
    ("changes", "sets"),
    [
        ({}, 3),
        ({"private": 3}, 3),
        ({"private": 3, "basis": "own"}, 3),
        ({"private": 3, "rule": "nuclear", "eps": 0.03}, 1),
        ({"private": 3, "rule": "none"}, 1),
    ],
)
def test_what_it_keeps_is_at_most_what_is_listed(changes: dict, sets: int) -> None:
    one = until_task(tiny.trainer("ness-plus", epochs=1, norm="stored", **changes), 2)  # before the last: at its most
    tensors, _ = one.method.state()
    sizes = sizes_of(one.context.model, 3, (1, 6, 6))
    held = sum(value.numel() * value.element_size() for name, value in tensors.items() if not name.startswith("rest/"))
    held += sum(p.numel() * 4 for name, p in one.context.model.named_parameters() if name.startswith("heads"))  # kept
    listed = one.spec.kept_at_most(sizes, one.context.own)
    assert 0.8 * listed < held <= listed
    assert sum(name.endswith("/gram") for name in tensors) == sets * len(sizes.layers)


def test_at_most_a_third_of_the_fan_in_is_one_rule_for_all() -> None:
    one = tiny.trainer("ness-plus", private=36, epochs=1)
    fan_ins = {name: layer.fan_in for name, layer in one.method.guard._found.layers.items()}
    to_the_end = until_task(one, 2)
    parts = to_the_end.method.guard._tasks.private["task 2"]
    assert {name: part.width for name, part in parts.items()} == {name: fan_in // 3 for name, fan_in in fan_ins.items()}
    weights = sizes_of(one.context.model, 3, (1, 6, 6)).weights
    assert directions_within(weights, 0, 1.0) == max(fan_ins.values()) // 3


def test_the_record_says_what_a_task_keeps() -> None:
    one = tiny.to_the_end(tiny.trainer("ness-plus", private=3, norm="stored"))
    weights = sum(outputs * 3 for outputs in (4, 16))  # k numbers an output unit
    norms = 4 * 4 + 1  # γ, β, mean and variance of four maps, and a counter
    assert [notes.get("kept") for notes in one.notes] == [None, weights + norms, weights + norms]


@pytest.mark.parametrize(("name", "value"), [("drift", 0.0), ("keep", 1.5), ("private", -1)])
def test_values_out_of_range_are_refused(name: str, value: float) -> None:
    with pytest.raises(NessError, match=name):
        resolve("ness-plus", "digits", changes={name: value})


def test_a_setting_of_another_rule_is_refused() -> None:
    with pytest.raises(NessError, match="eps"):
        resolve("ness-plus", "digits", changes={"eps": 1e-3})


def test_forgets_next_to_nothing_on_real_digits() -> None:
    one = until_task(on_digits(epochs=4), 3)
    assert min(one.matrix[2][task] - one.matrix[task][task] for task in range(2)) > -2
    assert min(one.matrix[2][:3]) > 90


@pytest.mark.slow
def test_beats_ness_on_digits_and_forgets_less_than_a_point() -> None:
    found = {
        method: [scores(tiny.to_the_end(on_digits(seed, method)).matrix) for seed in (1, 2, 3)]
        for method in ("ness", "ness-plus")
    }
    mean = {method: sum(each.acc for each in all_of) / 3 for method, all_of in found.items()}
    assert mean["ness-plus"] > mean["ness"]
    assert min(each.bwt for each in found["ness-plus"]) > -1
