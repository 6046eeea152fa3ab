"""MiniLM: a small pretrained sentence encoder; its linear layers train, embeddings and norms stay as they came."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load
from torch import Tensor, nn
from torch.nn import functional as F

from ness.errors import NessError
from ness.lab.language import packages
from ness.lab.networks.base import Network, NetworkSpec, Norms, heads

PADDING = 0  # the id of [PAD]


@dataclass(frozen=True)
class Sizes:
    """A BERT encoder's sizes; the default is all-MiniLM-L6-v2's."""

    blocks: int = 6
    width: int = 384
    hidden: int = 1536
    attention_heads: int = 12
    vocabulary: int = 30522
    positions: int = 512
    eps: float = 1e-12


class _Fixed(nn.Module):
    """Pretrained numbers that nobody trains: no parameters, and no part of a state dict."""

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_buffer(name, torch.zeros(shape), persistent=False)


class _Block(nn.Module):
    """Attention and a feed-forward layer, each with a residual and a norm behind it."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width, self.count, self.eps = sizes.width, sizes.attention_heads, sizes.eps
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, sizes.hidden), nn.Linear(sizes.hidden, width)
        self.norms = _Fixed(weight=(2, width), bias=(2, width))

    def forward(self, rows: Tensor, places: Tensor, real: Tensor) -> Tensor:
        """Rows (tokens, width) of the real tokens alone, which are at `places` of the flattened (n, t) `real`."""
        query, key, value = (self._padded(layer(rows), places, real) for layer in (self.query, self.key, self.value))
        scores = query @ key.mT / math.sqrt(query.shape[-1])  # torch's own attention has no second derivative
        shares = scores.masked_fill(~real[:, None, None, :], -math.inf).softmax(-1)
        seen = (shares @ value).transpose(1, 2).reshape(real.numel(), -1)[places]
        rows = self._norm(rows + self.out(seen), 0)
        return self._norm(rows + self.down(F.gelu(self.up(rows))), 1)

    def _padded(self, rows: Tensor, places: Tensor, real: Tensor) -> Tensor:
        """(n, heads, t, width of a head), zeros where there is no token."""
        every = rows.new_zeros(real.numel(), rows.shape[1]).index_copy(0, places, rows)
        return every.view(*real.shape, self.count, -1).transpose(1, 2)

    def _norm(self, rows: Tensor, which: int) -> Tensor:
        weight, bias = self.norms.get_buffer("weight")[which], self.norms.get_buffer("bias")[which]
        return F.layer_norm(rows, rows.shape[1:], weight, bias, self.eps)


class MiniLM(Network):
    """Token ids (n, 1, 1, t), 0 for padding, to the mean of their last states (n, width).

    Padding is left out before the first linear layer, so that no layer ever sees a row that is no token.
    """

    mixable, static = False, False

    def __init__(
        self, shape: tuple[int, ...], classes: Sequence[int], norms: Norms, sizes: Sizes | None = None
    ) -> None:
        super().__init__()
        self.sizes = sizes = sizes or Sizes()
        if shape[-1] > sizes.positions or shape[:-1] != (1, 1):
            raise NessError(
                f"minilm reads token ids (1, 1, t) with t up to {sizes.positions}, found {shape}: give it sentences, "
                "as the benchmark text does"
            )
        width = sizes.width
        self.embedding = _Fixed(
            words=(sizes.vocabulary, width),
            places=(sizes.positions, width),
            kind=(width,),
            weight=(width,),
            bias=(width,),
        )
        self.blocks = nn.ModuleList(_Block(sizes) for _ in range(sizes.blocks))
        self.heads = heads(width, classes)

    def features(self, x: Tensor) -> Tensor:
        """(n, width)."""
        ids = x.flatten(1).long()
        longest = int((ids != PADDING).sum(1).max().clamp(min=1))
        ids = ids[:, :longest]
        real = ids != PADDING
        real[:, 0] = True  # an empty sentence is its first token
        places = real.flatten().nonzero().squeeze(1)
        rows = self._embedded(ids.flatten()[places], places % longest)
        for block in self.blocks:
            rows = block(rows, places, real)
        total = rows.new_zeros(len(ids), rows.shape[1]).index_add(0, places // longest, rows)
        return total / real.sum(1, keepdim=True)

    def _embedded(self, ids: Tensor, places: Tensor) -> Tensor:
        held = {name: self.embedding.get_buffer(name) for name in ("words", "places", "kind", "weight", "bias")}
        rows = held["words"][ids] + held["places"][places] + held["kind"]
        return F.layer_norm(rows, rows.shape[1:], held["weight"], held["bias"], self.sizes.eps)

    def load_pretrained(self, data: Path | None) -> None:
        """The published weights, from their package."""
        archive = packages.find(packages.MINILM, data)
        self.load_bert(load(packages.member(archive, "model.safetensors").read()))

    @torch.no_grad()
    def load_bert(self, state: dict[str, Tensor]) -> None:
        """Weights under the names of transformers' `BertModel`; heads stay as they are."""
        for name, target in self._places().items():
            if name not in state or target.shape != state[name].shape:
                found = tuple(state[name].shape) if name in state else "nothing"
                raise NessError(f"minilm: the weights hold {found} as {name!r}, expected {tuple(target.shape)}")
            target.copy_(state[name])
        self.embedding.get_buffer("kind").copy_(state["embeddings.token_type_embeddings.weight"][0])

    def _places(self) -> dict[str, Tensor]:
        found = {
            f"embeddings.{theirs}": self.embedding.get_buffer(ours)
            for theirs, ours in (
                ("word_embeddings.weight", "words"),
                ("position_embeddings.weight", "places"),
                ("LayerNorm.weight", "weight"),
                ("LayerNorm.bias", "bias"),
            )
        }
        for number, block in enumerate(self.blocks):
            start = f"encoder.layer.{number}."
            for theirs, ours in _LINEARS.items():
                for kind in ("weight", "bias"):
                    found[f"{start}{theirs}.{kind}"] = block.get_parameter(f"{ours}.{kind}")
            for which, theirs in enumerate(("attention.output.LayerNorm", "output.LayerNorm")):
                for kind in ("weight", "bias"):
                    found[f"{start}{theirs}.{kind}"] = block.get_buffer(f"norms.{kind}")[which]
        return found


_LINEARS = {
    "attention.self.query": "query",
    "attention.self.key": "key",
    "attention.self.value": "value",
    "attention.output.dense": "out",
    "intermediate.dense": "up",
    "output.dense": "down",
}

NETWORKS = (NetworkSpec("minilm", "Pretrained sentence encoder of 6 blocks (all-MiniLM-L6-v2)", MiniLM),)
