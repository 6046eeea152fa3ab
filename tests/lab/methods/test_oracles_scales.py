"""Methods that keep a scale or an importance per task, against their published rules, restated here, in float64."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

from ness.lab import registry
from ness.lab.training.loader import Batch
from ness.lab.training.loop import Trainer
from oracles import Rule, Tensors, beside, float64

RESNET18 = registry.all_networks()["resnet18-32"]
RESNET = {"network": RESNET18, "shape": (3, 32, 32), "count": 6, "tasks": 2, "batch": 3, "epochs": 1}


@pytest.fixture(autouse=True)
def _in_float64() -> Iterator[None]:
    with float64():
        yield


class Scaled(Rule):
    """W_eff = W + Σ_j W B_j (Q_j - I) B_jᵀ with B_j fixed and Q_j trained with the task, from I; G ← G - G Π.

    BatchNorm stands still from the second task on; Q has its raw gradient and the rate of all else.
    """

    def __init__(self, one: Any, plain: Any) -> None:
        super().__init__(one, plain)
        self.bases: dict[int, dict[str, list[Tensor]]] = {}  # of each task's scales
        self.q: Tensors = {}  # 'task/layer/number'
        self.projector: Tensors = {}

    def effective(self, task: int, p: Tensors) -> Tensors:
        found = dict(p)
        for name, bases in self.bases.get(task, {}).items():
            w = p[f"{name}.weight"].flatten(1)
            whole = w
            for number, b in enumerate(bases):
                q = p.get(f"{task}/{name}/{number}", self.q[f"{task}/{name}/{number}"])
                whole = whole + w @ b @ (q - torch.eye(len(q))) @ b.mT
            found[f"{name}.weight"] = whole.view_as(p[f"{name}.weight"])
        return {n: v for n, v in found.items() if "/" not in n}

    def logits(self, x: Tensor, task: int, p: Tensors | None = None) -> Tensor:
        found: Tensor = functional_call(self.net, self.effective(task, p or self.p), (x, task))
        return found

    def lend(self, chosen: dict[str, list[Tensor]]) -> None:
        self.bases[self.task] = chosen
        for name, bases in chosen.items():
            for number, basis in enumerate(bases):
                self.q[f"{self.task}/{name}/{number}"] = torch.eye(basis.shape[1])

    def objective(self, batch: Batch) -> Any:
        return self.cross_entropy(batch)

    def step(self, batch: Batch) -> None:
        own = [key for key in self.q if key.startswith(f"{self.task}/")]
        if self.task == 0:
            names = super().trained()
        else:
            names = [*(f"{name}.weight" for name in self.layers), f"heads.{self.task}.weight"]
        at = {**self.p, **{key: self.q[key] for key in own}}
        gradients = self.gradients(self.objective(batch), [*names, *own], at)
        for name, away in self.projector.items():
            g = gradients[f"{name}.weight"]
            gradients[f"{name}.weight"] = (g.flatten(1) - g.flatten(1) @ away).view_as(g)
        for key in own:
            self.q[key] = self.q[key] - self.lr * gradients.pop(key)
        self.descend(gradients)

    def first_gradient(self, task: int, scaled: bool) -> Tensors:
        """∇L of all of a task's images, by layer (o, d); at the shared weights, or under the task's scales."""
        x, y = self.images(task)

        def loss(p: Tensors) -> Tensor:
            z = self.logits(x, task, p) if scaled else functional_call(self.net, p, (x, task))
            return F.cross_entropy(z, y)

        found = self.gradients(loss, [f"{name}.weight" for name in self.layers])
        return {name: found[f"{name}.weight"].flatten(1) for name in self.layers}

    @property
    def last(self) -> bool:
        return self.task + 1 == self.one.context.tasks


class Trgp(Scaled):
    """Lin et al. 2022: scales on the subspaces of the two old tasks that hold most, more than half, of the gradient."""

    def __init__(self, one: Any, plain: Any) -> None:
        super().__init__(one, plain)
        self.memory = {name: torch.zeros(m.weight[0].numel(), 0) for name, m in self.layers.items()}
        self.own_bases: list[Tensors] = []

    def before(self) -> None:
        if self.task:
            chosen: dict[str, list[Tensor]] = {}
            for name, g in self.first_gradient(self.task, scaled=False).items():
                shares = [
                    (float((g @ each[name] @ each[name].mT).norm() / g.norm()), each[name]) for each in self.own_bases
                ]
                shares.sort(key=lambda pair: -pair[0])
                if found := [basis for share, basis in shares[: self.own.reuse] if share > self.own.trust]:
                    chosen[name] = found
            self.lend(chosen)

    def after(self) -> None:
        if self.last:
            return
        self.own_bases.append({})
        epsilon = self.own.threshold + self.own.growth * self.task
        for name, rows in self.inputs(self.images(self.task)[0]).items():
            m, r = self.memory[name], rows.mT
            left, sigma, _ = torch.linalg.svd(r - m @ m.mT @ r, full_matrices=False)
            left, sigma = left[:, : len(m) - m.shape[1]], sigma[: len(m) - m.shape[1]]
            held = torch.tensor([float((each @ r) @ (each @ r)) for each in m.mT])
            energy, vectors = torch.cat([held, sigma**2]), torch.cat([m, left], 1)
            order = sorted(range(len(energy)), key=lambda i: -float(energy[i]))
            chosen: list[int] = []
            while float(energy[chosen].sum()) < epsilon * float((r**2).sum()):
                chosen.append(order[len(chosen)])
            self.own_bases[-1][name] = vectors[:, chosen]
            self.memory[name] = torch.cat([m, vectors[:, [i for i in chosen if i >= m.shape[1]]]], 1)
        self.close()

    def close(self) -> None:
        self.projector = {name: m @ m.mT for name, m in self.memory.items()}


class Cuber(Trgp):
    """Lin et al. 2022 (b): where the gradient is sufficient and agrees, subspaces are open and held back by
    λ‖(W - W₀) B‖²; where it does not agree, they are lent."""

    def __init__(self, one: Any, plain: Any) -> None:
        super().__init__(one, plain)
        self.ended: list[Tensors] = []
        self.open: dict[str, list[Tensor]] = {}
        self.start: Tensors = {}
        self.counts = [0, 0, 0]

    def before(self) -> None:
        self.open, chosen = {}, {}
        self.start = {name: self.p[f"{name}.weight"].flatten(1) for name in self.layers}
        if self.task:
            for name, g in self.first_gradient(self.task, scaled=False).items():
                closed, lent = [], []
                for each, ended in zip(self.own_bases, self.ended, strict=True):
                    basis, old = each[name], ended[name]
                    share = float((g @ basis).norm() / g.norm())
                    agrees = float((g * old).sum()) >= self.own.agreement * float(g.norm() * old.norm())
                    regime = 1 if share < self.own.trust else 3 if agrees else 2
                    self.counts[regime - 1] += 1
                    if regime == 3:
                        self.open.setdefault(name, []).append(basis)
                        continue
                    closed.append(basis)
                    if regime == 2:
                        lent.append((share, basis))
                lent.sort(key=lambda pair: -pair[0])
                if lent:
                    chosen[name] = [basis for _, basis in lent[: self.own.reuse]]
                both = torch.cat([g[:0].mT[:, :0], *closed], 1)
                left, sigma, _ = torch.linalg.svd(both, full_matrices=False)
                left = left[:, sigma > 1e-3]
                self.projector[name] = left @ left.mT
            self.lend(chosen)

    def objective(self, batch: Batch) -> Any:
        def loss(p: Tensors) -> Tensor:
            found = self.cross_entropy(batch)(p)
            for name, bases in self.open.items():
                for basis in bases:
                    way = (p[f"{name}.weight"].flatten(1) - self.start[name]) @ basis
                    found = found + self.own.pull * (way**2).sum()
            return found

        return loss

    def after(self) -> None:
        if not self.last:
            self.ended.append(self.first_gradient(self.task, scaled=True))
        super().after()


class Codecl(Scaled):
    """Apolinario et al.: C = R (R + α⁻² I)⁻¹, R = XᵀX/n, α raised by a tenth until Σ‖C x‖ ≥ recall·Σ‖x‖; C ← C OR C_t,
    directions held below the floor let go; scales on the K strongest directions of C AND C_new."""

    def __init__(self, one: Any, plain: Any) -> None:
        super().__init__(one, plain)
        self.c: Tensors = {}

    def cut(self, c: Tensor) -> Tensor:
        values, vectors = torch.linalg.eigh((c + c.mT) / 2)
        return vectors @ torch.where(values >= self.own.floor, values, 0.0).diag() @ vectors.mT

    def both(self, c: Tensor, b: Tensor) -> Tensor:
        """AND, with zeros as 1e-8, as the reference has it."""

        def inverse(a: Tensor) -> Tensor:
            values, vectors = torch.linalg.eigh((a + a.mT) / 2)
            return vectors @ (1 / values.clamp(1e-8, 1)).diag() @ vectors.mT

        return torch.linalg.inv(inverse(c) + inverse(b) - torch.eye(len(c)))

    def of(self, x: Tensor) -> Tensor:
        r, alpha = x.mT @ x / len(x), self.own.aperture
        while True:
            c = r @ torch.linalg.inv(r + alpha**-2 * torch.eye(len(r)))
            if float((x @ c).norm(dim=1).sum()) >= self.own.recall * float(x.norm(dim=1).sum()):
                return c
            alpha *= 1.1

    def seen(self) -> Tensors:
        x, _ = self.images(self.task)
        return self.inputs(x, self.effective(self.task, self.p))

    def inputs(self, x: Tensor, p: Tensors | None = None) -> Tensors:
        mine, self.bases = self.bases, {}  # the weights given are effective already
        found = super().inputs(x, p)
        self.bases = mine
        return found

    def before(self) -> None:
        if not self.task:
            return
        chosen = {}
        for name, x in self.seen().items():
            if x.shape[1] <= (self.own.shared if self.layers[name].weight.ndim == 4 else 50):
                continue
            overlap = self.both(self.c[name], self.cut(self.of(x)))
            if float(overlap.trace()) > self.own.overlap * float(self.c[name].trace()):
                chosen[name] = [torch.linalg.eigh((overlap + overlap.mT) / 2)[1].flip(1)[:, : self.own.shared]]
        self.lend(chosen)

    def after(self) -> None:
        if self.last:
            return
        for name, x in self.seen().items():
            c, eye = self.of(x), torch.eye(x.shape[1])
            if name in self.c:
                c = eye - self.both(eye - self.c[name], eye - c)
            self.c[name] = self.cut(c)
        self.projector = self.c


class Fsdgpm(Rule):
    """Deng et al.: ascend by half the batch each, inside M diag(λ) Mᵀ, and take the gradient of the mean replayed loss
    through that; clip to 2; λ = σ(10 θ) learnt beside; G ← G - G M diag(λ) Mᵀ."""

    given: list[tuple[Any, Any]]

    def __init__(self, one: Any, plain: Any) -> None:
        super().__init__(one, plain)
        self.memory: Tensors = {}
        self.theta: Tensors = {}
        self.speed: Tensors = {}
        self.orders: list[tuple[Tensor, Any]] = []

    def step(self, batch: Batch) -> None:
        everyone, weights = self.given.pop(0)
        heads = [f"heads.{task}.weight" for task in range(self.task + 1)]
        frozen = self.task > 0
        names = [n for n in self.p if n in heads or not (n.startswith("heads") or (frozen and "norm" in n))]
        p = {n: v.detach().clone().requires_grad_() for n, v in self.p.items()}
        theta = {n: v.detach().clone().requires_grad_() for n, v in self.theta.items()}
        fast, losses = dict(p), []
        for part in torch.arange(len(batch.labels)).chunk(2):
            loss = F.cross_entropy(self.logits(batch.images[part], self.task, fast), batch.labels[part])
            own = [n for n in names if n not in heads[:-1]]
            g = dict(zip(own, torch.autograd.grad(loss, [fast[n] for n in own], create_graph=True), strict=True))
            for name, m in self.memory.items():
                flat = g[f"{name}.weight"].flatten(1) @ m @ torch.sigmoid(10 * theta[name]).diag() @ m.mT
                g[f"{name}.weight"] = flat.view_as(g[f"{name}.weight"])
            fast = {**fast, **{n: fast[n] + self.own.ascent * v.clamp(-2, 2) for n, v in g.items()}}
            total: Any = 0
            for x, y, task, weight, row in zip(
                everyone.images, everyone.labels, everyone.tasks, weights, range(len(weights)), strict=True
            ):
                del x
                if row == 0:
                    rows = [self.logits(everyone.images, t, fast) for t in range(self.task + 1)]
                total = total + weight * F.cross_entropy(rows[int(task)][row : row + 1], y.view(1))
            losses.append(total / weights.sum())
        loss = (losses[0] + losses[1]) / 2
        found = torch.autograd.grad(loss, [*(p[n] for n in names), *theta.values()], allow_unused=True)
        g = {n: torch.zeros_like(p[n]) if v is None else v for n, v in zip(names, found, strict=False)}
        size = torch.stack([v.norm() for v in g.values()]).norm()
        g = {n: v * min(1.0, 2.0 / (float(size) + 1e-6)) for n, v in g.items()}
        if theta:
            moves = dict(zip(theta, found[len(names) :], strict=True))
            size = torch.stack([v.norm() for v in moves.values()]).norm()
            for name, v in moves.items():
                self.speed[name] = 0.9 * self.speed.get(name, 0) + v * min(1.0, 2.0 / (float(size) + 1e-6))
                self.theta[name] = self.theta[name] - self.own.importance_lr * self.speed[name]
        for name, m in self.memory.items():
            w = g[f"{name}.weight"]
            away = m @ torch.sigmoid(10 * self.theta[name]).diag() @ m.mT
            g[f"{name}.weight"] = (w.flatten(1) - w.flatten(1) @ away).view_as(w)
        self.descend(g)

    def after(self) -> None:
        if self.task + 1 == self.one.context.tasks:
            return
        (order,) = self.orders[-1:]
        held = self.one.method.memory
        rows: dict[str, list[Tensor]] = {name: [] for name in self.layers}
        for task in range(self.task + 1):
            mine = [n for n in order[0].tolist() if int(held.tasks[n]) == task]
            rest = [n for n in range(int(held.filled)) if int(held.tasks[n]) == task and n not in mine]
            x = held.images[[*mine, *rest[: 64 - len(mine)]]]
            for name, found in self.inputs(x).items():
                rows[name].append(found.view(len(x), -1, found.shape[1])[: len(mine)].flatten(0, 1))
        epsilon = self.own.threshold + self.own.growth * self.task
        for name, parts in rows.items():
            left, sigma, _ = torch.linalg.svd(torch.cat(parts).mT, full_matrices=False)
            share = (sigma**2).cumsum(0) / (sigma**2).sum()
            self.memory[name] = left[:, : int((share < epsilon).sum()) + 1]
        self.theta = {name: torch.full((m.shape[1],), 0.5) for name, m in self.memory.items()}
        self.speed = {}


@pytest.mark.parametrize(("network", "tasks"), [({}, 2), (RESNET, 1)], ids=["tiny", "resnet18"])
def test_trgp(network: dict[str, Any], tasks: int) -> None:
    _, other = beside("trgp", Trgp, optimizer="sgd", trust=0.3, **network)
    assert len(other.q) >= tasks


def test_trgp_where_one_old_task_at_most_is_reused() -> None:
    beside("trgp", Trgp, optimizer="sgd", trust=0.3, reuse=1)


@pytest.mark.parametrize("agreement", [0.0, -1.0])
def test_cuber(agreement: float) -> None:
    _, other = beside("cuber", Cuber, optimizer="sgd", trust=0.3, agreement=agreement, pull=0.5)
    assert other.counts[2]
    assert other.counts[1] or agreement == -1.0


def test_codecl() -> None:
    _, other = beside("codecl", Codecl, optimizer="sgd", overlap=0.2, shared=8, recall=0.9, tolerance=1e-6)
    assert other.q


def test_fsdgpm() -> None:
    def prepare(one: Trainer) -> list[Any]:
        draws: list[Any] = []
        make = one.method._make_memory

        def making(shape: Any) -> None:
            make(shape)
            plain = one.method.memory.beside

            def noting(*given: Any) -> Any:
                draws.append(plain(*given))
                return draws[-1]

            one.method.memory.beside = noting

        one.method._make_memory = making
        return draws

    orders: list[Any] = []

    class Given(Fsdgpm):
        def __init__(self, one: Any, plain: Any) -> None:
            super().__init__(one, plain)
            self.orders = orders
            rows = one.method._rows

            def noting(order: Tensor) -> Any:
                orders.append((order, None))
                return rows(order)

            one.method._rows = noting

    beside("fsdgpm", Given, optimizer="sgdm", memory=80, samples=30, replay=8, ascent=0.05, prepare=prepare, lr=0.02)
