"""How well a model predicts a text, and how far its predictions are from another model's."""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ness.lab.language.train import autocast

_AT_ONCE = 16  # blocks a pass


@torch.no_grad()
def loss_and_change(model: nn.Module, base: nn.Module | None, blocks: Tensor) -> tuple[float, float]:
    """Mean loss of a text's tokens, and the mean divergence KL(base ‖ model) of their predictions, both in nats.

    Args:
        model: the causal language model that is measured.
        base: the one it began from; None: no divergence is asked for, and 0 is returned.
        blocks: token ids, (n, t), on the models' device.
    """
    model.eval()
    total, change = 0.0, 0.0
    for part in torch.split(blocks, _AT_ONCE):
        with autocast(part.device):
            logits = model(input_ids=part).logits[:, :-1].float()
            origin = None if base is None else base(input_ids=part).logits[:, :-1].float()
        total += cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="sum").item()
        if origin is not None:
            known = origin.log_softmax(-1)
            change += (known.exp() * (known - logits.log_softmax(-1))).sum().item()
    count = blocks.shape[0] * (blocks.shape[1] - 1)
    return total / count, change / count
