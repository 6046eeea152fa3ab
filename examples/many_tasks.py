"""One model, five tasks, nothing forgotten: a shared update within a budget, private directions and norms a task.

    python examples/many_tasks.py

Real data (scikit-learn's 8×8 digits, turned and mirrored), a few seconds on a CPU. It ends with one task's plain
weights in a file, for whoever deploys that task alone.
"""

import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from sklearn.datasets import load_digits
from torch import Tensor, nn

import ness

torch.manual_seed(0)

# -- data: five views of the same digits; every fourth image is for testing ------------------------------------------
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)
test = torch.arange(len(labels)) % 4 == 0
views = {
    "upright": images,
    "turned": images.rot90(1, (2, 3)),
    "mirrored": images.flip(3),
    "inverted": 1 - images,
    "upside down": images.rot90(2, (2, 3)),
}


class Reader(nn.Module):
    """A small network with a head a task."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(512, 128), nn.ReLU(),
        )  # fmt: skip
        self.heads = nn.ModuleList(nn.Linear(128, 10) for _ in range(heads))


def train(model: Reader, task: int, x: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """An ordinary loop."""
    x, y = x[~test], labels[~test]
    model.train()
    for _ in range(8):
        for batch in torch.randperm(len(x)).split(32):
            optimizer.zero_grad()
            F.cross_entropy(model.heads[task](model.body(x[batch])), y[batch]).backward()
            optimizer.step()
    model.eval()


@torch.no_grad()
def accuracy(model: Reader, task: int, x: Tensor) -> float:
    guess = model.heads[task](model.body(x[test])).argmax(-1)
    return 100 * (guess == labels[test]).float().mean().item()


model = Reader(len(views))
guard = ness.NullSpace(model, rule=ness.Within(0.1), exclude=["heads"], norm="per_task")
learnt = []
for task, (name, x) in enumerate(views.items()):
    model.heads.requires_grad_(False)
    model.heads[task].requires_grad_(True)
    if task > 0:
        guard.constrain(task=name, private=8)
    train(model, task, x, torch.optim.AdamW(guard.parameters() if task else model.parameters(), lr=3e-3))
    if task > 0:
        guard.merge()
    learnt.append(accuracy(model, task, x))
    guard.observe(x[~test].split(64), forward=lambda model, batch: model.body(batch), task=name)  # no image is kept

for task, (name, x) in enumerate(views.items()):
    guard.use(name)
    print(f"{name:<12} learnt {learnt[task]:.1f} %, at the end {accuracy(model, task, x):.1f} %")
print(f"\n{guard.certificate()}")

# -- one task alone, as plain weights --------------------------------------------------------------------------------
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "turned.safetensors"
    guard.export("turned", path)
    alone = Reader(len(views)).eval()
    alone.load_state_dict(load_file(path))
print(f"\nexported: turned {accuracy(alone, 1, views['turned']):.1f} %")
