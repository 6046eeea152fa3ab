"""Milliseconds a step and lane on a CUDA card: plain loop, captured, captured side by side, unconstrained or NESS.

Steps of batch 64 on random images with the laboratory's own trainer, in the second of two tasks, where NESS is
constrained.
"""

import argparse
import time
from functools import partial

import torch

from ness.lab import registry
from ness.lab.capture import CapturedRunner, PlainRunner
from ness.lab.environment import repeatable
from ness.lab.jobs import resolve
from ness.lab.lanes import side_by_side
from ness.lab.pauses import Pausing
from ness.lab.streams.base import Benchmark, Request, Split, Stream, Task
from ness.lab.train import Trainer

IMAGES, EPOCHS = 64 * 50, 8


def stream(size: int, classes: int, request: Request) -> Stream:
    generator = torch.Generator().manual_seed(request.seed)

    def split(count: int) -> Split:
        images = torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8, generator=generator)
        return Split(images, torch.randint(0, classes, (count,), generator=generator))

    tasks = [Task(f"{t}", classes, split(IMAGES), split(64), split(64), (0.5,), (0.25,)) for t in range(2)]
    return Stream("random", tuple(tasks))


def prepared(
    method: str, network: str, size: int, seed: int, epochs: int, captured: bool, fast: bool, device: torch.device
) -> Trainer:
    """A trainer in its second task with one epoch behind it, captured if it is to be, and `epochs` before it."""
    bench = Benchmark("random", "", network, 2, partial(stream, size, 10))
    changes = {"epochs": epochs + 1, "lr": 1e-3, "lr_min": 0.0, "weight_decay": 1e-4}
    job = resolve(method, bench, changes=changes)
    runner = CapturedRunner() if captured else PlainRunner()
    net = registry.find("network", network, registry.all_networks())
    trainer = Trainer(job.method, net, job.load(seed, None), job.settings, seed, device, runner, fast=fast)
    while not (trainer.at == 1 and trainer.learning is not None and trainer.learning.epoch == 1):
        trainer.advance()
    return trainer


def some_epochs(trainer: Trainer, count: int) -> Pausing[None]:
    for _ in range(count):
        yield from trainer.unit()


def milliseconds(
    method: str, network: str, lanes: int, device: torch.device, captured: bool = True, fast: bool = False
) -> float:
    """Of one step of one lane, all lanes in their second task."""
    size, epochs = 84 if network.endswith("84") else 32, EPOCHS if captured else 2
    trainers = [prepared(method, network, size, seed, epochs, captured, fast, device) for seed in range(lanes)]
    torch.cuda.synchronize()
    began = time.perf_counter()
    side_by_side([partial(some_epochs, trainer, epochs) for trainer in trainers], device, lanes)
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - began) / (lanes * epochs * IMAGES / 64)


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
    for network in asked.networks:
        with repeatable(device):
            row = {"plain loop": milliseconds("ness", network, 1, device, captured=False)}
            for lanes in asked.lanes:
                row[f"captured, {lanes} lanes"] = milliseconds("ness", network, lanes, device)
                row[f"unconstrained, {lanes} lanes"] = milliseconds("finetune", network, lanes, device)
                row[f"ness-plus, {lanes} lanes"] = milliseconds("ness-plus", network, lanes, device)
        with repeatable(device, wanted=False):
            most = max(asked.lanes)
            row[f"captured --fast, {most} lanes"] = milliseconds("ness", network, most, device, fast=True)
        print(f"{network}: " + ", ".join(f"{name} {value:.3f}" for name, value in row.items()))
        for lanes in asked.lanes:
            ratio = row[f"captured, {lanes} lanes"] / row[f"unconstrained, {lanes} lanes"]
            print(f"  NESS costs {ratio:.2f} × the unconstrained step with {lanes} lanes", flush=True)


if __name__ == "__main__":
    main()
