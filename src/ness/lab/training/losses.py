"""The loss of a batch: cross-entropy, with mixed labels where images were mixed, each sample under its own task."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ness.lab.training.loader import Batch


def cross_entropy(logits: Tensor, batch: Batch) -> Tensor:
    """Mean cross-entropy of logits (n, classes); under mix-up share·CE(y) + (1 - share)·CE(partner's y)."""
    loss = F.cross_entropy(logits, batch.labels)
    if batch.partner is None or batch.share is None:
        return loss
    return batch.share * loss + (1 - batch.share) * F.cross_entropy(logits, batch.partner)


def cross_entropy_of_many(logits: Sequence[Tensor], batch: Batch, weights: Tensor | None = None) -> Tensor:
    """Mean cross-entropy where each sample counts under its own task's head: `logits[t]` is (n, classes of t).

    With `weights` (n,) the mean is weighted.
    """
    assert batch.tasks is not None
    each = torch.stack([_each(part, batch.labels) for part in logits])  # (tasks, n)
    own = each.gather(0, batch.tasks.unsqueeze(0)).squeeze(0)
    return own.mean() if weights is None else (own * weights).sum() / weights.sum()


def _each(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy (n,); a label this head does not have is clamped: its sample is another task's anyway."""
    return F.cross_entropy(logits, labels.clamp(max=logits.shape[1] - 1), reduction="none")
