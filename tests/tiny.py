"""A benchmark and a network small enough to train in a blink, for tests of the laboratory."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Generator, Tensor, nn

from ness.lab import registry
from ness.lab.benchmarks.base import Benchmark, Request, Split, Stream, Task
from ness.lab.networks.alexnet import ConvBlock, WideBlock
from ness.lab.networks.base import Network, NetworkSpec, Norms, Wire, heads, norm2d
from ness.lab.networks.dropout import Dropout
from ness.lab.runs.jobs import Job, resolve
from ness.lab.training.loop import Trainer


class TinyNet(Network):
    wires = (Wire("conv", "dropout", None, "norm"), Wire("fc", "fc", "dropout"))

    def __init__(
        self, shape: tuple[int, ...], classes: Sequence[int], norms: Norms, bias: bool = True, maps: int = 4
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(shape[0], maps, 3, padding=1, bias=False)
        self.norm = norm2d(maps, norms)
        self.pool = nn.MaxPool2d(2)
        self.dropout = Dropout(0.2)
        self.fc = nn.Linear(maps * (shape[1] // 2) * (shape[2] // 2), 16, bias)
        self.heads = heads(16, classes)

    def features(self, x: Tensor) -> Tensor:
        x = self.dropout(self.pool(torch.relu(self.norm(self.conv(x)))))
        out: Tensor = torch.relu(self.fc(x.flatten(1)))
        return out


class Blocks(Network):
    """Of AlexNet's blocks, which the GPU runs by kernels of its own."""

    wires = (Wire("conv.conv", "conv", None, "conv.norm"), Wire("fc.linear", "fc", "conv", "fc.norm"))

    def __init__(self, shape: tuple[int, ...], classes: Sequence[int], norms: Norms) -> None:
        super().__init__()
        side = (shape[1] - 2) // 2
        self.conv = ConvBlock(shape[0], 8, 3, 0.2, norms)
        self.fc = WideBlock(8 * side * side, 16, 0.5, norms)
        self.heads = heads(16, classes)

    def features(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(self.conv(x).flatten(1))
        return out


BLOCKS = NetworkSpec("tiny-blocks", "for tests", Blocks)
NETWORK = NetworkSpec("tiny", "for tests", TinyNet)
# wide enough for CODE-CL to scale the linear layer, too
WITHOUT_BIAS = NetworkSpec("tiny-without-bias", "for tests", partial(TinyNet, bias=False, maps=6))


def split(count: int, task: int, generator: Generator) -> Split:
    labels = torch.arange(count) % 3
    noise = torch.randint(0, 90, (count, 1, 6, 6), generator=generator)
    for image, label in zip(noise, labels.tolist(), strict=True):
        image[0, :, 2 * label : 2 * label + 2] += 120
        image.copy_(image.rot90(task, (1, 2)))
    return Split(noise.to(torch.uint8), labels)


def load(request: Request) -> Stream:
    generator = Generator().manual_seed(request.seed)
    tasks = [
        Task(
            f"task {t}",
            3,
            split(56, t, generator),
            split(20, t, generator),
            split(30, t, generator),
            mean=(0.3 + 0.05 * t,),
            std=(0.3,),
        )
        for t in range(3)
    ]
    return Stream("tiny", tuple(tasks))


BENCHMARK = Benchmark(
    name="tiny",
    title="for tests",
    network="tiny",
    tasks=3,
    load=load,
    settings={"fixed": {"epochs": 3, "batch": 16, "lr": 0.05, "lr_min": 1e-3, "patience": 2}},
)


def job(method: Any = "finetune", **changes: Any) -> Job:
    if method == "ness" and changes.get("rule") != "within":
        changes = {"eps": 0.03, **changes}  # so that these few inputs leave something free in every layer
    spec = registry.all_methods()[method] if isinstance(method, str) else method
    drawn = [name for name in ("samples", "trust_images") if hasattr(spec.settings(), name)]
    changes = {**dict.fromkeys(drawn, 40), **changes}  # of the 56 a task has
    return resolve(method, BENCHMARK, "fixed", changes)


def trainer(
    method: Any = "finetune",
    seed: int = 1,
    runner: Any = None,
    device: Any = None,
    fast: bool = False,
    network: NetworkSpec = NETWORK,
    **changes: Any,
) -> Trainer:
    if method in ("lora", "osf"):
        pytest.importorskip("peft")
    work = job(method, **changes)
    return Trainer(work.method, network, work.load(seed, None), work.settings, seed, device, runner, fast=fast)


def to_the_end(one: Trainer) -> Trainer:
    while not one.done:
        one.advance()
    return one


def same(one: Trainer, other: Trainer) -> bool:
    """Accuracy matrix and weights, bit for bit."""
    mine, theirs = one.context.model.state_dict(), other.context.model.state_dict()
    weights = mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
    return weights and one.matrix == other.matrix


def make_known(monkeypatch: Any) -> None:
    """Lets `run` and the command line find the tiny network and benchmark."""
    networks = {**registry.all_networks(), "tiny": NETWORK}
    benchmarks = {**registry.all_benchmarks(), "tiny": BENCHMARK}
    monkeypatch.setattr(registry, "all_networks", lambda: networks)
    monkeypatch.setattr(registry, "all_benchmarks", lambda: benchmarks)
