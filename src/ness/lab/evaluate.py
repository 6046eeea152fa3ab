"""Evaluation in one fixed order, batch 64, without a host synchronisation before the end."""

import torch
from torch import Tensor
from torch.nn import functional as F

from ness.lab.loader import Samples
from ness.lab.methods.base import Method


@torch.no_grad()
def evaluate(method: Method, samples: Samples, order: Tensor) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy and accuracy in percent, as tensors of one float64 on the device.

    The model goes into eval mode; what belongs to the task must be in use (`method.use`).
    """
    method.model.eval()
    loss = torch.zeros((), dtype=torch.float64, device=order.device)
    right = torch.zeros((), dtype=torch.float64, device=order.device)
    for batch in samples.batches(order):
        logits = method.logits(batch)
        loss += F.cross_entropy(logits, batch.labels, reduction="sum")
        right += (logits.argmax(1) == batch.labels).sum()
    return loss / len(order), 100 * right / len(order)
