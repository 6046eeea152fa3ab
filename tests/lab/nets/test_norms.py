import torch
from torch import Generator, nn

from ness.lab.nets.norms import hold_statistics, without_update


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
