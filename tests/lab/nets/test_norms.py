import torch
from torch import Generator, nn

import tiny
from ness.lab.nets.base import build
from ness.lab.nets.norms import hold_statistics, measure_statistics, without_update


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
    made = {"weights": Generator().manual_seed(0), "dropout": Generator().manual_seed(1)}
    net = build(tiny.NETWORK, (1, 6, 6), [3], "stored", **made, device=torch.device("cpu"))
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
    made = {"weights": Generator().manual_seed(0), "dropout": Generator().manual_seed(1)}
    net = build(tiny.NETWORK, (1, 6, 6), [3], "batch", **made, device=torch.device("cpu"))
    before = {name: value.clone() for name, value in net.state_dict().items()}
    measure_statistics(net, [torch.randn(4, 1, 6, 6)])
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
