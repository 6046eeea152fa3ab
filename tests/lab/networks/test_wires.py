"""What the networks say about their hidden units, for methods that gate them."""

import pytest
import torch
from torch import Generator, Tensor

import tiny
from ness.lab import registry
from ness.lab.networks.base import Network, build

SHAPES = {"digits": (1, 8, 8), "alexnet": (3, 32, 32), "resnet18-32": (3, 32, 32), "resnet18-84": (3, 84, 84)}


def made(name: str) -> Network:
    generator = Generator().manual_seed(1)
    spec = registry.all_networks()[name]
    return build(
        spec, SHAPES[name], [3], "batch", weights=generator, dropout=generator, device=torch.device("cpu")
    ).eval()


@pytest.mark.parametrize("name", SHAPES)
def test_every_shared_parameter_is_in_one_wire_and_reads_what_exists(name: str) -> None:
    network = made(name)
    modules = [module for wire in network.wires for module in (wire.layer, wire.norm) if module is not None]
    named = [f"{module}.{part}" for module in modules for part, _ in network.get_submodule(module).named_parameters()]
    shared = {part for part, _ in network.named_parameters() if not part.startswith("heads")}
    assert len(named) == len(set(named))
    assert set(named) == shared
    written = {wire.writes for wire in network.wires}
    assert {wire.reads for wire in network.wires} - {None} <= written


@pytest.mark.parametrize("name", SHAPES)
def test_units_are_where_the_wires_say(name: str) -> None:
    """Each unit's channel count is its writers', and a unit set to zero is not read: its readers' columns are idle."""
    network = made(name)
    seen: dict[str, list[Tensor]] = {}

    def keep(unit: str):
        return lambda module, inputs, output: seen.setdefault(unit, []).append(output)

    for unit in {wire.writes for wire in network.wires}:
        network.get_submodule(unit).register_forward_hook(keep(unit))
    for wire in network.wires:
        network.get_submodule(wire.layer).register_forward_hook(
            lambda module, inputs, output, wire=wire: seen.setdefault(f"into {wire.layer}", []).append(inputs[0])
        )
    network.features(torch.randn(2, *SHAPES[name], generator=Generator().manual_seed(0)))
    for wire in network.wires:
        (unit,) = seen[wire.writes]
        assert unit.shape[1] == network.get_parameter(f"{wire.layer}.weight").shape[0]
        if wire.reads is not None:
            (read,), (into,) = seen[wire.reads], seen[f"into {wire.layer}"]
            reached = torch.relu(read)  # units named before their ReLU are read after it
            assert torch.equal(reached.reshape(into.shape), into)


def test_a_network_without_wires_cannot_be_gated(monkeypatch) -> None:
    monkeypatch.setattr(tiny.TinyNet, "wires", ())
    with pytest.raises(Exception, match="does not say where its hidden units are"):
        tiny.trainer("hat")
