"""Where a captured step's time goes on a CUDA GPU: its kernels, how often each runs and how long, alone on the GPU.

Those of an epoch, its short validation included, divided by its steps.
With lanes side by side kernels overlap, so a step takes less than their sum; what is long here is what they fight for.
"""

import argparse
from collections import defaultdict

import torch
from gpu_step import STEPS, some_epochs, synchronize, to_second_task, trainer
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from ness.lab.runs.environment import repeatable


def kernels(method: str, network: str, device: torch.device) -> dict[str, tuple[float, float]]:
    """Microseconds a step and launches a step of every kernel, over an epoch of the second task."""
    activity = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
    one = trainer(method, network, 0, 3, False, False, device)
    to_second_task(one)
    synchronize(device)
    with profile(activities=[activity]) as found:
        some_epochs(one, 1)
        synchronize(device)
    spent: dict[str, float] = defaultdict(float)
    count: dict[str, int] = defaultdict(int)
    for event in found.events():
        if device.type == "cuda" and event.device_type != DeviceType.CUDA:
            continue  # the host's side of it
        spent[event.name] += event.device_time if device.type == "cuda" else event.self_cpu_time_total
        count[event.name] += 1
    return {name: (spent[name] / STEPS, count[name] / STEPS) for name in spent}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", nargs="*", default=["alexnet", "resnet18-84"])
    parser.add_argument("--methods", nargs="*", default=["finetune", "ness"])
    parser.add_argument("--most", type=int, default=15, help="kernels shown")
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu_kernels: no CUDA GPU here; nothing measured")
        return
    device = torch.device("cuda")
    for network in asked.networks:
        for method in asked.methods:
            with repeatable(device):
                found = kernels(method, network, device)
            total, launches = (sum(pair[i] for pair in found.values()) for i in range(2))
            print(f"{network}, {method}: {total:.0f} microseconds of kernels a step in {launches:.0f} launches")
            for name, (spent, count) in sorted(found.items(), key=lambda item: -item[1][0])[: asked.most]:
                print(f"  {spent:7.1f}  {100 * spent / total:4.1f} %  {count:5.1f} x  {name[:110]}", flush=True)


if __name__ == "__main__":
    main()
