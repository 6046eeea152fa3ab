import pytest
import torch
from torch import Generator

from ness import NessError
from ness.lab.networks.dropout import Dropout, drawn, without_dropout


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


@pytest.mark.parametrize("p", [1e-7, 0.01, 0.2, 0.5, 0.99])
def test_each_number_is_dropped_with_probability_p_whatever_its_place(p: float) -> None:
    kept = drawn(torch.empty(1_000_003), p, Generator().manual_seed(2))
    assert kept.shape == (1_000_003,)
    for place in range(4):  # in a draw of the generator, which serves four
        share = 1 - float(kept[place::4].double().mean())
        assert abs(share - p) < 5 * (p * (1 - p) / 250_000) ** 0.5 + 2**-16
    pairs = kept[:-3].view(-1, 4).double()
    assert (torch.corrcoef(pairs.T) - torch.eye(4)).nan_to_num().abs().max() < 0.01  # nor do they depend on one another


@pytest.mark.parametrize("shape", [(0,), (1,), (3, 5), (2, 3, 4, 5)])
def test_any_shape_and_layout_is_masked(shape: tuple[int, ...]) -> None:
    layer = Dropout(0.5)
    layer.generator = Generator().manual_seed(3)
    x = torch.ones(shape, dtype=torch.float64)
    x = x.to(memory_format=torch.channels_last) if x.dim() == 4 else x
    found = layer(x)
    assert found.shape == x.shape
    assert found.dtype == x.dtype
    assert set(found.flatten().tolist()) <= {0.0, 2.0}
    kept = layer.draw(x)
    assert kept is not None
    assert kept.stride() == x.stride()  # the kernels of a GPU read both in one order


def test_without_dropout_nothing_is_dropped_or_drawn_and_modes_come_back() -> None:
    network = torch.nn.Sequential(Dropout(0.5), torch.nn.Dropout(0.5), torch.nn.BatchNorm1d(3), Dropout(0.5).eval())
    x = torch.randn(4, 3, generator=Generator().manual_seed(1))
    with without_dropout(network):
        assert torch.equal(network[:2](x), x)  # the first has no generator, so it would have refused to draw
        assert network[2].training
    with pytest.raises(ValueError, match="expected 2D"), without_dropout(network):
        network(x[0])
    assert [module.training for module in network] == [True, True, True, False]
