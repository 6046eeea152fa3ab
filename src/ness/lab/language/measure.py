"""How well a model predicts a text, and how far its predictions are from another model's."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ness.lab.language.train import autocast

_AT_ONCE = 16  # blocks a pass


@torch.no_grad()
def predictions(model: nn.Module, blocks: Tensor) -> list[Tensor]:
    """Log-probabilities of every next token, (n', t - 1, vocabulary) for each 16 blocks: kept to compare others with.

    Args:
        model: the causal language model.
        blocks: token ids, (n, t), on the model's device.
    """
    model.eval()
    return [_logits(model, part).log_softmax(-1) for part in torch.split(blocks, _AT_ONCE)]


@torch.no_grad()
def loss_and_change(model: nn.Module, known: Sequence[Tensor] | None, blocks: Tensor) -> tuple[float, float]:
    """Mean loss of a text's tokens, and the mean divergence KL(base ‖ model) of their predictions, both in nats.

    Args:
        model: the causal language model that is measured.
        known: the `predictions` of the one it began from; None: no divergence is asked for, and 0 is returned.
        blocks: token ids, (n, t), on the model's device.
    """
    model.eval()
    total, change = 0.0, 0.0
    for index, part in enumerate(torch.split(blocks, _AT_ONCE)):
        logits = _logits(model, part)
        total += cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="sum").item()
        if known is not None:
            origin = known[index]
            change += (origin.exp() * (origin - logits.log_softmax(-1))).sum().item()
    count = blocks.shape[0] * (blocks.shape[1] - 1)
    return total / count, change / count


def _logits(model: nn.Module, part: Tensor) -> Tensor:
    with autocast(part.device):
        logits: Tensor = model(input_ids=part).logits
    return logits[:, :-1].float()


@torch.no_grad()
def similarities_kept(before: Tensor, after: Tensor, nearest: int = 10) -> dict[str, float]:
    """How much of the similarities between inputs is left: cosines of all pairs, and each input's nearest others.

    Args:
        before: features of the same inputs by the network as it was, (n, d).
        after: by the network as it is now.
        nearest: k of the neighbours that are compared.

    Returns:
        `spearman`: rank correlation of the cosines of all pairs; `overlap`: mean share of the k nearest that are still
        among them. 1 and 1: nothing changed.

    >>> points = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
    >>> similarities_kept(points, 2 * points)
    {'spearman': 1.0, 'overlap': 1.0}
    """
    pairs = torch.triu_indices(len(before), len(before), 1)
    ranks, neighbours = [], []
    for features in (before, after):
        unit = torch.nn.functional.normalize(features.double().cpu())
        cosines = unit @ unit.mT
        ranks.append(cosines[pairs[0], pairs[1]].argsort(stable=True).argsort().double())
        neighbours.append(cosines.fill_diagonal_(-2).topk(nearest).indices)
    spearman = torch.corrcoef(torch.stack(ranks))[0, 1].item()
    same = (neighbours[0][:, :, None] == neighbours[1][:, None, :]).any(-1).double().mean().item()
    return {"spearman": round(spearman, 6), "overlap": round(same, 6)}
