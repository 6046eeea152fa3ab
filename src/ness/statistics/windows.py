"""The Gram of overlapping patches from products of the image with itself, shifted: no patch is copied.

Two kernel places k and k + δ meet the same pairs of pixels, n and n + δ, whichever k is: only the edges differ. So for
every shift δ the pairs are multiplied once, in segments (a pixel wide at the edges, one in the middle), and each pair
of places adds up the segments inside its window. All are sums of products, none is taken away, so nothing cancels.
"""

from __future__ import annotations

import torch
from torch import Tensor

LEAST_CHANNELS = 16  # fewer make products too thin to pay
WIDEST = 2400  # columns; the whole of C is made beside its strips
AT_ONCE = 1 << 22  # numbers of images widened to float64 at a time: 32 MB
IN_CACHE = 1 << 17  # of them multiplied at a time: 1 MB


def gram_of_windows(rows: Tensor, width: int) -> Tensor | None:
    """C = Xᵀ X (groups, width, width) in float64 of patches as `ConvLayer.windows` gives them; None: use the patches.

    With a column more than the patches have, X is [x; 1].

    >>> image = torch.arange(480.0).view(1, 1, 16, 5, 6)  # (groups, images, channels, height, width)
    >>> rows = image.unfold(3, 2, 1).unfold(4, 2, 1).permute(0, 1, 3, 4, 2, 5, 6)
    >>> patches = rows.reshape(20, 64).double()
    >>> torch.allclose(gram_of_windows(rows, 64)[0], patches.mT @ patches)
    True
    """
    if rows.ndim != 7 or rows.is_cuda or width > WIDEST:
        return None
    groups, images, high, wide, channels, down, across = rows.shape
    strides = rows.stride()
    if strides[2:4] != strides[5:] or high < down or wide < across or channels < LEAST_CHANNELS or down * across < 4:
        return None
    shape = groups, images, high + down - 1, wide + across - 1, channels
    fan_in = channels * down * across
    whole = rows.new_zeros(groups, width, width, dtype=torch.float64)
    places = channels, down, across
    blocks = whole[:, :fan_in, :fan_in].view(groups, *places, *places)
    every = rows.as_strided(shape, strides[:5])
    for part in torch.split(every, max(1, AT_ONCE // every[:, :1].numel()), dim=1):
        image = part.to(torch.float64).contiguous()
        _add_products_(blocks, image)
        if width > fan_in:
            whole[:, :fan_in, fan_in] += _sums(image, down, across)
    if width > fan_in:
        whole[:, fan_in, :fan_in] = whole[:, :fan_in, fan_in]
        whole[:, fan_in, fan_in] = images * high * wide
    return whole


def _add_products_(blocks: Tensor, image: Tensor) -> None:
    """Adds Σ x(n + k) x(n + k')ᵀ for all kernel places k and k', to (groups, c, *k, c, *k')."""
    down, across = blocks.shape[2:4]
    for y in range(down):
        for x in range(1 - across if y else 0, across):  # the other half is the mirror of this one
            rows, columns = down - y, across - abs(x)  # places k for which k + (y, x) is one too
            first = max(0, -x)
            found = _windows(image, (y, x), rows, columns, first)
            for i in range(rows):
                for j in range(columns):
                    here, there = (i, first + j), (i + y, first + j + x)
                    blocks[:, :, *here, :, *there] += found[i, j]
                    if (y, x) != (0, 0):
                        blocks[:, :, *there, :, *here] += found[i, j].mT


def _windows(image: Tensor, shift: tuple[int, int], rows: int, columns: int, first: int) -> Tensor:
    """Products of pixels and those at a shift, over each of rows × columns windows: (rows, columns, groups, c, c)."""
    y, x = shift
    groups, _, high, wide, channels = image.shape
    down, along = _segments(high - y, rows), _segments(wide - abs(x), columns)
    parts = image.new_zeros(len(down), len(along), groups, channels, channels)
    for some in torch.split(image, max(1, IN_CACHE // (high * wide * channels)), dim=1):
        left, right = some[:, :, : high - y, first:], some[:, :, y:, first + x :]
        for i, (top, height) in enumerate(down):
            for j, (start, length) in enumerate(along):
                one, other = (
                    half[:, :, top : top + height, start : start + length].reshape(groups, -1, channels)
                    for half in (left, right)
                )
                parts[i, j].baddbmm_(one.mT, other)
    inside = [image.new_ones(2 * n - 1, 2 * n - 1).triu().tril(n - 1)[:n] for n in (rows, columns)]
    return torch.einsum("ki,lj,ijgcd->klgcd", *inside, parts)


def _segments(size: int, windows: int) -> list[tuple[int, int]]:
    """Start and length of what windows that begin at 0, 1, … and together fill `size` are made of.

    >>> _segments(6, 3)
    [(0, 1), (1, 1), (2, 2), (4, 1), (5, 1)]
    """
    edge = windows - 1
    middle = (edge, size - 2 * edge)
    return [*((n, 1) for n in range(edge)), middle, *((size - edge + n, 1) for n in range(edge))]


def _sums(image: Tensor, down: int, across: int) -> Tensor:
    """Σ x(n + k) for every kernel place k: (groups, c · down · across)."""
    high, wide = image.shape[2] - down + 1, image.shape[3] - across + 1
    columns = image.sum(1)
    found = [columns[:, i : i + high, j : j + wide].sum((1, 2)) for i in range(down) for j in range(across)]
    return torch.stack(found, dim=-1).flatten(1)
