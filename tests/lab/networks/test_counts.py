"""The networks of the paper, by the parameter count."""

import pytest
import torch
from torch import Generator, nn

from ness.lab import registry
from ness.lab.networks.base import Network, build

CPU = torch.device("cpu")


def made(name: str, shape: tuple[int, ...], classes: list[int], norms: str = "batch", seed: int = 1) -> Network:
    generator = Generator().manual_seed(seed)
    spec = registry.all_networks()[name]
    return build(spec, shape, classes, norms, weights=generator, dropout=generator, device=CPU)


@pytest.mark.parametrize(
    ("name", "shape", "classes", "count", "width"),
    [
        ("alexnet", (3, 32, 32), [10] * 10, 6_713_216, 2048),
        ("alexnet-eighth", (3, 32, 32), [10] * 10, 128_624, 256),
        ("resnet18-32", (3, 32, 32), [10] * 5, 1_125_140, 640),
        ("resnet18-84", (3, 84, 84), [5] * 20, 1_237_140, 1440),
    ],
)
def test_parameters_and_features(name: str, shape: tuple[int, ...], classes: list[int], count: int, width: int) -> None:
    network = made(name, shape, classes)
    assert sum(parameter.numel() for parameter in network.parameters()) == count
    assert all(layer.bias is None for layer in network.modules() if isinstance(layer, nn.Linear | nn.Conv2d))
    images = torch.randn(4, *shape, generator=Generator().manual_seed(0))
    assert network.features(images).shape == (4, width)
    assert network(images, 1).shape == (4, classes[1])


def test_fan_ins_of_resnet_in_module_order() -> None:
    convs = [layer for layer in made("resnet18-32", (3, 32, 32), [10]).modules() if isinstance(layer, nn.Conv2d)]
    fan_ins = [layer.weight[0].numel() for layer in convs]
    assert fan_ins == [
        27, 180, 180, 180, 180, 180, 360, 20, 360, 360, 360, 720, 40, 720, 720, 720, 1440, 80, 1440, 1440,
    ]  # fmt: skip


def test_fan_ins_of_alexnet() -> None:
    layers = [m for m in made("alexnet", (3, 32, 32), [10]).modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    assert [layer.weight[0].numel() for layer in layers] == [48, 576, 512, 1024, 2048, 2048]


def test_resnet_on_images_that_are_not_square() -> None:
    network = made("resnet18-84", (1, 60, 84), [3])
    assert network(torch.randn(2, 1, 60, 84, generator=Generator().manual_seed(0)), 0).shape == (2, 3)


def test_weights_are_torch_defaults_from_the_generator_alone() -> None:
    before = torch.random.get_rng_state()
    one, two, other = (made("digits", (1, 8, 8), [10, 10], seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(one.fc1.weight, two.fc1.weight)
    assert not torch.equal(one.fc1.weight, other.fc1.weight)
    bound = 512**-0.5  # U(±1/√d)
    weight = one.fc1.weight.detach()
    assert weight.abs().max() <= bound
    assert abs(float(weight.std()) - bound / 3**0.5) < 0.02 * bound


def test_batch_statistics_depend_on_the_batch_and_stored_ones_do_not() -> None:
    images = torch.randn(8, 1, 8, 8, generator=Generator().manual_seed(0))
    for norms, equal in (("batch", False), ("stored", True)):
        network = made("digits", (1, 8, 8), [10], norms).eval()
        whole, half = network(images, 0)[:4], network(images[:4], 0)
        assert torch.allclose(whole, half, atol=1e-6) is equal
