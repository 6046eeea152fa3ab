"""Repair: plain training, and after each task what it changed is reshaped by the Grams of old inputs and of its own."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import ness
from ness.errors import NessError
from ness.lab.gpu.coroutines import pause
from ness.lab.methods.base import Context, Method, MethodSpec, Sizes, TaskData
from ness.lab.methods.ness import features_of, observed
from ness.lab.networks.norms import batch_norms, hold_statistics
from ness.lab.runs.settings import setting


@dataclass(frozen=True)
class RepairSettings:
    """What repair adds to plain training."""

    strength: float = setting(10.0, "s: how much an earlier task's inputs count against the new one's")
    passes: int = setting(1, "groups of layers, each observed behind what is already repaired; 1: all in one go")
    new_under: float = setting(
        1.0, "where the new Grams are taken: from 0, the weights before the task, to 1, after it"
    )
    ridge: float = setting(1e-3, "λ over the mean squared input: how much a change is kept where neither says anything")
    refit: int = setting(50, "steps of L-BFGS in which the task's head is fitted to the repaired features; 0: none")
    refit_decay: float = setting(1e-4, "weight decay of that fit")


class Repair(Method):
    """D ← D (C_n + λI)(C_n + s t C_o + λI)⁻¹ after each task, C_o the mean Gram of the t earlier tasks' inputs."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.own: RepairSettings = context.own
        self.grams: dict[str, ness.Gram] = {}  # of earlier tasks' inputs, each under the weights that it ended with
        self.base: dict[str, Tensor] = {}  # the model as the task found it
        self.pretrained = context.general is not None and len(context.general) > 0
        if context.general is not None and self.pretrained:  # what it could do before counts as an earlier task
            self._keep(list(observed(self.model, (context.general,), context.training, mixed=False)))

    def before_task(self, lesson: TaskData) -> None:
        """Keeps the weights that are to be repaired towards."""
        self._remember()

    def _remember(self) -> None:
        self.base = {name: value.detach().clone() for name, value in self.model.state_dict().items()}

    def parameters(self, lesson: TaskData) -> list[nn.Parameter]:
        """Everything but the norms, which stand still from the second task on: they have no Gram."""
        trained = super().parameters(lesson)
        if lesson.task == 0 and not self.pretrained:
            return trained
        norms = {id(parameter) for norm in batch_norms(self.model) for parameter in norm.parameters()}
        return [parameter for parameter in trained if id(parameter) not in norms]

    def train_mode(self, lesson: TaskData) -> None:
        """Training mode, except that BatchNorm stands still from the second task on."""
        self.model.train()
        if lesson.task > 0:
            hold_statistics(self.model)

    def after_task(self, lesson: TaskData) -> Mapping[str, Any]:
        """Repairs, fits the head again, and adds the task's inputs to the Grams that are kept."""
        notes: dict[str, Any] = {}
        if lesson.task > 0 or self.pretrained:
            with self.context.watch.phase("decomposition"):
                notes["repair"] = self._repair(lesson)
                pause()
                self._refit(lesson)
        self.base = {}
        if lesson.task < self.context.tasks - 1:
            self._keep(self._batches(lesson))
            pause()
        return notes

    def _keep(self, batches: list[Any]) -> None:
        """Adds the Grams of these inputs to those that are kept."""
        with self.context.watch.phase("observing"):
            guard = ness.NullSpace(self.model, exclude=["heads"])
            guard.observe(batches, forward=features_of)
            for name, gram in guard.grams.items():
                self.grams[name] = self.grams[name] + gram if name in self.grams else gram

    def _batches(self, lesson: TaskData) -> list[Any]:
        return list(observed(self.model, (lesson.train,), self.context.training, mixed=False))

    def _repair(self, lesson: TaskData) -> list[dict[str, Any]]:
        try:
            done = ness.repair(
                self.model,
                self.base,
                old=self.grams,
                new=self._batches(lesson),
                strength=self.own.strength * (lesson.task + self.pretrained),
                passes=self.own.passes,
                ridge=self.own.ridge,
                new_under=self.own.new_under,
                exclude=["heads"],
                others="base",
                inplace=True,
                forward=features_of,
            )
        except NessError as error:
            if "equal, bit for bit" in str(error):  # nothing trained: nothing was forgotten
                return []
            raise
        return [
            {"name": row.name, "old_before": row.old_before, "old_after": row.old_after, "kept": row.kept}
            for row in done.rows
        ]

    def _refit(self, lesson: TaskData) -> None:
        """The head's cross-entropy on the repaired features, by L-BFGS from where it is."""
        if not self.own.refit:
            return
        head = self.model.heads[lesson.task]
        with torch.no_grad():
            batches = self._batches(lesson)
            features = torch.cat([features_of(self.model, batch) for batch in batches])
            labels = torch.cat([batch.labels for batch in batches])
        parameters = list(head.parameters())
        flags = [parameter.requires_grad for parameter in parameters]
        optimizer = torch.optim.LBFGS(parameters, max_iter=self.own.refit, line_search_fn="strong_wolfe")

        def loss() -> Tensor:
            optimizer.zero_grad()
            decay = torch.stack([parameter.square().sum() for parameter in parameters]).sum()
            value = nn.functional.cross_entropy(head(features), labels) + self.own.refit_decay / 2 * decay
            value.backward()  # type: ignore[no-untyped-call]
            return value

        with torch.enable_grad():
            head.requires_grad_(True)
            optimizer.step(loss)  # type: ignore[no-untyped-call]
        for parameter, flag in zip(parameters, flags, strict=True):
            parameter.requires_grad_(flag)
            parameter.grad = None

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The Grams; the weights before the task are the model's own where a task is taken up."""
        tensors = {name: gram.matrix for name, gram in self.grams.items()}
        return tensors, {"counts": {name: gram.count for name, gram in self.grams.items()}}

    def load_state(self, tensors: dict[str, Tensor], manifest: dict[str, Any]) -> None:
        """Puts the Grams back, and keeps the model as it was when the task began."""
        device = self.context.device
        self.grams = {
            name: ness.Gram(tensors[name].to(device), count) for name, count in manifest.get("counts", {}).items()
        }
        self._remember()


def check(settings: Any) -> None:
    """Refuses a strength below 0, and counts that are none."""
    if not 0 <= settings.strength < float("inf"):
        raise NessError(f"strength is {settings.strength}, expected a number, at least 0, e.g. 10")
    if not 0 <= settings.new_under <= 1:
        raise NessError(f"new_under is {settings.new_under}, expected a number from 0 to 1")
    if settings.passes < 1:
        raise NessError(f"passes is {settings.passes}, expected at least 1")
    if not 1e-14 <= settings.ridge <= 1:
        raise NessError(f"ridge is {settings.ridge}, expected a share from 1e-14 to 1, e.g. 1e-3")
    if settings.refit < 0 or settings.refit_decay < 0:
        raise NessError(f"refit is {settings.refit} and refit_decay {settings.refit_decay}, expected at least 0")


def kept_at_most(sizes: Sizes, own: Any) -> int:
    """Bytes of a float64 Gram per layer, and of the model as the task found it."""
    return 4 * sizes.parameters + sum(8 * width * width for _, width in sizes.layers)


# Training itself is the benchmark's, as for `finetune`. Strength and ridge were chosen on digits; a benchmark that is
# tuned (`ness tune --method repair --over strength=3,10,30`) gets its own line here.
PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "fixed": {
        "*": {"ridge": 1e-3},
        "digits": {"strength": 10.0},
        "cifar100": {"strength": 10.0},
        "five-datasets": {"strength": 10.0},
        "mini-imagenet": {"strength": 10.0},
    },
    "reference": {},
    "paper": {},
}

METHOD = MethodSpec(
    name="repair",
    title="Plain training, then what it changed is reshaped",
    build=Repair,
    keeps="one Gram per layer (d × d), and the model while a task trains",
    kept_at_most=kept_at_most,
    paper="this project: docs/repair.md",
    year=2026,
    settings=RepairSettings,
    presets=PRESETS,
    check=check,
)
