"""Folders of statistics in the place of old or new batches."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ness
from helpers import low_rank


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 10), nn.ReLU(), nn.Linear(10, 8))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).relu())


def prepared(folder: Path) -> tuple[Model, Model, Tensor, Tensor]:
    torch.manual_seed(0)
    base = Model()
    tuned = copy.deepcopy(base)
    with torch.no_grad():
        for parameter in tuned.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    old, new = low_rank(80, 12), torch.randn(90, 12)
    guard = ness.NullSpace(base)
    guard.observe(old)
    guard.export_statistics(folder)
    return base, tuned, old, new


def test_old_statistics_are_as_good_as_old_inputs(tmp_path: Path) -> None:
    base, tuned, old, new = prepared(tmp_path)
    seen = ness.repair(tuned, base, old=old, new=new, ridge=1e-5)
    told = ness.repair(tuned, base, old=tmp_path, new=new)
    for one, other in zip(seen.model.parameters(), told.model.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-3)
    assert told.on_old is None
    assert told.on_new is not None
    assert told["head"].old_after == pytest.approx(seen["head"].old_after, rel=1e-2)
    assert [row.old for row in told.front([1.0])] == [None]
    str(told.front([1.0]))
    alone = ness.repair(tuned, base, old=str(tmp_path))
    assert alone.on_new is None
    assert all(row.old_after < row.old_before for row in alone)


def test_names_may_differ_by_a_prefix(tmp_path: Path) -> None:
    base, tuned, _, new = prepared(tmp_path)
    told = ness.repair(tuned, base, old=tmp_path, new=new).model
    inner = ness.repair(tuned.body, base.body, old=tmp_path, new=new).model
    assert torch.equal(inner[0].weight, told.body[0].weight)


def test_mistakes(tmp_path: Path) -> None:
    base, tuned, _, new = prepared(tmp_path)
    with pytest.raises(ness.NessError, match="same data"):
        ness.repair(tuned, base, old=tmp_path, new=tmp_path)
    with pytest.raises(ness.NessError, match="holds no"):
        ness.repair(tuned, base, old=tmp_path / "nothing", new=new)
    with pytest.raises(ness.NessError, match="one go"):
        ness.repair(tuned, base, old=tmp_path, new=new, passes=2)
    for name, width, message in (
        ("stem", 12, "no statistics of 'stem'|no statistics of stem"),
        ("head", 9, "another architecture"),
    ):
        before, after = nn.Module(), nn.Module()
        before.add_module(name, nn.Linear(width, 4))
        after.add_module(name, nn.Linear(width, 4))
        with pytest.raises(ness.NessError, match=message):
            ness.repair(after, before, old=tmp_path)
    with pytest.warns(ness.NessWarning, match="under other weights"):
        ness.repair(base, tuned, old=tmp_path, new=new)


def test_grams_that_somebody_kept() -> None:
    torch.manual_seed(0)
    base = Model().double()
    tuned = copy.deepcopy(base)
    with torch.no_grad():
        for parameter in tuned.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    old, new = low_rank(80, 12, dtype=torch.float64), torch.randn(90, 12, dtype=torch.float64)
    guard = ness.NullSpace(base)
    guard.observe(old)
    for passes in (1, 3):
        seen = ness.repair(tuned, base, old=old, new=new, passes=passes)
        kept = ness.repair(tuned, base, old=guard.grams, new=new, passes=passes)
        for one, other in zip(seen.model.parameters(), kept.model.parameters(), strict=True):
            assert torch.allclose(one, other, atol=1e-9)
    few = {name: gram for name, gram in guard.grams.items() if name != "head"}
    with pytest.raises(ness.NessError, match="no Gram of 'head'"):
        ness.repair(tuned, base, old=few, new=new)
    wrong = {**guard.grams, "head": guard.grams["body.0"]}
    with pytest.raises(ness.NessError, match="the Gram of 'head' is"):
        ness.repair(tuned, base, old=wrong, new=new)
