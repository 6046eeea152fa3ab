"""What observing costs beside its floor: the forward pass, and one symmetric product for each distinct layer input.

The floor is counted and timed in the same run: half of what Xᵀ X takes as one full product, on rows of the same shape
and in the dtype of the statistics, for every input that layers read (q, k and v read one; gate and up read one). Times
are CPU time of this process, medians of interleaved rounds. What a call costs besides its batches is the last column:
a copy of every Gram it adds to, so that an error leaves the guard as it was, and a look at every weight.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ness

ROUNDS, MANY = 5, 4


class Block(nn.Module):
    """A decoder's block: attention with fewer keys than queries, and a gated MLP."""

    def __init__(self, width: int, heads: int, keys: int, inner: int) -> None:
        super().__init__()
        self.heads, self.keys, head = heads, keys, width // heads
        self.first, self.second = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = nn.Linear(width, keys * head, bias=False), nn.Linear(width, keys * head, bias=False)
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        q, k, v = (
            part.unflatten(-1, (n, -1)).transpose(1, 2)
            for part, n in ((self.q(h), self.heads), (self.k(h), self.keys), (self.v(h), self.keys))
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        h = self.second(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


#: name -> width, heads, key heads, inner width, blocks
MODELS = {
    "SmolLM2-135M": (576, 9, 3, 1536, 4),
    "MiniLM": (384, 12, 12, 1536, 6),
    "1B (one block)": (2048, 32, 8, 8192, 1),
}


def median(ways: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median CPU time of each, in turn."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):  # the first turn warms up
        for name, way in ways.items():
            start = time.process_time()
            way()
            if turn:
                times[name].append(time.process_time() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def measure(name: str, dtype: torch.dtype, tokens: int, rounds: int) -> float:
    """Prints one line; returns the ratio to the floor."""
    torch.manual_seed(0)
    width, heads, keys, inner, blocks = MODELS[name]
    model = nn.Sequential(*(Block(width, heads, keys, inner) for _ in range(blocks))).eval()
    x = torch.randn(4, tokens // 4, width)
    guard = ness.NullSpace(model, statistics_dtype=dtype)
    guard.observe(x)
    inputs = {id(state.moments.gram): state.moments.gram for state in guard._protected.values()}
    rows = [torch.randn(tokens, gram.width, dtype=dtype) for gram in inputs.values()]

    def forward() -> None:
        with torch.no_grad():
            model(x)

    took = median(
        {
            "forward": forward,
            "products": lambda: [part.mT @ part for part in rows],
            "one": lambda: guard.observe([x]),
            "many": lambda: guard.observe([x] * (1 + MANY)),
        },
        rounds,
    )
    batch = (took["many"] - took["one"]) / MANY
    floor = took["forward"] + took["products"] / 2
    print(
        f"{name:15s} {str(dtype).removeprefix('torch.'):8s} {len(inputs):3d} inputs of {len(guard.layers):3d} layers  "
        f"forward {took['forward'] * 1e3:7.1f}  floor {floor * 1e3:7.1f}  observe {batch * 1e3:7.1f} ms a batch  "
        f"{batch / floor:5.2f} × the floor   a call {max(0.0, took['one'] - batch) * 1e3:6.1f} ms"
    )
    return batch / floor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    asked = parser.parse_args()
    warnings.simplefilter("ignore", ness.NessWarning)
    print(f"{asked.tokens} tokens a batch, {torch.get_num_threads()} threads, torch {torch.__version__}")
    for name in MODELS:
        for dtype in (torch.float64, torch.float32):
            measure(name, dtype, asked.tokens, asked.rounds)


if __name__ == "__main__":
    main()
