"""CODE-CL: a conceptor per layer instead of a basis, and a task's own recombination where old and new inputs overlap.

The preset `reference` repeats a rate of 0.1 that nobody asked for, and other slips of the code: a random start of the
scales, no gradient through what linear layers subtract, plain shortcuts, and its schedule's book-keeping.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ness.lab.gpu.coroutines import pause
from ness.lab.methods._conceptors import Conceptor, conjunction, disjunction, of_rows, within
from ness.lab.methods._projection.project import ADAM, check_no_decay, named, removal, under
from ness.lab.methods._projection.rows import check_count, draw, input_rows
from ness.lab.methods._projection.scales import Scale, Scaling, identity_scale
from ness.lab.methods.base import Context, MethodSpec, Sizes, TaskData
from ness.lab.runs.settings import check_ranges, setting
from ness.layers import Layer, LinearLayer


@dataclass(frozen=True)
class CodeclSettings:
    """What CODE-CL adds, and the reference's slips as switches."""

    aperture: float = setting(6.0, "α: how readily a conceptor takes a direction")
    recall: float = setting(0.95, "share of an input's length a conceptor must keep; α is raised until it does")
    floor: float = setting(0.2, "directions of which less is held are let go")
    overlap: float = setting(0.5, "capacity of old AND new, as a share of old, from which a task gets its own scale")
    shared: int = setting(80, "K: directions of the overlap that a task recombines")
    samples: int = setting(125, "images drawn of a task to see its layers' inputs")
    scale_start: Literal["identity", "random"] = setting(
        "identity", "where a task's scale begins; the reference's random one changes the function at once"
    )
    subtracted: Literal["attached", "detached"] = setting(
        "attached", "gradient through the subtracted W U Uᵀ of linear layers; the reference has none"
    )
    shortcuts: Literal["scaled", "plain"] = setting(
        "scaled", "whether shortcuts get scales; in the reference they do not"
    )


class Codecl(Scaling):
    """C a layer; G ← G (I - C); W_eff = W + W U_t (S_t - I) U_tᵀ for the task at hand."""

    by_rows = True  # where a layer's inputs are scaled; one whose weights are has no pairs

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.own: CodeclSettings = context.own
        self.conceptors: dict[str, Conceptor] = {}  # float32, as they are kept

    def detached(self, layer: Layer) -> bool:
        """The reference's linear layers take no gradient through what they subtract."""
        own: CodeclSettings = self.context.own
        return own.subtracted == "detached" and isinstance(layer, LinearLayer)

    def before_task(self, lesson: TaskData) -> None:
        """Where the new task's inputs overlap what is held, U_t and S_t; a layer between two pauses."""
        check_count("samples", self.own.samples, lesson.train)
        if lesson.task == 0:
            return
        self.scales[lesson.task] = {}
        for name, rows in self._rows(lesson).items():
            if not self._wide_enough(name):
                continue
            held = wide(self.conceptors[name])
            new = of_rows(rows, self.own.aperture, self.own.recall).cut(self.own.floor)
            both = within(conjunction, held, new)
            if float(both.capacity) > self.own.overlap * float(held.capacity):
                self.scales[lesson.task][name] = [self._scale(both.vectors[:, : self.own.shared].float())]
            pause()

    def _wide_enough(self, name: str) -> bool:
        layer = self.layers[name]
        if "shortcut" in name and self.own.shortcuts == "plain":
            return False
        return layer.fan_in > (50 if isinstance(layer, LinearLayer) else self.own.shared)

    def _scale(self, basis: Tensor) -> Scale:
        if self.own.scale_start == "identity":
            return identity_scale(basis)
        size = basis.shape[1]
        drawn = torch.rand(size, size, generator=self.context.random.method, device=basis.device)
        return Scale(basis, nn.Parameter((2 * drawn - 1) / size**0.5))  # U(±1/√K), torch's start of a linear layer

    def _rows(self, lesson: TaskData) -> dict[str, Tensor]:
        """What layers see of a few of the task's images, passed as the task passes them: under its scales."""
        images = draw(lesson.train, self.own.samples, self.context.random.method).images
        return input_rows(self.model, self.layers, images, forward=self.effective(lesson.task))

    def after_task(self, lesson: TaskData) -> Mapping[str, Any]:
        """C ← C OR C_t, small directions let go; not after the last task."""
        notes = {"scaled": sorted(self.scales.get(lesson.task, {}))}
        if self.is_last(lesson):
            return notes
        for name, rows in self._rows(lesson).items():
            found = of_rows(rows, self.own.aperture, self.own.recall)
            if name in self.conceptors:
                found = within(disjunction, wide(self.conceptors[name]), found)
            cut = found.cut(self.own.floor)
            self.conceptors[name] = Conceptor(cut.vectors.float(), cut.values.float())
            pause()
        self._close()
        return {**notes, "capacity": {name: round(float(c.capacity), 4) for name, c in self.conceptors.items()}}

    def _close(self) -> None:
        """Π = C."""
        self.removals = {name: removal(c.vectors, c.values) for name, c in self.conceptors.items()}

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Conceptors, and every task's directions and matrices."""
        vectors = {name: c.vectors for name, c in self.conceptors.items()}
        values = {name: c.values for name, c in self.conceptors.items()}
        tensors = named("vectors", vectors) | named("values", values) | self.matrices()
        for task, layers in self.scales.items():
            tensors |= named(f"basis/{task}", {name: scales[0].basis for name, scales in layers.items()})
        return tensors, {"scaled": {str(task): list(layers) for task, layers in self.scales.items()}}

    def load_state(self, tensors: dict[str, Tensor], manifest: dict[str, Any]) -> None:
        """Puts them back."""
        device = self.context.device
        values = under("values", tensors, device)
        self.conceptors = {name: Conceptor(v, values[name]) for name, v in under("vectors", tensors, device).items()}
        self._close()
        for task, names in manifest["scaled"].items():
            self.scales[int(task)] = {}
            bases = under(f"basis/{task}", tensors, device)
            for name in names:
                self.put_back(int(task), name, [bases[name]], tensors)


def wide(conceptor: Conceptor) -> Conceptor:
    """The same in float64, for its algebra."""
    return Conceptor(conceptor.vectors.double(), conceptor.values.double())


def check(settings: Any) -> None:
    """Refuses numbers outside their range, and weight decay."""
    check_ranges(
        settings,
        ("aperture", settings.aperture > 0, "above 0"),
        ("recall", 0 < settings.recall < 1, "a share between 0 and 1"),
        ("floor", 0 <= settings.floor < 1, "from 0 to below 1"),
        ("overlap", 0 <= settings.overlap <= 1, "from 0 to 1"),
        ("shared", settings.shared >= 1, "at least 1"),
        ("samples", settings.samples >= 2, "at least 2: BatchNorm cannot normalise one image"),
    )
    check_no_decay(settings)


def kept_at_most(sizes: Sizes, own: Any) -> int:
    """Bytes of full conceptors, and of U and S for each task but the first in layers wide enough."""
    shared: int = own.shared
    conceptors = sum(width * (width + 1) for _, width in sizes.layers)
    scales = sum((width + shared) * shared for _, width in sizes.layers if width > shared)
    return 4 * (conceptors + (sizes.tasks - 1) * scales)


# `fixed` has the rates its scripts ask for, `reference` what its code then does: it never passes lr on, so every
# benchmark runs at 0.1; halves the rate while it divides its own book of it by 3 (5-datasets: five decays either way);
# and waits one epoch longer. Its validation images of CIFAR-100 are always seed 0's, those of MiniImageNet 125 a task.
PRESETS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "fixed": {
        "*": {"optimizer": "sgd", "weight_decay": 0.0},
        "digits": {"lr": 0.1, "samples": 200, "shared": 20, "overlap": 0.1},
        "cifar100": {"lr": 0.01, "aperture": 6.0, "recall": 0.95},
        "five-datasets": {"lr": 0.1, "aperture": 4.0, "recall": 0.01},
        "mini-imagenet": {"lr": 0.1, "aperture": 8.0, "recall": 0.95},
    },
    "reference": {
        "*": {"scale_start": "random", "subtracted": "detached", "shortcuts": "plain"},
        "cifar100": {"lr": 0.1, "patience": 7, "split_seed": 0},
        "five-datasets": {"patience": 6, "lr_factor": 2.0, "lr_min": 0.004, "epochs": 100},
        "mini-imagenet": {"patience": 7, "lr_factor": 2.0, "lr_min": 1e-5, "split": "2375/125"},
    },
}

METHOD = MethodSpec(
    name="codecl",
    title="Conceptors instead of bases, and a task's own mix where inputs overlap",
    build=Codecl,
    keeps="a conceptor per layer (d × r), and each task's directions and scales (d × K, K × K)",
    kept_at_most=kept_at_most,
    paper="Apolinario et al., CODE-CL",
    year=2025,
    settings=CodeclSettings,
    presets=PRESETS,
    refuses={"adamw": ADAM},
    check=check,
    revision=lambda own: 2,  # 1: rows of the shared weights alone, recall a mean of ratios, AND with all that is new
)
