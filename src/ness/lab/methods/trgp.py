"""TRGP: GPM, and old tasks whose inputs a new task shares lend it their subspace, rescaled by a matrix of its own.

The preset `reference` repeats slips of the code: a task's strongest new direction is left out of the memory,
all scales hang on the first layer's, AlexNet's BatchNorm stays free, ResNet's third task may reuse the second alone.
Its mean over several shuffled test passes is not repeated: every method is evaluated alike here.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ness.errors import NessError
from ness.lab.methods._projection.basis import directions, joined, residual
from ness.lab.methods._projection.project import ADAM, layer_parameters, named, sam_revision, under
from ness.lab.methods._projection.rows import check_count, draw
from ness.lab.methods._projection.scales import Scaling, identity_scale
from ness.lab.methods.base import Context, MethodSpec, Sizes, TaskData
from ness.lab.methods.gpm import COMMON, Gpm, GpmSettings, check
from ness.lab.runs.settings import setting
from ness.lab.training.loader import Batch
from ness.lab.training.losses import cross_entropy


@dataclass(frozen=True)
class TrgpSettings(GpmSettings):
    """What TRGP adds, and the reference's slips as switches."""

    trust: float = setting(0.5, "share of the first gradient's norm that an old task's subspace must hold")
    reuse: int = setting(2, "old tasks a layer may reuse at most")
    trust_images: int = setting(125, "images of the new task for its first gradient")
    strongest: Literal["kept", "dropped"] = setting(
        "kept", "whether a task's strongest new direction enters the memory; the reference drops it by > instead of >="
    )
    gate: Literal["none", "first"] = setting(
        "none", "reference: no scale without one on the first layer, nor in a block without one on its first"
    )
    third_task: Literal["all", "second"] = setting(
        "all", "old tasks the third task may reuse; the reference's ResNet code: the second alone"
    )
    norms: Literal["frozen", "free"] = setting(
        "frozen", "BatchNorm's γ and β after the first task; the reference's AlexNet code leaves them free"
    )


def energies(basis: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Vectors [M, U] (d, r + s) and what of the rows' energy each holds: mᵢᵀR Rᵀmᵢ, and σᵢ² of the residual."""
    fresh, sigma = directions(residual(rows, basis))
    fresh = fresh[:, : rows.shape[1] - basis.shape[1]]
    held = (rows @ basis).square().sum(0)
    return torch.cat([basis, fresh], 1), torch.cat([held, sigma[: fresh.shape[1]].square()])


def covering(energy: Tensor, total: float, threshold: float) -> list[int]:
    """The fewest vectors, strongest first, that hold the share of the total.

    >>> covering(torch.tensor([1.0, 9.0, 4.0]), 14.0, 0.97)
    [1, 2, 0]
    """
    order = energy.argsort(descending=True, stable=True)
    count = int((energy[order].cumsum(0) < threshold * total).sum()) + 1
    found: list[int] = order[:count].tolist()
    return found


def admitted(chosen: Sequence[int], old: int, *, strongest: bool) -> list[int]:
    """Which of the chosen vectors are new and enter the memory; without the strongest new one if so asked."""
    first = old if strongest else old + 1
    return [index for index in chosen if index >= first]


def trusted(gradient: Tensor, bases: Mapping[int, Tensor], trust: float, most: int) -> list[int]:
    """Old tasks in regime 2, ‖G Bⱼ Bⱼᵀ‖_F > trust·‖G‖_F, the strongest first, `most` at most."""
    shares = {task: float((gradient @ basis).norm()) for task, basis in bases.items()}
    ranked = sorted(shares, key=lambda task: -shares[task])[:most]
    return [task for task in ranked if shares[task] > trust * float(gradient.norm())]


def gated(chosen: Mapping[str, list[int]], names: Sequence[str]) -> dict[str, list[int]]:
    """The reference's gate: nothing without a scale on the first layer, or on the first of a block; no shortcut."""
    if not chosen.get(names[0]):
        return {}
    first: dict[str, str] = {}
    for name in names:
        first.setdefault(name.rpartition(".")[0], name)
    return {
        name: tasks
        for name, tasks in chosen.items()
        if chosen.get(first[name.rpartition(".")[0]]) and "shortcut" not in name
    }


class Reusing(Scaling, Gpm):
    """M of all tasks, B_t of each task, Q of each task in the layers where it reuses subspaces of old ones."""

    strongest = True  # whether a task's strongest new direction enters the memory

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.task_bases: list[dict[str, Tensor]] = []  # B_t by layer
        self.lenders: dict[int, dict[str, list[int]]] = {}  # task -> layer -> old tasks it reuses

    def before_task(self, lesson: TaskData) -> None:
        """Finds the old tasks to reuse in every layer and gives the task its matrices there, Q = I."""
        super().before_task(lesson)
        check_count("trust_images", self.own.trust_images, lesson.train)
        if lesson.task > 0:
            self._lend(lesson.task, self._choose(lesson))

    def _choose(self, lesson: TaskData) -> dict[str, list[int]]:
        """The old tasks that each layer reuses, those without any left out."""
        raise NotImplementedError

    def gradient(self, lesson: TaskData, logits: Callable[[Batch], Tensor]) -> dict[str, Tensor]:
        """∇L of a few images of the task with respect to the shared weights, by layer (o, d)."""
        batch = draw(lesson.train, self.own.trust_images, self.context.random.method)
        loss = cross_entropy(logits(batch), batch)
        parameters = layer_parameters(self.layers)
        found = dict(zip(map(id, parameters), torch.autograd.grad(loss, parameters), strict=True))
        return {
            name: layer.joint(found[id(layer.weight)], None if layer.bias is None else found[id(layer.bias)])[0]
            for name, layer in self.layers.items()
        }

    def _lend(self, task: int, chosen: dict[str, list[int]]) -> None:
        self.lenders[task] = chosen
        self.scales[task] = {
            name: [identity_scale(self.task_bases[old][name]) for old in tasks] for name, tasks in chosen.items()
        }

    def after_task(self, lesson: TaskData) -> Mapping[str, Any]:
        """The memory grows, seen by the shared weights alone; the record says whom each layer trusted."""
        if not self.is_last(lesson):
            self.task_bases.append({})
        return {**super().after_task(lesson), "trusted": self.lenders.get(lesson.task, {})}

    def remember(self, name: str, rows: Tensor, threshold: float) -> None:
        """B_t: the fewest of [M, U] that cover the task; M grows by those of U among them."""
        own = self.task_bases[-1]
        basis = self.bases[name].double()
        if basis.shape[1] == 0:
            super().remember(name, rows, threshold)
            own[name] = self.bases[name]
            return
        vectors, energy = energies(basis, rows)
        chosen = covering(energy, float(rows.square().sum()), threshold)
        fresh = admitted(chosen, basis.shape[1], strongest=self.strongest)
        own[name] = vectors[:, chosen].float()
        self.bases[name] = joined(basis, vectors[:, fresh]).float()

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Bases of all and of each task, matrices, and whom each task trusts."""
        tensors, _ = super().state()
        for task, bases in enumerate(self.task_bases):
            tensors |= named(f"task/{task}", bases)
        lenders = {str(task): chosen for task, chosen in self.lenders.items()}
        return tensors | self.matrices(), {"finished": len(self.task_bases), "lenders": lenders}

    def load_state(self, tensors: dict[str, Tensor], manifest: dict[str, Any]) -> None:
        """Puts them back."""
        super().load_state(tensors, manifest)
        self.task_bases = [under(f"task/{task}", tensors, self.context.device) for task in range(manifest["finished"])]
        self.lenders = {int(task): chosen for task, chosen in manifest["lenders"].items()}
        for task, chosen in self.lenders.items():
            self.scales[task] = {}
            for name, tasks in chosen.items():
                self.put_back(task, name, [self.task_bases[old][name] for old in tasks], tensors)


class Trgp(Reusing):
    """Reuses where an old task's subspace holds much of the first gradient."""

    by_rows = True  # where a layer's inputs are scaled; one whose weights are has no pairs

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.free_norms = self.own.norms == "free"
        self.strongest = self.own.strongest == "kept"

    def _choose(self, lesson: TaskData) -> dict[str, list[int]]:
        gradients = self.gradient(lesson, lambda batch: self.model(batch.images, batch.task))
        tasks = range(lesson.task)
        if lesson.task == 2 and self.own.third_task == "second":
            tasks = range(1, 2)
        chosen: dict[str, list[int]] = {}
        for name, gradient in gradients.items():
            bases = {task: self.task_bases[task][name] for task in tasks}
            if found := trusted(gradient, bases, self.own.trust, self.own.reuse):
                chosen[name] = found
        return gated(chosen, list(self.layers)) if self.own.gate == "first" else chosen


def check_trgp(settings: Any) -> None:
    """Refuses a trust that is no share, and what GPM refuses."""
    if not 0 < settings.trust < 1:
        raise NessError(f"trust is {settings.trust:g}, expected a share between 0 and 1")
    for name in ("reuse", "trust_images"):
        if getattr(settings, name) < (1 if name == "reuse" else 2):
            raise NessError(f"{name} is {getattr(settings, name)}, expected at least {1 if name == 'reuse' else 2}")
    check(settings)


def kept_at_most(sizes: Sizes, own: Any) -> int:
    """Bytes of full bases of all and of each task but the last, and of Q for each task but the first."""
    square = 4 * sum(width * width for _, width in sizes.layers)
    reuse: int = own.reuse
    return square * (1 + (1 + reuse) * (sizes.tasks - 1))


PRESETS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "fixed": {
        "*": COMMON["*"],
        "digits": {**COMMON["digits"], "trust_images": 200},
        "cifar100": COMMON["cifar100"],
        "five-datasets": {**COMMON["five-datasets"], "threshold": 0.965, "growth": 0.0, "trust_images": 500},
        "mini-imagenet": {**COMMON["mini-imagenet"], "threshold": 0.985, "growth": 0.0, "trust_images": 500},
    },
    "reference": {
        "*": {"first_rule": "strict", "strongest": "dropped", "gate": "first"},
        "cifar100": {"norms": "free"},
        "five-datasets": {"third_task": "second"},
        "mini-imagenet": {"third_task": "second", "epochs": 200},
    },
}

METHOD = MethodSpec(
    name="trgp",
    title="GPM that lets a task rescale the subspaces of old tasks it trusts",
    build=Trgp,
    keeps="a basis per layer for all tasks and for each, and each task's scales (k × k)",
    kept_at_most=kept_at_most,
    paper="Lin et al., Trust Region Gradient Projection",
    year=2022,
    settings=TrgpSettings,
    presets=PRESETS,
    refuses={"adamw": ADAM},
    check=check_trgp,
    revision=sam_revision,
)
