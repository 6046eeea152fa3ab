"""Continual learning without forgetting, for PyTorch.

Three verbs: `observe` what the model must not forget, `constrain` its updates, `merge` them when the task is learnt;
and a `certificate` that says how much it can have lost. See `ness.NullSpace`.
"""

from ness._version import __version__
from ness.certificate import Certificate, CertificateRow
from ness.comparison import Comparison
from ness.costs import Cost, CostRow, cost
from ness.errors import NessError, NessWarning
from ness.guard import NullSpace
from ness.repairing.repair import repair
from ness.repairing.report import Front, Repair, RepairRow
from ness.rules import Budget, Energy, Frobenius, Nuclear, Rank, Rule, Soft, Within
from ness.statistics.gram import Gram
from ness.verbs.release import release

__all__ = [
    # the guard, and what it gives back
    "NullSpace",
    "Certificate",
    "CertificateRow",
    "Comparison",
    "Gram",
    # a model whose guard is gone
    "release",
    # a fine-tune that has forgotten already
    "repair",
    "Repair",
    "RepairRow",
    "Front",
    # what it takes, before anything is allocated
    "cost",
    "Cost",
    "CostRow",
    # which directions are free
    "Rule",
    "Nuclear",
    "Frobenius",
    "Energy",
    "Rank",
    "Budget",
    "Soft",
    "Within",
    # what can go wrong
    "NessError",
    "NessWarning",
    "__version__",
]  # fmt: skip
