"""A benchmark and a network of your own, complete: three tasks of noisy symbols, and the network that learns them.

pip install ./examples/own_benchmark
ness run --benchmark symbols --method ness
ness run --benchmark digits --network symbols-net --method ness
"""

from collections.abc import Sequence

import torch
from torch import Generator, Tensor, nn

from ness.lab.benchmarks import Benchmark, Request, Stream, stream_from_tasks, task_from_tensors
from ness.lab.networks.base import Network, NetworkSpec, Norms, heads, norm2d

TASKS, CLASSES = 3, 8


class SymbolsNet(Network):
    """One convolution, BatchNorm, one linear layer; `heads` has one bias-free layer per task."""

    def __init__(self, shape: tuple[int, ...], classes: Sequence[int], norms: Norms) -> None:
        super().__init__()
        self.conv = nn.Conv2d(shape[0], 16, 3, padding=1, bias=False)
        self.norm = norm2d(16, norms)
        self.pool = nn.AdaptiveAvgPool2d(4)
        self.fc = nn.Linear(16 * 16, 64)
        self.heads = heads(64, classes)

    def features(self, x: Tensor) -> Tensor:
        """What all heads read, (n, 64), from images (n, c, h, w)."""
        x = self.pool(self.norm(self.conv(x)).relu()).flatten(1)
        out: Tensor = self.fc(x).relu()
        return out


def symbols(count: int, patterns: Tensor, generator: Generator) -> tuple[Tensor, Tensor]:
    """Noisy images of a task's own patterns (classes, 8, 8), and which one each shows."""
    labels = torch.randint(len(patterns), (count,), generator=generator)
    images = 100 + 30 * patterns[labels] + 50 * torch.randn(count, 8, 8, generator=generator)
    return images.clamp(0, 255).to(torch.uint8)[:, None], labels


def load(request: Request) -> Stream:
    """The tasks of a run: the same for all seeds, so that seeds differ in start and order alone."""
    generator = Generator().manual_seed(0)
    tasks = []
    for number in range(TASKS):
        patterns = torch.randn(CLASSES, 8, 8, generator=generator)
        train, test = symbols(1000, patterns, generator), symbols(400, patterns, generator)
        tasks.append(task_from_tensors(f"symbols {number}", train, test))
    return stream_from_tasks("symbols", tasks)


NETWORK = NetworkSpec("symbols-net", "One convolution and one linear layer", SymbolsNet)
BENCHMARK = Benchmark(
    name="symbols",
    title="Three tasks of eight noisy symbols",
    network="symbols-net",
    tasks=TASKS,
    load=load,
    settings={"fixed": {"epochs": 5, "lr": 0.05}},
)
