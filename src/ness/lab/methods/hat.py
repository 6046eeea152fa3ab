"""HAT: every task learns near-binary gates on hidden units; what its units need stays as it was."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ness.errors import NessError
from ness.lab.methods._selection import SELECTION_ONLY_WITH, Selection
from ness.lab.methods.base import Context, Method, MethodSpec, Sizes, TaskData
from ness.lab.networks.base import Network, Wire
from ness.lab.runs.settings import setting
from ness.lab.training.loader import Batch, Clock

Tensors = dict[str, Tensor]
REACH = 6.0  # embeddings stay in ±6
STEEP = 50.0  # s·e is clipped here in the compensation, so that cosh stays finite


@dataclass(frozen=True)
class HatSettings(Selection):
    """What HAT adds to the training settings."""

    smax: float = setting(400.0, "steepest gate: an epoch anneals s from 1/smax to smax; tests use smax")
    sparsity: float = setting(0.75, "λ: the price of a unit no earlier task uses")
    clip: float = setting(1e4, "largest norm of a step's gradient")


def annealed(clock: Clock | None, smax: float) -> Tensor | float:
    """s = 1/smax + (smax - 1/smax)·x at the share x of the epoch's samples; smax outside training."""
    return smax if clock is None else 1 / smax + (smax - 1 / smax) * clock.within


def compensation(embedding: Tensor, s: Tensor | float, smax: float) -> Tensor:
    """What turns the gradient of σ(s·e) into smax·σ'(e): gates must learn while they are steep.

    >>> compensation(torch.tensor([1.0], dtype=torch.float64), 2.0, 400.0)
    tensor([374.5218], dtype=torch.float64)
    """
    steep = torch.clamp(s * embedding, -STEEP, STEEP)
    return smax / s * (torch.cosh(steep) + 1) / (torch.cosh(embedding) + 1)


def crowding(gates: Tensor, claimed: Tensor) -> Tensor:
    """Σ a(1 - m) / Σ (1 - m): the share of the free units that the gates open.

    >>> crowding(torch.ones(2), torch.tensor([1.0, 0.0]))
    tensor(1.)
    """
    free = 1 - claimed
    return (gates * free).sum() / free.sum().clamp_min(torch.finfo(free.dtype).eps)


def openness(weight: Tensor, out: Tensor, into: Tensor | None) -> Tensor:
    """1 - min(m_out, m_in) for each connection of a weight (o, i, …): 0 where both its ends are claimed.

    Without `into` (the image; a bias; BatchNorm) it is 1 - m_out. Where a linear layer reads maps, each channel's
    mask covers its places, one after the other.

    >>> openness(torch.ones(2, 4), torch.tensor([1.0, 0.0]), torch.tensor([1.0, 0.0]))
    tensor([[0., 0., 1., 1.], [1., 1., 1., 1.]])
    """
    rows = out.view(-1, *[1] * (weight.ndim - 1))
    if into is None:
        return 1 - rows
    columns = into.repeat_interleave(weight.shape[1] // len(into))
    return 1 - torch.minimum(rows, columns.view(1, -1, *[1] * (weight.ndim - 2)))


def masks(network: Network, claimed: Tensors) -> Tensors:
    """By name of the parameter, what its gradient is multiplied with: weight, bias and BatchNorm of every wire."""
    found: Tensors = {}
    for wire in network.wires:
        out = claimed[wire.writes]
        into = None if wire.reads is None else claimed[wire.reads]
        for module in filter(None, (wire.layer, wire.norm)):
            for name, value in network.get_submodule(module).named_parameters():
                reads = into if (module, name) == (wire.layer, "weight") else None
                found[f"{module}.{name}"] = openness(value, out, reads)
    return found


def widths(network: Network) -> dict[str, int]:
    """How many units each gate has, by the module that puts them out, in the order of the wires."""
    return {wire.writes: outputs(network, wire) for wire in network.wires}


def outputs(network: Network, wire: Wire) -> int:
    """The outputs of a wire's layer."""
    weight: Tensor = network.get_parameter(f"{wire.layer}.weight")
    return weight.shape[0]


class Hat(Method):
    """Embeddings e of each task, a = σ(s·e); claimed units m = max over finished tasks of σ(smax·e).

    Both are one vector over the units of all gates: a vector a gate would be many small operations.
    """

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.own: HatSettings = context.own
        self.select_on = self.own.select_on
        self.widths = widths(self.model)
        if not self.widths:
            raise NessError(
                f"{type(self.model).__name__} does not say where its hidden units are, so hat cannot gate them; "
                "give the network `wires` (ness.lab.networks.base.Wire)"
            )
        self.embeddings: list[nn.Parameter] = []  # by task
        self.claimed = torch.zeros(sum(self.widths.values()), device=context.device)
        self.masks: Tensors = {}  # empty until something is claimed
        self.opened = self.claimed  # a of the pass that is under way, and the same by gate
        self.gates: Tensors = {}
        self.statistics: list[Tensors] = []  # running ones, of every finished task
        for name in self.widths:
            self.model.get_submodule(name).register_forward_hook(self._gate(name))

    def _gate(self, name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
            gate = self.gates[name].to(output.dtype)  # half precision under --fast, which the kernels expect of both
            return output * gate.view(1, -1, *[1] * (output.ndim - 2))

        return hook

    def by_gate(self, units: Tensor) -> Tensors:
        """A vector over all units, cut by the module that puts them out."""
        return dict(zip(self.widths, torch.split(units, list(self.widths.values())), strict=True))

    def before_task(self, lesson: TaskData) -> None:
        """Draws the task's embeddings, N(0, 1)."""
        random, device = self.context.random.method, self.context.device
        self.embeddings.append(nn.Parameter(torch.randn(len(self.claimed), generator=random, device=device)))

    def parameters(self, lesson: TaskData) -> list[nn.Parameter]:
        """The backbone, the head, and the task's embeddings."""
        return [*super().parameters(lesson), self.embeddings[lesson.task]]

    def logits(self, batch: Batch) -> Tensor:
        """Through the gates of the batch's task, as steep as the clock says."""
        self.opened = torch.sigmoid(annealed(batch.clock, self.own.smax) * self.embeddings[batch.task])
        self.gates = self.by_gate(self.opened)
        return super().logits(batch)

    def loss(self, batch: Batch) -> Tensor:
        """Cross-entropy, and the price of units that were free."""
        loss = super().loss(batch)
        return loss + self.own.sparsity * crowding(self.opened, self.claimed)

    def penalty(self, lesson: TaskData) -> Tensor:
        """The price of units that were free, under gates as steep as at test."""
        opened = torch.sigmoid(self.own.smax * self.embeddings[lesson.task])
        return self.own.sparsity * crowding(opened, self.claimed)

    def after_backward(self, batch: Batch) -> None:
        """Blocks what earlier tasks need, mends the gates' gradients, clips."""
        for name, mask in self.masks.items():
            gradient = self.model.get_parameter(name).grad
            if gradient is not None:
                gradient *= mask
        own = self.embeddings[batch.task]
        if own.grad is not None:
            own.grad *= compensation(own.detach(), annealed(batch.clock, self.own.smax), self.own.smax)
        torch.nn.utils.clip_grad_norm_([*self.model.parameters(), own], self.own.clip)

    @torch.no_grad()
    def after_step(self, batch: Batch) -> None:
        """Keeps the embeddings within reach."""
        self.embeddings[batch.task].clamp_(-REACH, REACH)

    @torch.no_grad()
    def after_task(self, lesson: TaskData) -> Mapping[str, Any]:
        """Claims the task's units, and keeps its running statistics: weights of blocked units stay, data does not."""
        opened = torch.sigmoid(self.own.smax * self.embeddings[lesson.task])
        self.claimed = torch.maximum(self.claimed, opened)
        self.masks = masks(self.model, self.by_gate(self.claimed))
        self.statistics.append({name: value.clone() for name, value in self._running().items()})
        return {"claimed": float(self.claimed.mean())}

    def use(self, task: int) -> None:
        """The running statistics of that task; its gates follow from the batch."""
        running = self._running()
        for name, value in self.statistics[task].items():
            running[name].copy_(value)

    def _running(self) -> Tensors:
        return dict(self.model.named_buffers())

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Embeddings of all tasks begun, claimed units, statistics of all tasks finished."""
        tensors = {"claimed": self.claimed}
        tensors |= {f"embedding/{task}": each.detach() for task, each in enumerate(self.embeddings)}
        for task, each in enumerate(self.statistics):
            tensors |= {f"statistics.{task}/{name}": value for name, value in each.items()}
        return tensors, {"begun": len(self.embeddings), "finished": len(self.statistics)}

    def load_state(self, tensors: dict[str, Tensor], manifest: dict[str, Any]) -> None:
        """Puts them back on the device; what is blocked follows from what is claimed."""

        def held(kind: str) -> Tensors:
            start = f"{kind}/"
            return {k.removeprefix(start): v.to(self.context.device) for k, v in tensors.items() if k.startswith(start)}

        own = held("embedding")
        self.embeddings = [nn.Parameter(own[str(task)].clone()) for task in range(manifest["begun"])]
        self.statistics = [held(f"statistics.{task}") for task in range(manifest["finished"])]
        self.claimed = tensors["claimed"].to(self.context.device)
        if self.statistics:
            self.masks = masks(self.model, self.by_gate(self.claimed))


def check(settings: Any) -> None:
    """Refuses gates that cannot close, and decay, which moves what is blocked."""
    if settings.smax < 1 or settings.sparsity < 0 or settings.clip <= 0:
        raise NessError(
            f"smax is {settings.smax}, sparsity {settings.sparsity}, clip {settings.clip}; "
            "expected 1 or more, 0 or more, above 0"
        )
    if settings.weight_decay:
        raise NessError(
            f"weight_decay is {settings.weight_decay}, but decay also moves weights that hat blocks; set it to 0"
        )


def kept_at_most(sizes: Sizes, own: Any) -> int:
    """Bytes of a gate per unit and task, of what is claimed, and of stored statistics, if every layer has them."""
    units = sum(outputs for outputs, _ in sizes.layers)
    return 4 * (sizes.tasks + 1) * units + sizes.tasks * sum(8 * outputs + 8 for outputs, _ in sizes.layers)


# reference: the repository's schedule; fixed and paper: the GPM paper's rates, shared schedules.
# The rate on digits was chosen with `ness tune`.
HAT_SCHEDULE = {"lr": 0.05, "lr_min": 1e-4, "lr_factor": 3.0, "patience": 5, "epochs": 200}
PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "fixed": {
        "*": {"optimizer": "sgd", "weight_decay": 0.0},
        "digits": {"lr": 0.1},
        "cifar100": {"lr": 0.05},
        "five-datasets": {"lr": 0.1},
        "mini-imagenet": {"lr": 0.03},
    },
    "reference": {"*": HAT_SCHEDULE},
}

METHOD = MethodSpec(
    name="hat",
    title="Learned gates per task; what its units need is blocked",
    build=Hat,
    keeps="a gate per unit and task, and stored BatchNorm statistics per task",
    kept_at_most=kept_at_most,
    paper="Serrà et al., Overcoming Catastrophic Forgetting with Hard Attention to the Task",
    year=2018,
    settings=HatSettings,
    presets=PRESETS,
    check=check,
    only_with=SELECTION_ONLY_WITH,
    refuses={"adamw": "its scaling undoes the blocking of weights that earlier tasks need; use --optimizer sgd"},
)
