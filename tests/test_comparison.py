"""The end-to-end change, against a copy of the model kept by the test."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import ness
from helpers import ZOO, named, train

pytestmark = pytest.mark.filterwarnings("ignore::ness.NessWarning")


@pytest.mark.parametrize("name", sorted(ZOO))
def test_compare_is_the_distance_to_the_model_as_observed(name: str) -> None:
    torch.manual_seed(0)
    model, old, new = ZOO[name]()
    model.eval()
    guard = ness.NullSpace(model, rule=ness.Nuclear(0.02))
    guard.observe(old)
    then = copy.deepcopy(model)
    guard.constrain()
    assert guard.compare(old).rms_change == 0
    train(model, torch.optim.AdamW(guard.parameters(), lr=1e-2), new)
    for _ in range(2):  # constrained, and merged
        comparison = guard.compare([old[:10], old[10:]])
        with torch.no_grad():
            now, before = model(old), then(old)
            change = (now - before).double()
            assert torch.equal(model(old), now)  # the model is left as it is
        assert comparison.samples == len(old)
        assert comparison.rms_change == pytest.approx(float(change.square().mean().sqrt()), rel=1e-3, abs=1e-7)
        assert comparison.max_change == pytest.approx(float(change.abs().max()), rel=1e-2, abs=1e-6)
        assert 0 < comparison.relative_change < 10
        assert f"{len(old)} samples" in str(comparison)
        if guard.constrained:
            guard.merge()


def test_compare_takes_any_output_and_keeps_modes() -> None:
    class Several(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> dict[str, object]:
            y = self.fc(x)
            return {"logits": y, "more": (y * 2, y.argmax(-1))}

    model = Several().train()
    guard = ness.NullSpace(model, rule=ness.Rank(3))
    guard.observe(torch.randn(40, 8))
    guard.constrain()
    torch.nn.init.normal_(guard.parameters()[0])
    comparison = guard.compare(torch.randn(5, 8))
    assert comparison.max_change > 0
    assert model.training
    with pytest.raises(ness.NessError, match="no floating-point output"):
        guard.compare(torch.randn(5, 8), forward=lambda m, b: m(b)["more"][1])


def test_samples_are_counted_where_a_loss_comes_first() -> None:
    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            logits = self.fc(x)
            return {"loss": logits.mean(), "logits": logits}

    guard = ness.NullSpace(WithLoss())
    guard.observe(torch.randn(30, 8))
    assert guard.compare([torch.randn(7, 8), torch.randn(5, 8)]).samples == 12


def test_norms_that_a_task_trains_for_itself_count() -> None:
    torch.manual_seed(0)
    model = named(fc=nn.Linear(20, 20), norm=nn.LayerNorm(20), head=nn.Linear(20, 3)).eval()
    x = torch.randn(200, 20)
    guard = ness.NullSpace(model, rule=ness.Rank(0), exclude="head", norm="per_task")
    guard.observe(x)
    before = model(x).detach()
    guard.constrain(task="b")
    model.head.requires_grad_(False)
    train(model, torch.optim.AdamW(guard.parameters(), lr=1e-2), torch.randn(99, 20))
    now = model(x).detach()
    moved = float((now - before).norm() / before.norm())
    assert moved > 0.01
    assert guard.compare(x).relative_change == pytest.approx(moved, rel=1e-3)
    assert torch.equal(model(x), now)  # the norms are back
    guard.merge()
    guard.use("first")
    assert guard.compare(x).relative_change == 0
