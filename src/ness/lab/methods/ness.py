"""NESS: after the first task every layer learns only in the null space of what earlier tasks put into it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

from torch import Tensor, nn

import ness
from ness.errors import NessError
from ness.lab.gpu.coroutines import pause
from ness.lab.methods._projection.rows import backbone_layers
from ness.lab.methods.base import Context, Method, MethodSpec, Sizes, TaskData
from ness.lab.networks.base import Network
from ness.lab.networks.norms import batches_at_once, in_parts
from ness.lab.runs.settings import Training, setting
from ness.lab.training.loader import LARGE_BATCH, Batch, Samples, fixed_order, together

BATCHES_A_CALL = 16  # observed between two pauses


@dataclass(frozen=True)
class NessSettings:
    """What NESS adds to the training settings."""

    eps: float = setting(1e-3, "ε₁: how small a singular value must be to count as null, as a share of the norm")
    rule: Literal["nuclear", "frobenius", "soft", "within"] = setting(
        "nuclear",
        "the norm in τ = ε₁·‖I‖: the code's, the paper's text, the code's with soft weights; or a drift budget",
    )
    drift: float = setting(
        ness.Within().drift, "with rule within: the most that any old task's outputs may move in a layer, as a fraction"
    )
    statistics: Literal["kept", "recomputed"] = setting(
        "kept", "each task's Gram taken once after it, no data kept; or all old data passed through before each task"
    )
    history: Literal["all", "first"] = setting("all", "earlier tasks that are protected")
    borders: Literal["apart", "mixed"] = setting("apart", "whether a batch of old data may span two tasks")


def rule_of(own: Any) -> ness.Rule:
    """The rule of settings with `rule`, `eps` and `drift`."""
    if own.rule == "within":
        return ness.Within(own.drift)
    if own.rule == "frobenius":
        return ness.Frobenius(own.eps)
    return ness.Soft(ness.Nuclear(own.eps)) if own.rule == "soft" else ness.Nuclear(own.eps)


class Ness(Method):
    """W ← W + (U V)ᵀ with U the directions that earlier inputs hardly use; the guard holds both."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.own: NessSettings = context.own
        self.guard: ness.NullSpace = self._new_guard()
        self.pretrained = context.general is not None and len(context.general) > 0
        if self.pretrained:
            self._observe_general()

    def _new_guard(self) -> "ness.NullSpace":
        return ness.NullSpace(self.model, rule=rule_of(self.own), exclude=["heads"], norm="freeze")

    def before_task(self, lesson: TaskData) -> None:
        """Confines every layer of the backbone, from the second task on, or from the first of a pretrained network."""
        if self._free(lesson):
            return
        if self.own.statistics == "recomputed":
            self.guard = self._new_guard()
            protected = lesson.earlier[:1] if self.own.history == "first" else lesson.earlier
            if self.pretrained:
                self._observe_general()
            self._observe(protected)
        with self.context.watch.phase("decomposition"):
            self.guard.constrain(form=self._form(), progress=lambda *_: pause())

    def _form(self) -> Literal["any", "sgd"]:
        """The cheaper form wherever it is the same training.

        SAM ascends by ρ·g/‖g‖, with g = G U of V or G U Uᵀ of ΔW = (U V)ᵀ. They are as long, and the ascents the same,
        where U is orthonormal: under a hard rule, and without a bias, whose column is scaled.
        """
        training = self.context.training
        if training.optimizer == "sam" and training.sam_tasks == "all":
            without_bias = all(layer.bias is None for layer in backbone_layers(self.model).values())
            return "sgd" if self.own.rule in ("nuclear", "frobenius") and without_bias else "any"
        return "any" if training.optimizer == "adamw" else "sgd"

    def parameters(self, lesson: TaskData) -> list[nn.Parameter]:
        """Everything in the first task; afterwards the layers' updates (V) and the head."""
        return super().parameters(lesson) if self._free(lesson) else list(self.guard.parameters())

    def _free(self, lesson: TaskData) -> bool:
        """Whether nothing is to be kept yet: the first task of a network that could do nothing before."""
        return lesson.task == 0 and not self.pretrained

    def after_task(self, lesson: TaskData) -> Mapping[str, Any]:
        """Merges the update into plain weights and takes this task's Grams; says what every layer may have lost."""
        notes: dict[str, Any] = {}
        if not self._free(lesson):
            self.guard.merge()
            notes["certificate"] = [certificate_row(row) for row in self.guard.certificate().rows]
        last = lesson.task == self.context.tasks - 1
        wanted = self.own.history == "all" or lesson.task == 0
        if self.own.statistics == "kept" and wanted and not last:
            self._observe((lesson.train,))
        return notes

    def _observe_general(self) -> None:
        assert self.context.general is not None
        self._observe((self.context.general,))

    def _observe(self, tasks: tuple[Samples, ...]) -> None:
        batches = observed(self.model, tasks, self.context.training, mixed=self.own.borders == "mixed")
        observing(self.guard, batches, self.context)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The guard: Grams, bases and updates."""
        return self.guard.state()

    def load_state(self, tensors: dict[str, Tensor], manifest: dict[str, Any]) -> None:
        """Puts the guard back, constrained if it was."""
        self.guard.load_state(tensors, manifest)


def features_of(model: nn.Module, batch: Batch) -> Tensor:
    """The pass that is observed: the shared layers; heads are each task's own."""
    assert isinstance(model, Network)
    with in_parts(model, batch.parts):
        return model.features(batch.images)


def observing(guard: ness.NullSpace, batches: Iterator[Batch], context: Context) -> None:
    """Observes a few batches a call, with a pause after each: the statistics are the same, bit for bit."""
    with context.watch.phase("observing"):
        for first in batches:
            more = max(1, BATCHES_A_CALL // first.parts) - 1
            guard.observe([first, *islice(batches, more)], forward=features_of)
            pause()


def observed(model: Network, tasks: tuple[Samples, ...], training: Training, *, mixed: bool) -> Iterator[Batch]:
    """Tasks in batches: task by task in a fixed random order, or stored order across borders.

    Order and size matter only where BatchNorm uses the statistics of the batch; elsewhere batches are large.
    """
    size = LARGE_BATCH if training.norm == "stored" else training.batch
    at_once = batches_at_once(model, size)
    if mixed:
        every = together(tasks)
        yield from every.batches(every.stored_order(), size, at_once)
        return
    for samples in tasks:
        order = fixed_order(len(samples), samples.task, "train", samples.labels.device)
        yield from samples.batches(order, size, at_once)


def certificate_row(row: Any) -> dict[str, Any]:
    """What a record keeps of a layer's certificate."""
    within = {} if row.task_drift is None else {"task_drift": row.task_drift, "shrunk": row.shrunk}
    return within | {
        "name": row.name,
        "fan_in": row.fan_in,
        "rank": row.rank,
        "bound": row.bound,
        "rms_bound": row.rms_bound,
        "rms_drift": row.rms_drift,
        "relative_drift": row.relative_drift,
    }


def check(settings: Any) -> None:
    """Refuses an ε₁ or a drift that is no share, and a budget over tasks where the books begin anew with each."""
    if not 0 < settings.eps < 1:
        raise NessError(f"eps is {settings.eps}, expected a share between 0 and 1, e.g. 1e-3")
    if not 0 < settings.drift <= 1:
        raise NessError(
            f"drift is {settings.drift}, expected a fraction above 0, at most 1, e.g. {ness.Within().drift}"
        )
    if settings.rule == "within" and settings.statistics == "recomputed":
        raise NessError("rule within is a budget for all tasks together, so it needs statistics kept; found recomputed")


def kept_at_most(sizes: Sizes, own: Any) -> int:
    """Bytes that the guard keeps."""
    return guard_bytes(sizes, own.rule)


def guard_bytes(sizes: Sizes, rule: str) -> int:
    """Bytes of Grams (a triangle each) and cross moments in float64, of the model in float32, and of sums per layer.

    Rule within keeps three Grams: of all rows, a relative one, and the newest task's, which has no cross moment yet.
    Rule none never changes a shared weight, so there is no cross moment at all.
    """
    sets, crosses = {"within": (3, 2), "none": (1, 0)}.get(rule, (1, 1))
    return 4 * sizes.parameters + sum(
        8 * (sets * (width * (width + 1) // 2) + crosses * width * outputs) + 32 * sets
        for outputs, width in sizes.layers
    )


# epochs, patience and the like are the benchmarks'.
PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "fixed": {
        "digits": {"eps": 2e-3},
        "digits/sgd": {"lr": 0.2},
        "digits/sam": {"lr": 0.2},
        "digits/adamw": {"lr": 2e-3, "lr_min": 1e-4},
        "cifar100": {"eps": 1e-3, "weight_decay": 1e-4, "lr": 0.005},
        "cifar100/sam": {"lr": 0.05},
        "five-datasets": {"eps": 1e-3, "weight_decay": 5e-5, "lr": 0.05},
        "five-datasets/sam": {"lr": 0.1},
        "mini-imagenet": {"eps": 5e-4, "weight_decay": 1e-5, "lr": 0.01},
        "mini-imagenet/sam": {"lr": 0.1},
    },
    "reference": {
        "*": {"statistics": "recomputed", "borders": "mixed", "sam_tasks": "first"},
        "five-datasets": {"history": "first"},
    },
    "paper": {"*": {"rule": "frobenius", "statistics": "recomputed"}},
}

METHOD = MethodSpec(
    name="ness",
    title="Learns in the null space of earlier inputs",
    build=Ness,
    keeps="one Gram per layer (d × d); all old data with --statistics recomputed",
    kept_at_most=kept_at_most,
    paper="Pham et al., Learning in the Null Space",
    year=2026,
    settings=NessSettings,
    presets=PRESETS,
    only_with={
        "borders": ("statistics", ("recomputed",)),
        "eps": ("rule", ("nuclear", "frobenius", "soft")),
        "drift": ("rule", ("within",)),
    },
    check=check,
    needs_old_data=lambda own: bool(own.statistics == "recomputed"),
)
