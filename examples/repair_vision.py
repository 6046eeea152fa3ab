"""It has forgotten already: a network fine-tuned on turned digits reads upright ones again, without training.

    python examples/repair_vision.py

Real data (scikit-learn's 8×8 digits), a few seconds on a CPU.
"""

import copy

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import ness

torch.manual_seed(0)

# -- data: upright digits are old, digits turned by 90° are new; every fourth image is for testing -------------------
digits = load_digits()
upright = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
turned = upright.rot90(1, (2, 3))
labels = torch.tensor(digits.target)
test = torch.arange(len(labels)) % 4 == 0


def train(model: nn.Module, images: torch.Tensor, epochs: int, lr: float) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    x, y = images[~test], labels[~test]
    for _ in range(epochs):
        for batch in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()


@torch.no_grad()
def accuracy(model: nn.Module, images: torch.Tensor) -> float:
    return 100 * (model(images[test]).argmax(-1) == labels[test]).float().mean().item()


def show(name: str, model: nn.Module) -> None:
    print(f"{name:24} upright {accuracy(model, upright):5.1f} %   turned {accuracy(model, turned):5.1f} %")


# -- a network that reads upright digits is fine-tuned on turned ones: plainly, with one head for both ----------------
base = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
    nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10),
)  # fmt: skip
train(base, upright, epochs=15, lr=2e-3)
tuned = copy.deepcopy(base)
train(tuned, turned, epochs=10, lr=1e-3)
show("before:", base)
show("fine-tuned:", tuned)

# -- what people do about it: weights half-way between the two (WiSE-FT) ---------------------------------------------
for share in (0.5, 0.7):
    between = copy.deepcopy(base)
    with torch.no_grad():
        for mine, theirs in zip(between.parameters(), tuned.parameters(), strict=True):
            mine.lerp_(theirs, share)
    show(f"interpolated {share}:", between)

# -- repaired: no training, no labels; layer by layer, each behind what is already repaired ----------------------------
old, new = upright[~test].split(256), turned[~test].split(256)
for strength in (1.0, 10.0):
    repaired = ness.repair(tuned, base, old=old, new=new, strength=strength, passes=4)
    show(f"repaired, strength {strength:g}:", repaired.model)
print(f"\n{repaired}")
