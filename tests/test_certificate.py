"""The certificate as people and programs read it."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import ness
from helpers import low_rank, named


def certificate(tasks: int = 1) -> ness.Certificate:
    torch.manual_seed(0)
    model = named(trunk=nn.Linear(32, 8), act=nn.ReLU(), head=nn.Linear(8, 2))
    guard = ness.NullSpace(model, rule=ness.Nuclear(1e-2), exclude=["head"])
    for _ in range(tasks):
        guard.observe(low_rank(64, 32) + 0.01 * torch.randn(64, 32))
        guard.constrain()
        torch.nn.init.normal_(guard.parameters()[0], std=0.1)
        guard.merge()
    return guard.certificate()


def test_rows_carry_the_agreed_names() -> None:
    (row,) = certificate().rows
    names = ["name", "fan_in", "rank", "tau", "update_norm", "bound", "rms_bound", "rms_drift", "relative_drift"]
    assert list(certificate().to_dicts()[0]) == names
    assert json.loads(json.dumps(certificate().to_dicts()))[0]["name"] == "trunk"
    assert (row.name, row.fan_in) == ("trunk", 32)
    assert 0 < row.rms_drift <= row.rms_bound <= row.bound
    assert row.bound <= row.tau * row.update_norm * (1 + 1e-9)


def test_bounds_add_up_over_tasks_and_drift_stays_below() -> None:
    rows = [certificate(tasks).rows[0] for tasks in (1, 2, 3)]
    assert rows[0].bound < rows[1].bound < rows[2].bound
    assert all(row.rms_drift <= row.rms_bound for row in rows)


def test_it_prints_as_a_table() -> None:
    lines = str(certificate()).splitlines()
    heads = "name fan in rank tau update norm bound rms bound rms drift relative drift"
    assert lines[0].split() == heads.split()
    assert lines[1].startswith("trunk")
    assert len(lines[0]) == len(lines[1])
    assert lines[-1] == "holds: the measured drift is within its bound in every layer"


def test_rows_by_name() -> None:
    found = certificate()
    assert found["trunk"] is found.rows[0]
    assert [row.name for row in found] == ["trunk"]
    assert len(found) == 1
    with pytest.raises(KeyError, match="no row 'x'; rows: trunk"):
        found["x"]


def test_groups_are_a_root_sum_square() -> None:
    torch.manual_seed(1)
    whole = named(conv=nn.Conv1d(8, 6, 1, groups=2, bias=False)).double()
    x = torch.randn(30, 8, 4, dtype=torch.float64)
    guard = ness.NullSpace(whole, rule=ness.Rank(2))
    guard.observe(x)
    guard.constrain()
    torch.nn.init.normal_(guard.parameters()[0])
    together = guard.certificate().rows[0]
    parts = []
    for group in range(2):
        part = named(conv=nn.Conv1d(4, 3, 1, bias=False)).double()
        alone = ness.NullSpace(part, rule=ness.Rank(2))
        alone.observe(x[:, 4 * group : 4 * group + 4])
        alone.constrain()
        with torch.no_grad():
            alone.parameters()[0].copy_(guard.parameters()[0][group : group + 1])
        parts.append(alone.certificate().rows[0])
    for figure in ("tau", "update_norm", "bound", "rms_bound", "rms_drift"):
        squares = sum(getattr(part, figure) ** 2 for part in parts)
        assert getattr(together, figure) == pytest.approx(squares**0.5, rel=1e-9)
    assert together.rank == sum(part.rank for part in parts)
