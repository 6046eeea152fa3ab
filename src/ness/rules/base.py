"""What a rule is: a small frozen dataclass that sees the spectra of all layers and says which directions are free."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ness.errors import NessError
from ness.statistics.spectrum import Spectrum

TIE_SLACK = 1e-12  # σ ≤ τ up to this relative slack: a tie counts as small
SOFT_CUTOFF = 0.02  # soft weights below this are dropped
SMALLEST, DIGITS = -20, 900  # the steps that advice is given in: three digits each, from 1e-18 to 1
LARGEST_COUNT = 1 << 62


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

    def settled_by(self, spectrum: Spectrum) -> bool:
        """Whether it frees all directions that a spectrum leaves out, and the weakest of those that it has.

        Then every σ that was left out is smaller than one that is free.
        """
        first = self.weights.shape[-1] - spectrum.directions.shape[-1]
        return bool((self.weights[..., :first] == 1).all()) and bool((self.weights[..., first] == 1).all())


class Rule:
    """Chooses free directions; subclass it, add a `name`, implement `select`, and it saves and loads by itself."""

    name: ClassVar[str] = ""
    relative: ClassVar[bool] = (
        False  # True: layers keep relative moments, and spectra are theirs (`ness.statistics.relative`)
    )
    registry: ClassVar[dict[str, type[Rule]]] = {}

    @property
    def strongest(self) -> bool:
        """Whether the strongest σ of a layer and its Σσ² are all that the choice in that layer depends on.

        Then wide layers are decomposed as far as the weakest direction that it protects, and one more.
        """
        return False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.name:
            Rule.registry[cls.name] = cls

    def select(self, spectra: Mapping[str, Spectrum]) -> dict[str, Selection]:
        """A selection for every layer."""
        raise NotImplementedError(f"{type(self).__name__} must implement select(spectra)")

    def looser(self, frees: Callable[[Rule], bool]) -> Rule | None:
        """The strictest rule of this kind that frees something, where this one frees nothing: what to advise.

        Args:
            frees: whether a rule leaves some direction of some layer free.

        Returns:
            The rule, in three digits; None where no value frees anything, or where the kind does not know.
        """
        return None

    def limit(self, task: int) -> float:
        """The most that T² = Σ_j rel_j² may be once the n-th constrained task is merged; relative rules alone."""
        return float("inf")

    def expect(self, known: float | None, measured: float | None) -> float | None:
        """ρ² to expect of the next update, from that of the last and what it was; None: it could move no old output."""
        return known if measured is None else measured


def strictest_share(build: Callable[[float], Rule], frees: Callable[[Rule], bool]) -> Rule | None:
    """The rule with the smallest share in (0, 1], in three digits, that frees something."""

    def share(step: int) -> float:
        return float(f"{100 + step % DIGITS}e{SMALLEST + step // DIGITS}")

    return _first(lambda step: build(share(step)), frees, 0, (-2 - SMALLEST) * DIGITS)


def strictest_count(build: Callable[[int], Rule], frees: Callable[[Rule], bool], above: int) -> Rule | None:
    """The rule with the smallest whole number above this one that frees something."""
    most = above + 1
    while most < LARGEST_COUNT and not frees(build(most)):
        most *= 2
    return _first(build, frees, above + 1, most)


def _first(build: Callable[[int], Rule], frees: Callable[[Rule], bool], low: int, high: int) -> Rule | None:
    """By halves: the more is allowed, the more is free."""
    if not frees(build(high)):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if frees(build(middle)) else (middle + 1, high)
    return build(high)


def at_most(sigma: Tensor, threshold: Tensor) -> Tensor:
    """s_i = 1 where σ_i ≤ τ, ties included."""
    return (sigma <= threshold.unsqueeze(-1) * (1 + TIE_SLACK)).to(sigma.dtype)


def hard_selection(sigma: Tensor, weights: Tensor) -> Selection:
    """A selection whose τ is the largest selected σ of each group."""
    return Selection(weights, (sigma * weights).amax(dim=-1))


def soft_selection(sigma: Tensor, threshold: Tensor) -> Tensor:
    """s_i = min(1, τ/σ_i), 0 where σ_i = 0: such directions are for the rule to judge; weights below 0.02 are 0."""
    scaled = threshold.unsqueeze(-1) / sigma.clamp(min=torch.finfo(sigma.dtype).tiny)
    soft = torch.where(sigma > 0, scaled.clamp(max=1), 0.0)
    return torch.where(soft >= SOFT_CUTOFF, soft, 0.0)


def check_fraction(rule: str, field: str, value: float) -> None:
    """Raise unless a rule's value is a number from 0 to 1."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise NessError(f"{rule}({field}={value!r}): expected a number from 0 to 1")


def check_count(rule: str, field: str, value: int) -> None:
    """Raise unless a rule's value is a whole number, 0 or more."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise NessError(f"{rule}({field}={value!r}): expected a whole number, 0 or more")


def rule_to_dict(rule: Rule) -> dict[str, Any]:
    """The rule as JSON: its name and its fields.

    >>> from ness.rules import Nuclear, Soft
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
