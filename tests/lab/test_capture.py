"""Captured epochs, as far as that goes without a card: inputs read from buffers at a counter are the same steps."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

import tiny
from ness.lab.capture import Buffers, PlainRunner, _moving, _one, runner_for
from ness.lab.lesson import Learning, copies
from ness.lab.step import Inputs

VARIANTS = {
    "sgdm": {},
    "sam": {"optimizer": "sam"},
    "adamw": {"optimizer": "adamw", "lr": 0.01},
    "cosine and mix-up": {"schedule": "cosine", "mixup": 0.4},
    "stored norms": {"norm": "stored"},
}


class Buffered(PlainRunner):
    """What a captured epoch does, with the graph left out."""

    def steps(self, learning: Learning, inputs: Sequence[Inputs]) -> Tensor:
        buffers = Buffers.like(inputs)
        buffers.fill(inputs)
        for each in inputs:
            _one(learning.step, buffers, len(each.index))
        assert int(buffers.counter) == len(inputs)
        return buffers.loss / len(inputs)


@pytest.mark.parametrize("method", ["finetune", "frozen", "joint", "ness"])
@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_steps_from_buffers_are_the_same_steps(method: str, variant: str) -> None:
    changes = VARIANTS[variant]
    if method == "joint" and "mixup" in changes:
        changes = {"schedule": "cosine"}  # a mixed image would be of two tasks
    plain = tiny.to_the_end(tiny.trainer(method, epochs=2, **changes))
    buffered = tiny.to_the_end(tiny.trainer(method, epochs=2, runner=Buffered(), **changes))
    assert tiny.same(plain, buffered)


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
