"""A stream of your own: three tasks of tensors, three methods, and what each forgets.

    python examples/own_stream.py

Needs no download; some ten seconds on a CPU. A task is images (n, c, h, w) and labels that count from 0 inside the
task; uint8 images are kept as they are and normalised on the way to the network.
"""

import torch
from torch import Tensor

from ness.lab import run
from ness.lab.benchmarks import stream_from_tasks, task_from_tensors


def symbols(count: int, patterns: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Noisy grey images 8×8 of a task's own symbols: a random pattern per class."""
    labels = torch.randint(len(patterns), (count,), generator=generator)
    images = 100 + 30 * patterns[labels] + 50 * torch.randn(count, 8, 8, generator=generator)
    return images.clamp(0, 255).to(torch.uint8)[:, None], labels


# 1. Tensors become tasks, tasks a stream.
generator = torch.Generator().manual_seed(0)
tasks = []
for name in ("first", "second", "third"):
    patterns = torch.randn(8, 8, 8, generator=generator)  # eight classes
    train, test = symbols(1000, patterns, generator), symbols(400, patterns, generator)
    tasks.append(task_from_tensors(name, train=train, test=test))
stream = stream_from_tasks("symbols", tasks)

# 2. Three methods learn it, each with two seeds, by a network of the laboratory.
for method in ("finetune", "ness", "ness-plus"):
    results = run(method, stream, network="digits", seeds=(1, 2), epochs=5, lr=0.05)
    print(results)
    for learnt, row in enumerate(results.accuracy):
        seen = ", ".join(f"{task} {value:.1f} %" for task, value in zip(results.tasks[: learnt + 1], row, strict=False))
        print(f"  after {results.tasks[learnt]}: {seen}")
# `results.plot("symbols.png")` draws this; `run(..., out="runs")` keeps records, which `ness report runs` shows.
