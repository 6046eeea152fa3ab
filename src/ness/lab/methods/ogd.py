"""OGD: gradients stay orthogonal to the gradients of old tasks' own logits, over all shared weights together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ness.errors import NessError
from ness.lab.loader import Batch
from ness.lab.methods._project import ADAM, Projecting, Removal, check_no_decay, layer_parameters
from ness.lab.methods._rows import check_count, draw
from ness.lab.methods.base import Context, Lesson, MethodSpec, Sizes
from ness.lab.nets.base import Network
from ness.lab.settings import setting

TINY = 1e-3  # a gradient of which less than this share is new adds nothing but rounding


@dataclass(frozen=True)
class OgdSettings:
    """What OGD adds."""

    samples: int = setting(100, "samples of each task whose logit's gradient is kept")


def logit_gradients(model: Network, parameters: Sequence[nn.Parameter], batch: Batch) -> Tensor:
    """∇_w f_y(x) of the true class's logit for every sample, (n, p), from one forward pass (OGD-GTL).

    With batch statistics in BatchNorm a sample's logit depends on the batch it is in, and so does its gradient.
    """
    logits: Tensor = model(batch.images, batch.task)
    chosen = logits.gather(1, batch.labels.unsqueeze(1)).squeeze(1)
    rows = []
    for logit in chosen:
        found = torch.autograd.grad(logit, parameters, retain_graph=True)
        rows.append(torch.cat([each.flatten() for each in found]))
    return torch.stack(rows)


def extended(basis: Tensor, vectors: Tensor) -> Tensor:
    """Orthonormal rows S (m, p) and, after them, what is new in each vector (n, p): Gram-Schmidt, twice each.

    >>> extended(torch.eye(3)[:1], torch.tensor([[2.0, 1.0, 0.0], [4.0, 2.0, 0.0]]))
    tensor([[1., 0., 0.],
            [0., 1., 0.]])
    """
    grown = torch.cat([basis, torch.zeros_like(vectors)])
    count = len(basis)
    for vector in vectors:
        length = float(vector.norm())
        for _ in range(2):
            vector = vector - (grown[:count] @ vector) @ grown[:count]
        if length > 0 and float(vector.norm()) > TINY * length:
            grown[count] = vector / vector.norm()
            count += 1
    return grown[:count].clone()


class Ogd(Projecting):
    """S (m, p) over all shared weights; g ← g - Sᵀ S g."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.own: OgdSettings = context.own
        self.shared = layer_parameters(self.layers)
        self.basis = torch.zeros(0, sum(parameter.numel() for parameter in self.shared), device=context.device)

    def before_task(self, lesson: Lesson) -> None:
        """Makes sure, before any training, that the task has the samples that will be drawn of it."""
        check_count("samples", self.own.samples, lesson.train)

    @torch.no_grad()
    def after_backward(self, batch: Batch) -> None:
        """g ← g - Sᵀ S g, all layers as one vector."""
        if len(self.basis) == 0:
            return
        gradients = [parameter.grad for parameter in self.shared if parameter.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        projected = Removal((self.basis.mT, self.basis))(flat.unsqueeze(0)).squeeze(0)
        parts = torch.split(projected, [gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))

    def after_task(self, lesson: Lesson) -> Mapping[str, Any]:
        """Keeps the directions of a few samples' own logits; not after the last task."""
        if self.is_last(lesson):
            return {}
        batch = draw(lesson.train, self.own.samples, self.context.random.method)
        self.basis = extended(self.basis, logit_gradients(self.model, self.shared, batch))
        return {"directions": len(self.basis)}

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The directions."""
        return {"basis": self.basis}, {}

    def load_state(self, tensors: dict[str, Tensor], manifest: dict[str, Any]) -> None:
        """Puts them back."""
        self.basis = tensors["basis"].to(self.context.device)


def check(settings: Any) -> None:
    """Refuses no samples, and weight decay."""
    if settings.samples < 2:
        raise NessError(f"samples is {settings.samples}, expected at least 2: BatchNorm cannot normalise one image")
    check_no_decay(settings)


def kept_at_most(sizes: Sizes, own: Any) -> int:
    """Bytes of the directions of every task but the last, float32."""
    samples: int = own.samples
    return 4 * samples * (sizes.tasks - 1) * sum(outputs * width for outputs, width in sizes.layers)


# no published settings for these benchmarks: GPM's rates. On AlexNet a direction is 26 MB, so
# fewer samples there.
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
    keeps="a direction over all shared weights for each of a few samples a task",
    kept_at_most=kept_at_most,
    paper="Farajtabar et al., Orthogonal Gradient Descent",
    year=2020,
    settings=OgdSettings,
    presets=PRESETS,
    refuses={"adamw": ADAM},
    check=check,
)
