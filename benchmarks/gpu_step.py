"""Milliseconds a step and lane on a CUDA GPU: plain loop, captured, captured side by side, unconstrained or NESS.

Steps of batch 64 with the laboratory's own trainer, in the second of two tasks, where NESS is constrained. Images are
random with the spectrum of photographs, 1/f, and eps is large enough for the first layer to train. Where nothing of the
early layers is free, as on white noise, their half of the backward pass is left out, and NESS would seem cheaper than
it is; so the free directions of every layer are printed too.
"""

import argparse
import time
from functools import partial

import torch
from torch import Tensor

from ness.lab import registry
from ness.lab.benchmarks.base import Benchmark, Request, Split, Stream, Task
from ness.lab.gpu.capture import runner_for
from ness.lab.gpu.coroutines import pause
from ness.lab.gpu.scheduler import allow_many_streams, side_by_side
from ness.lab.runs.environment import repeatable
from ness.lab.runs.jobs import resolve
from ness.lab.training.loop import Trainer

STEPS, EPOCHS = 40, 2  # an epoch's, and epochs that are timed
EPS = 0.01  # the presets' are 0.0005 to 0.001, at which photographs leave the first layer a few directions


def smooth_images(count: int, size: int, generator: torch.Generator) -> Tensor:
    """Images (count, 3, size, size) as uint8 whose amplitudes fall as 1/f, mostly grey, as photographs do."""
    grey = torch.randn(count, 1, size, size, generator=generator)
    noise = grey + 0.3 * torch.randn(count, 3, size, size, generator=generator)
    up, across = torch.fft.fftfreq(size), torch.fft.rfftfreq(size)
    frequency = (up[:, None].square() + across.square()).sqrt().clamp_min(1 / size)
    smooth = torch.fft.irfft2(torch.fft.rfft2(noise) / frequency, s=(size, size))
    return (128 + 64 * smooth / smooth.std()).clamp(0, 255).to(torch.uint8)


def stream(size: int, classes: int, request: Request) -> Stream:
    generator = torch.Generator().manual_seed(request.seed)

    def split(count: int) -> Split:
        labels = torch.randint(0, classes, (count,), generator=generator)
        return Split(smooth_images(count, size, generator), labels)

    tasks = [Task(f"{t}", classes, split(64 * STEPS), split(64), split(64), (0.5,), (0.25,)) for t in range(2)]
    return Stream("random", tuple(tasks))


def trainer(
    method: str, network: str, seed: int, epochs: int, plain: bool, fast: bool, device: torch.device
) -> Trainer:
    size = 84 if network.endswith("84") else 32
    bench = Benchmark("random", "", network, 2, partial(stream, size, 10))
    changes = {"epochs": epochs, "lr": 1e-3, "lr_min": 0.0, **OWN.get(method, {})}
    job = resolve(method, bench, changes=changes)
    net = registry.find("network", network, registry.all_networks())
    runner = runner_for(device, plain)
    return Trainer(job.method, net, job.load(seed, None), job.settings, seed, device, runner, fast=fast)


def to_second_task(trainer: Trainer) -> None:
    """One epoch of the second task is behind it afterwards, and captured if it is to be."""
    while not (trainer.at == 1 and trainer.learning is not None and trainer.learning.epoch == 1):
        trainer.advance()


def some_epochs(trainer: Trainer, count: int) -> None:
    pause("steps")
    for _ in range(count):
        trainer.advance()


def milliseconds(
    method: str, network: str, lanes: list[int], device: torch.device, plain: bool = False, fast: bool = False
) -> list[float]:
    """Of one step of one lane in the second task, for each number of lanes."""
    epochs = 1 + EPOCHS * len(lanes)
    trainers = [trainer(method, network, seed, epochs, plain, fast, device) for seed in range(max(lanes))]
    side_by_side([partial(to_second_task, each) for each in trainers], device, max(lanes))
    found = []
    for count in lanes:
        synchronize(device)
        began = time.perf_counter()
        side_by_side([partial(some_epochs, each, EPOCHS) for each in trainers[:count]], device, count)
        synchronize(device)
        found.append(1e3 * (time.perf_counter() - began) / (count * EPOCHS * STEPS))
    return found


def free_directions(network: str, device: torch.device) -> str:
    """'rank/fan-in' of every layer in the second task of NESS."""
    one = trainer("ness", network, 0, 1, True, False, device)
    to_second_task(one)
    rows = one.method.guard.certificate().rows  # type: ignore[attr-defined]
    return " ".join(f"{row.rank}/{row.fan_in}" for row in rows)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


METHODS = {"captured": "ness", "unconstrained": "finetune", "ness-plus": "ness-plus"}
DECAY = {"weight_decay": 1e-4}
OWN = {"ness": {"eps": EPS, **DECAY}, "finetune": DECAY, "ness-plus": DECAY}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", nargs="*", default=["alexnet", "resnet18-84", "resnet18-32"])
    parser.add_argument("--lanes", nargs="*", type=int, default=[1, 5, 16])
    others = sorted({*registry.all_methods()} - {"joint"})  # which has no second task
    parser.add_argument("--also", nargs="*", default=[], choices=others, help="steps of other methods too")
    asked = parser.parse_args()
    allow_many_streams()
    if not torch.cuda.is_available():
        print("gpu_step: no CUDA GPU here; nothing measured")
        return
    device = torch.device("cuda")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, milliseconds a step and lane, batch 64")
    for network in asked.networks:
        row: dict[str, float] = {}

        def say(label: str, value: float, network: str = network, row: dict[str, float] = row) -> None:
            row[label] = value
            print(f"{network}: {label} {value:.3f}", flush=True)

        with repeatable(device):
            print(f"{network}: free directions {free_directions(network, device)}", flush=True)
            say("plain loop", milliseconds("ness", network, [1], device, plain=True)[0])
            for label, method in {**METHODS, **{name: name for name in asked.also}}.items():
                for lanes, value in zip(asked.lanes, milliseconds(method, network, asked.lanes, device), strict=True):
                    say(f"{label}, {lanes} lanes", value)
        for lanes in asked.lanes:
            ratio = row[f"captured, {lanes} lanes"] / row[f"unconstrained, {lanes} lanes"]
            print(f"  NESS costs {ratio:.2f} × the unconstrained step with {lanes} lanes", flush=True)
        with repeatable(device, wanted=False):
            most = max(asked.lanes)
            say(f"captured --fast, {most} lanes", milliseconds("ness", network, [most], device, fast=True)[0])


if __name__ == "__main__":
    main()
