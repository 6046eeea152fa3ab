"""Rules that say which input directions are free: small frozen dataclasses that see the spectra of all layers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ness.errors import NessError
from ness.relative import solve_threshold, spending_limit
from ness.spectrum import Spectrum

TIE_SLACK = 1e-12  # σ ≤ τ up to this relative slack: a tie counts as small
SOFT_CUTOFF = 0.02  # soft weights below this are dropped
DEFAULT_DRIFT = 0.1  # what `Within` allows every task's outputs to move by, as a fraction of their size
TRAVEL_CLAMP = 16.0  # a measured ρ² counts up to this factor above or below the one assumed at first


@dataclass(frozen=True)
class Selection:
    """What a rule frees in one layer: a weight s_i in [0, 1] a direction, and the threshold τ behind it.

    `threshold` is the τ the rule set; where a rule sets none it is the largest selected σ of the group.
    """

    weights: Tensor  # s, (groups, d), in the order of the spectrum
    threshold: Tensor  # τ, (groups,)

    @property
    def rank(self) -> int:
        """Directions that remain free, all groups together."""
        return int((self.weights > 0).sum())


class Rule:
    """Chooses free directions; subclass it, add a `name`, implement `select`, and it saves and loads by itself."""

    name: ClassVar[str] = ""
    relative: ClassVar[bool] = False  # True: layers keep relative moments, and spectra are theirs (`ness.relative`)
    registry: ClassVar[dict[str, type[Rule]]] = {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.name:
            Rule.registry[cls.name] = cls

    def select(self, spectra: Mapping[str, Spectrum]) -> dict[str, Selection]:
        """A selection for every layer."""
        raise NotImplementedError(f"{type(self).__name__} must implement select(spectra)")

    def limit(self, task: int) -> float:
        """The most that T² = Σ_j rel_j² may be once the n-th constrained task is merged; relative rules alone."""
        return float("inf")

    def expect(self, known: float | None, measured: float | None) -> float | None:
        """ρ² to expect of the next update, from that of the last and what it was; None: it could move no old output."""
        return known if measured is None else measured


def _at_most(sigma: Tensor, threshold: Tensor) -> Tensor:
    """s_i = 1 where σ_i ≤ τ, ties included."""
    return (sigma <= threshold.unsqueeze(-1) * (1 + TIE_SLACK)).to(sigma.dtype)


def _hard(sigma: Tensor, weights: Tensor) -> Selection:
    """A selection whose τ is the largest selected σ of each group."""
    return Selection(weights, (sigma * weights).amax(dim=-1))


def _soft(sigma: Tensor, threshold: Tensor) -> Tensor:
    """s_i = min(1, τ/σ_i), 0 where σ_i = 0: such directions are for the rule to judge; weights below 0.02 are 0."""
    scaled = threshold.unsqueeze(-1) / sigma.clamp(min=torch.finfo(sigma.dtype).tiny)
    soft = torch.where(sigma > 0, scaled.clamp(max=1), 0.0)
    return torch.where(soft >= SOFT_CUTOFF, soft, 0.0)


def _check_fraction(rule: str, field: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise NessError(f"{rule}({field}={value!r}): expected a number from 0 to 1")


def _check_count(rule: str, field: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise NessError(f"{rule}({field}={value!r}): expected a whole number, 0 or more")


@dataclass(frozen=True)
class Nuclear(Rule):
    """σ_i ≤ eps · Σσ: the rule of the paper's code, and the only one at which its eps make sense.

    >>> from ness.spectrum import decompose
    >>> spectra = {"fc": decompose(torch.diag(torch.tensor([9.0, 16.0, 0.0], dtype=torch.float64)).unsqueeze(0))}
    >>> Nuclear(0.5).select(spectra)["fc"]  # σ = (0, 3, 4), τ = 0.5 · 7
    Selection(weights=tensor([[1., 1., 0.]], ...), threshold=tensor([3.5000], ...))
    """

    eps: float = 1e-3
    name: ClassVar[str] = "nuclear"

    def __post_init__(self) -> None:
        _check_fraction("Nuclear", "eps", self.eps)

    def select(self, spectra: Mapping[str, Spectrum]) -> dict[str, Selection]:
        """τ = eps · ‖X‖_*."""
        chosen = {}
        for layer, spectrum in spectra.items():
            threshold = self.eps * spectrum.every_sigma.sum(dim=-1)
            chosen[layer] = Selection(_at_most(spectrum.sigma, threshold), threshold)
        return chosen


@dataclass(frozen=True)
class Frobenius(Rule):
    """σ_i ≤ eps · ‖X‖_F: the rule of the paper's text; at the paper's eps it usually frees nothing."""

    eps: float
    name: ClassVar[str] = "frobenius"

    def __post_init__(self) -> None:
        _check_fraction("Frobenius", "eps", self.eps)

    def select(self, spectra: Mapping[str, Spectrum]) -> dict[str, Selection]:
        """τ = eps · √(tr C)."""
        chosen = {}
        for layer, spectrum in spectra.items():
            threshold = self.eps * spectrum.every_sigma.square().sum(dim=-1).sqrt()
            chosen[layer] = Selection(_at_most(spectrum.sigma, threshold), threshold)
        return chosen


@dataclass(frozen=True)
class Energy(Rule):
    """Protects the fewest strongest directions that hold the fraction `keep` of Σσ², and frees the rest."""

    keep: float
    name: ClassVar[str] = "energy"

    def __post_init__(self) -> None:
        _check_fraction("Energy", "keep", self.keep)

    def select(self, spectra: Mapping[str, Spectrum]) -> dict[str, Selection]:
        """A direction is free when the directions stronger than it hold `keep` of the energy already."""
        chosen = {}
        for layer, spectrum in spectra.items():
            energy = spectrum.sigma.square()
            total = spectrum.every_sigma.square().sum(dim=-1, keepdim=True)
            private = (total - energy.sum(dim=-1, keepdim=True)).clamp(min=0)  # no shared update reaches it: protected
            stronger = (energy.flip(-1).cumsum(-1) - energy.flip(-1)).flip(-1) + private  # energy above each direction
            free = stronger >= self.keep * total * (1 - TIE_SLACK)
            chosen[layer] = _hard(spectrum.sigma, free.to(energy.dtype))
        return chosen


@dataclass(frozen=True)
class Rank(Rule):
    """Frees the `r` weakest directions of every layer (of every group), at most all of them; 0 frees none."""

    r: int
    name: ClassVar[str] = "rank"

    def __post_init__(self) -> None:
        _check_count("Rank", "r", self.r)

    def select(self, spectra: Mapping[str, Spectrum]) -> dict[str, Selection]:
        """The first r of the ascending spectrum."""
        chosen = {}
        for layer, spectrum in spectra.items():
            weights = torch.zeros_like(spectrum.sigma)
            weights[:, : self.r] = 1
            chosen[layer] = _hard(spectrum.sigma, weights)
        return chosen


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
        _check_count("Budget", "parameters", self.parameters)

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
            layer: _hard(spectrum.sigma, part.reshape(spectrum.sigma.shape).to(spectrum.sigma))
            for (layer, spectrum), part in zip(spectra.items(), parts, strict=True)
        }


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

    def select(self, spectra: Mapping[str, Spectrum]) -> dict[str, Selection]:
        """s_i = min(1, τ/σ_i)."""
        chosen = {}
        for layer, hard in self.rule.select(spectra).items():
            soft = _soft(spectra[layer].sigma, hard.threshold)
            chosen[layer] = Selection(torch.where(hard.weights > 0, hard.weights, soft), hard.threshold)
        return chosen


@dataclass(frozen=True)
class Within(Rule):
    """Layer by layer, every old task's outputs stay within the fraction `drift` of what they were, for ever.

    The fraction is a root-mean-square over that task's own rows, relative to the layer's own output on them when the
    task was observed; it holds for each task, however many follow and however they are trained. The threshold chooses
    itself: with s_i = min(1, τ/σ_i), τ is such that an update whose columns are ρ times as long as those of W spends
    what the budget has left. ρ is `strength` at first and follows what updates turn out to be, layer by layer, half-way
    each time. What training spends beyond the budget `merge` takes back: it shrinks the layer's update to fit (`shrunk`
    in the certificate). `constrain(max_drift=...)` holds the same figure at every step.

    >>> from dataclasses import replace
    >>> from ness.relative import Books
    >>> from ness.spectrum import decompose
    >>> gram = torch.diag(torch.tensor([9.0, 16.0, 0.0], dtype=torch.float64)).unsqueeze(0)
    >>> spectrum = replace(decompose(gram), books=Books(task=1, spent=0.0, column=0.001, travel=None))
    >>> Within(0.2).select({"fc": spectrum})["fc"]  # 0.001 · (9 + 11) = 0.2² · 1/2
    Selection(weights=tensor([[1.0000, 1.0000, 0.8292]], ...), threshold=tensor([3.3166], ...))
    """

    drift: float = DEFAULT_DRIFT
    strength: float = 1.0
    name: ClassVar[str] = "within"
    relative: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_fraction("Within", "drift", self.drift)
        if (
            isinstance(self.strength, bool)
            or not isinstance(self.strength, (int, float))
            or not 0 < self.strength < 1e6
        ):
            raise NessError(f"Within(strength={self.strength!r}): expected a number above 0, such as 1.0")

    def limit(self, task: int) -> float:
        """drift² · n/(n + 1)."""
        return spending_limit(self.drift, task)

    def expect(self, known: float | None, measured: float | None) -> float:
        """√(known · measured), both ρ² from the first assumption on: half-way, since updates follow τ in their turn.

        A layer that could not move tells nothing, and drifts back to the assumption instead of staying frozen by it.
        """
        first = self.strength**2
        low, high = first / TRAVEL_CLAMP, first * TRAVEL_CLAMP
        then, now = (first if each is None else min(max(each, low), high) for each in (known, measured))
        return math.sqrt(then * now)

    def select(self, spectra: Mapping[str, Spectrum]) -> dict[str, Selection]:
        """One τ a layer, for all its groups, with ρ²‖W‖²/d · Σ min(σ_i², τ²) = what is left of the limit."""
        chosen = {}
        for layer, spectrum in spectra.items():
            sigma, books = spectrum.sigma, spectrum.books
            if books is None:
                raise NessError(
                    f"Within: layer {layer!r} has a plain spectrum; expected one with books (NullSpace gives it)"
                )
            allowance = self.limit(books.task) - books.spent
            if allowance <= 0:
                chosen[layer] = Selection(torch.zeros_like(sigma), torch.zeros_like(sigma[:, 0]))
                continue
            unit = books.column * (self.strength**2 if books.travel is None else books.travel)
            target = allowance / unit if unit > 0 else float("inf")
            threshold = torch.full_like(sigma[:, 0], solve_threshold(sigma.square(), target))
            free = _at_most(sigma, threshold)
            chosen[layer] = Selection(torch.where(free > 0, free, _soft(sigma, threshold)), threshold)
        return chosen


def rule_to_dict(rule: Rule) -> dict[str, Any]:
    """The rule as JSON: its name and its fields.

    >>> rule_to_dict(Soft(Nuclear(0.001)))
    {'name': 'soft', 'rule': {'name': 'nuclear', 'eps': 0.001}}
    """
    if type(rule).name not in Rule.registry or not is_dataclass(type(rule)):
        raise NessError(f"{rule!r} cannot be saved: a rule is a frozen dataclass with a class attribute `name`")
    values = {field.name: getattr(rule, field.name) for field in fields(rule)}  # type: ignore[arg-type]
    return {"name": rule.name} | {k: rule_to_dict(v) if isinstance(v, Rule) else v for k, v in values.items()}


def rule_from_dict(data: Mapping[str, Any]) -> Rule:
    """The rule that `rule_to_dict` wrote.

    >>> rule_from_dict({'name': 'soft', 'rule': {'name': 'nuclear', 'eps': 0.001}})
    Soft(rule=Nuclear(eps=0.001))
    """
    name = data.get("name") if isinstance(data, Mapping) else data
    if name not in Rule.registry:
        raise NessError(f"unknown rule {name!r}; known: {', '.join(sorted(Rule.registry))}. Import its class first")
    values = {k: rule_from_dict(v) if isinstance(v, Mapping) else v for k, v in data.items() if k != "name"}
    return Rule.registry[name](**values)
