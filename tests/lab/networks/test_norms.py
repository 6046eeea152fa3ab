import pytest
import torch
from torch import Generator, nn

import tiny
from ness import NessError
from ness.lab.networks.base import BatchNorm2d, Network, Norms, build
from ness.lab.networks.norms import (
    batches_at_once,
    hold_statistics,
    in_parts,
    measure_statistics,
    passed_apart,
    takes_parts,
    without_update,
)


def tiny_network(norms: Norms) -> Network:
    made = {"weights": Generator().manual_seed(0), "dropout": Generator().manual_seed(1)}
    return build(tiny.NETWORK, (1, 6, 6), [3], norms, **made, device=torch.device("cpu"))


def model() -> nn.Sequential:
    return nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3, track_running_stats=False), nn.Dropout(0.5))


def test_hold_statistics_touches_stored_norms_only() -> None:
    net = model().train()
    hold_statistics(net)
    assert [module.training for module in net] == [False, True, True]


def test_without_update_leaves_running_statistics_and_momentum() -> None:
    net, x = model().train(), torch.randn(5, 3, generator=Generator().manual_seed(0))
    with without_update(net):
        net(x)
    assert torch.equal(net[0].running_mean, torch.zeros(3))
    assert net[0].momentum == 0.1
    net(x)
    assert not torch.equal(net[0].running_mean, torch.zeros(3))


def test_measured_statistics_are_those_of_the_images_without_dropout() -> None:
    net = tiny_network("stored")
    images = torch.randn(48, 1, 6, 6, generator=Generator().manual_seed(2))
    net.train()
    net.features(images)  # leaves statistics of its own behind
    measure_statistics(net, [images[:32], images[32:]])
    maps = net.conv(images).transpose(0, 1).flatten(1)
    assert torch.allclose(net.norm.running_mean, maps.mean(1), atol=1e-6)
    assert torch.allclose(net.norm.running_var, maps.var(1), rtol=0.05)  # a mean of the batches' variances
    assert not any(module.training for module in net.modules())
    assert net.norm.momentum == 0.1


def test_a_network_that_stores_no_statistics_is_left_as_it_is() -> None:
    net = tiny_network("batch")
    before = {name: value.clone() for name, value in net.state_dict().items()}
    measure_statistics(net, [torch.randn(4, 1, 6, 6)])
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_parts_are_set_inside_and_as_before_afterwards_whatever_happens() -> None:
    net = tiny_network("batch")
    with in_parts(net, 2):
        with pytest.raises(NessError, match="a batch of 4 in 3 parts"), in_parts(net, 3):
            net.features(torch.zeros(4, 1, 6, 6))
        assert net.norm.parts == 2
    assert net.norm.parts == 1


def test_parts_are_for_our_own_norms_that_use_the_batch() -> None:
    stored, batch = tiny_network("stored"), tiny_network("batch")
    assert [takes_parts(net.eval()) for net in (stored, batch)] == [False, True]
    assert [takes_parts(net.train()) for net in (stored, batch)] == [True, True]
    others = nn.BatchNorm2d(4), nn.BatchNorm2d(4, track_running_stats=False)
    assert [takes_parts(nn.Sequential(BatchNorm2d(4, track_running_stats=False), each.eval())) for each in others] == [
        True,  # what is stored needs no parts
        False,
    ]
    assert not takes_parts(nn.Sequential(nn.Linear(2, 2)))


def test_one_batch_at_once_on_the_cpu() -> None:
    assert batches_at_once(tiny_network("batch"), 64) == 1


@pytest.mark.parametrize("norms", ["batch", "stored"])
@pytest.mark.parametrize("sizes", [(4, 4, 4), (5, 4, 3), (12,)])
@pytest.mark.parametrize("own", [True, False])
def test_passed_apart_is_one_by_one(norms: Norms, sizes: tuple[int, ...], own: bool) -> None:
    """Also where the sizes differ or a norm is not ours."""
    images = torch.randn(12, 1, 6, 6, generator=Generator().manual_seed(2))
    found = []
    for together in (True, False):
        net = tiny_network(norms).train()
        net.dropout.p = 0.0
        if not own:
            net.norm = nn.BatchNorm2d(4, track_running_stats=norms == "stored")
        alone = (net.features(part) for part in images.split(sizes))
        features = passed_apart(net, images, sizes) if together else torch.cat(list(alone))
        found.append([features, *net.state_dict().values()])
    assert all(torch.allclose(mine, theirs, atol=1e-6) for mine, theirs in zip(*found, strict=True))
