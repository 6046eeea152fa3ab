"""Milliseconds a step and lane on a CUDA card: plain loop, captured, captured side by side, unconstrained or NESS.

Steps of batch 64 on random images with the laboratory's own trainer, in the second of two tasks, where NESS is
constrained.
"""

import argparse
import time
from functools import partial

import torch

from ness.errors import NessError
from ness.lab import registry
from ness.lab.capture import CapturedRunner, PlainRunner
from ness.lab.environment import repeatable
from ness.lab.jobs import resolve
from ness.lab.lanes import side_by_side
from ness.lab.pauses import Pausing
from ness.lab.streams.base import Benchmark, Request, Split, Stream, Task
from ness.lab.train import Trainer

IMAGES, EPOCHS = 64 * 50, 16


def stream(size: int, classes: int, request: Request) -> Stream:
    generator = torch.Generator().manual_seed(request.seed)

    def split(count: int) -> Split:
        images = torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8, generator=generator)
        return Split(images, torch.randint(0, classes, (count,), generator=generator))

    tasks = [Task(f"{t}", classes, split(IMAGES), split(64), split(64), (0.5,), (0.25,)) for t in range(2)]
    return Stream("random", tuple(tasks))


def lane(method: str, network: str, size: int, seed: int, captured: bool, device: torch.device) -> Pausing[list[float]]:
    """Trains two tasks; the moments at which the epochs of the second ended."""
    bench = Benchmark("random", "", network, 2, partial(stream, size, 10))
    job = resolve(method, bench, changes={"epochs": EPOCHS, "lr": 1e-3, "lr_min": 0.0, "weight_decay": 1e-4})
    runner = CapturedRunner() if captured else PlainRunner()
    net = registry.find("network", network, registry.all_networks())
    trainer = Trainer(job.method, net, job.load(seed, None), job.settings, seed, device, runner)
    ends: list[float] = []
    while not trainer.done:
        event = yield from trainer.unit()
        if event.kind == "epoch" and trainer.at == 1:
            ends.append(time.perf_counter())
    return ends


def milliseconds(method: str, network: str, size: int, lanes: int, captured: bool, device: torch.device) -> float:
    """Of one step of one lane: the time in which all lanes were in their second task, over the steps done in it."""
    runs = [partial(lane, method, network, size, seed, captured, device) for seed in range(lanes)]
    found = [end for end in side_by_side(runs, device, lanes) if not isinstance(end, NessError)]
    assert len(found) == lanes
    begin, end = max(ends[0] for ends in found), min(ends[-1] for ends in found)
    epochs = sum(begin < moment <= end for ends in found for moment in ends)
    return 1e3 * (end - begin) / epochs / (IMAGES / 64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", nargs="*", default=["alexnet", "resnet18-84", "resnet18-32"])
    parser.add_argument("--lanes", nargs="*", type=int, default=[1, 5, 16])
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu_step: no CUDA card here; nothing measured")
        return
    device = torch.device("cuda")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, milliseconds a step and lane, batch 64")
    with repeatable(device):
        for network in asked.networks:
            report(network, asked.lanes, device)


def report(network: str, several: list[int], device: torch.device) -> None:
    size = 84 if network.endswith("84") else 32
    row = {"plain loop": milliseconds("ness", network, size, 1, False, device)}
    for lanes in several:
        row[f"captured, {lanes} lanes"] = milliseconds("ness", network, size, lanes, True, device)
        row[f"unconstrained, {lanes} lanes"] = milliseconds("finetune", network, size, lanes, True, device)
    print(f"{network}: " + ", ".join(f"{name} {value:.3f}" for name, value in row.items()))
    for lanes in several:
        ratio = row[f"captured, {lanes} lanes"] / row[f"unconstrained, {lanes} lanes"]
        print(f"  NESS costs {ratio:.2f} × the unconstrained step with {lanes} lanes")


if __name__ == "__main__":
    main()
