"""The Gram: additive, exact in float64, whatever the batching."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import ness
from ness.layers import ConvLayer
from ness.statistics import gram as gram_module
from ness.statistics.gram import GPU_TILES, TILE, add_gram_, add_product_, gram_of_rows, parts_of, widened, with_ones


@given(cuts=st.lists(st.integers(0, 60), max_size=5), seed=st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_any_batching_and_order_agree(cuts: list[int], seed: int) -> None:
    torch.manual_seed(seed)
    rows = torch.randn(60, 9) * torch.logspace(-3, 3, 9)
    whole = ness.Gram.of(rows)
    edges = [0, *sorted(cuts), 60]
    parts = [ness.Gram.of(rows[a:b]) for a, b in itertools.pairwise(edges)]
    order = torch.randperm(len(parts)).tolist()
    total = ness.Gram.zeros(1, 9)
    for index in order:
        total = total + parts[index]
    assert total.count == whole.count == 60
    assert torch.allclose(total.matrix, whole.matrix, rtol=1e-10, atol=1e-10 * float(whole.matrix.abs().max()))


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.randn(2, 100, 5)
    whole = gram_of_rows(rows)
    monkeypatch.setattr(gram_module, "CHUNK_ELEMENTS", 7 * 10)
    assert torch.allclose(gram_of_rows(rows), whole, rtol=1e-12)
    assert len(list(gram_module.row_blocks(rows))) > 10


@given(
    groups=st.integers(1, 4),
    each=st.integers(1, 9),
    parts=st.integers(1, 7),
    width=st.integers(1, 6),
    seed=st.integers(0, 99),
)
@settings(max_examples=40, deadline=None)
def test_a_product_in_parts_is_the_product(groups: int, each: int, parts: int, width: int, seed: int) -> None:
    torch.manual_seed(seed)
    rows, before = torch.randn(groups, each * parts, width, dtype=torch.float64), torch.randn(groups, width, width)
    total = before.double()
    add_product_(total, rows, parts)
    assert torch.allclose(total, before.double() + rows.mT @ rows, rtol=1e-12, atol=1e-12)


@given(groups=st.integers(1, 40), count=st.integers(1, 60_000), width=st.integers(1, 3000))
@settings(max_examples=200, deadline=None)
def test_parts_divide_the_rows_and_are_no_larger_than_they(groups: int, count: int, width: int) -> None:
    parts = parts_of(torch.empty(groups, count, width, device="meta"))
    assert 1 <= parts <= GPU_TILES
    assert count % parts == 0
    if parts > 1:
        assert parts * width * width <= count * width
        assert groups * parts * (-(-width // TILE)) ** 2 <= GPU_TILES


def test_fast_mode_is_right_to_1e6() -> None:
    rows = torch.randn(1, 20_000, 16) + 0.5
    exact, fast = gram_of_rows(rows), gram_of_rows(rows, torch.float32)
    assert fast.dtype == torch.float64
    assert float((fast - exact).norm() / exact.norm()) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("constant", [False, True])
def test_a_view_of_patches_adds_what_the_rows_add(dtype: torch.dtype, constant: bool) -> None:
    conv = nn.Conv2d(4, 6, 3, stride=2, dilation=2, groups=2)
    layer = ConvLayer("conv", conv)
    x = torch.randn(7, 4, 11, 12)
    width = layer.fan_in + constant
    total = torch.ones(2, width, width, dtype=torch.float64)
    add_gram_(total, layer.windows(conv, x), layer.fan_in, dtype)
    rows = layer.patches(conv, x)
    expected = 1 + gram_of_rows(with_ones(rows) if constant else rows)
    assert torch.allclose(total, expected, rtol=1e-12 if dtype == torch.float64 else 1e-5, atol=1e-4)


def test_rows_of_a_bias_end_in_one() -> None:
    rows = torch.randn(2, 5, 3)
    assert torch.equal(widened(rows, 3, 4, torch.float32), with_ones(rows))
    assert torch.equal(with_ones(rows)[..., -1], torch.ones(2, 5))
    assert torch.equal(with_ones(rows)[..., :3], rows)


def test_save_and_load(tmp_path: Path) -> None:
    gram = ness.Gram.of(torch.randn(30, 4))
    gram.save(tmp_path / "deep" / "gram.safetensors")
    again = ness.Gram.load(tmp_path / "deep" / "gram.safetensors")
    assert torch.equal(again.matrix, gram.matrix)
    assert again.count == 30
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["gram.safetensors"]


def test_refuses_what_is_not_a_gram(tmp_path: Path) -> None:
    with pytest.raises(ness.NessError, match="float64 matrix of shape"):
        ness.Gram(torch.zeros(3, 3), 1)
    with pytest.raises(ness.NessError, match="do not add"):
        ness.Gram.zeros(1, 3) + ness.Gram.zeros(1, 4)
    (tmp_path / "file").write_bytes(b"nonsense")
    with pytest.raises(ness.NessError, match="cut off or foreign"):
        ness.Gram.load(tmp_path / "file")
