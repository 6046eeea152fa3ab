"""The benchmarks on the real data sets, where $NESS_DATA holds them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from ness.lab.benchmarks import cifar100, five_datasets, mini_imagenet
from ness.lab.benchmarks.base import Request, Stream, Task

pytestmark = pytest.mark.real


@pytest.fixture
def data() -> Path:
    if not os.environ.get("NESS_DATA"):
        pytest.skip("NESS_DATA names no folder")
    return Path(os.environ["NESS_DATA"])


def counts(stream: Stream) -> list[tuple[int, int, int]]:
    return [(len(task.train), len(task.valid), len(task.test)) for task in stream.tasks]


def trains(task: Task) -> None:
    """A plain loop lowers the loss on the task's tensors."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 5, 4), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (task.mean, task.std))
    losses = []
    for step in range(60):
        rows = torch.arange(64 * step, 64 * step + 64) % len(task.train)
        loss = nn.functional.cross_entropy(
            net((task.train.images[rows].float() / 255 - mean) / std), task.train.labels[rows]
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-10:]) < sum(losses[:10])


def test_cifar100(data: Path) -> None:
    stream = cifar100.BENCHMARK.load(Request(1, data))
    assert counts(stream) == [(4750, 250, 1000)] * 10
    trains(stream.tasks[0])


def test_cifar100_takes_3_seconds_and_250_megabytes_at_most(data: Path) -> None:
    code = (
        "import resource, sys, time, pathlib\n"
        "from ness.lab.benchmarks import cifar100\n"
        "from ness.lab.benchmarks.base import Request\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024\n"
        "before, start = peak(), time.perf_counter()\n"
        "stream = cifar100.BENCHMARK.load(Request(1, pathlib.Path(sys.argv[1])))\n"
        "print(time.perf_counter() - start, peak() - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(data)], capture_output=True, text=True, check=True)
    seconds, megabytes = map(float, done.stdout.split())
    assert seconds <= 3
    assert megabytes <= 250


@pytest.mark.parametrize(("fashion", "mean"), [("true", 0.219), ("mnist-copy", 0.100)])
def test_five_datasets(fashion: five_datasets.Fashion, mean: float, data: Path) -> None:
    stream = five_datasets.BENCHMARK.load(Request(1, data, five_datasets.Options(fashion)))
    assert counts(stream) == [
        (47_500, 2_500, 10_000),
        (57_000, 3_000, 10_000),
        (69_595, 3_662, 26_032),
        (57_000, 3_000, 10_000),
        (16_011, 842, 1_873),
    ]
    assert float(stream.tasks[3].train.images[:, 0].float().mean()) / 255 == pytest.approx(mean, abs=0.002)
    for task in stream.tasks:
        trains(task)


def test_five_datasets_normalise_to_mean_0_and_std_1(data: Path) -> None:
    for task in five_datasets.BENCHMARK.load(Request(1, data)).tasks:
        images = task.train.images.float() / 255
        normal = (images - torch.tensor(task.mean).view(-1, 1, 1)) / torch.tensor(task.std).view(-1, 1, 1)
        assert normal.mean((0, 2, 3)).abs().max() < 0.05
        assert (normal.std((0, 2, 3)) - 1).abs().max() < 0.05


@pytest.mark.parametrize(("split", "expected"), [("2450/50", (2450, 50, 500)), ("2375/125", (2375, 125, 500))])
def test_mini_imagenet(split: mini_imagenet.Division, expected: tuple[int, int, int], data: Path) -> None:
    stream = mini_imagenet.BENCHMARK.load(Request(1, data, mini_imagenet.Options(split)))
    assert counts(stream) == [expected] * 20
    assert stream.shape == (3, 84, 84)
    trains(stream.tasks[0])
