"""Five turned copies of scikit-learn's real 8×8 digits: the embedded benchmark, no download, seconds on two cores."""

from collections.abc import Callable

import torch
from torch import Generator, Tensor

from ness.lab.benchmarks.base import Benchmark, Request, Split, Stream, Task

TEST, VALID = 400, 200  # of 1797 images; the rest, 1197, is for training
WHITE = 240  # 16 grey levels of the original times 15
MEAN, STD = (0.2873,), (0.3539,)  # of the upright copy, over all images, in 0..1


def turned(quarters: int, *, negative: bool = False, mirrored: bool = False) -> Callable[[Tensor], Tensor]:
    """A view of uint8 images (n, 1, 8, 8): mirrored or not, turned by quarters, light and dark exchanged or not."""

    def view(images: Tensor) -> Tensor:
        images = images.flip(3) if mirrored else images
        images = images.rot90(quarters, (2, 3))
        return (WHITE - images if negative else images).contiguous()

    return view


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "upright": turned(0),
    "quarter, negative": turned(1, negative=True),
    "upside down": turned(2),
    "three quarters, negative": turned(3, negative=True),
    "mirrored quarter": turned(1, mirrored=True),
}


def load(request: Request) -> Stream:
    """The five tasks; the test images are the same for every seed, which images are for validation is not."""
    images, labels = request.once("digits", _read)
    order = torch.randperm(len(labels), generator=Generator().manual_seed(0))
    test, rest = order[:TEST], order[TEST:]
    rest = rest[torch.randperm(len(rest), generator=Generator().manual_seed(request.seed))]
    parts = {"valid": rest[:VALID], "train": rest[VALID:], "test": test}
    tasks = []
    for name, view in VIEWS.items():
        seen = view(images)
        splits = {part: Split(seen[index], labels[index]) for part, index in parts.items()}
        tasks.append(Task(name=name, classes=10, mean=MEAN, std=STD, **splits))
    return Stream("digits", tuple(tasks), {"source": "UCI optical recognition of handwritten digits, by scikit-learn"})


def _read() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.from_numpy(digits.images * 15).to(torch.uint8).unsqueeze(1)
    return images, torch.from_numpy(digits.target).to(torch.int64)


BENCHMARK = Benchmark(
    name="digits",
    title="Real 8×8 digits, turned five ways",
    network="digits",
    tasks=len(VIEWS),
    load=load,
    settings={
        "fixed": {
            "epochs": 15,
            "lr": 0.02,
            "lr_min": 1e-3,
            "patience": 3,
            "lr_factor": 3.0,
            "weight_decay": 1e-4,
            "norm": "stored",
        }
    },
)
