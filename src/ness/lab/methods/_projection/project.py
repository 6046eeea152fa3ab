"""Gradient projection, in one place: what is taken out of a layer's gradient, and the step all such methods share."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ness.errors import NessError
from ness.lab.methods._pairs import Pairs
from ness.lab.methods._projection.rows import Layers, backbone_layers
from ness.lab.methods.base import Context, Method, TaskData, backbone, current_heads
from ness.lab.networks.norms import hold_statistics
from ness.lab.training.loader import Batch
from ness.layers import Layer


@dataclass(frozen=True)
class Removal:
    """What is taken out of a gradient: G ← G - G Π, with Π (d, d) as a product of its factors."""

    factors: tuple[Tensor, ...]

    def __call__(self, gradient: Tensor) -> Tensor:
        """The gradient (o, d) without its part in Π."""
        *factors, last = self.factors
        part = gradient
        for factor in factors:
            part = part @ factor
        return torch.addmm(gradient, part, last, alpha=-1)

    @property
    def nothing(self) -> bool:
        """Whether Π has rank 0, by the shapes of its factors."""
        return any(factor.numel() == 0 for factor in self.factors)


def removal(basis: Tensor, weights: Tensor | None = None) -> Removal:
    """Π = M diag(λ) Mᵀ of a basis (d, r), λ = 1 by default; as one matrix where that is fewer multiplications."""
    scaled = basis if weights is None else basis * weights
    if 2 * basis.shape[1] > basis.shape[0]:
        return Removal(((scaled @ basis.mT).contiguous(),))
    return Removal((scaled.contiguous(), basis.mT.contiguous()))


def matrix_of(layer: Layer, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[W b] (o, width) of what has the shapes of a layer's weight and bias; not a copy where there is no bias."""
    whole = bias is None and layer.weight_part is None
    return layer.to_matrix(weight)[0] if whole else layer.joint(weight, bias)[0]


def gradient_of(layer: Layer) -> Tensor:
    """The gradient of [W b] of a layer as (o, width); a layer of which only one of the two trains is refused."""
    if layer.weight.grad is None or (layer.bias is not None and layer.bias.grad is None):
        missing = "weight" if layer.weight.grad is None else "bias"
        raise NessError(
            f"layer {layer.name!r}: its {missing} has no gradient, but directions are closed to weight and bias "
            "together; let both train, or build the layer without a bias"
        )
    return matrix_of(layer, layer.weight.grad, None if layer.bias is None else layer.bias.grad)


def split(layer: Layer, matrix: Tensor) -> tuple[Tensor, Tensor | None]:
    """A matrix (o, width) as the layer's weight and bias."""
    weight = layer.to_weight(matrix[:, : layer.fan_in].unsqueeze(0))
    return weight, None if layer.bias is None else matrix[:, -1]


def put_gradient(layer: Layer, matrix: Tensor) -> None:
    """Makes a matrix (o, width) the gradient of [W b]."""
    weight, bias = split(layer, matrix)
    assert layer.weight.grad is not None
    if weight.stride() == layer.weight.stride():
        layer.weight.grad = weight
    else:  # on a GPU convolutions are laid out channels last, and an optimizer wants gradients to be so too
        layer.weight.grad.copy_(weight)
    if bias is not None and layer.bias is not None and layer.bias.grad is not None:
        layer.bias.grad.copy_(bias)


@torch.no_grad()
def project_gradients(layers: Layers, removals: Mapping[str, Removal], pairs: Pairs | None = None) -> None:
    """Takes its removal out of the gradient of every layer that has both; of its rows where they are few and known."""
    for name, remove in removals.items():
        layer = layers[name]
        if remove.nothing or (layer.weight.grad is None and (layer.bias is None or layer.bias.grad is None)):
            continue
        known = None if pairs is None else pairs.of(name)
        matrix = remove(gradient_of(layer)) if known is None else known[1].mT @ remove(known[0])
        put_gradient(layer, matrix)


class Projecting(Method):
    """Training whose gradients lose what earlier tasks use of each layer.

    The first task is ordinary training. From the second on BatchNorm stands still (affine parameters and stored
    statistics), the task's head is free, and every other weight moves only where `removals` leave it room. A method
    fills `removals` after each task and when it is loaded.
    """

    free_norms = False  # whether BatchNorm's affine parameters go on training after the first task
    # Whether a linear layer multiplies by the very weights that train, and nothing but backward passes through the
    # network fills .grad before it is projected: then .grad is Σ gᵀ x, and its rows may be projected in its place. A
    # class says it of itself alone. What a subclass overrides may add to .grad, clip it, or put another in its place,
    # so its gradients are projected as they are, unless it says so too.
    by_rows = False

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.layers = backbone_layers(context.model)
        self.removals: dict[str, Removal] = {}
        self.pairs = Pairs(self.layers)

    def parameters(self, lesson: TaskData) -> list[nn.Parameter]:
        """Everything in the first task; afterwards the layers and the head, without BatchNorm unless it is free."""
        if lesson.task == 0 or self.free_norms:
            return super().parameters(lesson)
        return [*layer_parameters(self.layers), *current_heads(self.model, lesson)]

    def perturbed_beside(self, trained: Sequence[nn.Parameter]) -> Sequence[nn.Parameter]:
        """What of the backbone stands still: BatchNorm's γ and β have a gradient, so SAM's ascent moves them too."""
        moving = {id(parameter) for parameter in trained}
        return [parameter for parameter in backbone(self.model) if id(parameter) not in moving]

    def train_mode(self, lesson: TaskData) -> None:
        """Training mode; stored BatchNorm statistics stand still with their affine parameters."""
        self.model.train()
        if lesson.task > 0 and not self.free_norms:
            hold_statistics(self.model)

    def watching(self) -> AbstractContextManager[None]:
        """Keeps the rows of linear layers, to take out of them what would cost more to take out of gradients."""
        kind = type(self)
        replaced = any(callable(getattr(kind, name, None)) for name in vars(self))  # a hook, of this object alone
        return self.pairs.watching() if vars(kind).get("by_rows", False) and not replaced else nullcontext()

    def after_backward(self, batch: Batch) -> None:
        """G ← G - G Π."""
        project_gradients(self.layers, self.removals, self.pairs)
        self.pairs.clear()

    def is_last(self, lesson: TaskData) -> bool:
        """Whether nothing comes after this task, so that nothing needs to be kept of it."""
        return lesson.task == self.context.tasks - 1


def layer_parameters(layers: Layers) -> list[nn.Parameter]:
    """Weight and bias of every layer."""
    return [p for layer in layers.values() for p in (layer.weight, layer.bias) if p is not None]


def empty_bases(layers: Layers, device: torch.device) -> dict[str, Tensor]:
    """No direction in any layer: (d, 0)."""
    return {name: torch.zeros(layer.width, 0, device=device) for name, layer in layers.items()}


def named(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under 'prefix/name', for a method's state."""
    return {f"{prefix}/{name}": value for name, value in tensors.items()}


def under(prefix: str, tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """What `named` put under a prefix, on the device."""
    start = f"{prefix}/"
    return {name.removeprefix(start): value.to(device) for name, value in tensors.items() if name.startswith(start)}


ADAM = (
    "it rescales every entry of the projected gradient by itself, so steps leave the allowed directions (GPM on "
    "digits: 13 % of their length, 0.00003 % with sgd) and the promise to old tasks is void; use sgd, sgdm or sam"
)


def sam_revision(settings: Any) -> int:
    """2 where SAM works on frozen norms: until then its ascent left their γ and β out from the second task on."""
    frozen = getattr(settings, "norms", "frozen") == "frozen"
    return 2 if settings.optimizer == "sam" and settings.sam_tasks == "all" and frozen else 1


def check_no_decay(settings: Any) -> None:
    """Refuses weight decay: it is added after the projection and shrinks the protected directions too."""
    if settings.weight_decay > 0:
        raise NessError(
            f"weight_decay is {settings.weight_decay:g}, expected 0: decay pulls the weights along the protected "
            "directions too, after the gradient was projected"
        )
