"""Gradients of samples' own logits against autograd's, and which layers have factors."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ness.lab.methods._logits import logit_gradients
from ness.lab.methods._projection.rows import Layers, backbone_layers
from ness.lab.networks.base import Network, heads
from ness.lab.training.loader import Batch


class Two(Network):
    """Two layers of 8 units, and what happens between them by a function of the test."""

    def __init__(self, between: Callable[[nn.Module, Tensor], Tensor], *, bias: bool = True) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8, bias=bias), nn.Linear(8, 8, bias=bias)
        self.norm = nn.BatchNorm1d(8, track_running_stats=False)
        self.heads = heads(8, [3])
        self.between = between

    def features(self, x: Tensor) -> Tensor:
        return self.between(self, self.first(x))


def batch(*shape: int) -> Batch:
    generator = torch.Generator().manual_seed(4)
    images = torch.randn(*shape, generator=generator, dtype=torch.float64)
    return Batch(images, torch.randint(3, (shape[0],), generator=generator), 0)


def expected(model: Network, layers: Layers, of: Batch) -> dict[str, Tensor]:
    """∇ f_y of [W b] for every sample and layer, (n, o, width), by autograd alone."""
    found: dict[str, list[Tensor]] = {name: [] for name in layers}
    for number, label in enumerate(of.labels):
        model.zero_grad()
        model(of.images, of.task)[number, label].backward()
        for name, layer in layers.items():
            found[name].append(layer.joint(layer.weight.grad, None if layer.bias is None else layer.bias.grad)[0])
    model.zero_grad()
    return {name: torch.stack(rows) for name, rows in found.items()}


def meeting(net: nn.Module, x: Tensor) -> Tensor:
    return net.second(torch.relu(net.norm(x)))


def changed_in_place(net: nn.Module, x: Tensor) -> Tensor:
    return net.second(x.tanh_()).relu_()


def twice(net: nn.Module, x: Tensor) -> Tensor:
    return net.second(torch.relu(net.second(torch.tanh(x))))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("between", "factored"),
    [(meeting, ["first", "second"]), (changed_in_place, ["first", "second"]), (twice, ["first"])],
)
def test_gradients_are_autograds_and_layers_called_once_have_factors(between, factored, bias) -> None:
    model = Two(between, bias=bias).double()
    layers, drawn = backbone_layers(model), batch(4, 6)
    wanted = expected(model, layers, drawn)
    found = logit_gradients(model, layers, drawn)
    assert list(found.factored) == factored
    for name, each in found.factored.items():
        torch.testing.assert_close(each.dense(), wanted[name])
    rest = [wanted[name].flatten(1) for name in layers if name not in factored]
    torch.testing.assert_close(found.dense, torch.cat([found.dense[:, :0], *rest], 1))
    flat = torch.cat([each.flatten(1) for each in wanted.values()], 1)
    torch.testing.assert_close(found.products(4), flat @ flat.mT)
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("flat", [False, True])
def test_a_layer_that_sees_several_rows_a_sample_is_kept_as_it_is(flat) -> None:
    def between(net: nn.Module, x: Tensor) -> Tensor:
        rows = torch.tanh(x).flatten(0, 1) if flat else torch.tanh(x)
        return net.second(rows).reshape(x.shape).mean(1)

    model = Two(between).double()
    layers, drawn = backbone_layers(model), batch(4, 5, 6)
    found = logit_gradients(model, layers, drawn)
    assert not found.factored
    wanted = expected(model, layers, drawn)
    torch.testing.assert_close(found.dense, torch.cat([each.flatten(1) for each in wanted.values()], 1))


def test_a_layer_whose_factors_would_be_larger_is_kept_as_it_is() -> None:
    """12 samples that meet: 12·7 + 12·12·8 numbers instead of 12·7·8; those behind the norm do not meet."""
    model = Two(meeting).double()
    layers, drawn = backbone_layers(model), batch(12, 6)
    found = logit_gradients(model, layers, drawn)
    assert list(found.factored) == ["second"]
    torch.testing.assert_close(found.dense, expected(model, layers, drawn)["first"].flatten(1))
    assert list(logit_gradients(model, layers, drawn, ("first",)).factored) == ["first"]
