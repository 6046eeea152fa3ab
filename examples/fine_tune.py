"""My fine-tune forgets: a network that reads the digits 0 to 4 learns 5 to 9, with and without a guard.

    python examples/fine_tune.py

Real data (scikit-learn's 8×8 digits), a few seconds on a CPU.
"""

import copy

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import ness

torch.manual_seed(0)

# -- data: two tasks, old and new; every fourth image is for testing ------------------------------------------------
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)
test = torch.arange(len(labels)) % 4 == 0
old, new = labels < 5, labels >= 5


class Reader(nn.Module):
    """A small convolutional network with one head for the old digits and one for the new."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(256, 128), nn.ReLU(),
        )  # fmt: skip
        self.old_head, self.new_head = nn.Linear(128, 5), nn.Linear(128, 5)


def train(model: Reader, head: nn.Module, optimizer: torch.optim.Optimizer, mask: torch.Tensor) -> None:
    """An ordinary loop: the guard does not touch it."""
    x, y = images[mask & ~test], labels[mask & ~test] % 5
    model.train()
    for _ in range(20):
        for batch in torch.randperm(len(x)).split(32):
            optimizer.zero_grad()
            F.cross_entropy(head(model.body(x[batch])), y[batch]).backward()
            optimizer.step()
    model.eval()


def accuracy(model: Reader, head: nn.Module, mask: torch.Tensor) -> float:
    with torch.no_grad():
        guess = head(model.body(images[mask & test])).argmax(-1)
    return 100 * (guess == labels[mask & test] % 5).float().mean().item()


# -- the model learns 0 to 4 ----------------------------------------------------------------------------------------
model = Reader()
train(model, model.old_head, torch.optim.AdamW(model.parameters(), lr=3e-3), old)
print(f"before:            old digits {accuracy(model, model.old_head, old):.1f} %")

# -- plain fine-tuning on 5 to 9 ------------------------------------------------------------------------------------
plain = copy.deepcopy(model)
train(plain, plain.new_head, torch.optim.AdamW(plain.parameters(), lr=3e-3), new)
print(
    f"plain fine-tuning: old digits {accuracy(plain, plain.old_head, old):.1f} %, "
    f"new digits {accuracy(plain, plain.new_head, new):.1f} %"
)

# -- the same with a guard ------------------------------------------------------------------------------------------
guard = ness.NullSpace(model, rule=ness.Nuclear(3e-3), exclude=["old_head", "new_head"])
guard.observe(images[old & ~test].split(64), forward=lambda model, batch: model.body(batch))
guard.constrain()
model.old_head.requires_grad_(False)
train(model, model.new_head, torch.optim.AdamW(guard.parameters(), lr=3e-3), new)
certificate = guard.certificate()
guard.merge()
print(
    f"with a guard:      old digits {accuracy(model, model.old_head, old):.1f} %, "
    f"new digits {accuracy(model, model.new_head, new):.1f} %\n"
)
print(certificate)
