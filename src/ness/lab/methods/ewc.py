"""EWC: a quadratic pull to the last task's weights, each as strong as its Fisher information.

As in the HAT repository, the pull is part of the validation loss that moves the schedule and chooses the weights
(`select_on`): where it grows, cross-entropy alone may fall all the while and the rate would never be lowered.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from ness.lab.gpu.coroutines import pause
from ness.lab.methods._selection import SELECTION_ONLY_WITH, Selection
from ness.lab.methods.base import Context, Method, MethodSpec, Sizes, TaskData
from ness.lab.networks.base import Network
from ness.lab.networks.norms import batch_norms, hold_statistics
from ness.lab.runs.settings import check_ranges, setting
from ness.lab.training.loader import Batch, Samples, fixed_order
from ness.lab.training.losses import cross_entropy

Tensors = dict[str, Tensor]
Convention = Literal["ours", "hat", "avalanche"]
HAT_BATCH = 20  # samples whose mean gradient the HAT repository squares
AT_ONCE = 16  # per-sample gradients held at a time: memory of so many networks


@dataclass(frozen=True)
class EwcSettings(Selection):
    """What EWC adds to the training settings."""

    penalty: float = setting(250.0, "λ, in the units of --convention")
    convention: Convention = setting(
        "ours", "whose λ: λ/2·Σ F d² with per-sample F; the HAT repository's; avalanche's. Converted, never mixed"
    )
    fisher: Literal["sample", "batch"] = setting(
        "sample", "mean squared gradient of each sample; or of batches of 20, dropout on, as in the HAT repository"
    )
    fisher_samples: int = setting(5000, "training samples the per-sample Fisher is a mean over, at most")
    clip: float = setting(100.0, "largest norm of a step's gradient")


def strength(penalty: float, convention: Convention, batch: int) -> float:
    """λ of λ/2·Σ F d² on a per-sample Fisher, from a λ in another code base's units.

    The HAT repository squares the mean gradient of 20 samples, avalanche that of a training batch and has no 1/2; a
    squared mean of B gradients is about the per-sample Fisher divided by B.

    >>> strength(5000.0, "hat", 64), strength(5000.0, "ours", 64), strength(8000.0, "avalanche", 64)
    (250.0, 5000.0, 250.0)
    """
    return {"ours": penalty, "hat": penalty / HAT_BATCH, "avalanche": 2 * penalty / batch}[convention]


def quadratic(theta: Tensor, anchor: Tensor, fisher: Tensor, weight: float) -> Tensor:
    """λ/2 · Σ F (θ - θ*)².

    >>> quadratic(torch.tensor([1.0, 5.0]), torch.zeros(2), torch.tensor([2.0, 0.0]), 3.0)
    tensor(3.)
    """
    return weight / 2 * ((theta - anchor).square() * fisher).sum()


def vector(values: Mapping[str, Tensor], names: Iterable[str]) -> Tensor:
    """These tensors as one: a network's many would be many small operations."""
    return torch.cat([values[name].flatten() for name in names])


def merged(new: Tensors, old: Tensors, finished: int) -> Tensors:
    """F ← (F_new + k·F_old)/(k + 1), with k tasks in F_old; a parameter the new task does not train has F_new = 0.

    >>> merged({"w": torch.tensor(4.0)}, {"w": torch.tensor(1.0)}, 2)
    {'w': tensor(2.)}
    """
    return {
        name: (new.get(name, torch.zeros_like(value)) + finished * value) / (finished + 1)
        for name, value in old.items()
    }


def per_sample_fisher(model: Network, batches: Iterator[Batch], named: Mapping[str, nn.Parameter]) -> Tensors:
    """Mean over samples of the squared gradient of each sample's own loss, true labels, in the model's mode."""
    total = {name: torch.zeros_like(value) for name, value in named.items()}
    coupled = any(norm.training or not norm.track_running_stats for norm in batch_norms(model))
    squares = squares_apart if model.static and not coupled else squares_together
    count = 0
    for batch in batches:
        count += len(batch.labels)
        for found in squares(model, batch, named):
            for name, value in found.items():
                total[name] += value
        pause()
    return {name: value / count for name, value in total.items()}


def squares_apart(model: Network, batch: Batch, named: Mapping[str, nn.Parameter]) -> Iterator[Tensors]:
    """Sums of squared per-sample gradients where samples do not meet: one pass, vectorised over samples."""

    def loss(weights: Tensors, image: Tensor, label: Tensor) -> Tensor:
        logits: Tensor = functional_call(model, weights, (image.unsqueeze(0), batch.task))
        return F.cross_entropy(logits, label.unsqueeze(0))

    weights = {name: value.detach() for name, value in named.items()}
    each = vmap(grad(loss), in_dims=(None, 0, 0))
    for images, labels in zip(*(torch.split(part, AT_ONCE) for part in (batch.images, batch.labels)), strict=True):
        yield {name: value.square().sum(0) for name, value in each(weights, images, labels).items()}


def squares_together(model: Network, batch: Batch, named: Mapping[str, nn.Parameter]) -> Iterator[Tensors]:
    """The same where BatchNorm uses the batch's statistics, or a pass cannot be vectorised: one backward per sample.

    A batch of one cannot be normalised, and a sample's gradient runs through the statistics it is part of.
    """
    losses = F.cross_entropy(model(batch.images, batch.task), batch.labels, reduction="none")
    rows = torch.eye(len(losses), dtype=losses.dtype, device=losses.device)
    for some in torch.split(rows, AT_ONCE):
        found = torch.autograd.grad(losses, list(named.values()), some, retain_graph=True, is_grads_batched=True)
        yield {name: value.square().sum(0) for name, value in zip(named, found, strict=True)}


def batch_fisher(model: Network, samples: Samples, named: Mapping[str, nn.Parameter]) -> Tensors:
    """The HAT repository's: stored order, batches of 20, squared mean gradients.

    Each is weighted by 20, a last shorter batch too, as that code has it, and the sum divided by the samples.
    """
    total = {name: torch.zeros_like(value) for name, value in named.items()}
    for batch in samples.batches(samples.stored_order(), HAT_BATCH):
        loss = cross_entropy(model(batch.images, batch.task), batch)
        for name, value in zip(named, torch.autograd.grad(loss, list(named.values())), strict=True):
            total[name] += HAT_BATCH * value.square()
        pause()
    return {name: value / len(samples) for name, value in total.items()}


class Ewc(Method):
    """One anchor θ* (the last task's weights) and one running Fisher over all parameters, heads included."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        own: EwcSettings = context.own
        self.own = own
        self.select_on = own.select_on
        weight = strength(own.penalty, own.convention, context.training.batch)
        self.weight = weight * HAT_BATCH if own.fisher == "batch" else weight  # on the Fisher that is taken
        self.finished = 0  # tasks in the Fisher
        self.anchor: Tensors = {}
        self.fisher: Tensors = {}
        self.pull: tuple[Tensor, Tensor] | None = None  # both, of what trains in the task, as vectors

    def _trained(self) -> dict[str, nn.Parameter]:
        return {name: value for name, value in self.model.named_parameters() if value.requires_grad}

    def train_mode(self, lesson: TaskData) -> None:
        """Training mode; stored BatchNorm statistics stay the first task's, which no penalty could hold."""
        self.model.train()
        if lesson.task > 0:
            hold_statistics(self.model)

    def loss(self, batch: Batch) -> Tensor:
        """Cross-entropy, and the pull to the anchor once there is one."""
        loss = super().loss(batch)
        return loss + self._pulled() if self.finished else loss

    def penalty(self, lesson: TaskData) -> Tensor | None:
        """λ/2 · Σ F (θ - θ*)² once there is an anchor."""
        return self._pulled() if self.finished else None

    def _pulled(self) -> Tensor:
        trained = self._trained()
        if self.pull is None:
            self.pull = vector(self.anchor, trained), vector(self.fisher, trained)
        return quadratic(vector(trained, trained), *self.pull, self.weight)

    def after_backward(self, batch: Batch) -> None:
        """Clips the gradient: a strong pull far from the anchor must not throw the weights beyond it."""
        torch.nn.utils.clip_grad_norm_(list(self._trained().values()), self.own.clip)

    def after_task(self, lesson: TaskData) -> Mapping[str, Any]:
        """Takes this task's Fisher at the best weights, a batch between two pauses, and moves the anchor there."""
        if lesson.task == self.context.tasks - 1:
            return {}
        new = self._fisher(lesson.train)
        every = dict(self.model.named_parameters())
        old = self.fisher or {name: torch.zeros_like(value) for name, value in every.items()}
        self.fisher, self.pull = merged(new, old, self.finished), None
        self.anchor = {name: value.detach().clone() for name, value in every.items()}
        self.finished += 1
        return {"fisher": float(sum(value.sum() for value in self.fisher.values()))}

    def _fisher(self, samples: Samples) -> Tensors:
        if self.own.fisher == "batch":
            self.model.train()
            buffers = {name: value.clone() for name, value in self.model.named_buffers()}
            found = batch_fisher(self.model, samples, self._trained())
            for name, value in self.model.named_buffers():
                value.copy_(buffers[name])  # looking is not training: running statistics stay
            self.model.eval()
            return found
        self.model.eval()
        order = fixed_order(len(samples), samples.task, "train", samples.labels.device)
        batches = samples.batches(order[: self.own.fisher_samples], self.context.training.batch)
        return per_sample_fisher(self.model, batches, self._trained())

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Anchor and Fisher."""
        kept = {"anchor": self.anchor, "fisher": self.fisher}
        tensors = {f"{part}/{name}": value for part, held in kept.items() for name, value in held.items()}
        return tensors, {"finished": self.finished}

    def load_state(self, tensors: dict[str, Tensor], manifest: dict[str, Any]) -> None:
        """Puts them back on the device."""
        parts: dict[str, Tensors] = {"anchor": {}, "fisher": {}}
        for key, value in tensors.items():
            part, name = key.split("/", 1)
            parts[part][name] = value.to(self.context.device)
        self.anchor, self.fisher, self.finished = parts["anchor"], parts["fisher"], manifest["finished"]


def check(settings: Any) -> None:
    """Refuses a pull that pushes, and a Fisher of nothing."""
    check_ranges(
        settings,
        ("penalty", settings.penalty >= 0, "0 or more"),
        ("clip", settings.clip > 0, "above 0"),
        ("fisher_samples", settings.fisher_samples >= 2, "at least 2: BatchNorm cannot normalise one sample"),
    )


def kept_at_most(sizes: Sizes, own: Any) -> int:
    """Bytes of an anchor and a Fisher entry for every parameter, float32."""
    return 2 * 4 * sizes.parameters


# λ = 5000 of the HAT repository is 250 on a per-sample Fisher. reference: that repository's
# estimate and schedule; paper: its λ with the benchmarks' schedules. digits: chosen with `ness tune`.
HAT_SCHEDULE = {"optimizer": "sgd", "lr": 0.05, "lr_min": 1e-4, "lr_factor": 3.0, "patience": 5, "epochs": 200}
PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "fixed": {
        "*": {"optimizer": "sgd", "weight_decay": 0.0, "penalty": 250.0},
        "digits": {"lr": 0.05, "penalty": 500.0},
        "cifar100": {"lr": 0.05},
        "five-datasets": {"lr": 0.03},
        "mini-imagenet": {"lr": 0.03},
    },
    "reference": {"*": {**HAT_SCHEDULE, "penalty": 5000.0, "convention": "hat", "fisher": "batch"}},
    "paper": {"*": {"penalty": 5000.0, "convention": "hat", "fisher": "batch"}},
}

METHOD = MethodSpec(
    name="ewc",
    title="A pull to earlier weights, by their Fisher information",
    build=Ewc,
    keeps="two numbers per parameter",
    kept_at_most=kept_at_most,
    paper="Kirkpatrick et al., Overcoming catastrophic forgetting in neural networks",
    year=2017,
    settings=EwcSettings,
    presets=PRESETS,
    only_with={"fisher_samples": ("fisher", ("sample",)), **SELECTION_ONLY_WITH},
    check=check,
)
