"""A-GEM: a gradient that would raise the loss on remembered samples loses the part that does.

As published the memory holds equally many samples of every class, passes without dropout, and counts as the mean over
the samples drawn, each under its own task's head.

On purpose otherwise than the published code: a batch from the memory has equally many samples of every earlier task
(there: at random of all, which is equally many in the mean), and each task's are normalised by themselves (there: all
together, under statistics that no task is tested with). The samples kept of a class are a random choice of its training
images (there: the last ones seen, which in a single pass in random order is the same).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from ness.errors import NessError
from ness.lab.methods.base import Context, Method, MethodSpec, Sizes, TaskData, backbone, clear
from ness.lab.networks.dropout import without_dropout
from ness.lab.networks.norms import passed_apart
from ness.lab.runs.settings import setting
from ness.lab.training.loader import Batch, Samples, together


@dataclass(frozen=True)
class AgemSettings:
    """What A-GEM adds to the training settings."""

    memory: int = setting(200, "training samples kept of every task, equally many of each class")
    memory_batch: int = setting(
        64, "samples per step drawn from the memory, alike many of every earlier task, 2 at least"
    )


def half_space(gradient: Sequence[Tensor], reference: Sequence[Tensor]) -> list[Tensor]:
    """g, or g - (g·r / r·r) r where g·r < 0: the nearest gradient that does not raise the remembered loss.

    Both are one vector each, in pieces of any shapes; nothing is read on the host.

    >>> half_space([torch.tensor([1.0, -1.0])], [torch.tensor([0.0, 1.0])])
    [tensor([1., 0.])]
    """
    dot, square = inner(gradient, reference), inner(reference, reference)
    share = torch.where(dot < 0, dot / square, 0.0)  # r = 0 has g·r = 0: g stays
    return [torch.addcmul(g, share, r, value=-1) for g, r in zip(gradient, reference, strict=True)]


def inner(one: Sequence[Tensor], other: Sequence[Tensor]) -> Tensor:
    """The inner product of two vectors in pieces, put together first: many pieces would be many small operations."""
    a, b = (torch.cat([piece.flatten() for piece in each]) for each in (one, other))
    return (a * b).sum()


def portion(total: int, tasks: int) -> int:
    """How many samples each task gives to a batch of `total`: alike many, at least the two that BatchNorm needs.

    >>> portion(64, 3), portion(4, 3)
    (21, 2)
    """
    return max(2, total // tasks)


def drawn(samples: Samples, wanted: int, generator: Generator) -> tuple[Tensor, list[int]]:
    """Indices of `wanted` different samples of each task, or of all it has, task after task; and how many of each."""
    counts = samples.counts or (len(samples),)
    keys = torch.rand(len(samples), generator=generator, device=generator.device, dtype=torch.float64)
    order = (keys if samples.tasks is None else keys + samples.tasks).argsort()  # shuffled, each task in its own place
    each = [part[:wanted] for part in torch.split(order, list(counts))]
    return torch.cat(each), [len(part) for part in each]


def balanced(labels: Tensor, count: int, generator: Generator) -> Tensor:
    """Indices of `count` samples at random, as equally many of each class as there are.

    Classes that get one more than others are random, too; a class with too few samples gives all it has.

    >>> labels = torch.tensor([0, 0, 0, 0, 0, 0, 1, 2, 2])
    >>> labels[balanced(labels, 5, torch.Generator().manual_seed(0))].bincount()
    tensor([2, 1, 2])
    """
    order = torch.randperm(len(labels), generator=generator, device=labels.device)
    classes, shuffled = torch.unique(labels, return_inverse=True)
    shuffled = shuffled[order]
    own = (shuffled.unsqueeze(1) == torch.arange(len(classes), device=labels.device)).cumsum(0)
    rank = own.gather(1, shuffled.unsqueeze(1)).squeeze(1)  # the how manyth of its class, counted from 1
    place = torch.randperm(len(classes), generator=generator, device=labels.device)
    return order[(rank * len(classes) + place[shuffled]).argsort()[:count]]


class Agem(Method):
    """Keeps samples of every task; each step's gradient is set against theirs, over all that trains."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.own: AgemSettings = context.own
        self.memory: list[Samples] = []  # by task
        self.every: Samples | None = None  # the same together, as a step draws from it

    def parameters(self, lesson: TaskData) -> list[nn.Parameter]:
        """The backbone, the task's head, and the heads of the remembered tasks, which learn through the memory."""
        seen = [head for task, head in enumerate(self.model.heads) if task <= lesson.tasks[-1]]
        return backbone(self.model) + [parameter for head in seen for parameter in head.parameters()]

    def gradients(self, batch: Batch, trained: Sequence[nn.Parameter], *, sam: bool) -> Tensor:
        """The batch's gradient, then the memory's, then the rule; written back to every parameter, heads included."""
        loss = super().gradients(batch, trained, sam=sam)
        if self.memory:
            found = taken(trained)
            clear(trained)
            self.remembered().backward()  # type: ignore[no-untyped-call]
            for parameter, value in zip(trained, half_space(found, taken(trained)), strict=True):
                parameter.grad = value
        return loss

    def remembered(self) -> Tensor:
        """Mean loss of a batch drawn from the memory.

        Tasks are normalised apart, each under its own head: batch statistics of several tasks would be nobody's. Like
        all training passes this counts towards stored statistics; unlike others it goes without dropout.
        """
        every = self.every
        assert every is not None
        index, sizes = drawn(every, portion(self.own.memory_batch, len(self.memory)), self.context.random.step)
        batch = every.take(index)
        # not by `self.logits`, which is of one task: all tasks share one pass up to their heads
        with without_dropout(self.model):
            features = torch.split(passed_apart(self.model, batch.images, sizes), sizes)
        labels = torch.split(batch.labels, sizes)
        heads = [self.model.heads[part.task] for part in self.memory]
        losses = [
            F.cross_entropy(head(x), y, reduction="sum") for head, x, y in zip(heads, features, labels, strict=True)
        ]
        return torch.stack(losses).sum() / len(batch.labels)

    def after_task(self, lesson: TaskData) -> Mapping[str, Any]:
        """Keeps a random sample of every class of the task; nobody needs one of the last task."""
        if lesson.task == self.context.tasks - 1:
            return {}
        train, random = lesson.train, self.context.random.method
        order = balanced(train.labels, self.own.memory, random)
        kept = Samples(train.images[order], train.labels[order], train.task, train.mean, train.std)
        self._remember([*self.memory, kept])
        return {"remembered": sum(map(len, self.memory))}

    def _remember(self, memory: list[Samples]) -> None:
        self.memory = memory
        self.every = together(memory) if memory else None

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The memory."""
        kept = {f"{part.task}/{key}": getattr(part, key) for part in self.memory for key in KEPT}
        return kept, {"tasks": [part.task for part in self.memory]}

    def load_state(self, tensors: dict[str, Tensor], manifest: dict[str, Any]) -> None:
        """Puts the memory back on the device."""
        memory = []
        for task in manifest["tasks"]:
            images, labels, mean, std = (tensors[f"{task}/{key}"].to(self.context.device) for key in KEPT)
            memory.append(Samples(images, labels, task, mean, std))
        self._remember(memory)


KEPT = ("images", "labels", "mean", "std")


def taken(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """The gradients as they are; zeros where there is none, so that no parameter falls out of the vector."""
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]


def check(settings: Any) -> None:
    """Refuses a memory that BatchNorm cannot normalise."""
    for name in ("memory", "memory_batch"):
        if getattr(settings, name) < 2:
            raise NessError(f"{name} is {getattr(settings, name)}, expected at least 2 samples")


def kept_at_most(sizes: Sizes, own: Any) -> int:
    """Bytes of the samples of every task but the last: uint8 images, int64 labels, a few numbers per task."""
    memory: int = own.memory
    return (sizes.tasks - 1) * (memory * (sizes.image + 8) + 64)


# fixed and paper: the GPM paper's totals (2000, 3000, 500) by task, with the shared schedules.
# reference: the official code's single pass over small batches, with 13 samples per class. The rate on digits was
# chosen with `ness tune`.
PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "fixed": {
        "*": {"optimizer": "sgd", "weight_decay": 0.0},
        "digits": {"memory": 100, "lr": 0.05},
        "cifar100": {"memory": 200, "lr": 0.05},
        "five-datasets": {"memory": 600, "lr": 0.1},
        "mini-imagenet": {"memory": 25, "lr": 0.1},
    },
    "reference": {
        "*": {"epochs": 1, "batch": 10, "lr": 0.03, "memory": 130, "memory_batch": 256},
        "mini-imagenet": {"memory": 65},
    },
}

METHOD = MethodSpec(
    name="agem",
    title="Gradients that do not raise the loss on remembered samples",
    build=Agem,
    keeps="some samples of every task",
    keeps_samples=True,
    kept_at_most=kept_at_most,
    paper="Chaudhry et al., Efficient Lifelong Learning with A-GEM",
    year=2019,
    settings=AgemSettings,
    presets=PRESETS,
    check=check,
    refuses={
        "sgdm": "momentum brings back what the rule removed from earlier gradients; use --optimizer sgd",
        "adamw": "its scaling turns a gradient that harms nothing into a step that does; use --optimizer sgd",
    },
    revision=lambda own: 2,  # 1: a memory of classes as they came, passed with dropout
)
