"""Milliseconds a step on a CPU: plain, and with --fast, which is bfloat16 and channels last.

Steps of batch 64 with the laboratory's own trainer, in the second of two tasks, where NESS is constrained; images as in
gpu_step.py. Both ways in turn in one run, CPU time of this process, medians: the ratio is what counts, since a loaded
machine stretches all of them.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from gpu_step import STEPS, trainer

from ness import NessError
from ness.lab.gpu import amp
from ness.lab.training.loop import Trainer

WARM = 3  # steps that are not counted


def in_second_task(method: str, network: str, fast: bool) -> Trainer:
    """A trainer at the start of its second task, its first one passed over without a step."""
    one = trainer(method, network, 0, 1, True, fast, torch.device("cpu"))
    one.begin_task()
    assert one.learning is not None
    one.learning.judge(0.0)
    one.finish_task()
    one.begin_task()
    return one


def steps_of(one: Trainer) -> Callable[[int], None]:
    inputs = one.open_epoch()

    def step(number: int) -> None:
        assert one.learning is not None
        one.learning.step(inputs[number])

    return step


def milliseconds(method: str, network: str, count: int) -> dict[str, float]:
    """Of one step, for each way."""
    ways = {
        "plain": steps_of(in_second_task(method, network, False)),
        "--fast": steps_of(in_second_task(method, network, True)),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(WARM + count):
        for name, step in ways.items():
            began = time.process_time()
            step(number)
            if number >= WARM:
                times[name].append(1e3 * (time.process_time() - began))
    return {name: statistics.median(found) for name, found in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", nargs="*", default=["alexnet", "resnet18-32", "resnet18-84"])
    parser.add_argument("--methods", nargs="*", default=["finetune", "ness"])
    parser.add_argument("--steps", type=int, default=15, help=f"at most {STEPS - WARM}")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    try:
        amp.check(torch.device("cpu"))
    except NessError as error:
        print(f"cpu_step: {error}; nothing measured")
        return
    for network in asked.networks:
        for method in asked.methods:
            found = milliseconds(method, network, min(asked.steps, STEPS - WARM))
            text = "   ".join(f"{name} {value:6.1f} ms" for name, value in found.items())
            print(f"{network:12} {method:10} {text}   {found['plain'] / found['--fast']:.2f} times as fast", flush=True)


if __name__ == "__main__":
    main()
