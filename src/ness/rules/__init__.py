"""Which input directions are free: rules, each a small frozen dataclass."""

from ness.rules.base import Rule, Selection, rule_from_dict, rule_to_dict
from ness.rules.budget import Within
from ness.rules.spectral import Budget, Energy, Frobenius, Nuclear, Rank, Soft

__all__ = [
    "Budget",
    "Energy",
    "Frobenius",
    "Nuclear",
    "Rank",
    "Rule",
    "Selection",
    "Soft",
    "Within",
    "rule_from_dict",
    "rule_to_dict",
]
