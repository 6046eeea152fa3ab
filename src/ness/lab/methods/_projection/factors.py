"""Gradients of linear layers that are kept as what they are made of: vᵢ = Dᵢᵀ A instead of (o, d) numbers each.

The n samples of a task go through a layer together, so all n gradients share the inputs A (n, d); Dᵢ (n, o) is the
gradient of logit i with respect to the layer's outputs. Where samples do not meet behind the layer, only row i of Dᵢ
is not 0, and no other is kept.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Factors:
    """Gradients (m, o, width) in groups that share inputs: a group of n a task, or every gradient by itself."""

    inputs: Tensor  # A (groups, r, width): rows [x; 1] where there is a bias
    outputs: Tensor  # D (groups, k, r, o), m = groups · k

    @property
    def rows(self) -> Tensor:
        """A of all groups, one below the other: (groups · r, width)."""
        return self.inputs.flatten(0, 1)

    @property
    def size(self) -> int:
        """How many numbers are kept."""
        return self.inputs.numel() + self.outputs.numel()

    def along(self, moved: Tensor) -> Tensor:
        """V g (m,) = Σ_b ⟨Dᵢ[b], G a_b⟩ in float64, from what the gradient makes of the rows, A Gᵀ (groups · r, o)."""
        groups = len(self.outputs)
        found: Tensor = self.outputs.flatten(2) @ moved.reshape(groups, -1, 1)
        return found.flatten().to(torch.float64)

    def combined(self, weights: Tensor) -> Tensor:
        """Σᵢ cᵢ Dᵢ (groups · r, o), so that Vᵀ c is its transpose times A."""
        groups, each, rows, outputs = self.outputs.shape
        chosen = weights.to(self.outputs.dtype).reshape(groups, 1, each)
        return (chosen @ self.outputs.flatten(2)).reshape(groups * rows, outputs)

    def dense(self) -> Tensor:
        """The gradients themselves, (m, o, width)."""
        return torch.einsum("gkbo,gbd->gkod", self.outputs, self.inputs).flatten(0, 1)

    def followed_by(self, more: "Factors") -> "Factors":
        """These gradients and then those of one more task; in the form of a group a task unless neither needs it."""
        if self.outputs.shape[1:] != more.outputs.shape[1:]:
            count = max(self.outputs.shape[1], more.outputs.shape[1])
            return _whole(self, count).followed_by(_whole(more, count))
        return Factors(torch.cat([self.inputs, more.inputs]), torch.cat([self.outputs, more.outputs]))


def factors(inputs: Tensor, outputs: Tensor) -> Factors:
    """The gradients of one task from A (n, width) and D (n, n, o), which may turn out to hold the rows i of Dᵢ alone.

    >>> meet, apart = torch.ones(2, 2, 5), torch.eye(2)[..., None].expand(2, 2, 5)
    >>> [factors(torch.ones(2, 3), each).outputs.shape for each in (meet, apart)]
    [torch.Size([1, 2, 2, 5]), torch.Size([2, 1, 1, 5])]
    """
    count = len(inputs)
    own = outputs.diagonal().mT  # (n, o)
    if torch.count_nonzero(outputs) == torch.count_nonzero(own):
        return Factors(inputs.reshape(count, 1, -1), own.reshape(count, 1, 1, -1).contiguous())
    return Factors(inputs.unsqueeze(0), outputs.unsqueeze(0))


def _whole(kept: Factors, count: int) -> Factors:
    """The same gradients with all n rows of every Dᵢ, one group for each n of them."""
    if kept.outputs.shape[1] == count:
        return kept
    own = kept.outputs.reshape(-1, count, kept.outputs.shape[-1])  # (tasks, n, o)
    outputs = torch.diag_embed(own.mT).permute(0, 2, 3, 1).contiguous()  # (tasks, n, n, o)
    return Factors(kept.inputs.reshape(-1, count, kept.inputs.shape[-1]), outputs)


def products(kept: Factors, count: int) -> Tensor:
    """⟨vᵢ, vⱼ⟩ = Σ_bb' ⟨a_b, a_b'⟩ ⟨Dᵢ[b], Dⱼ[b']⟩ (m, n) in float64, of all gradients with those of the last n."""
    groups = count // kept.outputs.shape[1]
    inputs, outputs = kept.inputs[-groups:].double(), kept.outputs[-groups:].double()
    found = []  # a task at a time
    for rows, made in zip(torch.split(kept.inputs, groups), torch.split(kept.outputs, groups), strict=True):
        met = torch.einsum("gbd,hcd->gbhc", rows.double(), inputs)
        carried = torch.einsum("gbhc,hjco->ghjbo", met, outputs)
        found.append(torch.einsum("gibo,ghjbo->gihj", made.double(), carried).reshape(-1, count))
    return torch.cat(found)
