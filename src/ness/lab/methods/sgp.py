"""SGP: GPM whose stored directions carry an importance, so that gradients along them are scaled, not removed.

The preset `reference` counts as GPM's does, always draws CIFAR-100's validation images with seed 0, and on MiniImageNet
lets ε reach 1.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ness.errors import NessError
from ness.lab.methods._projection.basis import joined, new_directions
from ness.lab.methods._projection.project import ADAM, named, removal, sam_revision, under
from ness.lab.methods.base import Context, MethodSpec, Sizes
from ness.lab.methods.gpm import COMMON, Gpm, GpmSettings, check
from ness.lab.runs.settings import setting


@dataclass(frozen=True)
class SgpSettings(GpmSettings):
    """What SGP adds."""

    alpha: float = setting(10.0, "α: how fast importance saturates; 0 is proportional to σ, ∞ is GPM")


def importance(values: Tensor, alpha: float) -> Tensor:
    """λᵢ = (α + 1) vᵢ / (α vᵢ + max v), in [0, 1]; of no values none.

    >>> importance(torch.tensor([2.0, 1.0]), 1.0)
    tensor([1.0000, 0.6667])
    """
    if len(values) == 0 or float(values.max()) == 0:
        return torch.zeros_like(values)
    return (alpha + 1) * values / (alpha * values + values.max())


def usage(basis: Tensor, rows: Tensor) -> Tensor:
    """ρⱼ = ‖mⱼᵀ R‖₂: how much a task's inputs use each stored direction, (r,)."""
    used: Tensor = torch.linalg.vector_norm(rows @ basis, dim=0)
    return used


def accumulated(old: Tensor, values: Tensor, alpha: float) -> Tensor:
    """λ after a task: old entries min(1, λ + new), new ones as they are; `values` is [ρ; σ] of old and new."""
    fresh = importance(values, alpha)
    before = torch.cat([old, old.new_zeros(len(values) - len(old))])
    return (before + fresh).clamp(max=1)


class Sgp(Gpm):
    """M (d, r) and λ (r,) a layer; G ← G - G M diag(λ) Mᵀ."""

    by_rows = True

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.importances = {name: basis.new_zeros(0) for name, basis in self.bases.items()}

    def remember(self, name: str, rows: Tensor, threshold: float) -> None:
        """M ← [M, U], λ ← min(1, [λ, 0] + importance of [ρ, σ])."""
        basis, old = self.bases[name].double(), self.importances[name].double()
        fresh, sigma = new_directions(basis, rows, threshold, strict=self.own.first_rule == "strict")
        values = torch.cat([usage(basis, rows), sigma])
        self.bases[name] = joined(basis, fresh).float()
        self.importances[name] = accumulated(old, values, self.own.alpha).float()

    def close(self) -> None:
        """Π = M diag(λ) Mᵀ."""
        self.removals = {name: removal(basis, self.importances[name]) for name, basis in self.bases.items()}

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Bases and importances."""
        tensors, manifest = super().state()
        return tensors | named("importance", self.importances), manifest

    def load_state(self, tensors: dict[str, Tensor], manifest: dict[str, Any]) -> None:
        """Puts them back."""
        self.importances = under("importance", tensors, self.context.device)
        super().load_state(tensors, manifest)


def check_sgp(settings: Any) -> None:
    """Refuses a negative α and what GPM refuses."""
    if settings.alpha < 0:
        raise NessError(f"alpha is {settings.alpha:g}, expected 0 or more")
    check(settings)


def kept_at_most(sizes: Sizes, own: Any) -> int:
    """Bytes of full bases and their importances: Σ d² + d."""
    return 4 * sum(width * (width + 1) for _, width in sizes.layers)


# MiniImageNet: the reference's schedule passes 1; the fixed one and its α are a third party's.
PRESETS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "fixed": {
        "*": COMMON["*"],
        "digits": COMMON["digits"],
        "cifar100": {**COMMON["cifar100"], "lr": 0.05, "lr_min": 5e-5},
        "five-datasets": COMMON["five-datasets"],
        "mini-imagenet": {**COMMON["mini-imagenet"], "threshold": 0.98, "growth": 0.001, "alpha": 3.0},
    },
    "reference": {
        "*": {"first_rule": "strict"},
        "cifar100": {"split_seed": 0},
        "mini-imagenet": {"threshold": 0.97, "growth": 0.003, "alpha": 10.0, "full": "fill"},
    },
}

METHOD = MethodSpec(
    name="sgp",
    title="GPM with an importance per direction: scales gradients instead of removing them",
    build=Sgp,
    keeps="a basis per layer (d × r) and r importances",
    kept_at_most=kept_at_most,
    paper="Saha & Roy, Continual Learning with Scaled Gradient Projection",
    year=2023,
    settings=SgpSettings,
    presets=PRESETS,
    refuses={"adamw": ADAM},
    check=check_sgp,
    revision=sam_revision,
)
