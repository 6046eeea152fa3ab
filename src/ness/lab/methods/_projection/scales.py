"""A task's own recombination of shared weights inside a subspace: W + W B (Q - I) Bᵀ, used with that task alone.

Of a linear layer x W_effᵀ = x̃ Wᵀ with x̃ = x + x B (Q - I)ᵀ Bᵀ. The n rows of a batch take 2 n d k multiplications so,
W_eff takes 2 o d k, and the layer still multiplies by the very weights that train.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ness.lab.methods._pairs import Pairs, linear_layers
from ness.lab.methods._projection.project import Projecting, matrix_of, split
from ness.lab.methods.base import Context, TaskData
from ness.lab.training.loader import Batch
from ness.layers import Layer


@dataclass(frozen=True)
class Scale:
    """Q (k, k), trained with one task and kept for it, on a frozen basis B (d, k)."""

    basis: Tensor
    matrix: nn.Parameter
    identity: Tensor = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "identity", identity(self.basis))

    @property
    def change(self) -> Tensor:
        """Q - I."""
        return self.matrix - self.identity


def identity(basis: Tensor) -> Tensor:
    """I (k, k) of a basis (d, k)."""
    return torch.eye(basis.shape[1], dtype=basis.dtype, device=basis.device)


def identity_scale(basis: Tensor) -> Scale:
    """Q = I: the task starts at the shared weights."""
    return Scale(basis, nn.Parameter(identity(basis)))


def rescaled(weight: Tensor, scales: Sequence[Scale], *, detached: bool = False) -> Tensor:
    """W_eff = W + Σⱼ W Bⱼ (Qⱼ - I) Bⱼᵀ for W (o, d); with Q = I it is W, bit for bit.

    `detached` takes no gradient through the subtracted W Bⱼ Bⱼᵀ.
    """
    effective = weight
    for scale in scales:
        inside = weight @ scale.basis  # (o, k)
        changed = inside @ scale.matrix - inside.detach() if detached else inside @ scale.change
        effective = torch.addmm(effective, changed, scale.basis.mT)
    return effective


def rescaled_inputs(x: Tensor, scales: Sequence[Scale]) -> Tensor:
    """x̃ = x + Σⱼ x Bⱼ (Qⱼ - I)ᵀ Bⱼᵀ for x (…, d): x̃ Wᵀ is x W_effᵀ; with Q = I it is x, bit for bit."""
    effective = x
    for scale in scales:
        effective = effective + x @ scale.basis @ scale.change.mT @ scale.basis.mT
    return effective


@contextmanager
def seen_rescaled(scales: Sequence[tuple[nn.Module, Sequence[Scale]]]) -> Iterator[None]:
    """Inside, each of the linear modules gets x̃ in the place of its input x."""

    def replaced(own: Sequence[Scale], module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
        return (rescaled_inputs(inputs[0], own),)

    handles = [module.register_forward_pre_hook(partial(replaced, own)) for module, own in scales]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def effective_parameters(layer: Layer, scales: Sequence[Scale], *, detached: bool = False) -> dict[str, Tensor]:
    """The weight and bias a task uses in the place of the layer's own, by their names in the model."""
    joint = matrix_of(layer, layer.weight, layer.bias)
    weight, bias = split(layer, rescaled(joint, scales, detached=detached))
    found = {f"{layer.name}.{layer.weight_name}": weight}
    if bias is not None:
        found[f"{layer.name}.{layer.bias_name}"] = bias
    return found


class Scaling(Projecting):
    """Projected training of the shared weights, and for every task scales of its own, by layer.

    `scales[task][layer]` are switched by the task a batch is of, so each task is always used with its own.
    """

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.scales: dict[int, dict[str, list[Scale]]] = {}
        # A bias is a column of [W b] that no input of the module stands for.
        plain = {name: layer for name, layer in linear_layers(self.layers).items() if layer.bias is None}
        self.by_inputs = {name: layer for name, layer in plain.items() if not self.detached(layer)}
        self.pairs = Pairs(self.by_inputs)

    def detached(self, layer: Layer) -> bool:
        """Whether a layer's subtracted part is taken without gradient."""
        return False

    def parameters(self, lesson: TaskData) -> list[nn.Parameter]:
        """As in projected training, and the task's own matrices."""
        own = self.scales.get(lesson.task, {})
        return [*super().parameters(lesson), *(scale.matrix for scales in own.values() for scale in scales)]

    def logits(self, batch: Batch) -> Tensor:
        """Logits under the effective weights of the batch's task, or the inputs that amount to them."""
        own = self.scales.get(batch.task, {})
        replaced: dict[str, Tensor] = {}
        for name, scales in own.items():
            if name not in self.by_inputs:
                layer = self.layers[name]
                replaced |= effective_parameters(layer, scales, detached=self.detached(layer))
        with seen_rescaled([(self.layers[name].module, own[name]) for name in own if name in self.by_inputs]):
            logits: Tensor = functional_call(self.model, replaced, (batch.images, batch.task))
        return logits

    def effective(self, task: int) -> Callable[[Tensor], Tensor]:
        """The network as a task uses it, from images to logits, with every layer's own inputs as they are.

        All scales are put into weights: `logits` changes inputs where that is cheaper, and who looks at a layer then
        sees x̃ in the place of x.
        """
        replaced: dict[str, Tensor] = {}
        for name, scales in self.scales.get(task, {}).items():
            replaced |= effective_parameters(self.layers[name], scales)
        return lambda images: functional_call(self.model, replaced, (images, task))

    def matrices(self) -> dict[str, Tensor]:
        """Every Q under 'scale/task/layer/number', for the state."""
        return {
            f"scale/{task}/{name}/{number}": scale.matrix.detach()
            for task, layers in self.scales.items()
            for name, scales in layers.items()
            for number, scale in enumerate(scales)
        }

    def put_back(self, task: int, name: str, bases: Sequence[Tensor], tensors: dict[str, Tensor]) -> None:
        """The scales of a task in a layer, with the matrices that `matrices` named."""
        device = self.context.device
        found = [tensors[f"scale/{task}/{name}/{number}"].to(device) for number in range(len(bases))]
        pairs = zip(bases, found, strict=True)
        self.scales.setdefault(task, {})[name] = [Scale(basis, nn.Parameter(q.clone())) for basis, q in pairs]
