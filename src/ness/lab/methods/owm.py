"""OWM: a projector per layer that shrinks along every input seen, by recursive least squares."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ness.errors import NessError
from ness.lab.gpu.coroutines import pause
from ness.lab.methods._projection.project import ADAM, Projecting, Removal, check_no_decay, named, sam_revision, under
from ness.lab.methods._projection.rows import input_grams
from ness.lab.methods.base import Context, MethodSpec, Sizes, TaskData
from ness.lab.runs.settings import setting
from ness.lab.training.loader import Batch
from ness.layers import ConvLayer, Layer
from ness.statistics.gram import with_ones


@dataclass(frozen=True)
class OwmSettings:
    """What OWM adds."""

    updates: Literal["task-end", "every-batch"] = setting(
        "task-end", "P learns a task's inputs after it; or batch means in every step of every task, as in its own code"
    )
    alpha: float = setting(0.1, "α of task-end: mean squared input along a direction at which it is half closed")
    conv_decay: float = setting(1e-5, "every-batch, convolutions: α falls from 1 to this over a task")
    fc_decay: tuple[float, ...] = setting(
        (1e-4, 1e-2, 1e-1), "the same for linear layers, in order; the last for the rest"
    )
    clip: float = setting(0.0, "largest norm of all gradients together; 0: not clipped")


def shrunk(projector: Tensor, rows: Tensor, alpha: float | Tensor) -> Tensor:
    """P - P Rᵀ (αI + R P Rᵀ)⁻¹ R P for rows R (m, d): P⁻¹ grows by RᵀR/α, a block at once.

    >>> shrunk(torch.eye(2), torch.tensor([[1.0, 0.0]]), 1.0)
    tensor([[0.5000, 0.0000],
            [0.0000, 1.0000]])
    """
    through = rows @ projector  # R P, (m, d)
    inner = through @ rows.mT + alpha * torch.eye(len(rows), dtype=rows.dtype, device=rows.device)
    solved, _ = torch.linalg.solve_ex(inner, through)
    found: Tensor = projector - through.mT @ solved
    return (found + found.mT) / 2


def shrunk_by_gram(projector: Tensor, gram: Tensor, alpha: float) -> Tensor:
    """The same for as many rows as there are, by their Gram C: (P⁻¹ + C/α)⁻¹ = (I + P C/α)⁻¹ P."""
    eye = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    found: Tensor = torch.linalg.solve(eye + projector @ gram / alpha, projector)
    return (found + found.mT) / 2


def mean_rows(layer: Layer, module: nn.Module, x: Tensor, output: Tensor) -> Tensor:
    """What a batch shows of a layer in its own code: the mean input, or every second patch of the mean image."""
    mean = x.detach().mean(0, keepdim=True)
    if isinstance(layer, ConvLayer):
        high, wide = output.shape[-2:]
        grid = layer.patches(module, mean)[0].reshape(high, wide, layer.fan_in)
        rows = grid[::2, ::2].reshape(-1, layer.fan_in)
    else:
        rows = mean.reshape(1, layer.fan_in)
    rows = rows.to(torch.float64)
    return rows if layer.bias is None else with_ones(rows.unsqueeze(0))[0]


class Owm(Projecting):
    """P (d, d) a layer, from I; G ← G P."""

    by_rows = True

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.own: OwmSettings = context.own
        self.projectors = {
            name: torch.eye(layer.width, dtype=torch.float64, device=context.device)
            for name, layer in self.layers.items()
        }
        self.decays = decays(self.layers.values(), self.own)
        self.seen: dict[str, Tensor] = {}  # this step's rows by layer

    def gradients(self, batch: Batch, trained: Sequence[nn.Parameter], *, sam: bool) -> Tensor:
        """With every-batch, P takes the batch in before the batch's gradient is projected, from the first task on."""
        if self.own.updates == "task-end":
            return super().gradients(batch, trained, sam=sam)
        with self._watching():
            loss = super().gradients(batch, trained, sam=sam)
        assert batch.clock is not None
        for name, rows in self.seen.items():
            alpha = torch.pow(self.decays[name], batch.clock.elapsed.double())  # α = c^(share of the task done)
            self.projectors[name].copy_(shrunk(self.projectors[name], rows, alpha))
        self._close()
        return loss

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """Keeps the mean rows of every layer while a gradient is taken."""

        def keep(name: str, layer: Layer) -> Any:
            def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
                self.seen[name] = mean_rows(layer, module, inputs[0], output)

            return hook

        handles = [layer.module.register_forward_hook(keep(name, layer)) for name, layer in self.layers.items()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def after_backward(self, batch: Batch) -> None:
        """G ← G P, then clipped if so asked."""
        super().after_backward(batch)
        if self.own.clip > 0:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.own.clip)

    def moved_by_steps(self) -> Sequence[Tensor]:
        """The projectors, where steps move them."""
        return list(self.projectors.values()) if self.own.updates == "every-batch" else ()

    def after_task(self, lesson: TaskData) -> Mapping[str, Any]:
        """With task-end, P takes in the task: P⁻¹ ← P⁻¹ + (XᵀX/n)/α, a layer between two pauses; not after the last."""
        if self.own.updates == "task-end" and not self.is_last(lesson):
            grams = input_grams(self.model, self.layers, lesson.train, self.context.training.batch)
            for name, gram in grams.items():
                mean = gram.matrix[0] / gram.count
                self.projectors[name] = shrunk_by_gram(self.projectors[name], mean, self.own.alpha)
                pause()
            self._close()
        return {"open": {name: round(float(p.trace()), 1) for name, p in self.projectors.items()}}

    def _close(self) -> None:
        """Π = I - P."""
        self.removals = {
            name: Removal(((torch.eye(len(p), dtype=p.dtype, device=p.device) - p).float(),))
            for name, p in self.projectors.items()
        }

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The projectors."""
        return named("projector", self.projectors), {}

    def load_state(self, tensors: dict[str, Tensor], manifest: dict[str, Any]) -> None:
        """Puts them back."""
        self.projectors = {n: p.clone() for n, p in under("projector", tensors, self.context.device).items()}
        if any(not torch.equal(p, torch.eye(len(p)).to(p)) for p in self.projectors.values()):
            self._close()  # before the first task is learnt no gradient is touched, not even in its rounding


def decays(layers: Iterable[Layer], own: OwmSettings) -> dict[str, float]:
    """What α falls to in each layer."""
    found: dict[str, float] = {}
    linear = 0
    for layer in layers:
        if isinstance(layer, ConvLayer):
            found[layer.name] = own.conv_decay
        else:
            found[layer.name] = own.fc_decay[min(linear, len(own.fc_decay) - 1)]
            linear += 1
    return found


def check(settings: Any) -> None:
    """Refuses numbers outside their range, and weight decay."""
    for name, holds, expected in (
        ("alpha", settings.alpha > 0, "above 0"),
        ("conv_decay", 0 < settings.conv_decay <= 1, "above 0, 1 at most"),
        ("fc_decay", settings.fc_decay and all(0 < c <= 1 for c in settings.fc_decay), "numbers above 0, 1 at most"),
        ("clip", settings.clip >= 0, "0 or more"),
    ):
        if not holds:
            raise NessError(f"{name} is {getattr(settings, name)}, expected {expected}")
    check_no_decay(settings)


def kept(sizes: Sizes, own: Any) -> int:
    """Bytes of the projectors, float64: Σ d²."""
    return 8 * sum(width * width for _, width in sizes.layers)


# on the lineage's network, loop and frozen BatchNorm. The reference's own code also selects by
# test accuracy; that is not copied. Its rate is constant: a plateau whose patience no task outlasts.
REFERENCE = {"updates": "every-batch", "clip": 10.0, "optimizer": "sgdm", "lr": 0.02, "epochs": 25, "patience": 25}
PRESETS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "fixed": {
        "*": {"optimizer": "sgd", "weight_decay": 0.0},
        "digits": {"lr": 0.2},
        "cifar100": {"lr": 0.01},
        "five-datasets": {"lr": 0.1},
        "mini-imagenet": {"lr": 0.1},
    },
    "reference": {
        "*": {"updates": "every-batch", "clip": 10.0, "optimizer": "sgdm", "lr": 0.02},
        "cifar100": REFERENCE,
        "five-datasets": REFERENCE,
        "mini-imagenet": REFERENCE,
    },
}

METHOD = MethodSpec(
    name="owm",
    title="A projector per layer that shrinks along every input seen",
    build=Owm,
    keeps="a projector per layer (d × d)",
    kept_at_most=kept,
    paper="Zeng et al., Continual learning of context-dependent processing",
    year=2019,
    settings=OwmSettings,
    presets=PRESETS,
    refuses={"adamw": ADAM},
    only_with={
        "alpha": ("updates", ("task-end",)),
        "conv_decay": ("updates", ("every-batch",)),
        "fc_decay": ("updates", ("every-batch",)),
    },
    check=check,
    revision=sam_revision,
)
