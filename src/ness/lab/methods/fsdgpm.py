"""FS-DGPM: replay, weights pushed uphill inside old subspaces before the gradient is taken, softly projected after.

As published a batch has as many replayed samples beside it as it has of its own, so a short last batch has few. The
preset `reference` repeats the code: importances wrapped anew in every step, which end at a constant.

On purpose otherwise than the published code:

- Its network has one BatchNorm, whose running statistics normalise old images both where bases are made and at test.
  With `norm=batch` there are none: a task is tested under the statistics of its own images, so bases are made under
  those as well, each task's images in a pass of their own. With `norm=stored` both use running ones, as published.
- Those are not moved by the ascent, which passes the same images a second time.
- Until the memory holds anything, the first batch stands in for it: its copies weigh nothing in the loss.
- Halves of fewer than two samples cannot be normalised: a last batch of two or three is one ascent, not two.
- Momentum is not cleared at each decay of the rate, and backward transfer is divided by T - 1.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from ness.lab.gpu.coroutines import pause
from ness.lab.methods._projection.basis import new_directions
from ness.lab.methods._projection.project import (
    ADAM,
    Projecting,
    check_no_decay,
    empty_bases,
    named,
    project_gradients,
    removal,
    split,
    under,
)
from ness.lab.methods._projection.rows import check_count, input_rows
from ness.lab.methods._reservoir import Reservoir
from ness.lab.methods.base import Context, MethodSpec, Sizes, TaskData
from ness.lab.methods.gpm import thresholds
from ness.lab.networks.base import Network
from ness.lab.networks.norms import without_update
from ness.lab.runs.settings import check_ranges, setting
from ness.lab.training.loader import EVALUATION_BATCH, Batch
from ness.lab.training.losses import cross_entropy_of_many

CLAMP, CLIP, MOMENTUM, SHARPNESS = 2.0, 2.0, 0.9, 10.0  # of the ascent, of both gradients, of λ


@dataclass(frozen=True)
class FsdgpmSettings:
    """What FS-DGPM adds."""

    threshold: float = setting(0.97, "ε of the first task: share of a layer's input energy that a basis holds")
    growth: float = setting(0.003, "what ε grows by with each task")
    samples: int = setting(125, "remembered images whose inputs make the bases")
    memory: int = setting(1000, "samples kept of all tasks together")
    replay: int = setting(64, "of them beside a batch, in each step; never more than the batch has")
    ascent: float = setting(0.001, "η₁: how far weights are pushed uphill; falls with the learning rate")
    importance_lr: float = setting(0.01, "η₂: learning rate of λ; falls with the learning rate")
    second_order: bool = setting(True, "whether the gradient goes through the ascent")
    importances: Literal["learnt", "rewrapped"] = setting(
        "learnt", "λ = sigmoid(10·θ) with θ learnt; or the reference's λ ← sigmoid(10·λ), moved once a task"
    )
    norms: Literal["frozen", "free"] = setting("frozen", "BatchNorm's γ and β after the first task")


class Heads(nn.Module):
    """The network with the heads of all tasks so far: logits of each."""

    def __init__(self, model: Network, tasks: int) -> None:
        super().__init__()
        self.model, self.tasks = model, tasks

    def forward(self, x: Tensor) -> list[Tensor]:
        """One (n, classes) a task."""
        features = self.model.features(x)
        return [head(features) for head in list(self.model.heads)[: self.tasks]]


def uphill(weights: Mapping[str, Tensor], ascent: Mapping[str, Tensor], rate: float | Tensor) -> dict[str, Tensor]:
    """w + η₁·clamp(g, ±2) where there is a g."""
    return {
        name: weight + rate * ascent[name].clamp(-CLAMP, CLAMP) if name in ascent else weight
        for name, weight in weights.items()
    }


def clipped(gradients: Sequence[Tensor], most: float) -> list[Tensor]:
    """The gradients scaled so that their norm together is at most `most`."""
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(each) for each in gradients]))
    scale = (most / (norm + 1e-6)).clamp(max=1)
    return [each * scale for each in gradients]


def rewrapped(importance: Tensor) -> Tensor:
    """The reference's λ ← sigmoid(10·λ), applied to λ itself in every step: it ends at 0.99995."""
    return torch.sigmoid(SHARPNESS * importance)


class Fsdgpm(Projecting):
    """M (d, r) rebuilt after every task from remembered images, λ (r,) learnt along with the task."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.own: FsdgpmSettings = context.own
        self.free_norms = self.own.norms == "free"
        self.thresholds = thresholds(self.own.threshold, self.own.growth, context.tasks)
        self.bases = empty_bases(self.layers, context.device)
        self.theta: dict[str, Tensor] = {}  # θ (r,) by layer, or λ itself if rewrapped
        self.velocity: dict[str, Tensor] = {}
        self.memory: Reservoir | None = None

    def before_task(self, lesson: TaskData) -> None:
        """Makes the memory before the first task."""
        check_count("samples", self.own.samples, lesson.train)
        if self.memory is None:
            self._make_memory(lesson.train.images.shape[1:])

    def _make_memory(self, shape: Sequence[int]) -> None:
        self.memory = Reservoir(self.own.memory, tuple(shape), self.context.device)

    def parameters(self, lesson: TaskData) -> list[nn.Parameter]:
        """As in projected training, and the heads of earlier tasks, which learn through replay."""
        old = [p for task in range(lesson.task) for p in self.model.heads[task].parameters()]
        return [*super().parameters(lesson), *old]

    def gradients(self, batch: Batch, trained: Sequence[nn.Parameter], *, sam: bool) -> Tensor:
        """∇ of the mean loss of batch and replayed samples at w₁ and w₂: w pushed uphill by half the batch each."""
        own, weights = self.own, {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        shares = {name: theta.detach().requires_grad_() for name, theta in self.theta.items()}
        scale = 1.0 if batch.rate is None else batch.rate / self.context.training.lr
        assert self.memory is not None
        everyone, certain = self.memory.beside(batch, self._replayed(batch), self.context.random.step)
        heads = Heads(self.model, batch.task + 1)
        fast: Mapping[str, Tensor] = weights
        losses = []
        for half in halves(batch):
            fast = uphill(fast, self._ascent(half, fast, shares), own.ascent * scale)
            logits = functional_call(heads, {f"model.{n}": w for n, w in fast.items()}, (everyone.images,))
            losses.append(cross_entropy_of_many(logits, everyone, certain))
        loss = torch.stack(losses).mean()
        wanted = [*weights.values(), *shares.values()]
        found = torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True)
        for parameter, gradient in zip(weights.values(), clipped(found[: len(weights)], CLIP), strict=True):
            parameter.grad = gradient
        self._learn_importances(found[len(weights) :], own.importance_lr * scale, batch)
        assert batch.clock is not None
        self.memory.offer(batch, batch.clock.epoch == 0, self.context.random.step)
        return loss.detach()

    def _replayed(self, batch: Batch) -> int:
        """How many remembered samples there are beside a batch."""
        return min(self.own.replay, len(batch.labels))

    def _ascent(self, half: Batch, fast: Mapping[str, Tensor], shares: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """g of the half's loss at w; in layers with a basis G M diag(λ) Mᵀ: uphill where old tasks live."""
        with without_update(self.model):
            logits: Tensor = functional_call(self.model, dict(fast), (half.images, half.task))
        loss = F.cross_entropy(logits, half.labels)
        found = torch.autograd.grad(loss, list(fast.values()), create_graph=self.own.second_order, allow_unused=True)
        ascent = {name: each for name, each in zip(fast, found, strict=True) if each is not None}
        for name, share in shares.items():
            layer = self.layers[name]
            weight_name, bias_name = f"{name}.{layer.weight_name}", f"{name}.{layer.bias_name}"
            joint = layer.joint(ascent[weight_name], ascent.get(bias_name))[0]
            basis = self.bases[name]
            weight, bias = split(layer, joint @ basis * self._importance(share) @ basis.mT)
            ascent[weight_name] = weight
            if bias is not None:
                ascent[bias_name] = bias
        return ascent

    def _importance(self, theta: Tensor) -> Tensor:
        """λ: the reference's is θ itself."""
        return torch.sigmoid(SHARPNESS * theta) if self.own.importances == "learnt" else theta

    @torch.no_grad()
    def _learn_importances(self, gradients: Sequence[Tensor], rate: float | Tensor, batch: Batch) -> None:
        """One step of SGD with momentum on θ; rewrapped, it counts in a task's first step only."""
        if not self.theta:
            return
        for (name, theta), gradient in zip(self.theta.items(), clipped(gradients, CLIP), strict=True):
            self.velocity[name].mul_(MOMENTUM).add_(gradient)
            step = rate * self.velocity[name]
            if self.own.importances == "rewrapped":
                assert batch.clock is not None
                theta.copy_(rewrapped(theta - step * (batch.clock.elapsed == 0)))
            else:
                theta.sub_(step)

    def after_backward(self, batch: Batch) -> None:
        """G ← G - G M diag(λ) Mᵀ, with λ as this step has moved it."""
        importances = {name: self._importance(theta) for name, theta in self.theta.items()}
        project_gradients(self.layers, {n: removal(self.bases[n], share) for n, share in importances.items()})

    def moved_by_steps(self) -> Sequence[Tensor]:
        """The memory and λ."""
        assert self.memory is not None
        return [*self.memory.state().values(), *self.theta.values(), *self.velocity.values()]

    def after_task(self, lesson: TaskData) -> Mapping[str, Any]:
        """New bases from images of all tasks so far, θ at its start; not after the last task."""
        assert self.memory is not None
        if self.is_last(lesson):
            return {}
        random = self.context.random.method
        order = torch.randperm(int(self.memory.filled), generator=random, device=random.device)[: self.own.samples]
        rows = self._rows(order)
        for name, layer in self.layers.items():
            nothing = rows[name].new_zeros(layer.width, 0)
            found, _ = new_directions(nothing, rows[name], self.thresholds[lesson.task], strict=False)
            self.bases[name] = found.float()
            pause()
        self._start_importances()
        return {"ranks": {name: f"{basis.shape[1]}/{basis.shape[0]}" for name, basis in self.bases.items()}}

    def _rows(self, order: Tensor) -> dict[str, Tensor]:
        """Inputs of every layer (n, d) on remembered images, task by task.

        A pass is of one task alone, so that where BatchNorm uses the statistics of the batch they are such as the task
        is tested under: a pass of few images is filled up with others of the task, whose rows are not kept.
        """
        assert self.memory is not None
        filled = int(self.memory.filled)
        tasks = self.memory.tasks[:filled]
        found: dict[str, list[Tensor]] = {name: [] for name in self.layers}
        for task in sorted(set(tasks[order].tolist())):
            wanted = order[tasks[order] == task]
            others = (tasks == task).nonzero().flatten()
            others = others[~torch.isin(others, wanted)][: max(0, EVALUATION_BATCH - len(wanted))]
            together = torch.cat([wanted, others])
            if len(together) == 1:
                together = together.repeat(2)  # an image alone cannot be normalised
            images = self.memory.images[together]
            for name, rows in input_rows(self.model, self.layers, images, [len(wanted)] * len(self.layers)).items():
                found[name].append(rows)
        return {name: torch.cat(rows) for name, rows in found.items()}

    def _start_importances(self) -> None:
        """λ = 0.9933 where it is learnt (θ = ½, where the sigmoid still has a slope), 1 in the reference."""
        start = 0.5 if self.own.importances == "learnt" else 1.0
        self.theta = {name: torch.full_like(basis[0], start) for name, basis in self.bases.items()}
        self.velocity = {name: torch.zeros_like(theta) for name, theta in self.theta.items()}

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The memory, bases, θ and its velocity."""
        tensors = named("basis", self.bases) | named("theta", self.theta) | named("velocity", self.velocity)
        if self.memory is None:
            return tensors, {"shape": None}
        return tensors | named("memory", self.memory.state()), {"shape": list(self.memory.images.shape[1:])}

    def load_state(self, tensors: dict[str, Tensor], manifest: dict[str, Any]) -> None:
        """Puts them back."""
        device = self.context.device
        self.bases = under("basis", tensors, device)
        self.theta = {name: value.clone() for name, value in under("theta", tensors, device).items()}
        self.velocity = {name: value.clone() for name, value in under("velocity", tensors, device).items()}
        if manifest["shape"] is not None:
            self._make_memory(manifest["shape"])
            assert self.memory is not None
            self.memory.load(under("memory", tensors, device))


def halves(batch: Batch) -> list[Batch]:
    """The batch in two parts, one ascent each; a batch of fewer than four in one."""
    parts = 2 if len(batch.labels) >= 4 else 1
    pairs = zip(batch.images.chunk(parts), batch.labels.chunk(parts), strict=True)
    return [replace(batch, images=images, labels=labels) for images, labels in pairs]


def check(settings: Any) -> None:
    """Refuses numbers outside their range, and weight decay."""
    check_ranges(
        settings,
        ("threshold", 0 < settings.threshold < 1, "a share of the energy between 0 and 1"),
        ("growth", 0 <= settings.growth < 1, "from 0 to below 1, e.g. 0.003"),
        ("samples", 2 <= settings.samples <= settings.memory, "at least 2 and at most memory"),
        ("replay", 1 <= settings.replay <= settings.memory, "at least 1 and at most memory"),
        ("ascent", settings.ascent >= 0, "0 or more"),
        ("importance_lr", settings.importance_lr >= 0, "0 or more"),
        ("batch", settings.batch >= 4, "at least 4: each half of a batch is normalised by itself"),
    )
    check_no_decay(settings)


def kept_at_most(sizes: Sizes, own: Any) -> int:
    """Bytes of the memory (float32 images; label and task as int64) and of full bases with θ and its velocity."""
    memory: int = own.memory
    return (memory + 1) * (4 * sizes.image + 16) + 8 + 4 * sum(width * (width + 2) for _, width in sizes.layers)


# Its own AlexNet has one BatchNorm and one head for all classes; here it is the lineage's,
# with a head per task. There is no code of it for the other two benchmarks: schedules and ε are GPM's.
PRESETS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "fixed": {
        "*": {"optimizer": "sgdm", "weight_decay": 0.0, "lr": 0.01},
        "digits": {"epochs": 4, "lr": 0.06, "samples": 200, "replay": 32},
        "cifar100": {"epochs": 50, "norms": "free"},
        "five-datasets": {"threshold": 0.965, "growth": 0.0},
        "mini-imagenet": {"threshold": 0.985, "growth": 0.0003},
    },
    "reference": {"*": {"importances": "rewrapped"}},
}

METHOD = MethodSpec(
    name="fsdgpm",
    title="Replay with flat minima inside old subspaces, and soft projection",
    build=Fsdgpm,
    keeps="samples of all tasks, and a basis per layer (d × r)",
    keeps_samples=True,
    kept_at_most=kept_at_most,
    paper="Deng et al., Flattening Sharpness for Dynamic Gradient Projection Memory",
    year=2021,
    settings=FsdgpmSettings,
    presets=PRESETS,
    refuses={
        "adamw": ADAM,
        "sam": "it perturbs the weights in its own way (ascent); use sgdm or sgd",
        "mixup": "a memory of mixed images would have no labels of their own",
    },
    check=check,
    revision=lambda own: 2,  # 1: as many replays beside a short batch, and bases of all tasks' images in one pass
)
