"""The certificate as people and programs read it."""

from __future__ import annotations

import copy
import json
import pickle

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
    assert len(lines[0]) == len(lines[1]) <= 80
    assert lines[3].startswith("within its bounds; largest drift: ")
    assert lines[3].endswith(" % of its own outputs, in trunk")
    assert lines[4:] == [
        "trainable and unprotected: 18 of the model's 282 numbers",
        "  head.weight  16",
        "  head.bias     2",
    ]


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


def row(name: str, drift: float, bound: float = 1.0) -> ness.CertificateRow:
    return ness.CertificateRow(name, 8, 4, 0.1, 1.0, bound, bound, drift * 2, drift)


def test_the_verdict_names_the_worst_layer_and_its_drift_in_percent() -> None:
    found = ness.Certificate((row("a", 0.01), row("b.c", 0.31), row("d", 0.3)))
    assert found.largest_drift == 0.31
    assert found.largest_drift.name == "b.c"
    assert found.largest_drift.percent == pytest.approx(31)
    name, drift = found.largest_drift
    assert (name, drift) == ("b.c", 0.31)
    assert found.verdict == "within its bounds; largest drift: 31 % of its own outputs, in b.c"
    assert found.verdict in str(found)
    assert json.dumps(found.largest_drift) == "0.31"
    assert copy.deepcopy(found.largest_drift).name == pickle.loads(pickle.dumps(found.largest_drift)).name == "b.c"


def test_the_verdict_never_says_that_nothing_was_forgotten() -> None:
    found = str(ness.Certificate((row("a", 0.9, bound=5.0),)))
    assert "within its bounds" in found
    assert "90 %" in found
    assert "holds" not in found
    assert "forg" not in found


def test_a_broken_bound_is_named_beside_the_worst_layer() -> None:
    found = ness.Certificate((row("a", 0.01), row("b", 0.02, bound=1e-6), row("c", 0.4)))
    assert not found.holds
    lines = str(found).splitlines()
    expected = "BROKEN: the measured drift exceeds its bound in b; largest drift: 40 % of its own outputs, in c"
    assert expected in lines
    assert "within its bounds" not in str(found)


def test_outputs_that_overflow_are_the_worst() -> None:
    rows = (row("a", 2.0), row("b", float("nan")), row("c", float("inf")))
    assert ness.Certificate(rows).largest_drift.name == "b"
    assert ness.Certificate((rows[0], rows[2])).largest_drift.name == "c"
    assert ness.Certificate(()).largest_drift == 0
    assert ness.Certificate(()).verdict == "nothing was observed"


def test_the_worst_layer_is_the_one_that_moved_most_on_the_data() -> None:
    torch.manual_seed(0)
    model = named(a=nn.Linear(16, 16), act=nn.Tanh(), b=nn.Linear(16, 16))
    x = torch.randn(400, 16)
    guard = ness.NullSpace(model, rule=ness.Rank(8))
    guard.observe(x)
    inputs = {"a": x, "b": torch.tanh(model.a(x)).detach()}
    before = {name: getattr(model, name)(rows).detach() for name, rows in inputs.items()}
    guard.constrain()
    for parameter, size in zip(guard.parameters(), (0.01, 0.5), strict=True):
        torch.nn.init.normal_(parameter, std=size)
    guard.merge()
    moved = {
        name: float((getattr(model, name)(rows).detach() - before[name]).norm() / before[name].norm())
        for name, rows in inputs.items()
    }
    found = guard.certificate().largest_drift
    assert found.name == max(moved, key=lambda name: moved[name]) == "b"
    assert found == pytest.approx(moved["b"], rel=1e-4)


def test_a_printed_certificate_fits_eighty_columns_and_keeps_every_name() -> None:
    name = "bert.encoder.layer.0.attention.output.dense.and.more.of.a.name"
    model = torch.nn.Module()
    at = model
    *path, last = name.split(".")
    for part in path:
        at.add_module(part, torch.nn.Module())
        at = getattr(at, part)
    at.add_module(last, torch.nn.Linear(4, 4))
    model.forward = lambda x: at.get_submodule(last)(x)  # type: ignore[assignment]
    guard = ness.NullSpace(model)
    guard.observe(torch.randn(40, 4) * 1e-5)
    lines = str(guard.certificate()).splitlines()
    assert name in lines
    assert max(map(len, lines[: lines.index("")])) <= 80
