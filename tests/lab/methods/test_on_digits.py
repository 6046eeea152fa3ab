"""ewc, hat and agem on real digits: each forgets less than plain training, and is taken up where it was cut."""

from pathlib import Path

import pytest

import tiny
from ness.lab import registry
from ness.lab.runs import checkpoint
from ness.lab.runs.jobs import resolve
from ness.lab.runs.metrics import scores
from ness.lab.training.loop import Trainer

METHODS = ("agem", "ewc", "hat")


def trainer(method: str, seed: int = 1, **changes) -> Trainer:
    job = resolve(method, "digits", changes=changes)
    return Trainer(job.method, registry.all_networks()["digits"], job.load(seed, None), job.settings, seed)


def lost(method: str) -> float:
    """What the first task lost while the second was learnt, a few epochs each."""
    one = trainer(method, epochs=4)
    while one.at < 2:
        one.advance()
    return one.matrix[0][0] - one.matrix[1][0]


@pytest.fixture(scope="module")
def lost_by_finetune() -> float:
    return lost("finetune")


@pytest.mark.parametrize("method", METHODS)
def test_forgets_less_than_finetune(method: str, lost_by_finetune: float) -> None:
    assert lost(method) < lost_by_finetune - 10


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_beats_finetune_by_ten_points_of_bwt_at_its_preset(method: str) -> None:
    for seed in (1, 2, 3):
        found = [scores(tiny.to_the_end(trainer(name, seed)).matrix).bwt for name in ("finetune", method)]
        assert found[1] > found[0] + 10


@pytest.mark.parametrize("variant", [{"norm": "stored"}, {"optimizer": "sam"}])
@pytest.mark.parametrize("method", METHODS)
def test_taken_up_in_the_middle_of_a_task(method: str, variant: dict, tmp_path: Path) -> None:
    whole = tiny.trainer(method, **variant)
    for _ in range(8):  # the second task, after an epoch or two
        whole.advance()
    assert (whole.at, whole.learning.epoch > 0) == (1, True)
    cut = checkpoint.write(tmp_path, *whole.state())
    later = tiny.trainer(method, **variant)
    later.load_state(*checkpoint.read(cut))
    assert tiny.same(tiny.to_the_end(later), tiny.to_the_end(whole))
