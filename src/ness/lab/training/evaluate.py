"""Evaluation in one fixed order without a host synchronisation before the end.

In batches of 64 where BatchNorm uses the statistics of the batch, on a GPU several in one pass; where it uses stored
ones samples do not meet.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from ness.lab.methods.base import Method
from ness.lab.networks.norms import batches_at_once, in_parts
from ness.lab.training.loader import EVALUATION_BATCH, LARGE_BATCH, Samples
from ness.lab.training.task_statistics import lent


@torch.no_grad()
def evaluate(method: Method, samples: Samples, order: Tensor) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy and accuracy in percent, as tensors of one float64 on the device.

    The model goes into eval mode; what belongs to the task must be in use (`method.use`).
    """
    method.model.eval()
    loss = torch.zeros((), dtype=torch.float64, device=order.device)
    right = torch.zeros((), dtype=torch.float64, device=order.device)
    apart = method.context.training.norm == "stored" or lent(method.model)
    size = LARGE_BATCH if apart else EVALUATION_BATCH
    for batch in samples.batches(order, size, batches_at_once(method.model, size)):
        with in_parts(method.model, batch.parts):
            logits = method.logits(batch)
        loss += F.cross_entropy(logits, batch.labels, reduction="sum")
        right += (logits.argmax(1) == batch.labels).sum()
    return loss / len(order), 100 * right / len(order)
