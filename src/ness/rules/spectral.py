"""Rules on the singular values σ of what a layer has seen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from ness.errors import NessError
from ness.rules.base import (
    TIE_SLACK,
    Rule,
    Selection,
    at_most,
    check_count,
    check_fraction,
    hard_selection,
    soft_selection,
    strictest_count,
    strictest_share,
)
from ness.statistics.spectrum import Spectrum


@dataclass(frozen=True)
class Nuclear(Rule):
    """σ_i ≤ eps · Σσ: the rule of the paper's code, and the only one at which its eps make sense.

    >>> from ness.statistics.spectrum import decompose
    >>> spectra = {"fc": decompose(torch.diag(torch.tensor([9.0, 16.0, 0.0], dtype=torch.float64)).unsqueeze(0))}
    >>> Nuclear(0.5).select(spectra)["fc"]  # σ = (0, 3, 4), τ = 0.5 · 7
    Selection(weights=tensor([[1., 1., 0.]], ...), threshold=tensor([3.5000], ...))
    """

    eps: float = 1e-3
    name: ClassVar[str] = "nuclear"

    def __post_init__(self) -> None:
        check_fraction("Nuclear", "eps", self.eps)

    def select(self, spectra: Mapping[str, Spectrum]) -> dict[str, Selection]:
        """τ = eps · ‖X‖_*."""
        chosen = {}
        for layer, spectrum in spectra.items():
            threshold = self.eps * spectrum.every_sigma.sum(dim=-1)
            chosen[layer] = Selection(at_most(spectrum.sigma, threshold), threshold)
        return chosen

    def looser(self, frees: Callable[[Rule], bool]) -> Rule | None:
        """With a larger eps."""
        return strictest_share(lambda eps: replace(self, eps=eps), frees)


@dataclass(frozen=True)
class Frobenius(Rule):
    """σ_i ≤ eps · ‖X‖_F: the rule of the paper's text; at the paper's eps it usually frees nothing."""

    eps: float
    name: ClassVar[str] = "frobenius"

    def __post_init__(self) -> None:
        check_fraction("Frobenius", "eps", self.eps)

    @property
    def strongest(self) -> bool:
        """Yes."""
        return True

    def select(self, spectra: Mapping[str, Spectrum]) -> dict[str, Selection]:
        """τ = eps · √(tr C)."""
        chosen = {}
        for layer, spectrum in spectra.items():
            threshold = self.eps * spectrum.every_sigma.square().sum(dim=-1).sqrt()
            chosen[layer] = Selection(at_most(spectrum.sigma, threshold), threshold)
        return chosen

    def looser(self, frees: Callable[[Rule], bool]) -> Rule | None:
        """With a larger eps."""
        return strictest_share(lambda eps: replace(self, eps=eps), frees)


@dataclass(frozen=True)
class Energy(Rule):
    """Protects the fewest strongest directions that hold the fraction `keep` of Σσ², and frees the rest."""

    keep: float
    name: ClassVar[str] = "energy"

    def __post_init__(self) -> None:
        check_fraction("Energy", "keep", self.keep)

    @property
    def strongest(self) -> bool:
        """Yes."""
        return True

    def select(self, spectra: Mapping[str, Spectrum]) -> dict[str, Selection]:
        """A direction is free when the directions stronger than it hold `keep` of the energy already."""
        chosen = {}
        for layer, spectrum in spectra.items():
            energy = spectrum.sigma.square()
            total = spectrum.every_sigma.square().sum(dim=-1, keepdim=True)
            private = (total - energy.sum(dim=-1, keepdim=True)).clamp(min=0)  # no shared update reaches it: protected
            stronger = (energy.flip(-1).cumsum(-1) - energy.flip(-1)).flip(-1) + private  # energy above each direction
            free = stronger >= self.keep * total * (1 - TIE_SLACK)
            chosen[layer] = hard_selection(spectrum.sigma, free.to(energy.dtype))
        return chosen

    def looser(self, frees: Callable[[Rule], bool]) -> Rule | None:
        """That protects less: the share it gives up is the smallest."""
        return strictest_share(lambda share: replace(self, keep=round(1 - share, 15)), frees)


@dataclass(frozen=True)
class Rank(Rule):
    """Frees the `r` weakest directions of every layer (of every group), at most all of them; 0 frees none."""

    r: int
    name: ClassVar[str] = "rank"

    def __post_init__(self) -> None:
        check_count("Rank", "r", self.r)

    @property
    def strongest(self) -> bool:
        """Yes."""
        return True

    def select(self, spectra: Mapping[str, Spectrum]) -> dict[str, Selection]:
        """The first r of the ascending spectrum."""
        chosen = {}
        for layer, spectrum in spectra.items():
            weights = torch.zeros_like(spectrum.sigma)
            weights[:, : self.r] = 1
            chosen[layer] = hard_selection(spectrum.sigma, weights)
        return chosen

    def looser(self, frees: Callable[[Rule], bool]) -> Rule | None:
        """With a larger r."""
        return strictest_count(lambda r: replace(self, r=r), frees, self.r)


@dataclass(frozen=True)
class Budget(Rule):
    """Spends at most `parameters` trainable numbers, on the directions that disturb their layer least.

    Directions of all layers are ranked by σ_i / ‖X‖_F of their own group, the weakest first; a direction costs the
    output units of its group. (Groups of one layer that got fewer than others are padded with zeros, which learn
    nothing and are not counted.)
    """

    parameters: int
    name: ClassVar[str] = "budget"

    def __post_init__(self) -> None:
        check_count("Budget", "parameters", self.parameters)

    def select(self, spectra: Mapping[str, Spectrum]) -> dict[str, Selection]:
        """One threshold on the relative σ for all layers together."""
        relative, cost = [], []
        for spectrum in spectra.values():
            norm = spectrum.every_sigma.square().sum(dim=-1, keepdim=True).sqrt()
            share = torch.where(norm > 0, spectrum.sigma / norm, torch.inf)  # a group without input has none to offer
            relative.append(share.flatten().cpu())
            cost.append(torch.full_like(relative[-1], spectrum.outputs))
        order = torch.cat(relative).argsort(stable=True)
        taken = torch.zeros(len(order), dtype=torch.float64)
        taken[order] = (torch.cat(cost)[order].cumsum(0) <= self.parameters).to(torch.float64)
        parts = torch.split(taken, [len(part) for part in relative])
        return {
            layer: hard_selection(spectrum.sigma, part.reshape(spectrum.sigma.shape).to(spectrum.sigma))
            for (layer, spectrum), part in zip(spectra.items(), parts, strict=True)
        }

    def looser(self, frees: Callable[[Rule], bool]) -> Rule | None:
        """With more parameters."""
        return strictest_count(lambda parameters: replace(self, parameters=parameters), frees, self.parameters)


@dataclass(frozen=True)
class Soft(Rule):
    """The τ of another rule, but s_i = min(1, τ/σ_i) instead of a cut; weights below 0.02 are dropped.

    max σ_i s_i ≤ τ, so the bound on any single row is the hard rule's, unchanged; more directions learn, so the mean
    drift is larger.
    """

    rule: Rule
    name: ClassVar[str] = "soft"

    def __post_init__(self) -> None:
        if not isinstance(self.rule, Rule) or isinstance(self.rule, Soft) or self.rule.relative:
            raise NessError(f"Soft({self.rule!r}): expected a hard rule such as Nuclear(1e-3)")

    @property
    def strongest(self) -> bool:
        """As the rule that sets τ."""
        return self.rule.strongest

    def select(self, spectra: Mapping[str, Spectrum]) -> dict[str, Selection]:
        """s_i = min(1, τ/σ_i)."""
        chosen = {}
        for layer, hard in self.rule.select(spectra).items():
            soft = soft_selection(spectra[layer].sigma, hard.threshold)
            chosen[layer] = Selection(torch.where(hard.weights > 0, hard.weights, soft), hard.threshold)
        return chosen

    def looser(self, frees: Callable[[Rule], bool]) -> Rule | None:
        """On a looser rule: the strictest that frees something once it is soft."""
        inner = self.rule.looser(lambda rule: frees(Soft(rule)))
        return None if inner is None else Soft(inner)
