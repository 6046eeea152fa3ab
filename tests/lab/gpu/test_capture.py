"""Captured epochs, as far as that goes without a GPU: all but the graphs, whose work is done again instead."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tiny
from ness.lab import registry
from ness.lab.gpu.capture import CapturedRunner, PlainRunner, _moving, runner_for
from ness.lab.gpu.coroutines import Coroutine
from ness.lab.gpu.scheduler import side_by_side
from ness.lab.training.loop import Trainer
from ness.lab.training.task_training import copies

VARIANTS = {
    "sgdm": {},
    "sam": {"optimizer": "sam"},
    "adamw": {"optimizer": "adamw", "lr": 0.01},
    "cosine and mix-up": {"schedule": "cosine", "mixup": 0.4},
    "stored norms": {"norm": "stored"},
}


class Repeating(CapturedRunner):
    """Its graphs do their work again; recording does nothing, as on a GPU."""

    def _beside(self) -> Any:
        return nullcontext()

    def _record(self, work: Callable[[], object], random: torch.Generator | None = None) -> Any:
        return SimpleNamespace(replay=work)


@pytest.mark.parametrize("method", ["finetune", "frozen", "joint", "ness"])
@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_steps_from_buffers_are_the_same_steps(method: str, variant: str) -> None:
    changes = VARIANTS[variant]
    if method == "joint" and "mixup" in changes:
        changes = {"schedule": "cosine"}  # a mixed image would be of two tasks
    plain = tiny.to_the_end(tiny.trainer(method, epochs=2, **changes))
    repeated = tiny.to_the_end(tiny.trainer(method, epochs=2, runner=Repeating(), **changes))
    assert tiny.same(plain, repeated)


@pytest.mark.parametrize("method", sorted({*registry.all_methods()} - {"finetune", "frozen", "joint", "ness"}))
def test_whatever_a_method_moves_is_put_back_after_the_step_before_capture(method: str) -> None:
    plain, repeated = (tiny.trainer(method, epochs=2, runner=runner) for runner in (PlainRunner(), Repeating()))
    assert tiny.same(tiny.to_the_end(plain), tiny.to_the_end(repeated))


@pytest.mark.parametrize("method", sorted(registry.all_methods()))
def test_steps_of_blocks_from_buffers_are_the_same_steps(method: str) -> None:
    runners = PlainRunner(), Repeating()
    plain, repeated = (tiny.trainer(method, epochs=1, runner=runner, network=tiny.BLOCKS) for runner in runners)
    assert tiny.same(tiny.to_the_end(plain), tiny.to_the_end(repeated))


@pytest.mark.parametrize("norm", ["batch", "task"])
@pytest.mark.parametrize("method", sorted(registry.all_methods()))
def test_lanes_that_capture_end_as_if_alone(method: str, norm: str) -> None:
    """Whatever a run sets for a pass (parts, statistics, gates) is its own, at every pause."""

    def lane(seed: int) -> Trainer:
        trainer = tiny.trainer(method, seed, epochs=1, runner=Repeating(), norm=norm)
        trainer.run()
        return trainer

    together = side_by_side([partial(lane, seed) for seed in (1, 2)], torch.device("cpu"), 2)
    for seed, one in zip((1, 2), together, strict=True):
        assert isinstance(one, Trainer)
        assert tiny.same(one, tiny.to_the_end(tiny.trainer(method, seed, epochs=1, norm=norm)))


def test_the_host_is_free_between_the_step_before_capture_and_the_capture() -> None:
    runner = Repeating()
    trainer = tiny.trainer("finetune", epochs=2, runner=runner)
    trainer.advance()
    pauses = []
    for _ in range(2):
        unit = Coroutine(trainer.advance)
        pauses.append(list(unit))
    assert pauses == [["steps", "epoch", "epoch"], ["epoch"]]
    assert sorted(runner.graphs) == [8, 16]  # 56 samples: three batches of 16 and one of 8


def test_what_a_step_can_change_is_put_back() -> None:
    trainer = tiny.trainer("ness", epochs=1)
    while trainer.learning is None or trainer.at < 1:
        trainer.advance()
    learning = trainer.learning
    before = copies(_moving(learning))
    (first, *_) = trainer.open_epoch()
    learning.step(first)
    changed = [name for name, value in _moving(learning).items() if not torch.equal(value, before[name])]
    assert any("ness" in name for name in changed)  # the update, in the model's tensors
    assert any(name.startswith("optimizer/") for name in changed)


def test_the_cpu_steps_plainly() -> None:
    assert isinstance(runner_for(torch.device("cpu")), PlainRunner)
