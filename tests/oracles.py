"""A run of a method in float64 beside a restatement of its published rule: same start, same batches, step by step.

What is random is given to the restatement (batches, and whatever a test notes down of a run); all else it works out for
itself, from the images and its own weights, with none of the package's mathematics.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

import tiny
from ness.lab import registry
from ness.lab.benchmarks.base import Split, Stream, Task
from ness.lab.networks.base import Network, NetworkSpec, build
from ness.lab.training.loader import Batch, Samples, fixed_order
from ness.lab.training.loop import Trainer
from ness.lab.training.seeds import Randomness

Tensors = dict[str, Tensor]
CPU = torch.device("cpu")


@contextmanager
def float64() -> Iterator[None]:
    """All that is float32 elsewhere, what methods keep included, is float64 inside."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "float", Tensor.double)
        yield
    torch.set_default_dtype(before)


def stream(shape: tuple[int, ...], count: int, tasks: int, classes: int = 3) -> Stream:
    """Noisy images of a class's own mean, normalised, in float64."""
    generator = torch.Generator().manual_seed(5)

    def split(task: int, number: int) -> Split:
        labels = torch.arange(number) % classes
        means = torch.randn(classes, *shape, generator=torch.Generator().manual_seed(100 + task % 2))
        noise = torch.randn(number, *shape, generator=generator)
        return Split(means[labels] + 0.5 * noise + 0.3 * task, labels)

    made = [Task(f"task {t}", classes, split(t, count), split(t, 9), split(t, 9), (0.0,), (1.0,)) for t in range(tasks)]
    return Stream("oracle", tuple(made))


class Rule:
    """The restatement: weights by name, in place of the network's own; this class alone is fine-tuning with SGD."""

    def __init__(self, one: Trainer, plain: Network) -> None:
        self.one, self.net, self.own = one, plain, one.context.own
        self.training = one.training
        self.lr = self.training.lr
        self.momentum = self.training.momentum if self.training.optimizer == "sgdm" else 0.0
        self.p: Tensors = {name: value.detach().clone() for name, value in plain.named_parameters()}
        self.layers = {
            name: module
            for name, module in plain.named_modules()
            if isinstance(module, nn.Linear | nn.Conv2d) and not name.startswith("heads")
        }
        self.buffers: Tensors = {}
        self.task = 0

    # -- the network ------------------------------------------------------------------------------------------------

    def logits(self, x: Tensor, task: int, p: Tensors | None = None) -> Tensor:
        found: Tensor = functional_call(self.net, p or self.p, (x, task))
        return found

    def inputs(self, x: Tensor, p: Tensors | None = None) -> Tensors:
        """The rows (n, d) that each layer sees of images that pass together."""
        seen: Tensors = {}

        def keep(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
                seen[name] = inputs[0].detach()

            return hook

        handles = [module.register_forward_pre_hook(keep(name)) for name, module in self.layers.items()]
        with torch.no_grad():
            self.logits(x, 0, p)
        for handle in handles:
            handle.remove()
        return {name: self.rows(name, each) for name, each in seen.items()}

    def rows(self, name: str, x: Tensor) -> Tensor:
        module = self.layers[name]
        if isinstance(module, nn.Linear):
            return x
        patches = F.unfold(x, module.kernel_size, padding=module.padding, stride=module.stride)  # type: ignore[arg-type]
        return patches.mT.reshape(-1, patches.shape[1])

    def images(self, task: int) -> tuple[Tensor, Tensor]:
        samples: Samples = self.one.data["train"][task]
        return samples.images, samples.labels

    def in_batches(self, task: int) -> list[Tensor]:
        """A task's images as they pass when all of them are looked at: in a given order, so many at a time."""
        x, _ = self.images(task)
        return list(torch.split(x[fixed_order(len(x), task, "train", CPU)], self.training.batch))

    def grams(self, task: int, p: Tensors | None = None) -> Tensors:
        """Σ x xᵀ (d, d) of every layer over a task."""
        found: Tensors = {}
        for x in self.in_batches(task):
            for name, rows in self.inputs(x, p).items():
                found[name] = found.get(name, 0) + rows.mT @ rows
        return found

    # -- a step -----------------------------------------------------------------------------------------------------

    def trained(self) -> list[str]:
        """Names of what moves: shared weights and the task's head."""
        return [name for name in self.p if not name.startswith("heads") or name == f"heads.{self.task}.weight"]

    def gradients(self, loss: Callable[[Tensors], Tensor], names: list[str], at: Tensors | None = None) -> Tensors:
        leaves = {name: value.detach().clone().requires_grad_() for name, value in (at or self.p).items()}
        found = torch.autograd.grad(loss(leaves), [leaves[n] for n in names], allow_unused=True)
        return {n: torch.zeros_like(leaves[n]) if g is None else g for n, g in zip(names, found, strict=True)}

    def cross_entropy(self, batch: Batch) -> Callable[[Tensors], Tensor]:
        return lambda p: F.cross_entropy(self.logits(batch.images, batch.task, p), batch.labels)

    def descend(self, gradients: Tensors) -> None:
        for name, g in gradients.items():
            if self.momentum:
                g = self.buffers[name] = self.momentum * self.buffers.get(name, torch.zeros_like(g)) + g
            self.p[name] = self.p[name] - self.lr * g

    def step(self, batch: Batch) -> None:
        self.descend(self.gradients(self.cross_entropy(batch), self.trained()))

    def before(self) -> None:
        """When a task begins; `task` is its number."""

    def after(self) -> None:
        """When a task has ended."""

    def weights(self) -> Tensors:
        """What the network must hold by now."""
        return self.p


def plain_network(spec: NetworkSpec, data: Stream) -> Network:
    """The network as a run of seed 1 begins with it."""
    random = Randomness.of(1, CPU)
    classes = [task.classes for task in data.tasks]
    made = {"weights": random.weights, "dropout": random.step}
    found = build(spec, tuple(data.tasks[0].train.images.shape[1:]), classes, "batch", **made, device=CPU)
    return found.eval()


def still(network: Network) -> None:
    for module in network.modules():
        if hasattr(module, "p"):
            module.p = 0.0


def beside(
    method: str,
    restated: type[Rule],
    *,
    network: NetworkSpec = tiny.WITHOUT_BIAS,
    shape: tuple[int, ...] = (1, 6, 6),
    count: int = 36,
    tasks: int = 3,
    prepare: Callable[[Trainer], Any] = lambda one: None,
    tolerance: float = 1e-8,
    **changes: Any,
) -> tuple[Trainer, Rule]:
    """Trains both, comparing all weights after every step, and each seen task's logits after every task."""
    data = stream(shape, count, tasks)
    spec = registry.all_methods()[method]
    drawn = [name for name in ("samples", "trust_images") if hasattr(spec.settings(), name)]
    changes = {**dict.fromkeys(drawn, count), "epochs": 2, "batch": 12, "lr": 0.05, **changes}
    job = tiny.job(method, **changes)
    one = Trainer(job.method, network, data, replace(job.settings), 1)
    still(one.context.model)
    other = restated(one, plain_network(network, data))
    held = prepare(one)
    if held is not None:
        other.given = held  # type: ignore[attr-defined]
    while not one.done:
        other.task = one.at
        one.begin_task()
        other.buffers = {}
        other.before()
        for epoch in range(one.training.epochs):
            for inputs in one.open_epoch():
                batch = one.learning.lesson.train.take(inputs.index)
                one.learning.step(inputs)
                other.step(replace(batch, clock=inputs.clock, rate=inputs.lr))
                if not one.method.__class__.__name__.startswith("Ness"):  # whose weights stand beside an update
                    assert_same(one, other, tolerance)
            penalty = None if one.method.penalty(one.learning.lesson) is None else 0.0
            one.close_epoch(1.0, 1.0 - 0.1 * epoch, 50.0, penalty)
        assert one.learning.over
        one.finish_task()
        other.after()
        assert_same(one, other, tolerance)
        one.context.model.eval()
        for task in range(one.at):
            one.method.use(task)
            batch = one.data["test"][task].take(torch.arange(9))
            with torch.no_grad():
                torch.testing.assert_close(
                    one.method.logits(batch), other.logits(batch.images, task), rtol=tolerance, atol=tolerance
                )
        one.method.use(one.at - 1)
    moved = {n: float((value - dict(other.net.named_parameters())[n]).abs().max()) for n, value in other.p.items()}
    assert all(moved[f"{name}.weight"] > 1e-3 for name in list(other.layers)[:1]), moved  # it learnt something
    return one, other


def assert_same(one: Trainer, other: Rule, tolerance: float) -> None:
    expected = other.weights()
    for name, value in one.context.model.named_parameters():
        torch.testing.assert_close(
            value.detach(), expected[name].detach(), rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )
