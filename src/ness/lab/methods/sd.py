"""Space Decoupling, as we read it: directions that tasks share are closed, those of single tasks nearly so.

Only the paper's abstract was at hand and no code was found. Certain is that the feature space is split into a stability
space (what historic and current features share) and a plasticity space (the rest), under different constraints. How the
intersection is found (cosines of principal angles above τ) and what the constraint is (κ) are ours.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ness.errors import NessError
from ness.lab.methods._projection.basis import left_singular, new_directions, span
from ness.lab.methods._projection.project import ADAM, named, removal, sam_revision, under
from ness.lab.methods.base import Context, MethodSpec, Sizes
from ness.lab.methods.gpm import PRESETS as GPM_PRESETS
from ness.lab.methods.gpm import Gpm, GpmSettings, check
from ness.lab.runs.settings import setting
from ness.statistics.spectrum import symmetric_eigen


@dataclass(frozen=True)
class SdSettings(GpmSettings):
    """What Space Decoupling adds."""

    tau: float = setting(0.9, "τ: cosine of a principal angle from which a direction counts as shared")
    kappa: float = setting(0.9, "κ: how much of a gradient is removed along directions of single tasks; 1 is GPM")


def common(basis: Tensor, other: Tensor, tau: float) -> Tensor:
    """Directions of a basis (d, r) that lie in another's span: M Y for the cosines c ≥ τ in MᵀB = Y diag(c) Zᵀ.

    >>> common(torch.eye(3)[:, :2], torch.eye(3)[:, 1:], 0.9).abs()
    tensor([[0.],
            [1.],
            [0.]])
    """
    left, cosines = left_singular(basis.mT @ other)
    shared: Tensor = basis @ left[:, cosines >= tau]
    return shared


def plastic(basis: Tensor, stable: Tensor) -> Tensor:
    """The rest of a basis M beside the stable J inside it: an orthonormal basis of (I - J Jᵀ) M, r_M - r_J columns."""
    count = basis.shape[1] - stable.shape[1]
    if count <= 0:
        return basis[:, :0]
    rest = basis - stable @ (stable.mT @ basis)
    squares, right = symmetric_eigen((rest.mT @ rest).unsqueeze(0))  # σ is 0 or 1: squares lose nothing
    found: Tensor = rest @ (right[0][:, -count:] / squares[0][-count:].sqrt())
    return found


class Sd(Gpm):
    """M as in GPM, and J ⊂ span(M), what tasks share; G ← G - G J Jᵀ - κ·G R Rᵀ, with R the rest of M."""

    by_rows = True

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.stable = {name: basis.clone() for name, basis in self.bases.items()}  # J

    def remember(self, name: str, rows: Tensor, threshold: float) -> None:
        """J ← span [J, M ∩ B_t], then M grows as in GPM."""
        basis, stable = self.bases[name].double(), self.stable[name].double()
        own, _ = new_directions(basis[:, :0], rows, threshold, strict=False)  # B_t
        self.stable[name] = span(torch.cat([stable, common(basis, own, self.own.tau)], 1)).float()
        super().remember(name, rows, threshold)

    def close(self) -> None:
        """Π = J Jᵀ + κ R Rᵀ."""
        self.removals = {}
        for name, basis in self.bases.items():
            stable = self.stable[name].double()
            rest = plastic(basis.double(), stable)
            weights = torch.cat([stable.new_ones(stable.shape[1]), rest.new_full((rest.shape[1],), self.own.kappa)])
            self.removals[name] = removal(torch.cat([stable, rest], 1).float(), weights.float())

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Both bases."""
        tensors, manifest = super().state()
        return tensors | named("stable", self.stable), manifest

    def load_state(self, tensors: dict[str, Tensor], manifest: dict[str, Any]) -> None:
        """Puts them back."""
        self.stable = under("stable", tensors, self.context.device)
        super().load_state(tensors, manifest)


def check_sd(settings: Any) -> None:
    """Refuses shares outside their range, and what GPM refuses."""
    for name in ("tau", "kappa"):
        if not 0 <= getattr(settings, name) <= 1:
            raise NessError(f"{name} is {getattr(settings, name):g}, expected a number from 0 to 1")
    check(settings)


def kept_at_most(sizes: Sizes, own: Any) -> int:
    """Bytes of two full bases per layer, float32."""
    return 8 * sum(width * width for _, width in sizes.layers)


METHOD = MethodSpec(
    name="sd",
    title="Shared directions closed, those of single tasks nearly so (our reading)",
    build=Sd,
    keeps="two bases per layer (d × r): all directions, and the shared ones",
    kept_at_most=kept_at_most,
    paper="Zhao et al., Rethinking Gradient Projection Continual Learning",
    year=2023,
    settings=SdSettings,
    presets={"fixed": GPM_PRESETS["fixed"], "reference": {}, "paper": {}},
    refuses={"adamw": ADAM},
    check=check_sd,
    revision=sam_revision,
)
