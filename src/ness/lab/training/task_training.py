"""The state of one task being learnt: what trains, the optimizer, the schedule, and the best weights so far."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ness.lab.methods.base import Context, Method, TaskData, clear
from ness.lab.training import optimizers
from ness.lab.training.loader import Clock, epoch_order
from ness.lab.training.optimizers import Plateau, plateau, rates
from ness.lab.training.step import Inputs, Step

Tensors = dict[str, Tensor]


def live_tensors(method: Method, trained: Sequence[nn.Parameter]) -> Tensors:
    """Everything that can differ between two moments of a task: the model's tensors and what a method trains beside."""
    model = method.model
    named: Tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    known = {id(tensor) for tensor in named.values()}
    beside = [parameter for parameter in trained if id(parameter) not in known]
    return {**named, **{f"beside.{number}": parameter for number, parameter in enumerate(beside)}}


def copies(tensors: Tensors) -> Tensors:
    """Detached clones."""
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


@torch.no_grad()
def copy_into(targets: Tensors, values: Tensors) -> None:
    """Writes values into the tensors of the same names, where they are."""
    for name, value in values.items():
        targets[name].copy_(value)


class TaskTrainer:
    """One task in progress. The loop calls `inputs`, then `step` for each, then `judge`, epoch after epoch."""

    def __init__(self, method: Method, lesson: TaskData, context: Context) -> None:
        self.lesson, self.context, self.training = lesson, context, context.training
        training, random = context.training, context.random
        self.trained = method.parameters(lesson)
        chosen = {id(parameter) for parameter in self.trained}
        for parameter in context.model.parameters():
            parameter.requires_grad_(id(parameter) in chosen)
        lr = torch.tensor(training.lr, device=context.device)
        optimizer = optimizers.make(training, self.trained, lr)
        sam = training.optimizer == "sam" and (training.sam_tasks == "all" or lesson.task == 0)
        self.step = Step(method, lesson.train, self.trained, optimizer, lr, random.step, sam, context.fast)
        self.schedule = Plateau(training.lr, training.patience)
        self.epoch = 0  # epochs done
        self.last_rate = training.lr  # of the last step planned
        self.seconds = 0.0
        self.live = live_tensors(method, self.trained)
        names = {id(tensor): name for name, tensor in self.live.items()}
        moving = {names[id(parameter)] for parameter in self.trained} | set(dict(context.model.named_buffers()))
        self.moving = {name: self.live[name] for name in sorted(moving)}
        self.best: Tensors = {}

    def inputs(self) -> list[Inputs]:
        """The next epoch's steps: order, rates, mix-up shares and clocks, all on the device."""
        training, random, device = self.training, self.context.random, self.context.device
        mixed = training.norm == "stored"
        chunks = epoch_order(self.lesson.train, training.batch, random.order, mixed=mixed, drop_last=training.drop_last)
        steps = len(chunks)
        planned = rates(training, self.schedule.lr, self.epoch, steps)
        self.last_rate = planned[-1]
        rate = torch.tensor(planned, device=device)
        shares = None
        if training.mixup:
            drawn = random.host.beta(training.mixup, training.mixup, steps)
            shares = torch.tensor(drawn, dtype=torch.float32, device=device)
        counts = torch.tensor([0] + [len(chunk) for chunk in chunks]).cumsum(0)
        within = (counts[:-1] / counts[-1]).to(device)
        epoch = torch.tensor(float(self.epoch), device=device)
        elapsed = (epoch + within) / training.epochs
        return [
            Inputs(chunk, rate[i], None if shares is None else shares[i], Clock(epoch, within[i], elapsed[i]))
            for i, chunk in enumerate(chunks)
        ]

    def judge(self, valid_loss: float) -> None:
        """Counts an epoch: keeps its weights if they are the best so far, moves the schedule."""
        self.epoch += 1
        if self.training.schedule == "cosine":
            return
        self.schedule = plateau(self.schedule, valid_loss, self.training)
        if self.schedule.improved:
            if self.best:
                copy_into(self.best, self.moving)
            else:
                self.best = copies(self.moving)

    @property
    def over(self) -> bool:
        """Whether the task has had its epochs, or the plateau schedule ended it."""
        return self.schedule.stop or self.epoch >= self.training.epochs

    def finish(self) -> None:
        """Puts the best weights in place and lets go of gradients."""
        copy_into(self.moving, self.best)
        clear(self.trained)

    def state(self) -> tuple[Tensors, dict[str, Any]]:
        """What `load_state` needs, besides the model at the start of the task and the method's own state."""
        tensors = {f"best/{name}": value for name, value in self.best.items()}
        memory = optimizers.state_of(self.step.optimizer, self.trained)
        tensors |= {f"optimizer/{name}": value for name, value in memory.items()}
        schedule = dataclasses.asdict(self.schedule)
        schedule["best"] = None if math.isinf(self.schedule.best) else self.schedule.best
        return tensors, {"epoch": self.epoch, "seconds": self.seconds, "schedule": schedule}

    def load_state(self, tensors: Tensors, manifest: dict[str, Any]) -> None:
        """Goes on from where `state` was taken; the live tensors have been put back already."""
        self.epoch, self.seconds = manifest["epoch"], manifest["seconds"]
        schedule = dict(manifest["schedule"])
        schedule["best"] = math.inf if schedule["best"] is None else schedule["best"]
        self.schedule = Plateau(**schedule)
        self.best = {
            name.removeprefix("best/"): value.to(self.context.device)
            for name, value in tensors.items()
            if name.startswith("best/")
        }
        memory = {name.removeprefix("optimizer/"): v for name, v in tensors.items() if name.startswith("optimizer/")}
        optimizers.load_state(self.step.optimizer, self.trained, memory)
