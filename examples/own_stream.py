"""A stream of your own from Python: three tasks of tensors, made here, learnt one after the other by a plain loop.

    python examples/own_stream.py

Needs no download. A task is images (n, c, h, w) and labels that count from 0 inside the task; uint8 images are kept as
they are and normalised when they reach the network.
"""

import torch
from torch import Tensor, nn

from ness.lab.benchmarks import Request, Task, benchmark_from_stream, stream_from_tasks, task_from_tensors


def bars(count: int, period: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Noisy grey images 16×16 of bars that lie (label 0) or stand (label 1)."""
    labels = torch.randint(2, (count,), generator=generator)
    wave = (torch.arange(16) // period % 2 * 200).expand(16, 16)
    images = torch.where(labels[:, None, None] == 0, wave.T, wave)
    noise = torch.randint(0, 56, images.shape, generator=generator)
    return (images + noise).to(torch.uint8)[:, None], labels


def as_input(images: Tensor, task: Task) -> Tensor:
    """What the laboratory does on the device: (x / 255 - mean) / std, channel by channel."""
    mean, std = (torch.tensor(values)[:, None, None] for values in (task.mean, task.std))
    return (images.float() / 255 - mean) / std


generator = torch.Generator().manual_seed(0)
torch.manual_seed(0)

# 1. Tensors become tasks, tasks a stream, the stream a benchmark.
tasks = [
    task_from_tensors(f"bars of {period}", train=bars(600, period, generator), test=bars(200, period, generator))
    for period in (1, 2, 4)
]
stream = stream_from_tasks("bars", tasks)
benchmark = benchmark_from_stream(stream)
print(f"{benchmark.title}; images {stream.shape}; network {benchmark.network}")

# 2. Whatever takes a benchmark loads the stream like this; here, a plain loop learns it task after task.
body = nn.Sequential(
    nn.Conv2d(1, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(128, 32), nn.ReLU()
)
heads = nn.ModuleList(nn.Linear(32, task.classes) for task in stream.tasks)


@torch.no_grad()
def accuracy(number: int, task: Task) -> float:
    found = heads[number](body(as_input(task.test.images, task))).argmax(1)
    return (found == task.test.labels).float().mean().item()


for number, task in enumerate(benchmark.load(Request(seed=1)).tasks):
    optimizer = torch.optim.SGD([*body.parameters(), *heads[number].parameters()], lr=0.05, momentum=0.9)
    for _ in range(5):
        for rows in torch.randperm(len(task.train), generator=generator).split(64):
            logits = heads[number](body(as_input(task.train.images[rows], task)))
            optimizer.zero_grad()
            nn.functional.cross_entropy(logits, task.train.labels[rows]).backward()
            optimizer.step()
    seen = ", ".join(f"{known.name} {accuracy(k, known):.0%}" for k, known in enumerate(stream.tasks[: number + 1]))
    print(f"after {task.name!r}: {seen}")
