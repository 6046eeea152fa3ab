"""CUBER: TRGP that lets a task move the weights of old tasks it agrees with, for knowledge to be transferred backwards.

Before task t, with the gradient G = ∇L_t of every layer at the weights it starts from, W₀, an old task j with the
subspace B_j and the gradient G_j that it ended with is of one of three regimes in that layer:

    1  forget-free   ‖G B_j B_jᵀ‖ < ε₁ ‖G‖                     its subspace is closed
    2  hurt          ‖G B_j B_jᵀ‖ ≥ ε₁ ‖G‖, ⟨G_j, G⟩ < ε₂ ‖G_j‖ ‖G‖   closed, and lent to the task under a scale Q
    3  backward      ‖G B_j B_jᵀ‖ ≥ ε₁ ‖G‖, ⟨G_j, G⟩ ≥ ε₂ ‖G_j‖ ‖G‖   open; the loss holds the weights back there

so that the task minimises L_t + λ Σ_j∈3 ‖(W - W₀) B_j‖² with gradients that lose what is in the subspaces of 1 and 2.
A direction that an open subspace shares with a closed one is closed.

There is no public code of it; this is our reading of how the paper describes it, and these are ours: the pull is
squared (a norm has no gradient where training begins); λ was chosen with `ness tune`; gradients are of `trust_images`
images, those of an old task at its best weights, under its own scales; a layer lends `reuse` subspaces at most, those
that hold most, as TRGP does; memory and BatchNorm are TRGP's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ness.errors import NessError
from ness.lab.methods._projection.basis import span
from ness.lab.methods._projection.project import ADAM, Removal, matrix_of, named, removal, sam_revision, under
from ness.lab.methods.base import Context, MethodSpec, Sizes, TaskData
from ness.lab.methods.gpm import COMMON, GpmSettings, check
from ness.lab.methods.trgp import Reusing
from ness.lab.runs.settings import check_ranges, setting
from ness.lab.training.loader import Batch


@dataclass(frozen=True)
class CuberSettings(GpmSettings):
    """What CUBER adds."""

    trust: float = setting(0.5, "ε₁: share of the first gradient's norm that an old task's subspace must hold")
    agreement: float = setting(0.0, "ε₂: least cosine between an old task's gradient and the new one's to open it")
    pull: float = setting(1.0, "λ: how strongly the loss holds weights back in subspaces that are open")
    reuse: int = setting(2, "old tasks of the second regime that a layer may reuse at most")
    trust_images: int = setting(125, "images of a task for its first and last gradient")


def cosine(one: Tensor, other: Tensor) -> Tensor:
    """⟨A, B⟩ / (‖A‖ ‖B‖); 0 where one of them is 0.

    >>> cosine(torch.tensor([[3.0, 4.0]]), torch.tensor([[3.0, 0.0]]))
    tensor(0.6000)
    """
    size = one.norm() * other.norm()
    return torch.where(size > 0, (one * other).sum() / size, torch.zeros_like(size))


def regimes(
    gradient: Tensor, bases: Sequence[Tensor], gradients: Sequence[Tensor], trust: float, agreement: float
) -> list[int]:
    """The regime of each old task, 1, 2 or 3, in one layer: by ‖G B‖ and by the cosine of G with each G_j.

    >>> G, B, old = torch.tensor([[3.0, 4.0]]), torch.tensor([[1.0], [0.0]]), torch.tensor([[1.0, 0.0]])
    >>> regimes(G, [B, B, B], [old, -old, old], 0.5, 0.0), regimes(G, [B], [old], 0.7, 0.0)
    ([3, 2, 3], [1])
    """
    found = []
    for basis, old in zip(bases, gradients, strict=True):
        sufficient = float((gradient @ basis).norm()) >= trust * float(gradient.norm())
        found.append(1 if not sufficient else 3 if float(cosine(old, gradient)) >= agreement else 2)
    return found


def union_without(bases: Sequence[Tensor], shared: Tensor, openly: Sequence[int]) -> Tensor:
    """An orthonormal basis of the subspaces that stay closed; `shared` spans all of them."""
    if not openly:
        return shared
    closed = [basis for task, basis in enumerate(bases) if task not in openly]
    return span(torch.cat([shared[:, :0], *closed], 1))


class Cuber(Reusing):
    """M and B_t as in TRGP, the gradient G_t each task ended with, and which old tasks are open to the present one."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.task_gradients: list[dict[str, Tensor]] = []  # G_t by layer
        self.regimes: dict[str, list[int]] = {}  # of the present task, by layer and old task
        self.start: dict[str, Tensor] = {}  # [W b] as the present task found it, where a subspace is open

    def before_task(self, lesson: TaskData) -> None:
        """Finds the regime of every old task in every layer, closes and opens subspaces, and makes the scales."""
        self.regimes = {}
        super().before_task(lesson)
        self._open()

    def _choose(self, lesson: TaskData) -> dict[str, list[int]]:
        own = self.own
        chosen: dict[str, list[int]] = {}
        for name, gradient in self.gradient(lesson, lambda batch: self.model(batch.images, batch.task)).items():
            bases = [held[name] for held in self.task_bases]
            old = [held[name] for held in self.task_gradients]
            self.regimes[name] = regimes(gradient, bases, old, own.trust, own.agreement)
            hurt = [task for task, regime in enumerate(self.regimes[name]) if regime == 2]
            hurt.sort(key=lambda task: -float((gradient @ bases[task]).norm()))
            if hurt:
                chosen[name] = hurt[: own.reuse]
        return chosen

    def open_tasks(self, name: str) -> list[int]:
        """The old tasks whose subspace of a layer is open to the present task."""
        return [task for task, regime in enumerate(self.regimes.get(name, ())) if regime == 3]

    def _open(self) -> None:
        """Π of the closed subspaces of every layer, and where the present task began in layers with an open one."""
        self.close()
        self.start = {}
        for name, layer in self.layers.items():
            if openly := self.open_tasks(name):
                self.removals[name] = self._closed(name, openly)
                self.start[name] = matrix_of(layer, layer.weight, layer.bias).detach().clone()

    def _closed(self, name: str, openly: Sequence[int]) -> Removal:
        return removal(union_without([held[name] for held in self.task_bases], self.bases[name], openly))

    def loss(self, batch: Batch) -> Tensor:
        """Cross-entropy, and the pull to where the task began in subspaces that are open."""
        loss = super().loss(batch)
        return loss + self._pulled() if self.start and self.own.pull > 0 else loss

    def penalty(self, lesson: TaskData) -> Tensor | None:
        """λ Σ ‖(W - W₀) B_j‖² over open subspaces, where there are any."""
        return self._pulled() if self.start and self.own.pull > 0 else None

    def _pulled(self) -> Tensor:
        parts = []
        for name, start in self.start.items():
            layer = self.layers[name]
            moved = matrix_of(layer, layer.weight, layer.bias) - start
            parts += [(moved @ self.task_bases[task][name]).square().sum() for task in self.open_tasks(name)]
        pulled: Tensor = self.own.pull * torch.stack(parts).sum()
        return pulled

    def after_task(self, lesson: TaskData) -> Mapping[str, Any]:
        """The gradient the task ends with is kept as well; the record says which old tasks were open in which layer."""
        if not self.is_last(lesson):
            found = self.gradient(lesson, self.logits)
            self.task_gradients.append({name: value.detach() for name, value in found.items()})
        openly = {name: tasks for name in self.layers if (tasks := self.open_tasks(name))}
        return {**super().after_task(lesson), "open": openly}

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """TRGP's, the gradients, and the regimes of the task at hand."""
        tensors, manifest = super().state()
        for task, gradients in enumerate(self.task_gradients):
            tensors |= named(f"gradient/{task}", gradients)
        return tensors, {**manifest, "regimes": self.regimes}

    def load_state(self, tensors: dict[str, Tensor], manifest: dict[str, Any]) -> None:
        """Puts them back; the model is as the task found it."""
        super().load_state(tensors, manifest)
        device = self.context.device
        self.task_gradients = [under(f"gradient/{task}", tensors, device) for task in range(manifest["finished"])]
        self.regimes = manifest["regimes"]
        self._open()


def check_cuber(settings: Any) -> None:
    """Refuses shares and cosines outside their range, a pull that pushes, and what GPM refuses."""
    check_ranges(
        settings,
        ("trust", 0 < settings.trust < 1, "a share between 0 and 1"),
        ("agreement", -1 <= settings.agreement <= 1, "a cosine, from -1 to 1"),
        ("pull", settings.pull >= 0, "0 or more"),
        ("reuse", settings.reuse >= 1, "at least 1"),
    )
    if settings.trust_images < 2:
        raise NessError(f"trust_images is {settings.trust_images}, expected at least 2: BatchNorm cannot normalise one")
    check(settings)


def kept_at_most(sizes: Sizes, own: Any) -> int:
    """Bytes of full bases of all and of each task but the last, of those tasks' gradients, and of Q for later ones."""
    square = 4 * sum(width * width for _, width in sizes.layers)
    gradient = 4 * sum(outputs * width for outputs, width in sizes.layers)
    reuse: int = own.reuse
    return square * (1 + (1 + reuse) * (sizes.tasks - 1)) + gradient * (sizes.tasks - 1)


# TRGP's schedules and thresholds, from whose authors it is; λ was chosen on digits, among 0, 0.01, 0.1, 1, 10 and 100.
# A step of rate lr leaves the pull of k open tasks stable while 2·λ·k·lr < 2: at 0.1, with up to 18 of them, λ = 0.1.
PRESETS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "fixed": {
        "*": COMMON["*"],
        "digits": {**COMMON["digits"], "trust_images": 200},
        "cifar100": COMMON["cifar100"],
        "five-datasets": {**COMMON["five-datasets"], "threshold": 0.965, "growth": 0.0, "trust_images": 500},
        "mini-imagenet": {
            **COMMON["mini-imagenet"],
            **{"threshold": 0.985, "growth": 0.0, "trust_images": 500, "pull": 0.1},
        },
    },
    "reference": {"five-datasets": {"epochs": 100}, "mini-imagenet": {"epochs": 200}},
    "paper": {},
}

METHOD = MethodSpec(
    name="cuber",
    title="TRGP that opens the subspaces of old tasks whose gradients agree (our reading)",
    build=Cuber,
    keeps="a basis per layer for all tasks and for each, a gradient and scales (k × k) per task",
    kept_at_most=kept_at_most,
    paper="Lin et al., Beyond Not-Forgetting: Continual Learning with Backward Knowledge Transfer",
    year=2022,
    settings=CuberSettings,
    presets=PRESETS,
    refuses={"adamw": ADAM},
    check=check_cuber,
    revision=sam_revision,
)
