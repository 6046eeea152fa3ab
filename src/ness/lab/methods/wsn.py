"""WSN: each task learns which c of every layer's weights it uses; weights that an earlier task uses stand still.

Of a layer W (o, d) with scores s (o, d), task t's mask and what a step does:

    m_t = 1 where |s| is among the c·o·d largest of the layer, else 0        W_eff = W ⊙ m_t
    ∂L/∂W = G ⊙ m_t ⊙ (1 - M)        ∂L/∂s = G ⊙ W ⊙ sign(s)        with G = ∂L/∂W_eff
    M ← max(M, m_t) after the task

The gradient of the scores is straight-through: m_t counts as |s|. Scores go on from task to task, as published; heads
are a task's own and not masked; γ = 1 and β = 0 in every BatchNorm, which the published networks have without affine
parameters. So a task that is learnt is the same function for good, bit for bit, with every optimizer and weight decay.

On purpose otherwise than the published code: a task's mask is that of the weights and scores that validation chose,
and validation is of the scores as they are (there: of the last step taken, before its update); stored statistics, with
`norm=stored`, are kept per task. A bit a weight is what is counted for a mask (there: Huffman codes of it).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from ness.errors import NessError
from ness.lab.methods._masks import packed, unpacked, winners
from ness.lab.methods.base import Context, Method, MethodSpec, Sizes, TaskData, backbone, current_heads
from ness.lab.networks.base import Network
from ness.lab.runs.settings import setting
from ness.lab.training.loader import Batch

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class WsnSettings:
    """What WSN adds to the training settings."""

    capacity: float = setting(0.5, "c: share of every layer's weights that a task uses, 1 of n at least")
    score_gain: float = setting(1.0, "what the scores' gradient is multiplied by; AdamW takes it out again")


class Subnetwork(torch.autograd.Function):
    """W ⊙ m of a weight and the winners m; the gradient goes to free weights of m, and straight through to scores."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, scores: Tensor, mask: Tensor, moving: Tensor, gain: float) -> Tensor:
        """The effective weight; `moving` are the weights of m that no earlier task uses."""
        ctx.save_for_backward(weight, scores, moving)
        ctx.gain = gain
        return torch.where(mask, weight, 0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        """G ⊙ m ⊙ (1 - M) for the weight, gain·G ⊙ W ⊙ sign(s) for the scores."""
        weight, scores, moving = ctx.saved_tensors
        (gradient,) = gradients
        return torch.where(moving, gradient, 0), ctx.gain * gradient * weight * scores.sign(), None, None, None


def maskable(model: Network) -> dict[str, nn.Parameter]:
    """What is masked, by name: every parameter of the shared part that is not BatchNorm's."""
    norms = {id(p) for module in model.modules() if isinstance(module, _BatchNorm) for p in module.parameters()}
    shared = {id(parameter) for parameter in backbone(model)} - norms
    return {name: parameter for name, parameter in model.named_parameters() if id(parameter) in shared}


class Wsn(Method):
    """Scores s of every weight, a mask m_t of each finished task, and their union M."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.own: WsnSettings = context.own
        self.weights = maskable(self.model)
        self.scores = {name: nn.Parameter(self._drawn(weight)) for name, weight in self.weights.items()}
        self.masks: list[Tensors] = []  # of finished tasks, packed
        self.statistics: list[Tensors] = []  # running ones, of finished tasks
        self.free = {name: torch.ones_like(weight, dtype=torch.bool) for name, weight in self.weights.items()}
        self.fixed: Tensors = {}  # the weights as the task found them, where decay would move them
        self.opened: tuple[int, Tensors] = (-1, {})  # the masks of the finished task used last

    def _drawn(self, weight: Tensor) -> Tensor:
        """U(±1/√d), as the weights themselves."""
        bound = (weight[0].numel() or 1) ** -0.5
        return torch.empty_like(weight).uniform_(-bound, bound, generator=self.context.random.method)

    def before_task(self, lesson: TaskData) -> None:
        """Keeps hold of what decay must not move."""
        self._hold()

    def _hold(self) -> None:
        decays = self.context.training.weight_decay > 0 and self.masks
        self.fixed = {name: weight.detach().clone() for name, weight in self.weights.items()} if decays else {}

    def parameters(self, lesson: TaskData) -> list[nn.Parameter]:
        """Weights, scores and the head; BatchNorm's γ and β stay 1 and 0."""
        return [*self.weights.values(), *self.scores.values(), *current_heads(self.model, lesson)]

    def logits(self, batch: Batch) -> Tensor:
        """Logits of the subnetwork of the batch's task, which for a task being learnt is that of the scores."""
        if batch.task < len(self.masks):
            chosen = self._mask(batch.task)
            effective = {name: torch.where(chosen[name], weight, 0) for name, weight in self.weights.items()}
        else:
            effective = {name: self._effective(name) for name in self.weights}
        logits: Tensor = functional_call(self.model, effective, (batch.images, batch.task))
        return logits

    def _effective(self, name: str) -> Tensor:
        mask = winners(self.scores[name], self.own.capacity)
        result: Tensor = Subnetwork.apply(  # type: ignore[no-untyped-call]
            self.weights[name], self.scores[name], mask, mask & self.free[name], self.own.score_gain
        )
        return result

    def _mask(self, task: int) -> Tensors:
        if self.opened[0] != task:
            bits = self.masks[task]
            self.opened = task, {name: unpacked(bits[name], weight.shape) for name, weight in self.weights.items()}
        return self.opened[1]

    @torch.no_grad()
    def after_step(self, batch: Batch) -> None:
        """Takes weight decay back where an earlier task needs the weights."""
        for name, value in self.fixed.items():
            weight = self.weights[name]
            weight.copy_(torch.where(self.free[name], weight, value))

    @torch.no_grad()
    def after_task(self, lesson: TaskData) -> Mapping[str, Any]:
        """Keeps the task's mask and statistics; the record says what is in use, and what of the mask is reused."""
        chosen = {name: winners(scores, self.own.capacity) for name, scores in self.scores.items()}
        used = sum(int(mask.sum()) for mask in chosen.values())
        reused = sum(int((mask & ~self.free[name]).sum()) for name, mask in chosen.items())
        self.masks.append({name: packed(mask) for name, mask in chosen.items()})
        self.statistics.append({name: value.clone() for name, value in self.model.named_buffers()})
        self._close(chosen)
        claimed = sum(int((~free).sum()) for free in self.free.values())
        return {"claimed": claimed / sum(map(torch.numel, self.free.values())), "reused": reused / used}

    def _close(self, chosen: Tensors) -> None:
        """M ← max(M, m), in new tensors: a captured step reads those of its task."""
        self.free = {name: free & ~chosen[name] for name, free in self.free.items()}

    def use(self, task: int) -> None:
        """The running statistics of that task; its mask follows from the batch."""
        buffers = dict(self.model.named_buffers())
        for name, value in self.statistics[task].items():
            buffers[name].copy_(value)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Scores, masks a bit per weight, and statistics."""
        tensors = {f"scores/{name}": scores.detach() for name, scores in self.scores.items()}
        for kind, kept in (("mask", self.masks), ("statistics", self.statistics)):
            tensors |= {f"{kind}.{task}/{name}": v for task, each in enumerate(kept) for name, v in each.items()}
        return tensors, {"finished": len(self.masks)}

    @torch.no_grad()
    def load_state(self, tensors: dict[str, Tensor], manifest: dict[str, Any]) -> None:
        """Puts them back; what is free follows from the masks, what decay must not move from the model."""
        for name, scores in self.scores.items():
            scores.copy_(tensors[f"scores/{name}"])

        def held(kind: str) -> Tensors:
            start = f"{kind}/"
            return {k.removeprefix(start): v.to(self.context.device) for k, v in tensors.items() if k.startswith(start)}

        for task in range(manifest["finished"]):
            self.masks.append(held(f"mask.{task}"))
            self.statistics.append(held(f"statistics.{task}"))
            self._close(self._mask(task))
        self._hold()


def check(settings: Any) -> None:
    """Refuses a share that is none, and a gain that turns gradients round."""
    if not 0 < settings.capacity <= 1:
        raise NessError(f"capacity is {settings.capacity:g}, expected a share above 0, 1 at most, e.g. 0.5")
    if settings.score_gain <= 0:
        raise NessError(f"score_gain is {settings.score_gain:g}, expected a number above 0")


def kept_at_most(sizes: Sizes, own: Any) -> int:
    """Bytes of a bit per weight and task, of the scores, float32, and of stored statistics, if every layer has them."""
    weights = sum(outputs * width for outputs, width in sizes.layers)
    rounding = 2 * len(sizes.layers)  # a weight and a bias per layer, each of whole bytes
    statistics = sum(8 * outputs + 8 for outputs, _ in sizes.layers)
    return 4 * weights + sizes.tasks * (weights // 8 + rounding + statistics)


# Rates and ends of schedules are the repository's, for Adam; the benchmarks' are for SGD at rates ten times as high.
PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "fixed": {
        "*": {"optimizer": "adamw", "weight_decay": 0.0, "lr": 1e-3, "lr_min": 1e-5},
        "digits": {"lr": 3e-3},
        "cifar100": {"lr_min": 1e-6},
    },
    "reference": {
        "*": {"patience": 6, "lr_factor": 2.0},
        "cifar100": {"epochs": 200},
        "five-datasets": {"epochs": 100},
        "mini-imagenet": {"epochs": 100},
    },
}

METHOD = MethodSpec(
    name="wsn",
    title="A subnetwork per task; weights that earlier ones use are reused, not moved",
    build=Wsn,
    keeps="a bit per weight and task, a score per weight, and stored BatchNorm statistics per task",
    kept_at_most=kept_at_most,
    paper="Kang et al., Forget-free Continual Learning with Winning Subnetworks",
    year=2022,
    settings=WsnSettings,
    presets=PRESETS,
    check=check,
)
