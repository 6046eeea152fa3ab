"""Projecting methods against their published rules, restated here, in float64; on the ResNet18 too."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ness.lab import registry
from ness.lab.methods import dfgp
from ness.lab.training.loader import Batch, Clock
from oracles import Rule, Tensors, beside, float64

RESNET18 = registry.all_networks()["resnet18-32"]
RESNET = {"network": RESNET18, "shape": (3, 32, 32), "count": 6, "tasks": 2, "batch": 3, "epochs": 1}
SGD = {"optimizer": "sgd"}


@pytest.fixture(autouse=True)
def _in_float64() -> Iterator[None]:
    with float64():
        yield


class Projected(Rule):
    """From the second task on: BatchNorm stands still, and G ← G - G Π in every layer."""

    projector: Tensors

    def trained(self) -> list[str]:
        if self.task == 0:
            return super().trained()
        return [*(f"{name}.weight" for name in self.layers), f"heads.{self.task}.weight"]

    def project(self, gradients: Tensors) -> Tensors:
        if self.task:
            for name, away in self.projector.items():
                g = gradients[f"{name}.weight"]
                gradients[f"{name}.weight"] = (g.flatten(1) - g.flatten(1) @ away).view_as(g)
        return gradients

    def step(self, batch: Batch) -> None:
        self.descend(self.project(self.gradients(self.cross_entropy(batch), self.trained())))


def svd(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Left singular vectors and σ; of many columns by the eigenvectors of R Rᵀ."""
    if matrix.shape[1] > 4 * len(matrix):
        squares, left = torch.linalg.eigh(matrix @ matrix.mT)
        return left.flip(1), squares.flip(0).clamp(min=0).sqrt()
    left, sigma, _ = torch.linalg.svd(matrix, full_matrices=False)
    return left, sigma


class Gpm(Projected):
    """Saha et al.: R̂ = R - M Mᵀ R, and as many of its left singular vectors as bring the energy held to ε."""

    def __init__(self, one: Any, plain: Any) -> None:
        super().__init__(one, plain)
        self.memory = {name: torch.zeros(m.weight[0].numel(), 0) for name, m in self.layers.items()}

    def epsilon(self) -> float:
        return float(self.own.threshold + self.own.growth * self.task)

    def grown(self, basis: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        """The new vectors and their σ."""
        rest = r - basis @ (basis.mT @ r)
        left, sigma = svd(rest)
        total = float((r**2).sum())
        held, count = (total - float((rest**2).sum())) / total, 0
        while held < self.epsilon():
            held += float(sigma[count]) ** 2 / total
            count += 1
        return left[:, :count], sigma[:count]

    def after(self) -> None:
        if self.task + 1 < self.one.context.tasks:
            for name, rows in self.inputs(self.images(self.task)[0]).items():
                self.remember(name, rows.mT)
            self.projector = {name: self.closed(name) for name in self.layers}

    def remember(self, name: str, r: Tensor) -> None:
        self.memory[name] = torch.cat([self.memory[name], self.grown(self.memory[name], r)[0]], 1)

    def closed(self, name: str) -> Tensor:
        return self.memory[name] @ self.memory[name].mT


class Sgp(Gpm):
    """Saha and Roy: G ← G - G M diag(λ) Mᵀ, λ by (α + 1) v / (α v + max v) of how much each direction is used."""

    def __init__(self, one: Any, plain: Any) -> None:
        super().__init__(one, plain)
        self.share = {name: torch.zeros(0) for name in self.layers}

    def remember(self, name: str, r: Tensor) -> None:
        old, lam, alpha = self.memory[name], self.share[name], self.own.alpha
        new, sigma = self.grown(old, r)
        used = torch.tensor([float((column @ r).norm()) for column in old.mT])
        v = torch.cat([used, sigma])
        fresh = (alpha + 1) * v / (alpha * v + v.max())
        self.share[name] = torch.cat([(lam + fresh[: len(lam)]).clamp(max=1), fresh[len(lam) :]])
        self.memory[name] = torch.cat([old, new], 1)

    def closed(self, name: str) -> Tensor:
        return self.memory[name] @ self.share[name].diag() @ self.memory[name].mT


class Sd(Gpm):
    """Our reading: shared directions J (principal cosine at least τ) closed, the rest of M by κ."""

    def __init__(self, one: Any, plain: Any) -> None:
        super().__init__(one, plain)
        self.stable = {name: m[:, :0] for name, m in self.memory.items()}

    def remember(self, name: str, r: Tensor) -> None:
        own, _ = self.grown(self.memory[name][:, :0], r)
        y, c = svd(self.memory[name].mT @ own) if self.memory[name].shape[1] else (own[:0, :0], own[0, :0])
        both = torch.cat([self.stable[name], self.memory[name] @ y[:, c >= self.own.tau]], 1)
        left, sigma = svd(both)
        self.stable[name] = left[:, sigma > 1e-3]
        super().remember(name, r)

    def closed(self, name: str) -> Tensor:
        every, shared = super().closed(name), self.stable[name] @ self.stable[name].mT
        return shared + self.own.kappa * (every - shared)


class Sam(Gpm):
    """Foret et al. under GPM: the gradient at w + ρ g/‖g‖, of all that has one, frozen norms included; projected."""

    def step(self, batch: Batch) -> None:
        head = f"heads.{self.task}.weight"
        every = [name for name in self.p if not name.startswith("heads") or name == head]
        g = self.gradients(self.cross_entropy(batch), every)
        size = math.sqrt(sum(float((v**2).sum()) for v in g.values()))
        up = {**self.p, **{name: self.p[name] + self.training.rho * v / size for name, v in g.items()}}
        self.descend(self.project(self.gradients(self.cross_entropy(batch), self.trained(), up)))


class Dfgp(Gpm):
    """Yang et al.: raw and mixed loss, the shares moved uphill by ρ in length, SAM on the weights, then GPM."""

    given: list[Any]

    def step(self, batch: Batch) -> None:
        partner, share = self.given.pop(0)
        x, y, other = batch.images, batch.labels, batch.labels[partner]
        lam = share.clone().requires_grad_()

        def loss(p: Tensors, lam: Tensor, weights: Tensor) -> Tensor:
            wide = lam.view(-1, 1, 1, 1)
            z = self.logits((1 - wide) * x + wide * x[partner], self.task, p)
            mixed = (1 - weights) * F.cross_entropy(z, y, reduction="none")
            mixed = mixed + weights * F.cross_entropy(z, other, reduction="none")
            return self.cross_entropy(batch)(p) + self.own.mix_weight * mixed.mean()

        head = f"heads.{self.task}.weight"
        every = [name for name in self.p if not name.startswith("heads") or name == head]
        g = self.gradients(lambda p: loss(p, lam.detach(), share), every)
        (uphill,) = torch.autograd.grad(loss(self.p, lam, share), lam)
        worst = (share + self.own.mix_rho * uphill / uphill.norm()).clamp(0, 1)
        size = math.sqrt(sum(float((v**2).sum()) for v in g.values()))
        up = {**self.p, **{name: self.p[name] + self.training.rho * v / size for name, v in g.items()}}
        self.descend(self.project(self.gradients(lambda p: loss(p, worst, worst), self.trained(), up)))


class Ogd(Projected):
    """Farajtabar et al.: gradients of the true classes' logits, made orthonormal; g ← g - Sᵀ S g of all layers."""

    basis: Tensor | None = None

    def project(self, gradients: Tensors) -> Tensors:
        if self.basis is None:
            return gradients
        names = [f"{name}.weight" for name in self.layers]
        flat = torch.cat([gradients[name].flatten() for name in names])
        for vector in self.basis:
            flat = flat - (vector @ flat) * vector
        for name, part in zip(names, flat.split([gradients[n].numel() for n in names]), strict=True):
            gradients[name] = part.view_as(gradients[name])
        return gradients

    def after(self) -> None:
        if self.task + 1 == self.one.context.tasks:
            return
        x, labels = self.images(self.task)
        kept = [] if self.basis is None else list(self.basis)
        for sample in range(len(x)):
            names = [f"{name}.weight" for name in self.layers]
            g = self.gradients(lambda p, i=sample: self.logits(x, self.task, p)[i, labels[i]], names)
            vector = torch.cat([g[name].flatten() for name in names])
            size = vector.norm()
            for _ in range(2):
                for each in kept:
                    vector = vector - (each @ vector) * each
            if vector.norm() > 1e-3 * size:
                kept.append(vector / vector.norm())
        self.basis = torch.stack(kept)


class Owm(Rule):
    """Zeng et al.: P ← P - k kᵀ/(α + rᵀ k), k = P r, for the mean input or every second patch of the mean image, in
    every batch from the first on and before its gradient is projected; α = c^(share of the task done); clipped."""

    def __init__(self, one: Any, plain: Any) -> None:
        super().__init__(one, plain)
        self.p_of = {name: torch.eye(m.weight[0].numel()) for name, m in self.layers.items()}
        decays = iter([*self.own.fc_decay, *[self.own.fc_decay[-1]] * 9])
        self.c = {n: self.own.conv_decay if m.weight.ndim == 4 else next(decays) for n, m in self.layers.items()}

    def trained(self) -> list[str]:
        if self.task == 0:
            return super().trained()
        return [*(f"{name}.weight" for name in self.layers), f"heads.{self.task}.weight"]

    def step(self, batch: Batch) -> None:
        seen: Tensors = {}
        handles = [
            m.register_forward_pre_hook(lambda _, x, n=name: seen.update({n: x[0].detach()}))
            for name, m in self.layers.items()
        ]
        gradients = self.gradients(self.cross_entropy(batch), self.trained())
        for handle in handles:
            handle.remove()
        assert isinstance(batch.clock, Clock)
        for name, x in seen.items():
            alpha = self.c[name] ** float(batch.clock.elapsed)
            rows = self.rows(name, x.mean(0, keepdim=True))
            if x.ndim == 4:
                side = math.isqrt(len(rows))
                rows = rows.view(side, side, -1)[::2, ::2].reshape(-1, rows.shape[1])
            for r in rows:
                k = self.p_of[name] @ r
                self.p_of[name] = self.p_of[name] - torch.outer(k, k) / (alpha + r @ k)
            g = gradients[f"{name}.weight"]
            gradients[f"{name}.weight"] = (g.flatten(1) @ self.p_of[name]).view_as(g)
        size = math.sqrt(sum(float((v**2).sum()) for v in gradients.values()))
        self.descend({name: v * min(1.0, self.own.clip / (size + 1e-6)) for name, v in gradients.items()})


@pytest.mark.parametrize("network", [{}, RESNET], ids=["tiny", "resnet18"])
def test_gpm(network: dict[str, Any]) -> None:
    _, other = beside("gpm", Gpm, **SGD, **network)
    assert all(0 < m.shape[1] <= len(m) for m in other.memory.values())
    assert any(m.shape[1] < len(m) for m in other.memory.values())


def test_sgp() -> None:
    beside("sgp", Sgp, **SGD)


def test_sd() -> None:
    _, other = beside("sd", Sd, **SGD, tau=0.8)
    assert any(j.shape[1] for j in other.stable.values())


def test_gpm_with_sam() -> None:
    beside("gpm", Sam, optimizer="sam")


@pytest.mark.parametrize("tasks", [3])
def test_dfgp(tasks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draws: list[Any] = []
    plain = dfgp.Dfgp._both

    def noting(self: Any, batch: Any, partner: Tensor, share: Tensor) -> Tensor:
        if share.requires_grad:
            draws.append((partner.clone(), share.detach().clone()))
        return plain(self, batch, partner, share)

    monkeypatch.setattr(dfgp.Dfgp, "_both", noting)
    beside("dfgp", Dfgp, optimizer="sam", mix_weight=0.5, tasks=tasks, prepare=lambda one: draws)
    assert not draws


def test_ogd() -> None:
    _, other = beside("ogd", Ogd, **SGD, count=12, batch=4)
    assert len(other.basis) == 24


def test_owm_as_its_own_code_has_it() -> None:
    beside("owm", Owm, optimizer="sgdm", updates="every-batch", clip=1.0, lr=0.02)
