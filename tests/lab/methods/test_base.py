"""The interface carries the methods still to come: each shape of method as a few lines, cut and taken up in a task."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import tiny
from ness.lab.methods.base import Context, Method, MethodSpec, TaskData, clear
from ness.lab.runs import checkpoint
from ness.lab.training.loader import Batch, Samples
from ness.lab.training.losses import cross_entropy


class Projecting(Method):
    """GPM's shape: bases from end-of-task inputs, gradients projected after backward, norms frozen."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.basis: dict[str, Tensor] = {}

    def after_backward(self, batch: Batch) -> None:
        if self.basis:
            weight = self.model.fc.weight
            weight.grad -= weight.grad @ self.basis["fc"] @ self.basis["fc"].T
            self.model.norm.weight.grad = self.model.norm.bias.grad = None

    def after_task(self, lesson: TaskData) -> Mapping[str, Any]:
        index = torch.randperm(len(lesson.train), generator=self.context.random.method)[:20]
        seen: list[Tensor] = []
        hook = self.model.fc.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
        self.model.eval()
        with torch.no_grad():
            self.model.features(lesson.train.take(index).images)
        hook.remove()
        self.basis["fc"] = torch.linalg.svd(seen[0].T, full_matrices=False)[0][:, :5]
        return {"rank": 5}

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return dict(self.basis), {}

    def load_state(self, tensors: dict[str, Tensor], manifest: dict[str, Any]) -> None:
        self.basis = dict(tensors)


class Scaling(Method):
    """TRGP's and CODE-CL's shape: a task's own matrices change the weights it is used with, at test too."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.scales: list[nn.Parameter] = []

    def before_task(self, lesson: TaskData) -> None:
        loss = cross_entropy(
            self.model(lesson.train.take(torch.arange(20)).images, lesson.task),
            Batch(torch.empty(0), lesson.train.labels[:20], lesson.task),
        )
        torch.autograd.grad(loss, self.model.fc.weight)  # the first gradient on the new task's data
        self.scales.append(nn.Parameter(torch.ones(36)))

    def parameters(self, lesson: TaskData) -> list[nn.Parameter]:
        return [*super().parameters(lesson), self.scales[lesson.task]]

    def logits(self, batch: Batch) -> Tensor:
        weights = {"fc.weight": self.model.fc.weight * self.scales[batch.task]}
        out: Tensor = functional_call(self.model, weights, (batch.images, batch.task))
        return out

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return {str(i): scale.detach() for i, scale in enumerate(self.scales)}, {}

    def load_state(self, tensors: dict[str, Tensor], manifest: dict[str, Any]) -> None:
        self.scales = [nn.Parameter(tensors[str(i)].clone()) for i in range(len(tensors))]


class Replaying(Method):
    """A-GEM's and FS-DGPM's shape: a memory of samples, several passes a step, old heads trained through replay."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.memory: list[Samples] = []

    def parameters(self, lesson: TaskData) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def gradients(self, batch: Batch, trained, *, sam: bool) -> Tensor:
        loss = self.loss(batch)
        for samples in self.memory:
            draw = torch.randint(len(samples), (8,), generator=self.context.random.step)
            loss = loss + self.loss(samples.take(draw))
        clear(trained)
        loss.backward()
        return loss

    def after_task(self, lesson: TaskData) -> Mapping[str, Any]:
        train = lesson.train
        self.memory.append(Samples(train.images[:10], train.labels[:10], train.task, train.mean, train.std))
        return {}

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        kept = {f"{m.task}/{key}": getattr(m, key) for m in self.memory for key in ("images", "labels", "mean", "std")}
        return kept, {"tasks": [m.task for m in self.memory]}

    def load_state(self, tensors: dict[str, Tensor], manifest: dict[str, Any]) -> None:
        keys = ("images", "labels", "mean", "std")
        for task in manifest["tasks"]:
            held = {key: tensors[f"{task}/{key}"] for key in keys}
            self.memory.append(Samples(task=task, **held))


class Gated(Method):
    """HAT's shape: gates on hidden units by hooks, annealed by the clock, a regulariser, gradients masked, clamps."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.embeddings = [
            nn.Parameter(torch.randn(16, generator=context.random.weights)) for _ in range(context.tasks)
        ]
        self.used = torch.zeros(16)
        self.gate: Tensor | None = None
        self.model.fc.register_forward_hook(lambda module, inputs, output: output * self.gate)

    def parameters(self, lesson: TaskData) -> list[nn.Parameter]:
        return [*super().parameters(lesson), self.embeddings[lesson.task]]

    def logits(self, batch: Batch) -> Tensor:
        scale = 5.0 if batch.clock is None else 0.2 + 4.8 * batch.clock.within
        self.gate = torch.sigmoid(scale * self.embeddings[batch.task])
        return super().logits(batch)

    def loss(self, batch: Batch) -> Tensor:
        return super().loss(batch) + 0.1 * (torch.sigmoid(self.embeddings[batch.task]) * (1 - self.used)).mean()

    def after_backward(self, batch: Batch) -> None:
        self.model.fc.weight.grad *= (1 - self.used)[:, None]

    def after_step(self, batch: Batch) -> None:
        with torch.no_grad():
            self.embeddings[batch.task].clamp_(-6, 6)

    def after_task(self, lesson: TaskData) -> Mapping[str, Any]:
        self.used = torch.maximum(self.used, torch.sigmoid(5.0 * self.embeddings[lesson.task].detach()))
        return {}

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return {str(i): e.detach() for i, e in enumerate(self.embeddings)} | {"used": self.used}, {}

    def load_state(self, tensors: dict[str, Tensor], manifest: dict[str, Any]) -> None:
        self.used = tensors["used"].clone()
        with torch.no_grad():
            for i, embedding in enumerate(self.embeddings):
                embedding.copy_(tensors[str(i)])


class Anchored(Method):
    """EWC's shape: a penalty around the last weights, weighted by squared gradients taken at the end of a task."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.anchor: dict[str, Tensor] = {}
        self.fisher: dict[str, Tensor] = {}

    def loss(self, batch: Batch) -> Tensor:
        named = dict(self.model.named_parameters())
        penalty = sum(((named[n] - self.anchor[n]).square() * f).sum() for n, f in self.fisher.items())
        return super().loss(batch) + 5 * penalty

    def after_task(self, lesson: TaskData) -> Mapping[str, Any]:
        self.train_mode(lesson)
        named = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        for batch in lesson.train.batches(lesson.train.stored_order(), 20):
            found = torch.autograd.grad(super().loss(batch), list(named.values()))
            for name, gradient in zip(named, found, strict=True):
                self.fisher[name] = self.fisher.get(name, torch.zeros_like(gradient)) + gradient.square()
        self.anchor = {name: value.detach().clone() for name, value in self.model.named_parameters()}
        return {}

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return {f"a/{n}": v for n, v in self.anchor.items()} | {f"f/{n}": v for n, v in self.fisher.items()}, {}

    def load_state(self, tensors: dict[str, Tensor], manifest: dict[str, Any]) -> None:
        self.anchor = {name[2:]: value for name, value in tensors.items() if name.startswith("a/")}
        self.fisher = {name[2:]: value for name, value in tensors.items() if name.startswith("f/")}


class PrivateNorms(Method):
    """Norms of its own for each task, switched before evaluation."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.kept: list[dict[str, Tensor]] = []

    def after_task(self, lesson: TaskData) -> Mapping[str, Any]:
        self.kept.append({name: value.clone() for name, value in self.model.norm.state_dict().items()})
        return {}

    def use(self, task: int) -> None:
        self.model.norm.load_state_dict(self.kept[task])

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return {f"{i}/{n}": v for i, norm in enumerate(self.kept) for n, v in norm.items()}, {"tasks": len(self.kept)}

    def load_state(self, tensors: dict[str, Tensor], manifest: dict[str, Any]) -> None:
        names = list(self.model.norm.state_dict())
        self.kept = [{n: tensors[f"{i}/{n}"] for n in names} for i in range(manifest["tasks"])]


SHAPES = [Projecting, Scaling, Replaying, Gated, Anchored, PrivateNorms]


@pytest.mark.parametrize("shape", SHAPES)
def test_trains_and_is_taken_up_bit_for_bit(shape: type[Method], tmp_path: Path) -> None:
    spec = MethodSpec(shape.__name__.lower(), "for tests", shape, "something")
    whole = tiny.trainer(spec, norm="stored")
    cuts = []
    for number in range(100):
        if whole.done:
            break
        whole.advance()
        if number in (2, 4, 7, 9, 12):
            later = tiny.trainer(spec, norm="stored")
            later.load_state(*checkpoint.read(checkpoint.write(tmp_path, *whole.state())))
            cuts.append(later)
    assert len(cuts) == 5
    assert all(tiny.same(tiny.to_the_end(later), whole) for later in cuts)
    assert whole.matrix[-1][-1] > 40  # of three classes: it learns


def test_private_norms_are_in_use_when_their_task_is_evaluated() -> None:
    spec = MethodSpec("norms", "for tests", PrivateNorms, "norms")
    one = tiny.to_the_end(tiny.trainer(spec, norm="stored"))
    assert isinstance(one.method, PrivateNorms)
    assert torch.equal(one.method.kept[-1]["running_mean"], one.context.model.norm.running_mean)
    assert not torch.equal(one.method.kept[0]["running_mean"], one.method.kept[1]["running_mean"])


def test_a_method_that_keeps_nothing_refuses_a_checkpoint_that_holds_something() -> None:
    with pytest.raises(Exception, match="keeps nothing"):
        tiny.trainer("finetune").method.load_state({"x": torch.zeros(1)}, {})
