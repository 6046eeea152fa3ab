"""How a low-rank update should start: rows of B drawn as LoRA draws them, or along what the new task's inputs use most.

Digits 0 to 4 are learnt by plain training, then observed; digits 5 to 9 are the new task, trained at ranks 1, 4 and 16
with AdamW, its head included. For every seed both starts begin with the same weights and see the same batches. What
counts is the new task's loss after so many steps and its accuracy on images that were held out; the differences are
paired by seed. An MLP, and a small transformer that reads an image as eight rows. Everything is in scikit-learn.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import warnings

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import ness

MARKS = (5, 20, 100)


class Rows(nn.Module):
    """A transformer over the eight rows of a digit."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 64)
        self.place = nn.Parameter(torch.randn(8, 64) * 0.1)
        block = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.blocks(self.embed(x.view(-1, 8, 8)) + self.place)
        return hidden.mean(1)


def network(kind: str) -> nn.Module:
    mlp = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU())
    body, width = (mlp, 256) if kind == "mlp" else (Rows(), 64)
    return nn.ModuleDict({"body": body, "head": nn.Linear(width, 5)})


def digits(classes: range) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    images, labels = load_digits(return_X_y=True)
    kept = (labels >= classes.start) & (labels < classes.stop)
    x = torch.tensor(images[kept], dtype=torch.float32) / 8 - 1
    y = torch.tensor(labels[kept]) - classes.start
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y, cut = x[order], y[order], len(x) * 2 // 3
    return x[:cut], y[:cut], x[cut:], y[cut:]


def train(
    model: nn.Module, parameters: list[nn.Parameter], x: Tensor, y: Tensor, steps: int, lr: float, seed: int
) -> list[float]:
    """The loss over all of x at the marks."""
    optimizer, draw = torch.optim.AdamW(parameters, lr=lr), torch.Generator().manual_seed(seed)
    found = []
    for step in range(1, steps + 1):
        index = torch.randint(len(x), (64,), generator=draw)
        loss = F.cross_entropy(model["head"](model["body"](x[index])), y[index])  # type: ignore[index]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step in MARKS:
            with torch.no_grad():
                found.append(float(F.cross_entropy(model["head"](model["body"](x)), y)))  # type: ignore[index]
    return found


def measure(kind: str, rank: int, seeds: int, lr: float) -> None:
    x, y, *_ = digits(range(5))
    new_x, new_y, test_x, test_y = digits(range(5, 10))
    rows: dict[str, list[list[float]]] = {"random": [], "inputs": []}
    for seed in range(seeds):
        torch.manual_seed(seed)
        base = network(kind)
        train(base, list(base.parameters()), x, y, 200, 2e-3, seed)
        base["head"] = nn.Linear(base["head"].in_features, 5)  # type: ignore[index]
        for start, found in rows.items():
            model = copy.deepcopy(base)
            guard = ness.NullSpace(model, rule=ness.Soft(ness.Energy(0.95)), exclude=["head"])
            guard.observe(x, forward=lambda model, batch: model["body"](batch))  # type: ignore[index]
            generator = torch.Generator().manual_seed(seed)
            new = new_x if start == "inputs" else None
            guard.constrain(rank=rank, generator=generator, new=new, forward=lambda model, batch: model["body"](batch))
            losses = train(model, guard.parameters(), new_x, new_y, MARKS[-1], lr, seed)
            with torch.no_grad():
                right = (model["head"](model["body"](test_x)).argmax(-1) == test_y).float().mean()  # type: ignore[index]
            found.append([*losses, 100 * float(right)])
            guard.merge()
    for start, found in rows.items():
        means = [statistics.mean(column) for column in zip(*found, strict=True)]
        text = ", ".join(f"{mean:.3f} after {mark}" for mean, mark in zip(means, MARKS, strict=False))
        print(f"{kind:12s} rank {rank:2d} {start:7s} loss {text}; held out {means[-1]:.1f} %", flush=True)
    pairs = [[a - b for a, b in zip(*both, strict=True)] for both in zip(rows["inputs"], rows["random"], strict=True)]
    for what, column in zip(
        (*(f"loss after {mark}" for mark in MARKS), "held out, points"), zip(*pairs, strict=True), strict=True
    ):
        spread = statistics.stdev(column) / len(column) ** 0.5 if len(column) > 1 else float("nan")
        print(f"{'':12s}   inputs − random, {what}: {statistics.mean(column):+.3f} ± {spread:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--lr", type=float, default=3e-3)
    options = parser.parse_args()
    warnings.simplefilter("ignore", ness.NessWarning)
    for kind in ("mlp", "transformer"):
        for rank in options.ranks:
            measure(kind, rank, options.seeds, options.lr)


if __name__ == "__main__":
    main()
