"""The one training loop of the study: AdamW at a constant rate after a warm-up, the same for every method."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

_WARM_UP = 0.1  # share of the steps
_CLIP = 1.0  # norm of the whole gradient


def autocast(device: torch.device) -> AbstractContextManager[None]:
    """Matrix products in bfloat16 on a GPU; in float32 on a CPU."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def batches(blocks: Tensor, size: int, steps: int, generator: torch.Generator) -> Iterable[Tensor]:
    """As many batches as there are steps: every epoch in a new order, its last short batch left out."""
    order: list[int] = []
    for _ in range(steps):
        if len(order) < size:
            order = torch.randperm(len(blocks), generator=generator).tolist()
        yield blocks[order[:size]]
        order = order[size:]


def train(
    model: nn.Module,
    parameters: Iterable[nn.Parameter],
    data: Iterable[Tensor],
    rate: float,
    steps: int,
    at: Callable[[int], None] = lambda step: None,
) -> None:
    """Trains these parameters on next-token prediction.

    Args:
        model: maps `input_ids` to an object with `.logits`.
        parameters: what the optimizer holds; nothing else changes.
        data: a batch of token ids (n, t) a step.
        rate: learning rate after the warm-up.
        steps: how many.
        at: called with the number of every step that is done.
    """
    held = list(parameters)
    optimizer = torch.optim.AdamW(held, lr=rate, weight_decay=0.0)
    warm = max(1, round(_WARM_UP * steps))
    model.train()
    for step, batch in enumerate(data, start=1):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, step / warm)
        with autocast(batch.device):
            logits = model(input_ids=batch).logits[:, :-1]
        loss = cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(held, _CLIP)
        optimizer.step()
        at(step)
        model.train()
    model.eval()
