"""The loop: task after task, epoch after epoch, in units after which everything can be saved and taken up again."""

import dataclasses
import math
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from ness.errors import NessError
from ness.lab.benchmarks.base import Stream
from ness.lab.gpu.amp import channels_last
from ness.lab.gpu.capture import PlainRunner, Runner
from ness.lab.gpu.coroutines import pause
from ness.lab.language.measure import similarities_kept
from ness.lab.methods.base import Context, Method, MethodSpec, TaskData, open_for
from ness.lab.networks.base import Network, NetworkSpec, Norms, build
from ness.lab.runs.environment import Stopwatch
from ness.lab.runs.environment import together as together_in_time
from ness.lab.runs.settings import Training, draws_validation, part_of
from ness.lab.training.evaluate import evaluate
from ness.lab.training.loader import (
    LARGE_BATCH,
    SPLITS,
    Samples,
    SplitName,
    fixed_order,
    on_device,
    together,
    unlabelled,
)
from ness.lab.training.seeds import Randomness
from ness.lab.training.step import Inputs
from ness.lab.training.task_statistics import Statistics, by_task, measuring, named, own_norms, using
from ness.lab.training.task_training import TaskTrainer, Tensors, copies, copy_into, live_tensors

Result = TypeVar("Result")
Matrix = list[list[float | None]]  # A[t][i]: test accuracy of task i after task t, in percent


@dataclass(frozen=True)
class Event:
    """Something that happened, for the log and the display: "task", "epoch" or "learnt"."""

    kind: str
    facts: dict[str, Any] = field(default_factory=dict)


class Trainer:
    """One seed of one setting, from the first task to the last.

    `run` is the whole of it; `advance` does one unit of work (begin a task, one epoch, finish a task) and returns what
    happened. Between units `state` is all there is to save.
    """

    def __init__(
        self,
        method: MethodSpec,
        network: NetworkSpec,
        stream: Stream,
        settings: Any,
        seed: int,
        device: torch.device | None = None,
        runner: Runner | None = None,
        watch: Stopwatch | None = None,
        fast: bool = False,
        data: Path | None = None,
    ) -> None:
        self.watch = watch or Stopwatch()
        self.spent: dict[str, float] = {}  # seconds by phase before the run was cut
        self.device = device or torch.device("cpu")
        self.spec, self.stream = method, stream
        self.training: Training = part_of(settings, Training)
        self.draws_validation = draws_validation(dataclasses.asdict(self.training))
        self.random = Randomness.of(seed, self.device)
        lying = channels_last(self.device, fast)
        model = self._built(network, lying, data)
        if self.training.mixup and not model.mixable:
            raise NessError(f"mixup is {self.training.mixup:g}, but {network.name} reads tokens, which cannot be mixed")
        own = part_of(settings, method.settings)
        self.runner = runner if runner and model.static else PlainRunner()
        general = None if stream.general is None else unlabelled(stream.general.known, self.device)
        self.context = Context(
            model, self.training, own, len(stream), self.random, self.device, self.watch, fast, general
        )
        self.held_out = None if stream.general is None else unlabelled(stream.general.held_out, self.device)
        self.before = self._features_of_general()  # of the network as it came
        self.method: Method = method.build(self.context)
        self.data: dict[SplitName, list[Samples]] = {
            split: [on_device(getattr(task, split), task, i, self.device, lying) for i, task in enumerate(stream.tasks)]
            for split in SPLITS
        }
        self.orders = {
            split: [fixed_order(len(samples), samples.task, split, self.device) for samples in held]
            for split, held in self.data.items()
        }
        together_now = method.plan == "all at once"
        every = tuple(range(len(stream)))
        self.lessons: tuple[tuple[int, ...], ...] = (every,) if together_now else tuple((task,) for task in every)
        self.old_data = method.needs_old_data is not None and method.needs_old_data(own)
        self.at = 0  # lessons finished
        self.learning: TaskTrainer | None = None
        self.start: Tensors = {}  # the model when the current task began
        self.matrix: Matrix = []
        self.epochs: list[int] = []
        self.seconds: list[float] = []
        self.notes: list[dict[str, Any]] = []  # what the method said about each task
        self.statistics: dict[int, Statistics] = {}  # of the norms, by task, with norm task

    def _built(self, network: NetworkSpec, lying: bool, data: Path | None) -> Network:
        classes = [task.classes for task in self.stream.tasks]
        made = {"weights": self.random.weights, "dropout": self.random.step}
        norms: Norms = "stored" if self.training.norm == "stored" else "batch"
        shape, device = self.stream.shape, self.device
        model = build(network, shape, classes, norms, **made, device=device, channels_last=lying, data=data)
        if self.training.norm == "task":
            own_norms(model)  # or it is refused before any training
        return model

    def general_ability(self) -> dict[str, float] | None:
        """How alike sentences (or images) of general kind are to each other, against the network as it came."""
        after = self._features_of_general()
        return None if self.before is None or after is None else similarities_kept(self.before, after)

    @torch.no_grad()
    def _features_of_general(self) -> torch.Tensor | None:
        if self.held_out is None:
            return None
        model = self.context.model.eval()
        batches = self.held_out.batches(self.held_out.stored_order())
        return torch.cat([model.features(batch.images) for batch in batches])

    @property
    def done(self) -> bool:
        """Whether every task has been learnt."""
        return self.at == len(self.lessons)

    def run(self, listen: Callable[[Event], None] = lambda event: None) -> None:
        """Trains task after task to the end, or on from where `load_state` put it.

        Args:
            listen: is called with each event, when `state()` is all that a later process needs to go on from there.
        """
        while not self.done:
            if self.learning is None:
                listen(self.begin_task())
            while not self._current().over:
                listen(self.epoch())
            listen(self.finish_task())

    def advance(self) -> Event:
        """One unit of work: begins a task, trains an epoch of it, or finishes it."""
        if self.learning is None:
            return self.begin_task()
        return self.finish_task() if self.learning.over else self.epoch()

    def epoch(self) -> Event:
        """One epoch and its validation: all of it is on its way before the host asks for a number."""
        began, learning = time.perf_counter(), self._current()
        with self.watch.phase("steps"):
            loss = self.runner.steps(learning, self.open_epoch())
            judged = self.runner.evaluation(learning, self._valid)
            numbers = torch.stack([loss.to(torch.float64), *judged])
            pause("epoch")
            found = numbers.tolist()
        event = self.close_epoch(*found)
        learning.seconds += time.perf_counter() - began
        return event

    def begin_task(self) -> Event:
        """Starts the next task."""
        began = time.perf_counter()
        pause()
        lesson = self._lesson()
        self.start = copies(live_tensors(self.method, ()))
        open_for(self.context.model, lesson)
        self.context.model.eval()
        with self.watch.phase("statistics"):
            not_a_generator(self.method.before_task(lesson), "before_task")  # type: ignore[func-returns-value]
        self.learning = TaskTrainer(self.method, lesson, self.context)
        trained = sum(parameter.numel() for parameter in self.learning.trained)
        pause("steps")
        self.learning.seconds += time.perf_counter() - began
        return Event("task", {"task": lesson.task, "name": self._name(), "trained": trained})

    def _lesson(self) -> TaskData:
        tasks = self.lessons[self.at]
        train = self.data["train"]
        earlier = tuple(train[: tasks[0]]) if self.old_data else ()
        valid = together([self.data["valid"][task] for task in tasks])
        return TaskData(tasks, together([train[task] for task in tasks]), earlier, valid)

    def _name(self) -> str:
        tasks = self.lessons[self.at]
        return self.stream.tasks[tasks[0]].name if len(tasks) == 1 else "all tasks"

    def open_epoch(self) -> list[Inputs]:
        """Puts the model in training mode and draws the epoch's steps; run them with `learning.step`, in this order."""
        learning = self._current()
        self.method.train_mode(learning.lesson)
        inputs = learning.inputs()
        if self.draws_validation:
            self._draw_validation(learning.lesson.tasks)
        return inputs

    def _draw_validation(self, tasks: Sequence[int]) -> None:
        """Another order of validation images, where a captured evaluation reads it.

        The loss of the same weights depends on who shares a batch, and the lowest one chooses the weights that are
        kept: it should be no particular order's.
        """
        for task in tasks:
            order = self.orders["valid"][task]
            order.copy_(torch.randperm(len(order), generator=self.random.order))

    def _valid(self) -> torch.Tensor:
        """Cross-entropy and accuracy on validation data of what is being learnt, (2,) on the device.

        Where the method's objective has a penalty, that is a third number.
        """
        lesson = self._current().lesson
        pairs = [self._evaluate(task, "valid") for task in lesson.tasks]
        found = torch.stack([torch.stack(pair) for pair in pairs]).mean(0)
        with torch.no_grad():
            penalty = self.method.penalty(lesson)
        return found if penalty is None else torch.cat([found, penalty.to(found.dtype).view(1)])

    def close_epoch(self, loss: float, valid: float, accuracy: float, penalty: float | None = None) -> Event:
        """Moves the schedule and reports; `valid` is the cross-entropy, `penalty` what the objective adds to it."""
        learning = self._current()
        if penalty is not None and self.method.select_on == "objective":
            valid += penalty
        facts = {
            "task": learning.lesson.task,
            "epoch": learning.epoch + 1,
            "lr": learning.last_rate,
            "loss": loss,
            "valid_loss": valid,
            "valid_accuracy": accuracy,
            **({} if penalty is None else {"valid_penalty": penalty}),
        }
        if not (math.isfinite(facts["loss"]) and math.isfinite(valid)):
            raise NessError(
                f"task {learning.lesson.task + 1}, epoch {facts['epoch']}: the training loss is {facts['loss']}, the "
                f"validation loss {valid}; training diverged: lower --lr"
            )
        learning.judge(valid)
        return Event("epoch", facts)

    def finish_task(self) -> Event:
        """Ends a task: best weights in place, the method's own end of task, and a row of the accuracy matrix."""
        began = time.perf_counter()
        pause()
        learning = self._current()
        learning.finish()
        self.context.model.eval()
        with self.watch.phase("statistics"):
            notes = dict(not_a_generator(self.method.after_task(learning.lesson), "after_task"))
        seen = learning.lesson.tasks[-1] + 1
        with self.watch.phase("evaluation"):
            if self.training.norm == "task":
                for task in learning.lesson.tasks:
                    self.statistics[task] = self._measured(task)
                    pause()
            right = []
            for task in range(seen):
                self.method.use(task)
                with using(self.context.model, self.statistics.get(task, {})):
                    right.append(self._evaluate(task, "test")[1])
                pause()
            self.method.use(seen - 1)
            row: list[float | None] = [*torch.stack(right).tolist(), *[None] * (len(self.stream) - seen)]
        learning.seconds += time.perf_counter() - began
        facts = {
            "task": learning.lesson.task,
            "name": self._name(),
            "epochs": learning.epoch,
            "accuracy": row[:seen],
            "seconds": learning.seconds,
            **({"notes": notes} if notes else {}),
        }
        self.matrix.append(row)
        self.epochs.append(learning.epoch)
        self.seconds.append(learning.seconds)
        self.notes.append(notes)
        self.at += 1
        self.learning, self.start = None, {}
        return Event("learnt", facts)

    @torch.no_grad()
    def _measured(self, task: int) -> Statistics:
        """What the task's training images look like to its norms, under the function it is used with."""
        self.method.use(task)
        with measuring(self.context.model) as found:
            samples, order = self.data["train"][task], self.orders["train"][task]
            for index in torch.tensor_split(order, math.ceil(len(order) / LARGE_BATCH)):  # no batch of one left over
                self.method.logits(samples.take(index))
        return found

    def _evaluate(self, task: int, split: SplitName) -> tuple[torch.Tensor, torch.Tensor]:
        return evaluate(self.method, self.data[split][task], self.orders[split][task])

    def _current(self) -> TaskTrainer:
        assert self.learning is not None
        return self.learning

    def state(self) -> tuple[Tensors, dict[str, Any]]:
        """Everything a later process needs to go on, bit for bit: tensors by name, and JSON."""
        method, method_json = self.method.state()
        random, host = self.random.state()
        learning, learning_json = ({}, None) if self.learning is None else self.learning.state()
        live = live_tensors(self.method, self.learning.trained if self.learning else ())
        parts = {
            "live": live,
            "start": self.start,
            "method": method,
            "random": random,
            "learning": learning,
            "norms": named(self.statistics),
        }
        tensors = {f"{part}/{name}": value.detach() for part, held in parts.items() for name, value in held.items()}
        manifest = {
            "at": self.at,
            "learning": learning_json,
            "method": method_json,
            "host": host,
            "matrix": self.matrix,
            "epochs": self.epochs,
            "seconds": self.seconds,
            "notes": self.notes,
            "times": self.times(),
        }
        return tensors, manifest

    def times(self) -> dict[str, float]:
        """Seconds by phase, those before the run was cut included."""
        return together_in_time(self.spent, self.watch.times())

    def load_state(self, tensors: Tensors, manifest: dict[str, Any]) -> None:
        """Puts a new trainer of the same settings where `state` was taken."""
        parts: dict[str, Tensors] = {part: {} for part in ("live", "start", "method", "random", "learning", "norms")}
        for key, value in tensors.items():
            part, name = key.split("/", 1)
            parts[part][name] = value
        self.at, self.matrix = manifest["at"], manifest["matrix"]
        self.epochs, self.seconds, self.notes = manifest["epochs"], manifest["seconds"], manifest["notes"]
        self.spent = manifest.get("times", {})
        in_task = manifest["learning"] is not None
        copy_into(live_tensors(self.method, ()), parts["start"] if in_task else parts["live"])
        if in_task:
            open_for(self.context.model, self._lesson())
        self.method.load_state(parts["method"], manifest["method"])
        if in_task:
            self.start = copies({name: value.to(self.device) for name, value in parts["start"].items()})
            self.learning = TaskTrainer(self.method, self._lesson(), self.context)
            copy_into(self.learning.live, parts["live"])
            self.learning.load_state(parts["learning"], manifest["learning"])
        self.random.load_state(parts["random"], manifest["host"])
        self.statistics = by_task(parts["norms"], self.device)


def not_a_generator(found: Result, hook: str) -> Result:
    """What a method's hook returned; a generator, whose body has not run yet, is refused."""
    if isinstance(found, Generator):
        raise NessError(
            f"{hook} of the method returned a generator, so nothing of it has run; call "
            "ness.lab.gpu.coroutines.pause() where it yields"
        )
    return found
