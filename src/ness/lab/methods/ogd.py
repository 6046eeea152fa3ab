"""OGD: gradients stay orthogonal to the gradients of old tasks' own logits, over all shared weights together.

On AlexNet such a gradient is 26 MB, and a step would read all of them twice. Those of linear layers are kept as factors
instead, and none is made orthonormal: S = R V follows from the inner products K = V Vᵀ alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ness.errors import NessError
from ness.lab.methods._logits import Gradients, logit_gradients, project
from ness.lab.methods._projection.factors import Factors
from ness.lab.methods._projection.project import ADAM, Projecting, check_no_decay, named, sam_revision, under
from ness.lab.methods._projection.rows import check_count, draw
from ness.lab.methods.base import Context, MethodSpec, Sizes, TaskData
from ness.lab.runs.settings import setting
from ness.lab.training.loader import Batch

TINY = 1e-3  # a gradient of which less than this share is new adds nothing but rounding


@dataclass(frozen=True)
class OgdSettings:
    """What OGD adds."""

    samples: int = setting(100, "samples of each task whose logit's gradient is kept")


def extended(mixing: Tensor, gram: Tensor) -> Tensor:
    """R (r', m) of S = R V, orthonormal, from R (r, m') of the first m' vectors and K = V Vᵀ (m, m) of all, float64.

    Gram-Schmidt in order, twice each; a vector of which less than TINY is new gets no row.

    >>> vectors = torch.tensor([[2.0, 0.0], [4.0, 0.0], [1.0, 5.0]], dtype=torch.float64)
    >>> extended(torch.zeros(0, 0, dtype=torch.float64), vectors @ vectors.mT)
    tensor([[ 0.5000,  0.0000,  0.0000],
            [-0.1000,  0.0000,  0.2000]], dtype=torch.float64)
    """
    count, known = mixing.shape
    total = len(gram)
    grown = gram.new_zeros(count + total - known, total)
    grown[:count, :known] = mixing
    for number in range(known, total):
        row = gram.new_zeros(total)
        row[number] = 1
        for _ in range(2):
            row -= (grown[:count] @ (gram @ row)) @ grown[:count]
        left = float(row @ gram @ row)
        if left > TINY**2 * float(gram[number, number]):
            grown[count] = row / left**0.5
            count += 1
    return grown[:count].clone()


def bordered(gram: Tensor, columns: Tensor) -> Tensor:
    """A symmetric matrix (m, m) from its first rows and columns (m', m') and its last columns (m, n)."""
    known = len(gram)
    whole = columns.new_empty(len(columns), len(columns))
    whole[:known, :known] = gram
    whole[:, known:] = columns
    whole[known:, :known] = columns[:known].mT
    return whole


class Ogd(Projecting):
    """V (m, p) over all shared weights and R (r, m); g ← g - Sᵀ S g with S = R V."""

    by_rows = True

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.own: OgdSettings = context.own
        self.kept: Gradients | None = None
        self.gram = torch.zeros(0, 0, dtype=torch.float64)  # K = V Vᵀ (m, m), on the host
        self.mixing = torch.zeros(0, 0, dtype=torch.float64, device=context.device)

    def before_task(self, lesson: TaskData) -> None:
        """Makes sure, before any training, that the task has the samples that will be drawn of it."""
        check_count("samples", self.own.samples, lesson.train)

    @torch.no_grad()
    def after_backward(self, batch: Batch) -> None:
        """g ← g - Vᵀ Rᵀ R V g, all layers as one vector."""
        if self.kept is not None:
            project(self.layers, self.kept, self.mixing, self.pairs)
        self.pairs.clear()

    def after_task(self, lesson: TaskData) -> Mapping[str, Any]:
        """Keeps the gradients of a few samples' own logits; not after the last task."""
        if self.is_last(lesson):
            return {}
        batch = draw(lesson.train, self.own.samples, self.context.random.method)
        names = None if self.kept is None else tuple(self.kept.factored)
        found = logit_gradients(self.model, self.layers, batch, names)
        self.kept = found if self.kept is None else self.kept.followed_by(found)
        self.gram = bordered(self.gram, self.kept.products(len(batch.labels)).cpu())
        self.mixing = extended(self.mixing.cpu(), self.gram).to(self.context.device)
        return {"directions": len(self.mixing)}

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The gradients, their inner products, and how they make an orthonormal basis."""
        if self.kept is None:
            return {}, {}
        inputs = {name: each.inputs for name, each in self.kept.factored.items()}
        outputs = {name: each.outputs for name, each in self.kept.factored.items()}
        whole = {"dense": self.kept.dense, "gram": self.gram, "mixing": self.mixing}
        return {**whole, **named("inputs", inputs), **named("outputs", outputs)}, {}

    def load_state(self, tensors: dict[str, Tensor], manifest: dict[str, Any]) -> None:
        """Puts them back."""
        if not tensors:  # nothing was kept yet
            return
        device = self.context.device
        inputs, outputs = under("inputs", tensors, device), under("outputs", tensors, device)
        factored = {name: Factors(inputs[name], outputs[name]) for name in self.layers if name in inputs}
        self.kept = Gradients(tensors["dense"].to(device), factored)
        self.gram, self.mixing = tensors["gram"].cpu(), tensors["mixing"].to(device)


def check(settings: Any) -> None:
    """Refuses no samples, and weight decay."""
    if settings.samples < 2:
        raise NessError(f"samples is {settings.samples}, expected at least 2: BatchNorm cannot normalise one image")
    check_no_decay(settings)


def kept_at_most(sizes: Sizes, own: Any) -> int:
    """Bytes of the gradients of every task but the last, float32, and of K and R, float64.

    Of a linear layer, which sees one row an image, what is smaller: dense gradients, or factors if samples meet.
    """
    n: int = own.samples
    numbers = 0
    for (outputs, width), linear in zip(sizes.layers, sizes.linear, strict=True):
        dense = n * outputs * width
        numbers += min(dense, n * width + n * n * outputs) if linear else dense
    return 4 * (sizes.tasks - 1) * numbers + 2 * 8 * (n * (sizes.tasks - 1)) ** 2


# no published settings for these benchmarks: GPM's rates. On AlexNet BatchNorm makes samples meet behind both wide
# layers, so the factors of a task grow with the square of its samples: fewer of them there.
PRESETS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "fixed": {
        "*": {"optimizer": "sgd", "weight_decay": 0.0},
        "digits": {"lr": 0.1, "samples": 60, "epochs": 6},
        "cifar100": {"lr": 0.01, "samples": 25},
        "five-datasets": {"lr": 0.1},
        "mini-imagenet": {"lr": 0.1},
    },
}

METHOD = MethodSpec(
    name="ogd",
    title="Gradients orthogonal to those of old tasks' logits",
    build=Ogd,
    keeps="the logit's gradient of a few samples per task: linear layers' as factors, others' whole",
    kept_at_most=kept_at_most,
    paper="Farajtabar et al., Orthogonal Gradient Descent",
    year=2020,
    settings=OgdSettings,
    presets=PRESETS,
    refuses={"adamw": ADAM},
    check=check,
    revision=sam_revision,
)
