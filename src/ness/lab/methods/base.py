"""What a method is: a few hooks around the loop's step. It sees the model, the task and the step, never files."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ness.errors import NessError
from ness.lab.methods._selection import SelectOn
from ness.lab.networks.base import Network
from ness.lab.networks.norms import without_update
from ness.lab.runs.environment import Stopwatch
from ness.lab.runs.settings import Training
from ness.lab.training import optimizers
from ness.lab.training.loader import Batch, Samples
from ness.lab.training.losses import cross_entropy
from ness.lab.training.seeds import Randomness
from ness.layers import LinearLayer
from ness.layers.discovery import discover

State = tuple[dict[str, Tensor], dict[str, Any]]  # tensors, and whatever else as JSON


@dataclass(frozen=True)
class NoSettings:
    """A method without settings of its own."""


@dataclass(frozen=True)
class Context:
    """What a method works with during a whole run."""

    model: Network
    training: Training
    own: Any  # the method's own settings, an instance of its spec's `settings`
    tasks: int
    random: Randomness
    device: torch.device
    watch: Stopwatch = field(default_factory=Stopwatch)  # a method may say where its time goes: `with watch.phase(…)`
    fast: bool = False  # steps run in bfloat16: see `ness.lab.gpu.amp`
    general: Samples | None = None  # what a pretrained network could do before: unlabelled inputs to observe


@dataclass(frozen=True)
class TaskData:
    """What is being learnt: one task, or several at once (`joint`), with the data a method may look at."""

    tasks: tuple[int, ...]
    train: Samples
    earlier: tuple[Samples, ...] = ()  # earlier tasks' training data; empty unless the method says it needs old data
    valid: Samples | None = None  # of what is being learnt, to choose by

    @property
    def task(self) -> int:
        """The (first) task, counted from 0."""
        return self.tasks[0]


class Method:
    """The hooks, in the order in which the loop calls them; this class alone is plain fine-tuning.

    A step is tensors in, tensors out: no hook called inside one (`gradients`, `loss`, `logits`, `after_backward`,
    `after_step`), nor `penalty`, may read a tensor's value on the host or branch on it, and random numbers come from
    `context.random.step` there. Then the same step runs in the plain loop and captured in a CUDA graph. The clock on
    the batch says where in the task the step is.
    """

    select_on: SelectOn = "loss"  # what the plateau schedule and the choice of the best weights look at

    def __init__(self, context: Context) -> None:
        self.context = context
        self.model = context.model

    def before_task(self, lesson: TaskData) -> None:
        """Gets ready for a task.

        The model is as the last task left it, in eval mode, all trainable but other tasks' heads. What takes long may
        call `ness.lab.gpu.coroutines.pause()` now and then, so that runs side by side on one GPU do not wait for it.
        Nothing is saved in between.
        """

    def parameters(self, lesson: TaskData) -> list[nn.Parameter]:
        """What trains in this task; everything else gets neither gradient nor weight decay."""
        return backbone(self.model) + current_heads(self.model, lesson)

    def train_mode(self, lesson: TaskData) -> None:
        """Puts the modules into the mode in which the task is trained."""
        self.model.train()

    def watching(self) -> AbstractContextManager[None]:
        """What is around `gradients` in every step: for hooks that must see its passes."""
        return nullcontext()

    def gradients(self, batch: Batch, trained: Sequence[nn.Parameter], *, sam: bool) -> Tensor:
        """Fills `.grad` of what trains and returns the loss; replace it for steps of several passes.

        With `sam` the gradient is SAM's: at w + ρ·g/‖g‖, with w restored exactly, whatever happens in between.
        """
        beside = self.perturbed_beside(trained) if sam else ()
        with optimizers.taking_part(beside):
            loss = self.loss(batch)
            loss.backward()  # type: ignore[no-untyped-call]
            kept = optimizers.ascend([*trained, *beside], self.context.training.rho) if sam else []
        if sam:
            with optimizers.restoring(kept), without_update(self.model):
                clear(trained)
                self.loss(batch).backward()  # type: ignore[no-untyped-call]
        return loss

    def perturbed_beside(self, trained: Sequence[nn.Parameter]) -> Sequence[nn.Parameter]:
        """Frozen parameters that SAM's ascent moves as well; they are put back, and no optimizer steps them."""
        return ()

    def loss(self, batch: Batch) -> Tensor:
        """The loss of a batch; add a penalty here."""
        return cross_entropy(self.logits(batch), batch)

    def logits(self, batch: Batch) -> Tensor:
        """Logits of a batch under the batch's task; also what evaluation calls."""
        logits: Tensor = self.model(batch.images, batch.task)
        return logits

    def after_backward(self, batch: Batch) -> None:
        """Changes gradients before the optimizer's step: projections, masks."""

    def after_step(self, batch: Batch) -> None:
        """Changes parameters after the optimizer's step: clamps."""

    def penalty(self, lesson: TaskData) -> Tensor | None:
        """What the objective adds to the cross-entropy at the weights as evaluation uses them: () on the device.

        It is logged with every validation, and part of the validation loss where `select_on` is "objective". None
        where the objective is the cross-entropy alone; a method gives either all through a task.
        """
        return None

    def moved_by_steps(self) -> Sequence[Tensor]:
        """Tensors that a step changes besides the model's and what trains: a replay memory, running averages.

        Capturing a step runs it once for nothing; what is named here is put back afterwards.
        """
        return ()

    def after_task(self, lesson: TaskData) -> Mapping[str, Any]:
        """Takes what must be kept of a task; returns what the record should say. It may pause, as `before_task` may.

        The best weights are in place, the model is in eval mode.
        """
        return {}

    def use(self, task: int) -> None:
        """Switches to what belongs to a task (its scales, its norms) before that task is evaluated."""

    def state(self) -> State:
        """All that `load_state` needs to go on from the end of any epoch, in a task or between two."""
        return {}, {}

    def load_state(self, tensors: dict[str, Tensor], manifest: dict[str, Any]) -> None:
        """Puts a new instance, on a model as it was when the task began, where `state` was taken.

        Between tasks the model is as the last task left it; in one it is as `before_task` found it. The values of what
        trains are filled in by the loop afterwards.
        """
        if tensors or manifest:
            raise NessError(f"{type(self).__name__} keeps nothing, but its checkpoint holds {sorted(tensors)}")


def backbone(model: Network) -> list[nn.Parameter]:
    """Every parameter that is not a head's."""
    heads = {id(parameter) for parameter in model.heads.parameters()}
    return [parameter for parameter in model.parameters() if id(parameter) not in heads]


def current_heads(model: Network, lesson: TaskData) -> list[nn.Parameter]:
    """The parameters of the heads of the tasks being learnt."""
    return [parameter for task in lesson.tasks for parameter in model.heads[task].parameters()]


def open_for(model: Network, lesson: TaskData) -> None:
    """How a task finds the model: everything trainable but the heads of other tasks."""
    model.requires_grad_(True)
    for task, head in enumerate(model.heads):
        head.requires_grad_(task in lesson.tasks)


def clear(parameters: Sequence[nn.Parameter]) -> None:
    """Drops every gradient; a parameter without one is not touched by the optimizer, decay included."""
    for parameter in parameters:
        parameter.grad = None


@dataclass(frozen=True)
class Sizes:
    """What the amount a method keeps depends on: the backbone's layers, the tasks and one image."""

    layers: tuple[tuple[int, int], ...]  # (outputs o, columns of the input rows) of every layer: d, and 1 with a bias
    weights: tuple[tuple[int, int], ...]  # (outputs o, fan-in d) of every layer
    linear: tuple[bool, ...]  # which of the layers are linear
    tasks: int
    parameters: int  # of the whole network, heads included
    image: int  # numbers in one image


def sizes_of(model: Network, tasks: int, image: Sequence[int]) -> Sizes:
    """The sizes of a network, which may be on the meta device."""
    layers = discover(model, (), ("heads",)).layers.values()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    shapes = tuple((layer.outputs, layer.width) for layer in layers)
    weights = tuple((layer.outputs, layer.fan_in) for layer in layers)
    linear = tuple(isinstance(layer, LinearLayer) for layer in layers)
    return Sizes(shapes, weights, linear, tasks, parameters, math.prod(image))


@dataclass(frozen=True)
class MethodSpec:
    """A named method: how it is made, what it costs to keep, what it allows, and the settings it comes with.

    `presets` maps a preset to overrides by benchmark: "*" for every benchmark, "cifar100" for one,
    "cifar100/sam" or "*/sam" for one with that optimizer; "fixed" is the base of the other two.
    `refuses` maps an optimizer or a schedule it cannot work with to the reason, for the error message.
    """

    name: str
    title: str
    build: Callable[[Context], Method]
    keeps: str  # what stays between tasks, besides the network
    keeps_samples: bool = False  # whether samples of earlier tasks are among what it keeps
    kept_at_most: Callable[[Sizes, Any], int] | None = None  # bytes of it, by its settings; None: not known beforehand
    paper: str = ""
    year: int | None = None
    settings: type = NoSettings
    presets: Mapping[str, Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)
    refuses: Mapping[str, str] = field(default_factory=dict)
    only_with: Mapping[str, tuple[str, Collection[Any]]] = field(default_factory=dict)  # as settings.ONLY_WITH
    check: Callable[[Any], None] | None = None  # refuses values of its own settings
    needs_old_data: Callable[[Any], bool] | None = None  # whether earlier tasks' samples are needed, by its settings
    plan: Literal["one by one", "all at once"] = "one by one"
    # Which rule these settings now ask for: 1, or one more each time that it changed and the settings did not. A record
    # of an earlier one keeps its name and is never taken for a run of this one.
    revision: Callable[[Any], int] | None = None
