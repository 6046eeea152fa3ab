"""The method `repair`: plain training whose change is reshaped after each task, from the Grams kept so far."""

from pathlib import Path

import pytest
import torch

import tiny
from ness import NessError
from ness.lab import registry
from ness.lab.methods.base import sizes_of
from ness.lab.methods.repair import kept_at_most
from ness.lab.runs import checkpoint
from ness.lab.runs.jobs import resolve
from ness.lab.runs.metrics import scores
from ness.lab.training.loop import Trainer

pytestmark = pytest.mark.filterwarnings("ignore:repair. [0-9]+ of:ness.NessWarning")


def on_digits(method: str, seed: int = 1, **changes) -> Trainer:
    job = resolve(method, "digits", changes=changes)
    return Trainer(job.method, registry.all_networks()["digits"], job.load(seed, None), job.settings, seed)


def until_task(one, task: int):
    while one.at < task:
        one.advance()
    return one


def test_forgets_less_than_finetune_and_learns_as_much() -> None:
    lost, learnt = {}, {}
    for method in ("finetune", "repair"):
        one = until_task(on_digits(method, epochs=4), 2)
        lost[method], learnt[method] = one.matrix[0][0] - one.matrix[1][0], one.matrix[1][1]
    assert lost["repair"] < lost["finetune"] - 10
    assert learnt["repair"] > learnt["finetune"] - 5


def test_training_is_plain_and_the_repair_moves_every_layer_and_no_norm() -> None:
    one = until_task(tiny.trainer("repair", norm="stored"), 1)
    model, before = one.context.model, {name: v.clone() for name, v in one.context.model.state_dict().items()}
    grams = {name: gram.matrix.clone() for name, gram in one.method.grams.items()}
    assert list(grams) == ["conv", "fc"]
    until_task(one, 2)
    after = model.state_dict()
    moved = {name for name in after if not torch.equal(after[name], before[name])}
    assert {"conv.weight", "fc.weight", "heads.1.weight"} <= moved
    assert not any(name.startswith(("norm.", "heads.0")) for name in moved)
    rows = {row["name"]: row for row in one.notes[1]["repair"]}
    assert list(rows) == ["conv", "fc"]
    for name, row in rows.items():
        assert row["old_after"] < row["old_before"]
        assert (one.method.grams[name].matrix - grams[name]).diagonal(dim1=1, dim2=2).min() >= 0


def test_strength_0_is_plain_training_with_a_head_fitted_again() -> None:
    plain = until_task(tiny.trainer("repair", norm="stored", strength=0.0, refit=0), 2)
    again = until_task(tiny.trainer("repair", norm="stored", strength=0.0, refit=0), 2)
    repaired = until_task(tiny.trainer("repair", norm="stored", strength=50.0, refit=0), 2)
    mine, theirs, other = (one.context.model.state_dict() for one in (plain, again, repaired))
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert not torch.equal(mine["fc.weight"], other["fc.weight"])
    assert torch.equal(mine["heads.1.weight"], other["heads.1.weight"])


@pytest.mark.parametrize("changes", [{"norm": "stored"}, {"optimizer": "sam"}, {"passes": 2}])
def test_taken_up_in_the_middle_of_a_task(changes: dict, tmp_path: Path) -> None:
    whole = tiny.trainer("repair", **changes)
    for _ in range(8):  # the second task, after an epoch or two
        whole.advance()
    assert (whole.at, whole.learning.epoch > 0) == (1, True)
    cut = checkpoint.write(tmp_path, *whole.state())
    later = tiny.trainer("repair", **changes)
    later.load_state(*checkpoint.read(cut))
    assert tiny.same(tiny.to_the_end(later), tiny.to_the_end(whole))


def test_what_it_keeps_is_within_what_it_says() -> None:
    one = until_task(tiny.trainer("repair", epochs=1), 2)
    tensors, _ = one.method.state()
    kept = sum(value.numel() * value.element_size() for value in tensors.values())
    sizes = sizes_of(one.context.model, 3, (3, 8, 8))
    assert kept + 4 * sizes.parameters == kept_at_most(sizes, one.method.own)


@pytest.mark.parametrize(
    ("name", "value"),
    [("strength", -1.0), ("passes", 0), ("ridge", 0.0), ("new_under", 2.0), ("refit", -1), ("refit_decay", -1.0)],
)
def test_settings_that_mean_nothing_are_refused(name: str, value: float) -> None:
    with pytest.raises(NessError, match=name):
        resolve("repair", "digits", changes={name: value})


@pytest.mark.parametrize("preset", ["fixed", "reference", "paper"])
@pytest.mark.parametrize("benchmark", ["digits", "cifar100", "five-datasets", "mini-imagenet"])
def test_a_row_on_every_benchmark_trains_as_finetune_does(benchmark: str, preset: str) -> None:
    mine, plain = (resolve(name, benchmark, preset).settings for name in ("repair", "finetune"))
    assert (mine.strength, mine.ridge) == (10.0, 1e-3)
    for name in ("optimizer", "lr", "epochs", "batch", "momentum", "weight_decay"):
        assert getattr(mine, name) == getattr(plain, name), name


@pytest.mark.slow
def test_beats_finetune_by_ten_points_of_bwt_at_its_preset() -> None:
    for seed in (1, 2, 3):
        found = [scores(tiny.to_the_end(on_digits(name, seed)).matrix).bwt for name in ("finetune", "repair")]
        assert found[1] > found[0] + 10
