import pytest
import torch
from torch import Generator

from ness import NessError
from ness.lab.nets.dropout import Dropout


def test_masks_come_from_its_generator() -> None:
    layer, x = Dropout(0.3), torch.ones(20_000)
    state = torch.random.get_rng_state()
    layer.generator = Generator().manual_seed(1)
    first = layer(x)
    layer.generator.manual_seed(1)
    assert torch.equal(layer(x), first)
    assert not torch.equal(layer(x), first)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert abs(float((first == 0).float().mean()) - 0.3) < 0.02
    assert abs(float(first.mean()) - 1) < 0.02  # the expectation is kept


def test_without_a_generator_training_is_refused() -> None:
    with pytest.raises(NessError, match="generator"):
        Dropout(0.5)(torch.ones(2))
    assert torch.equal(Dropout(0.5).eval()(torch.ones(2)), torch.ones(2))
