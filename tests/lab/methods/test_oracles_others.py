"""Penalties, masks, replay and null spaces against their published rules, restated here; on the ResNet18 too."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

from ness.lab import registry
from ness.lab.networks.base import Network
from ness.lab.training.loader import Batch
from oracles import Rule, Tensors, beside, float64

RESNET18 = registry.all_networks()["resnet18-32"]
RESNET = {"network": RESNET18, "shape": (3, 32, 32), "count": 6, "tasks": 2, "batch": 3, "epochs": 1}
FEW = pytest.mark.filterwarnings("ignore:fewer rows than inputs")
BOTH = pytest.mark.parametrize("network", [{}, RESNET], ids=["tiny", "resnet18"])


@pytest.fixture(autouse=True)
def _in_float64() -> Iterator[None]:
    with float64():
        yield


class Ewc(Rule):
    """Kirkpatrick et al. as the HAT repository has it: CE + λ/2 Σ F (θ - θ*)²; F the mean of 20·(mean gradient of 20
    samples)² over the images in stored order, F ← (F_t + k F)/(k + 1)."""

    fisher: Tensors | None = None

    def step(self, batch: Batch) -> None:
        def loss(p: Tensors) -> Tensor:
            found = self.cross_entropy(batch)(p)
            for name in self.fisher or ():
                found = found + self.own.penalty / 2 * (self.fisher[name] * (p[name] - self.anchor[name]) ** 2).sum()
            return found

        g = self.gradients(loss, self.trained())
        size = math.sqrt(sum(float((v**2).sum()) for v in g.values()))
        self.descend({name: v * min(1.0, self.own.clip / (size + 1e-6)) for name, v in g.items()})

    def after(self) -> None:
        x, y = self.images(self.task)
        new = {name: torch.zeros_like(value) for name, value in self.p.items()}
        for rows in torch.arange(len(x)).split(20):

            def loss(p: Tensors, rows: Tensor = rows) -> Tensor:
                return F.cross_entropy(self.logits(x[rows], self.task, p), y[rows])

            for name, g in self.gradients(loss, self.trained()).items():
                new[name] = new[name] + 20 * g**2 / len(x)
        old, k = self.fisher or new, self.task
        self.fisher = {name: (new[name] + k * old[name]) / (k + 1) for name in new}
        self.anchor = {name: value.clone() for name, value in self.p.items()}


class Hat(Rule):
    """Serrà et al.: units gated by σ(s e), s annealed over an epoch; gradients of weights between claimed units are
    blocked, those of e mended; λ Σ a (1 - m)/Σ(1 - m) beside the loss."""

    def __init__(self, one: Any, plain: Network) -> None:
        super().__init__(one, plain)
        self.gates = list(dict.fromkeys(wire.writes for wire in plain.wires))
        self.units = {w.writes: plain.get_parameter(f"{w.layer}.weight").shape[0] for w in plain.wires}
        self.claimed = {name: torch.zeros(self.units[name]) for name in self.gates}
        self.e: list[Tensors] = []
        self.now: Tensors = {}
        for name in self.gates:
            plain.get_submodule(name).register_forward_hook(self.gate(name))

    def gate(self, name: str) -> Any:
        return lambda module, inputs, y: y * self.now[name].view(1, -1, *[1] * (y.ndim - 2))

    def logits(self, x: Tensor, task: int, p: Tensors | None = None) -> Tensor:
        if p is None:  # at test
            self.now = {name: torch.sigmoid(self.own.smax * self.e[task][name]) for name in self.gates}
        found: Tensor = functional_call(
            self.net, {n: v for n, v in (p or self.p).items() if not n.startswith("e/")}, (x, task)
        )
        return found

    def before(self) -> None:
        drawn = self.one.method.embeddings[self.task].detach()
        self.e.append(dict(zip(self.gates, drawn.clone().split(list(self.units.values())), strict=True)))

    def step(self, batch: Batch) -> None:
        smax = self.own.smax
        s = 1 / smax + (smax - 1 / smax) * float(batch.clock.within)
        at = {**self.p, **{f"e/{name}": value for name, value in self.e[self.task].items()}}

        def loss(p: Tensors) -> Tensor:
            self.now = {name: torch.sigmoid(s * p[f"e/{name}"]) for name in self.gates}
            used = sum((self.now[name] * (1 - self.claimed[name])).sum() for name in self.gates)
            free = sum((1 - self.claimed[name]).sum() for name in self.gates)
            return self.cross_entropy(batch)(p) + self.own.sparsity * used / free

        g = self.gradients(loss, [*self.trained(), *(f"e/{name}" for name in self.gates)], at)
        if self.task:
            for wire in self.net.wires:
                out = self.claimed[wire.writes]
                weight = g[f"{wire.layer}.weight"]
                both = out.unsqueeze(1).expand(len(out), weight.shape[1])
                if wire.reads is not None:
                    into = self.claimed[wire.reads]
                    places = weight.shape[1] // len(into)  # of a map, behind which a linear layer sees it
                    both = torch.stack([out.clamp(max=unit) for unit in into.tolist() for _ in range(places)], 1)
                weight *= (1 - both).view(*both.shape, *[1] * (weight.ndim - 2))
                for part in ("weight", "bias") if wire.norm else ():
                    g[f"{wire.norm}.{part}"] *= 1 - out
        for name in self.gates:
            e = self.e[self.task][name]
            g[f"e/{name}"] *= smax / s * (torch.cosh((s * e).clamp(-50, 50)) + 1) / (torch.cosh(e) + 1)
        size = math.sqrt(sum(float((v**2).sum()) for v in g.values()))
        g = {name: v * min(1.0, self.own.clip / (size + 1e-6)) for name, v in g.items()}
        for name in self.gates:
            self.e[self.task][name] = (self.e[self.task][name] - self.lr * g.pop(f"e/{name}")).clamp(-6, 6)
        self.descend(g)

    def after(self) -> None:
        for name in self.gates:
            opened = torch.sigmoid(self.own.smax * self.e[self.task][name])
            self.claimed[name] = torch.maximum(self.claimed[name], opened)


class Agem(Rule):
    """Chaudhry et al.: g ← g - (g·r / r·r) r where g·r < 0, with r the gradient of the mean loss of the memory, each
    sample under its own head; of everything that trains, old heads included."""

    conflicts = 0

    def step(self, batch: Batch) -> None:
        names = [n for n in self.p if not n.startswith("heads") or int(n.split(".")[1]) <= self.task]
        g = self.gradients(self.cross_entropy(batch), names)
        if self.task:
            old = [self.images(task) for task in range(self.task)]

            def remembered(p: Tensors) -> Tensor:
                losses = [F.cross_entropy(self.logits(x, t, p), y, reduction="none") for t, (x, y) in enumerate(old)]
                return torch.cat(losses).mean()

            r = self.gradients(remembered, names)
            dot = sum(float((g[n] * r[n]).sum()) for n in names)
            if dot < 0:
                self.conflicts += 1
                g = {n: g[n] - dot / sum(float((v**2).sum()) for v in r.values()) * r[n] for n in names}
        self.descend(g)


class Ness(Rule):
    """Pham et al.: U the eigenvectors of Σ x xᵀ with σ ≤ ε Σσ; W + (U V)ᵀ with V trained from 0, under decay, beside
    the head; merged after the task. Task 1 is ordinary training, decay included."""

    def __init__(self, one: Any, plain: Network) -> None:
        super().__init__(one, plain)
        self.gram: Tensors = {}
        self.u: Tensors = {}
        self.v: Tensors = {}

    def whole(self, p: Tensors) -> Tensors:
        """W + (U V)ᵀ of every layer."""
        found = {n: value for n, value in p.items() if "/" not in n}
        for name, u in self.u.items():
            w = p[f"{name}.weight"]
            found[f"{name}.weight"] = w + (u @ p[f"v/{name}"]).mT.view_as(w)
        return found

    def logits(self, x: Tensor, task: int, p: Tensors | None = None) -> Tensor:
        found: Tensor = functional_call(self.net, self.whole({**self.v, **(p or self.p)}), (x, task))
        return found

    def before(self) -> None:
        for name, c in self.gram.items():
            squares, q = torch.linalg.eigh(c)
            sigma = squares.clamp(min=0).sqrt()
            self.u[name] = q[:, sigma <= self.own.eps * sigma.sum()]
            self.v[f"v/{name}"] = torch.zeros(self.u[name].shape[1], len(self.p[f"{name}.weight"]))

    def step(self, batch: Batch) -> None:
        names = self.trained() if self.task == 0 else [*self.v, f"heads.{self.task}.weight"]
        at = {**self.p, **self.v}
        g = self.gradients(self.cross_entropy(batch), names, at)
        if self.training.optimizer == "sam":
            size = math.sqrt(sum(float((v**2).sum()) for v in g.values()))
            up = {**at, **{n: at[n] + self.training.rho * v / size for n, v in g.items()}}
            g = self.gradients(self.cross_entropy(batch), names, up)
        for n in names:
            v = g[n] + self.training.weight_decay * at[n]
            if self.momentum:
                v = self.buffers[n] = self.momentum * self.buffers.get(n, torch.zeros_like(v)) + v
            (self.v if n in self.v else self.p)[n] = at[n] - self.lr * v

    def after(self) -> None:
        self.p = {n: value.detach() for n, value in self.whole({**self.p, **self.v}).items()}
        self.u, self.v = {}, {}
        if self.task + 1 < self.one.context.tasks:
            for name, c in self.grams(self.task).items():
                self.gram[name] = self.gram.get(name, 0) + c


class NessPlus(Ness):
    """Ours, under the soft rule: K the k strongest directions of the first Gram, Q σ² Qᵀ the rest of the Gram beside
    them; s = min(1, τ/σ), below .02 none; W + A diag(s) Qᵀ + B Kᵀ with A merged, and B, γ and β the task's own."""

    def __init__(self, one: Any, plain: Network) -> None:
        super().__init__(one, plain)
        self.k: Tensors = {}
        self.private: dict[int, Tensors] = {0: {}}
        self.norms: dict[int, Tensors] = {}

    def whole(self, p: Tensors) -> Tensors:
        found = {n: value for n, value in p.items() if "/" not in n}
        for name, u in self.u.items():
            w = p[f"{name}.weight"]
            found[f"{name}.weight"] = w + (p[f"v/{name}"] @ u.mT + p[f"b/{name}"] @ self.k[name].mT).view_as(w)
        return found

    def before(self) -> None:
        for name, c in self.gram.items():
            d = len(c)
            squares, q = torch.linalg.eigh(c)
            tau = self.own.eps * squares.clamp(min=0).sqrt().sum()
            if name not in self.k:
                self.k[name] = q.flip(1)[:, : min(self.own.private, d // 3)]
            rest = torch.linalg.qr(self.k[name], mode="complete")[0][:, self.k[name].shape[1] :]
            squares, inner = torch.linalg.eigh(rest.mT @ c @ rest)
            s = (tau / squares.clamp(min=0).sqrt()).clamp(max=1)
            self.u[name] = (rest @ inner * s)[:, s >= 0.02]
            outputs = len(self.p[f"{name}.weight"])
            self.v[f"v/{name}"] = torch.zeros(outputs, self.u[name].shape[1])
            self.v[f"b/{name}"] = torch.zeros(outputs, self.k[name].shape[1])

    def step(self, batch: Batch) -> None:
        norms = [n for n in self.p if not n.startswith("heads") and n.rpartition(".")[0] not in self.layers]
        names = self.trained() if self.task == 0 else [*self.v, *norms, f"heads.{self.task}.weight"]
        at = {**self.p, **self.v}
        for n, g in self.gradients(self.cross_entropy(batch), names, at).items():
            (self.v if n in self.v else self.p)[n] = at[n] - self.lr * g

    def after(self) -> None:
        used = {n: value.detach() for n, value in self.whole({**self.p, **self.v}).items()}
        self.norms[self.task] = {
            n: self.p[n] for n in self.p if not n.startswith("heads") and n.rpartition(".")[0] not in self.layers
        }
        self.private[self.task] = {
            name: (self.v[f"b/{name}"] @ self.k[name].mT).detach() for name in self.layers if f"b/{name}" in self.v
        }
        self.p = dict(used)
        for name, b in self.private[self.task].items():
            self.p[f"{name}.weight"] = used[f"{name}.weight"] - b.view_as(used[f"{name}.weight"])
        self.u, self.v = {}, {}
        if self.task + 1 < self.one.context.tasks:
            for name, c in self.grams(self.task, used).items():
                self.gram[name] = self.gram.get(name, 0) + c

    def weights(self) -> Tensors:
        return self.as_used(self.task)

    def as_used(self, task: int) -> Tensors:
        """The weights of a task that has been learnt."""
        found = {**self.p, **self.norms[task]}
        for name, b in self.private[task].items():
            found[f"{name}.weight"] = found[f"{name}.weight"] + b.view_as(found[f"{name}.weight"])
        return found

    def logits(self, x: Tensor, task: int, p: Tensors | None = None) -> Tensor:
        if p is None:
            p = self.as_used(task)
        return super().logits(x, task, p)


@BOTH
def test_ewc(network: dict[str, Any]) -> None:
    changes = {"penalty": 50.0, "convention": "hat", "fisher": "batch", "optimizer": "sgd", "clip": 100.0}
    _, other = beside("ewc", Ewc, **{"count": 36, **network}, **changes)
    assert max(float(value.max()) for value in other.fisher.values()) > 1e-3


@BOTH
def test_hat(network: dict[str, Any]) -> None:
    _, other = beside("hat", Hat, optimizer="sgd", smax=50.0, **network)
    claimed = torch.cat(list(other.claimed.values()))
    assert (claimed > 0.9).any()
    assert (claimed < 0.1).any()


@BOTH
def test_agem(network: dict[str, Any]) -> None:
    count = network.get("count", 36)
    _, other = beside("agem", Agem, optimizer="sgd", memory=count, memory_batch=3 * count, **network)
    assert other.conflicts


@pytest.mark.parametrize(
    ("optimizer", "network"), [("sgdm", {}), ("sam", {}), ("sgdm", RESNET)], ids=["sgdm", "sam", "resnet18"]
)
@FEW
def test_ness(optimizer: str, network: dict[str, Any]) -> None:
    beside("ness", Ness, optimizer=optimizer, eps=0.02, weight_decay=0.02, tolerance=1e-7, **network)


@FEW
def test_ness_plus() -> None:
    changes = {"rule": "soft", "eps": 0.02, "private": 4, "norm": "batch", "optimizer": "sgd", "weight_decay": 0.0}
    _, other = beside("ness-plus", NessPlus, tolerance=1e-7, **changes)
    assert all(float(b.abs().max()) > 1e-4 for b in other.private[2].values())
