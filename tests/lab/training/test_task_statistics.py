"""Statistics of a task's own: measured over its images, lent in eval mode alone."""

import pytest
import torch
from torch import Generator, nn

import tiny
from ness import NessError
from ness.lab.networks.base import Network, build
from ness.lab.networks.norms import takes_parts
from ness.lab.training.task_statistics import by_task, lent, measuring, named, own_norms, using


def network() -> Network:
    made = {"weights": Generator().manual_seed(0), "dropout": Generator().manual_seed(1)}
    return build(tiny.NETWORK, (1, 6, 6), [3], "batch", **made, device=torch.device("cpu"))


def test_statistics_are_measured_over_all_batches_and_lent_in_eval_mode_alone() -> None:
    net = network().eval()
    images = torch.randn(48, 1, 6, 6, generator=Generator().manual_seed(2))
    with measuring(net) as found:
        assert found == {}
        for some in (images[:32], images[32:]):
            net.features(some)
    (mean, var) = found["norm"]
    maps = net.conv(images).transpose(0, 1).flatten(1)
    assert torch.allclose(mean, maps.mean(1), atol=1e-6)
    assert torch.allclose(var, maps.var(1), rtol=0.05)  # a mean of the batches' variances
    of_batch = net.features(images)
    with using(net, found):
        assert lent(net)
        assert not takes_parts(net)
        alone = torch.cat([net.features(image.unsqueeze(0)) for image in images])
        assert torch.allclose(alone, net.features(images), atol=1e-5)
        assert not torch.equal(net.features(images), of_batch)
        net.train()
        net.dropout.eval()
        assert torch.equal(net.features(images), of_batch)
    assert not lent(net)
    assert not net.norm._forward_hooks


def test_norms_that_are_not_ours_cannot_be_lent_statistics() -> None:
    with pytest.raises(NessError, match="found BatchNorm1d in Sequential"):
        own_norms(nn.Sequential(nn.BatchNorm1d(3)))
    with pytest.raises(NessError, match="found none in Linear"):
        own_norms(nn.Linear(2, 2))


def test_statistics_go_into_a_file_and_come_back() -> None:
    held = {0: {"a.norm": (torch.zeros(2), torch.ones(2))}, 12: {"b": (torch.ones(1), torch.zeros(1))}}
    tensors = named(held)
    assert sorted(tensors) == ["0/a.norm/mean", "0/a.norm/var", "12/b/mean", "12/b/var"]
    found = by_task(tensors, torch.device("cpu"))
    assert found.keys() == held.keys()
    assert torch.equal(found[0]["a.norm"][1], torch.ones(2))
    assert torch.equal(found[12]["b"][0], torch.ones(1))
