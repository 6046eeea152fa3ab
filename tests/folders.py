"""A small guard and its folder, for the tests of what is persisted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import ness
from helpers import named


def small() -> nn.Module:
    torch.manual_seed(0)
    return named(a=nn.Linear(2, 1, bias=False))


def guard_of(model: nn.Module, rows: int = 5) -> ness.NullSpace:
    guard = ness.NullSpace(model, rule=ness.Rank(1))
    guard.observe(torch.ones(rows, 2))
    return guard


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


def refused(folder: Path, model: nn.Module) -> None:
    with pytest.raises(ness.NessError) as found:
        ness.NullSpace.load(folder, model)
    assert "\n" not in str(found.value)
