"""GPM: after each task the directions that hold most of every layer's inputs are closed to later gradients.

The preset `reference` counts one direction fewer in the first task (8.3) and, on MiniImageNet, repeats two slips of the
code behind the NESS paper: ε passes 1, after which only heads train, and inputs are seen in a corner only.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from ness.errors import NessError
from ness.lab.gpu.coroutines import pause
from ness.lab.methods._crop import corner_rows
from ness.lab.methods._projection.basis import joined, new_directions
from ness.lab.methods._projection.project import (
    ADAM,
    Projecting,
    check_no_decay,
    empty_bases,
    named,
    removal,
    sam_revision,
    under,
)
from ness.lab.methods._projection.rows import check_count, check_images, draw, input_rows
from ness.lab.methods.base import Context, MethodSpec, Sizes, TaskData
from ness.lab.runs.settings import setting


@dataclass(frozen=True)
class GpmSettings:
    """What GPM and those that share its memory add to the training settings."""

    threshold: float = setting(0.97, "ε of the first task: share of a layer's input energy that is protected")
    growth: float = setting(0.003, "what ε grows by with each task")
    full: Literal["refuse", "fill"] = setting(
        "refuse", "an ε that reaches 1: an error, or the whole space is closed, as the reference does in silence"
    )
    first_rule: Literal["paper", "strict"] = setting(
        "paper", "first task: the fewest directions that reach ε, or one fewer, as the reference counts"
    )
    samples: int = setting(125, "images drawn of a task to see its layers' inputs")
    layer_images: tuple[int, ...] = setting((), "how many of them each layer uses, in order; none: all of them")


@dataclass(frozen=True)
class WholeSettings(GpmSettings):
    """Of GPM itself."""

    geometry: Literal["true", "32x32"] = setting(
        "true", "where inputs are looked at; the reference's MiniImageNet code sees a corner, as if of 32×32 images"
    )


def thresholds(threshold: float, growth: float, tasks: int, *, fill: bool = False) -> list[float]:
    """ε of each task but the last, of which nothing is kept; a schedule that reaches 1 is refused unless asked for."""
    found = [threshold + growth * task for task in range(tasks - 1)]
    reached = next((task for task, value in enumerate(found) if value >= 1), None)
    if reached is not None and not fill:
        raise NessError(
            f"growth is {growth:g}: the threshold {threshold:g} + {growth:g}·k reaches 1 at task "
            f"{reached + 1} of {tasks} and closes every layer for good; lower growth or threshold"
        )
    return found


class Gpm(Projecting):
    """The memory the lineage shares: M (d, r) a layer, orthonormal; G ← G - G M Mᵀ from the second task on."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.own: Any = context.own
        check_images(self.own.layer_images, self.own.samples, self.layers)
        fill = self.own.full == "fill"
        self.thresholds = thresholds(self.own.threshold, self.own.growth, context.tasks, fill=fill)
        self.bases = empty_bases(self.layers, context.device)

    def before_task(self, lesson: TaskData) -> None:
        """Makes sure, before any training, that the task has the images that will be drawn of it."""
        check_count("samples", self.own.samples, lesson.train)

    def after_task(self, lesson: TaskData) -> Mapping[str, Any]:
        """Adds what this task uses of every layer to the memory, a layer between two pauses; not after the last one."""
        if self.is_last(lesson):
            return {}
        rows = self.rows_of(lesson)
        threshold = self.thresholds[lesson.task]
        for name in self.layers:
            self.remember(name, rows[name], threshold)
            pause()
        self.close()
        return {"ranks": {name: f"{basis.shape[1]}/{basis.shape[0]}" for name, basis in self.bases.items()}}

    def rows_of(self, lesson: TaskData) -> dict[str, Tensor]:
        """Inputs of every layer on a few images of the task (n, d): Rᵀ."""
        images = draw(lesson.train, self.own.samples, self.context.random.method).images
        return input_rows(self.model, self.layers, images, self.own.layer_images)

    def remember(self, name: str, rows: Tensor, threshold: float) -> None:
        """M ← [M, U₁ … U_r]."""
        basis = self.bases[name].double()
        fresh, _ = new_directions(basis, rows, threshold, strict=self.own.first_rule == "strict")
        self.bases[name] = joined(basis, fresh).float()

    def close(self) -> None:
        """Π = M Mᵀ of every layer."""
        self.removals = {name: removal(basis) for name, basis in self.bases.items()}

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The bases."""
        return named("basis", self.bases), {}

    def load_state(self, tensors: dict[str, Tensor], manifest: dict[str, Any]) -> None:
        """Puts the bases back."""
        self.bases = under("basis", tensors, self.context.device)
        self.close()


class GpmItself(Gpm):
    """GPM, with the reference's way of looking at MiniImageNet as a choice."""

    by_rows = True

    def rows_of(self, lesson: TaskData) -> dict[str, Tensor]:
        """Inputs of every layer, or of the corner the reference sees."""
        if self.own.geometry == "true":
            return super().rows_of(lesson)
        images = draw(lesson.train, self.own.samples, self.context.random.method).images
        return corner_rows(self.model, self.layers, images, self.own.layer_images)


def check(settings: Any) -> None:
    """Refuses shares outside their range, no samples, and weight decay."""
    if not 0 < settings.threshold < 1:
        raise NessError(f"threshold is {settings.threshold:g}, expected a share of the energy between 0 and 1")
    if not 0 <= settings.growth < 1:
        raise NessError(f"growth is {settings.growth:g}, expected a number from 0 to below 1, e.g. 0.003")
    if settings.samples < 2:
        raise NessError(f"samples is {settings.samples}, expected at least 2: BatchNorm cannot normalise one image")
    check_no_decay(settings)


def kept_at_most(sizes: Sizes, own: Any) -> int:
    """Bytes of full bases, float32: Σ d²."""
    return 4 * sum(width * width for _, width in sizes.layers)


ALEXNET_IMAGES = (24, 100, 100, 125, 125)  # of which each layer sees the first so many
RESNET_IMAGES = (*[10] * 9, *[50] * 4, *[100] * 7)  # 17 convolutions 3×3 and 3 shortcuts, in module order

# epochs, patience and the like are the benchmarks'.
COMMON: dict[str, dict[str, Any]] = {
    "*": {"optimizer": "sgd", "weight_decay": 0.0},
    "digits": {"lr": 0.1, "samples": 200},
    "cifar100": {"lr": 0.01, "layer_images": ALEXNET_IMAGES},
    "five-datasets": {"lr": 0.1, "samples": 100, "layer_images": RESNET_IMAGES},
    "mini-imagenet": {"lr": 0.1, "samples": 100, "layer_images": RESNET_IMAGES},
}
PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "fixed": {
        "*": COMMON["*"],
        "digits": {**COMMON["digits"], "threshold": 0.97, "growth": 0.003},
        "cifar100": {**COMMON["cifar100"], "threshold": 0.97, "growth": 0.003},
        "five-datasets": {**COMMON["five-datasets"], "threshold": 0.965, "growth": 0.0},
        "mini-imagenet": {**COMMON["mini-imagenet"], "threshold": 0.985, "growth": 0.0003},
    },
    "reference": {
        "*": {"first_rule": "strict"},
        "five-datasets": {"epochs": 100},
        "mini-imagenet": {"threshold": 0.965, "growth": 0.003, "full": "fill", "geometry": "32x32"},
    },
}

METHOD = MethodSpec(
    name="gpm",
    title="Closes the directions that earlier inputs use most",
    build=GpmItself,
    keeps="an orthonormal basis per layer (d × r)",
    kept_at_most=kept_at_most,
    paper="Saha et al., Gradient Projection Memory",
    year=2021,
    settings=WholeSettings,
    presets=PRESETS,
    refuses={"adamw": ADAM},
    check=check,
    revision=sam_revision,
)
