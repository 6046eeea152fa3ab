"""NESS+: a shared update in the null space of earlier inputs, and a few private directions and norms per task."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

import ness
from ness.lab.gpu.coroutines import pause
from ness.lab.methods.base import Context, Method, MethodSpec, Sizes, TaskData, sizes_of
from ness.lab.methods.ness import certificate_row, guard_bytes, observed, observing, rule_of
from ness.lab.networks.norms import batch_norms, measure_statistics
from ness.lab.runs.settings import check_ranges, setting
from ness.updates.private import capped

SHARED = "shared weights/"


@dataclass(frozen=True)
class NessPlusSettings:
    """What NESS+ adds to the training settings."""

    rule: Literal["within", "soft", "nuclear", "none"] = setting(
        "within", "shared update: by a budget of drift, soft or hard at eps, or no shared update at all"
    )
    drift: float = setting(
        ness.Within().drift, "with within: how far a task's own outputs may ever move, layer by layer, relative RMS"
    )
    eps: float = setting(6e-4, "ε₁ of soft and nuclear: how small a singular value must be to count as null")
    keep: float = setting(0.05, "what a task may keep for itself, as a share of the shared layers' weights")
    private: int | None = setting(None, "private directions per layer; left out: as many as `keep` allows")
    basis: Literal["shared", "own"] = setting("shared", "private directions: one set for all tasks, or one per task")
    norms: Literal["own", "frozen"] = setting("own", "norm layers: a copy per task, or the first task's")


def directions_within(layers: tuple[tuple[int, int], ...], norms: int, keep: float) -> int:
    """The largest k at which Σ o·k, k capped in each layer (o, d), and a task's norms are at most `keep` of Σ o·d.

    d is the fan-in, the constant 1 of a bias not counted.

    >>> directions_within(((64, 48), (128, 576), (256, 512), (2048, 1024), (2048, 2048)), 4 * 4544, 0.05)
    68
    """
    weights = sum(outputs * fan_in for outputs, fan_in in layers)
    widest = max(fan_in for _, fan_in in layers)

    def fits(k: int) -> bool:
        return norms + sum(outputs * capped(k, fan_in) for outputs, fan_in in layers) <= keep * weights

    k = 0
    while k < capped(widest, widest) and fits(k + 1):
        k += 1
    return k


def private_directions(own: Any, layers: tuple[tuple[int, int], ...], norms: int) -> int:
    """k under these settings: what they ask for, or as many as `keep` allows beside norms of so many numbers."""
    if own.private is not None:
        return int(own.private)
    return directions_within(layers, norms if own.norms == "own" else 0, own.keep)


def norm_numbers(model: nn.Module) -> int:
    """Numbers in a copy of the network's norms: affine parameters and statistics."""
    return sum(values.numel() for norm in batch_norms(model) for values in norm.state_dict().values())


class NessPlus(Method):
    """W_t = W + B_t Kᵀ: W moves in the null space alone, B_t and the norms are the task's own."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.own: NessPlusSettings = context.own
        self.guard = ness.NullSpace(
            self.model,
            rule=ness.Rank(0) if self.own.rule == "none" else rule_of(self.own),
            exclude=["heads"],
            norm="per_task" if self.own.norms == "own" else "freeze",
            private_basis="shared" if self.own.basis == "shared" else "per_task",
        )
        sizes = sizes_of(self.model, context.tasks, ())
        self.private = private_directions(self.own, sizes.weights, norm_numbers(self.model))

    def before_task(self, lesson: TaskData) -> None:
        """From the second task on: the shared weights, confined, and room for what is the task's own."""
        if lesson.task > 0:
            training = self.context.training
            form: Literal["any", "sgd"] = "sgd" if training.optimizer in ("sgd", "sgdm") else "any"
            with self.context.watch.phase("decomposition"):
                self.guard.constrain(
                    form=form, task=_name(lesson.task), private=self.private, progress=lambda *_: pause()
                )

    def parameters(self, lesson: TaskData) -> list[nn.Parameter]:
        """Everything in the first task; afterwards the updates, the norms and the head."""
        return super().parameters(lesson) if lesson.task == 0 else list(self.guard.parameters())

    def after_task(self, lesson: TaskData) -> Mapping[str, Any]:
        """Measures the task's norms, merges what is shared, and takes the Grams of the task as it is used."""
        training = self.context.training
        if lesson.task == 0 or self.own.norms == "own":
            batches = observed(self.model, (lesson.train,), training, mixed=False)
            measure_statistics(self.model, (batch.images for batch in batches))
        notes: dict[str, Any] = {}
        if lesson.task > 0:
            self.guard.merge()
            certificate = self.guard.certificate()
            notes["certificate"] = [certificate_row(row) for row in certificate.rows]
            notes["kept"] = certificate.kept.get(_name(lesson.task), 0)
        if lesson.task < self.context.tasks - 1:
            batches = observed(self.model, (lesson.train,), training, mixed=False)
            observing(self.guard, batches, self.context)
        return notes

    def use(self, task: int) -> None:
        """The task's private part and norms."""
        if len(self.guard.tasks) > 1:
            self.guard.use(self.guard.tasks[task])

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The guard: Grams, bases, updates, what each task keeps; in a task also the shared weights it started from."""
        tensors, manifest = self.guard.state()
        shared = self._shared_weights() if self.guard.constrained else {}
        return {**tensors, **{f"{SHARED}{name}": value for name, value in shared.items()}}, manifest

    def load_state(self, tensors: dict[str, Tensor], manifest: dict[str, Any]) -> None:
        """Puts the guard back, constrained if it was; a task begins with the last one's private part in the model."""
        held = {name.removeprefix(SHARED): value for name, value in tensors.items() if name.startswith(SHARED)}
        with torch.no_grad():
            for name, value in self._shared_weights().items() if held else ():
                value.copy_(held[name])
        self.guard.load_state({name: value for name, value in tensors.items() if not name.startswith(SHARED)}, manifest)

    def _shared_weights(self) -> dict[str, Tensor]:
        weights = {f"{layer}.{kind}" for layer in self.guard.layers for kind in ("weight", "bias")}
        return {name: value.detach() for name, value in self.model.named_parameters() if name in weights}


def _name(task: int) -> str:
    return f"task {task + 1}"


def check(settings: Any) -> None:
    """Refuses budgets and counts outside their range."""
    check_ranges(
        settings,
        ("drift", settings.drift > 0, "above 0, e.g. 0.1"),
        ("eps", 0 < settings.eps < 1, "a share between 0 and 1, e.g. 6e-4"),
        ("keep", 0 < settings.keep < 1, "a share between 0 and 1, e.g. 0.05"),
        ("private", settings.private is None or settings.private >= 0, "0 or more"),
    )


def kept_at_most(sizes: Sizes, own: Any) -> int:
    """Bytes that the guard keeps, besides what `ness` keeps under the same rule.

    That is the shared weights beside those of the task in use, directions in float64, once or a task, and every task's
    own part in float32: its numbers on the directions, and its norms (γ, β, mean, variance; a counter).
    """
    k = directions_within(sizes.weights, 0, own.keep) if own.private is None else own.private
    widths = [(outputs, fan_in, capped(k, fan_in)) for outputs, fan_in in sizes.weights]
    directions = sum((fan_in + 1) * private for _, fan_in, private in widths)
    if own.private is None:
        a_task = own.keep * sum(outputs * fan_in for outputs, fan_in, _ in widths)
    else:
        a_task = sum(outputs * private + 5 * outputs for outputs, _, private in widths)
    bases = sizes.tasks - 1 if own.basis == "own" else 1
    shared = 4 * sum(outputs * width for outputs, width in sizes.layers)
    return guard_bytes(sizes, own.rule) + shared + int(4 * (sizes.tasks - 1) * a_task) + 8 * bases * directions


RECIPE = {"schedule": "cosine", "drop_last": True, "mixup": 0.2, "norm": "stored", "lr": 0.01, "weight_decay": 1e-4}
PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "fixed": {
        "digits": {"norm": "stored"},
        "cifar100": {**RECIPE, "epochs": 50},
        "five-datasets": {**RECIPE, "epochs": 20},
        "mini-imagenet": {**RECIPE, "epochs": 30},
    }
}

METHOD = MethodSpec(
    name="ness-plus",
    title="A shared null-space update, and private directions and norms per task",
    build=NessPlus,
    keeps="three Grams per layer (d × d); per task k numbers per output, and norms (5 % of the weights by default)",
    kept_at_most=kept_at_most,
    paper="this project: docs/ness-plus.md",
    year=2026,
    settings=NessPlusSettings,
    presets=PRESETS,
    only_with={
        "drift": ("rule", ("within",)),
        "eps": ("rule", ("soft", "nuclear")),
    },
    check=check,
)
