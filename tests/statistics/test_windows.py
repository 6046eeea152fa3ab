"""Grams of overlapping patches by shifted products are those of the patches themselves."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import ness
from ness.layers.conv import ConvLayer
from ness.statistics import windows
from ness.statistics.gram import Gram
from ness.statistics.windows import gram_of_windows


def rows_of(conv: nn.Conv2d, x: Tensor) -> tuple[ConvLayer, Tensor, Tensor]:
    """The layer, its patches as it hands them over, and [patches; 1] in float64."""
    layer = ConvLayer("conv", conv)
    patches = layer.patches(conv, x).double()
    one = patches.new_ones(*patches.shape[:2], layer.width - layer.fan_in)
    return layer, layer.windows(conv, x), torch.cat([patches, one], dim=2)


@settings(max_examples=30, deadline=None)
@given(
    kernel=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    size=st.tuples(st.integers(4, 9), st.integers(4, 9)),
    padding=st.integers(0, 2),
    images=st.integers(1, 4),
    groups=st.integers(1, 2),
    bias=st.booleans(),
    last=st.booleans(),
    seed=st.integers(0, 9),
)
def test_it_is_the_gram_of_the_patches(kernel, size, padding, images, groups, bias, last, seed) -> None:
    conv = nn.Conv2d(16 * groups, 4 * groups, kernel, padding=padding, groups=groups, bias=bias)
    x = torch.randn(images, 16 * groups, *size, generator=torch.Generator().manual_seed(seed)) + 1
    x = x.to(memory_format=torch.channels_last) if last else x
    layer, rows, patches = rows_of(conv, x)
    found = gram_of_windows(rows, layer.width)
    places = tuple(n + 2 * padding - k + 1 for n, k in zip(size, kernel, strict=True))
    if kernel[0] * kernel[1] < 4 or places[0] < kernel[0] or places[1] < kernel[1]:
        assert found is None
        return
    exact = patches.mT @ patches
    assert found is not None
    assert (found - exact).abs().max() <= 1e-13 * exact.abs().max()
    assert torch.equal(found, found.mT) or (found - found.mT).abs().max() <= 1e-13 * exact.abs().max()


@pytest.mark.parametrize("changes", [{"stride": 2}, {"dilation": 2}, {"in_channels": 3}, {"kernel_size": 1}])
def test_patches_are_used_where_shifts_bring_nothing(changes: dict[str, int]) -> None:
    asked = {"in_channels": 16, "out_channels": 4, "kernel_size": 3, **changes}
    conv = nn.Conv2d(**asked)
    layer, rows, _ = rows_of(conv, torch.randn(2, asked["in_channels"], 9, 9))
    assert gram_of_windows(rows, layer.width) is None


def test_blocks_of_images_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    conv = nn.Conv2d(16, 4, 3)
    layer, rows, patches = rows_of(conv, torch.randn(7, 16, 8, 8, generator=torch.Generator().manual_seed(1)))
    monkeypatch.setattr(windows, "AT_ONCE", 3 * 16 * 64)
    monkeypatch.setattr(windows, "IN_CACHE", 2 * 16 * 64)
    found = gram_of_windows(rows, layer.width)
    torch.testing.assert_close(found, patches.mT @ patches, rtol=1e-12, atol=1e-10)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_pixel_that_is_not_finite_is_seen_in_the_diagonal(value: float) -> None:
    conv = nn.Conv2d(16, 4, 3)
    x = torch.randn(2, 16, 8, 8)
    x[1, 5, 0, 7] = value  # a corner, in one patch alone
    layer, rows, _ = rows_of(conv, x)
    found = gram_of_windows(rows, layer.width)
    assert found is not None
    assert not torch.isfinite(found.diagonal(dim1=1, dim2=2)).all()


def test_a_guard_observes_wide_convolutions_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 20, 3, bias=False))
    batches = [torch.randn(12, 16, 8, 8, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)]

    def observed() -> dict[str, Gram]:
        guard = ness.NullSpace(model)
        guard.observe(batches)
        return guard.grams

    shifted = observed()
    monkeypatch.setattr(windows, "LEAST_CHANNELS", 1000)
    for name, gram in observed().items():
        assert shifted[name].count == gram.count
        torch.testing.assert_close(shifted[name].matrix, gram.matrix, rtol=1e-12, atol=1e-9)
        assert not torch.equal(shifted[name].matrix, gram.matrix)  # another way of adding up
