"""What observing costs: one pass for all layers against a pass per layer, and memory against the number of samples.

The statistics themselves cost the same either way, so the gain is largest where the forward pass is the dear part: the
maxout network has five layers whose outputs are many times their inputs; in the AlexNet-like one the Grams of wide
patches in float64 cost more than the passes do.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

import ness

BATCHES, ROUNDS = 6, 5


class Maxout(nn.Module):
    """The largest of 32 linear pieces a unit."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.pieces = nn.Linear(width, width * 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.pieces(x).unflatten(-1, (32, -1)).amax(-2)


def maxout() -> nn.Module:
    return nn.Sequential(*[Maxout(128) for _ in range(5)])


def alexnet_like() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 64, 4), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(64, 128, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(128, 256, 2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(1024, 1024), nn.ReLU(),
        nn.Linear(1024, 1024),
    )  # fmt: skip


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "maxout": (maxout, (2048, 128)),
    "AlexNet-like": (alexnet_like, (32, 3, 32, 32)),
}


def batches(shape: tuple[int, ...], count: int = BATCHES) -> Iterator[Tensor]:
    batch = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    return (batch for _ in range(count))


def together(model: nn.Module, shape: tuple[int, ...]) -> None:
    ness.NullSpace(model).observe(batches(shape))


def per_layer(model: nn.Module, shape: tuple[int, ...]) -> None:
    for name in ness.NullSpace(model).layers:
        ness.NullSpace(model, include=[name]).observe(batches(shape))


def one_pass(model: nn.Module, shape: tuple[int, ...]) -> None:
    with torch.no_grad():
        for batch in batches(shape):
            model(batch)


def peak_mebibytes(count: int) -> float:
    """Peak memory of a fresh process that observes `count` batches of the AlexNet-like network."""
    code = (
        f"import sys; sys.path[:0] = {sys.path!r}\n"
        "import observe, resource\n"
        "guard = observe.ness.NullSpace(observe.alexnet_like())\n"
        f"guard.observe(observe.batches((32, 3, 32, 32), {count}))\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(run.stdout)


def main() -> None:
    torch.manual_seed(0)
    ways = {"one pass, all layers": together, "a pass per layer": per_layer, "forward passes alone": one_pass}
    for network, (build, shape) in NETWORKS.items():
        model = build().eval()
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(ROUNDS):
            for name, way in ways.items():
                start = time.perf_counter()
                way(model, shape)
                times[name].append(time.perf_counter() - start)
        median = {name: statistics.median(values) for name, values in times.items()}
        print(f"observe, {network}: 5 layers, {BATCHES} batches of {shape[0]}, {torch.get_num_threads()} threads:")
        for name, value in median.items():
            print(f"  {name:22s} {value:7.3f} s   {value / median['one pass, all layers']:5.2f} × one pass")
    few, many = peak_mebibytes(4), peak_mebibytes(40)
    print(f"peak memory, AlexNet-like: {few:.0f} MiB after 128 images, {many:.0f} MiB after 1280")


if __name__ == "__main__":
    main()
