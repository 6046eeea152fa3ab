"""What is launched for a shape. Block sizes follow from it alone: then a seed's bits are the same in every process."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ness.lab.gpu import kernels

WHOLE = 2560  # rows up to which one program does all rows of its channels
LANES = 32  # columns of a tile: 128 bytes of float32
PROGRAMS = 264  # two a processor of an H200: tiles of the sums become smaller until there are as many
PARTIALS = 512  # blocks of rows at most; above, a program takes several


class Steps(NamedTuple):
    """What happens after the norm: a sum, ReLU, dropout with this scale of what is kept, 2×2 max-pool."""

    add: bool = False
    relu: bool = False
    scale: float | None = None
    pool: bool = False

    @property
    def coded(self) -> bool:
        """Whether the forward pass says in a byte a place through which of them gradients flow."""
        return self.add or self.scale is not None or self.pool


class Forward(NamedTuple):
    """The result, and what the backward pass reads besides x, γ and β."""

    y: Tensor
    mean: Tensor  # (parts, C)
    invstd: Tensor
    code: Tensor | None  # uint8, y's shape as (rows, C)
    won: Tensor | None  # x where it won, y's shape as (rows, C)


class Gradients(NamedTuple):
    """Of x, of what was added, and of γ and β, where they were asked for."""

    x: Tensor | None
    add: Tensor | None
    gamma: Tensor | None
    beta: Tensor | None


class _Tiles(NamedTuple):
    """How (rows, C) is read in many programs."""

    fold: int  # K: rows that are one line of K·C columns
    tall: int  # lines of a tile
    blocks: int  # tiles of a program
    programs: int  # along the lines
    columns: int  # programs along the columns

    def grid(self, parts: int) -> tuple[int, int, int]:
        return self.programs, self.columns, parts

    @property
    def warps(self) -> int:
        return _warps(self.tall * LANES)


def _summing(rows: int, channels: int) -> _Tiles:
    """Tiles of the sums: as tall as leaves enough programs, and few enough partial sums to finish quickly."""
    fold, columns, lines = _folded(rows, channels)
    tall = 128
    while tall > 64 and _ceil(lines, tall) * columns < PROGRAMS:
        tall //= 2
    blocks = _ceil(_ceil(lines, tall), PARTIALS)
    return _Tiles(fold, tall, blocks, _ceil(lines, tall * blocks), columns)


def _putting(rows: int, channels: int) -> _Tiles:
    """Tiles of what is done number by number: 2048 of them."""
    fold, columns, lines = _folded(rows, channels)
    return _Tiles(fold, 64, 1, _ceil(lines, 64), columns)


def _folded(rows: int, channels: int) -> tuple[int, int, int]:
    """K, the programs along K·C columns, and the lines of K rows."""
    fold = LANES // math.gcd(LANES, channels)
    return fold, fold * channels // LANES, _ceil(rows, fold)


def _few(rows: int) -> int:
    """Channels of a program that has all rows: a sector of 32 bytes, two where rows are few."""
    return 16 if rows <= 256 else 8


def _tall(rows: int) -> int:
    return min(max(_power(rows), 16), 1024)


def _shape(x: Tensor, parts: int) -> tuple[int, int, int, int]:
    """(images of a part, C, H, W); a matrix has maps of one place."""
    images, channels, *sides = x.shape
    assert images % parts == 0, f"{images} images are not {parts} equal parts"
    high, wide = sides or (1, 1)
    return images // parts, channels, high, wide


def forward(
    x: Tensor,
    gamma: Tensor,
    beta: Tensor,
    add: Tensor | None,
    kept: Tensor | None,
    running: tuple[Tensor, Tensor] | None,
    momentum: float,
    eps: float,
    steps: Steps,
    parts: int = 1,
) -> Forward:
    """Normalises x (n, C), or (n, C, h, w) dense channels-last, by its own statistics, and takes the steps.

    `running` mean and variance are moved by `momentum`. So many equal consecutive `parts` of x are each normalised as
    if they were alone; what is chosen for their shape is chosen as if they were, too, so that their bits are the same.
    """
    assert parts == 1 or running is None, "running statistics are not moved by a batch in parts"
    images, channels, high, wide = _shape(x, parts)
    rows = images * high * wide
    size = (len(x), channels, high // 2, wide // 2) if steps.pool else x.shape
    layout = torch.contiguous_format if x.ndim == 2 else torch.channels_last
    y = torch.empty(size, dtype=x.dtype, device=x.device, memory_format=layout)
    mean, invstd = (gamma.new_empty(parts, channels) for _ in range(2))
    places = y.numel() // channels // parts
    code = torch.empty((parts * places, channels), dtype=torch.uint8, device=x.device) if steps.coded else None
    won = torch.empty((parts * places, channels), dtype=x.dtype, device=x.device) if steps.pool else None
    bytes_kept = x if kept is None else kept.view(torch.uint8)
    added, codes, winners = (x if each is None else each for each in (add, code, won))  # x: never read as such
    running_mean, running_var = running or (mean, invstd)
    tracked, dropped, scale = running is not None, kept is not None, steps.scale or 1.0
    if rows <= WHOLE:
        few, tall, tall_pooled = _few(rows), _tall(rows), min(_tall(places), 256)
        kernels.whole_forward[_ceil(channels, few), parts](
            x, added, bytes_kept, y, codes, winners, mean, invstd, running_mean, running_var, gamma, beta,
            rows, images, momentum, eps, scale, channels, high, wide,
            steps.relu, dropped, steps.add, steps.pool, tracked, tall, tall_pooled, few, parts > 1,
            num_warps=_warps(tall * few),
        )  # fmt: skip
        return Forward(y, mean, invstd, code, won)
    tiles = _summing(rows, channels)
    entries = tiles.programs * tiles.fold
    means, squares = torch.empty(2, parts * entries, channels, dtype=torch.float32, device=x.device)
    kernels.statistics[tiles.grid(parts)](
        x, means, squares, rows, tiles.blocks, channels, tiles.fold, tiles.tall, LANES, parts > 1,
        num_warps=tiles.warps,
    )  # fmt: skip
    tall, span = _tall(entries), tiles.tall * tiles.blocks
    kernels.finish_statistics[_ceil(channels, 8), parts](
        means, squares, mean, invstd, running_mean, running_var, rows, entries, span, momentum, eps,
        channels, tiles.fold, tracked, tall, 8, parts > 1, num_warps=_warps(tall * 8),
    )  # fmt: skip
    if steps.pool:
        lanes = min(64, _power(channels))
        kernels.put_windows[_ceil(places, 16), _ceil(channels, lanes), parts](
            x, bytes_kept, y, codes, winners, mean, invstd, gamma, beta, places, scale,
            channels, high, wide, dropped, 16, lanes, parts > 1, num_warps=4,
        )  # fmt: skip
    else:
        tiles = _putting(rows, channels)
        kernels.put_places[tiles.grid(parts)](
            x, added, bytes_kept, y, codes, mean, invstd, gamma, beta, rows, scale,
            channels, tiles.fold, steps.relu, dropped, steps.add, tiles.tall, LANES, parts > 1, num_warps=4,
        )  # fmt: skip
    return Forward(y, mean, invstd, code, won)


def backward(
    dy: Tensor,
    x: Tensor,
    gamma: Tensor,
    beta: Tensor,
    saved: Forward,
    steps: Steps,
    *,
    want_x: bool,
    want_add: bool,
    want_affine: bool,
) -> Gradients:
    """The gradients; `saved` is what `forward` gave (its `y` is not read), dy has y's shape in any layout."""
    _, mean, invstd, code, won = saved
    parts = len(mean)
    images, channels, high, wide = _shape(x, parts)
    rows = images * high * wide
    places = rows if won is None else len(won) // parts
    dense = dy.is_contiguous() if x.ndim == 2 else dy.is_contiguous(memory_format=torch.channels_last)
    if not dense and not (steps.pool and rows <= WHOLE and dy.is_contiguous()):  # what is flattened next, NCHW
        dy = dy.contiguous(memory_format=torch.contiguous_format if x.ndim == 2 else torch.channels_last)
    strides = dy.stride() if steps.pool else (0, 0, 0, 0)
    dx = torch.empty_like(x) if want_x else None
    d_add = torch.empty_like(x) if want_add else None
    affine = torch.empty(2, parts, channels, dtype=torch.float32, device=x.device)
    dgammas, dbetas = affine  # of each part: its dx needs its own
    codes, winners, to_x, to_add = (x if each is None else each for each in (code, won, dx, d_add))  # x: not touched
    scale = steps.scale or 1.0
    if rows <= WHOLE:
        few, tall, tall_pooled = _few(rows), _tall(rows), min(_tall(places), 256)
        kernels.whole_backward[_ceil(channels, few), parts](
            x, dy, codes, winners, to_x, to_add, dgammas, dbetas, mean, invstd, gamma, beta,
            rows, images, scale, *strides, channels, high, wide,
            steps.relu, steps.coded, steps.pool, want_x, want_add, tall, tall_pooled, few, parts > 1,
            num_warps=_warps(tall * few),
        )  # fmt: skip
    else:
        tiles = _summing(places, channels)
        entries = tiles.programs * tiles.fold
        totals, products = torch.empty(2, parts * entries, channels, dtype=torch.float32, device=x.device)
        kernels.sums[tiles.grid(parts)](
            winners if steps.pool else x, dy, codes, totals, products, mean, invstd, gamma, beta,
            places, tiles.blocks, scale, channels, tiles.fold, steps.relu, steps.coded, tiles.tall, LANES, parts > 1,
            num_warps=tiles.warps,
        )  # fmt: skip
        tall = _tall(entries)
        kernels.finish_sums[_ceil(channels, 8), parts](
            totals, products, invstd, dgammas, dbetas, entries, channels, tall, 8, parts > 1,
            num_warps=_warps(tall * 8),
        )  # fmt: skip
        if steps.pool and want_x:
            lanes, windows = min(64, _power(channels)), images * ((high + 1) // 2) * ((wide + 1) // 2)
            kernels.give_windows[_ceil(windows, 16), _ceil(channels, lanes), parts](
                x, dy, codes, to_x, dgammas, dbetas, mean, invstd, gamma, windows, rows, scale, *strides,
                channels, high, wide, 16, lanes, parts > 1, num_warps=4,
            )  # fmt: skip
        elif want_x or want_add:
            tiles = _putting(rows, channels)
            kernels.give_places[tiles.grid(parts)](
                x, dy, codes, to_x, to_add, dgammas, dbetas, mean, invstd, gamma, beta, rows, scale, channels,
                tiles.fold, steps.relu, steps.coded, want_x, want_add, tiles.tall, LANES, parts > 1, num_warps=4,
            )  # fmt: skip
    dgamma, dbeta = (affine.sum(1) if parts > 1 else affine[:, 0]) if want_affine else (None, None)
    return Gradients(dx, d_add, dgamma, dbeta)


def try_on(device: torch.device) -> None:
    """Builds and runs one kernel, and raises whatever stands in the way."""
    x, one = torch.zeros(4, 4, device=device), torch.ones(4, device=device)
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        forward(x, one, one, None, None, None, 0.0, 1e-5, Steps())


def _ceil(number: int, by: int) -> int:
    return -(-number // by)


def _power(number: int) -> int:
    """The least power of two that is not below."""
    return 1 << (number - 1).bit_length()


def _warps(numbers: int) -> int:
    """Of a tile of so many numbers: 16 a thread, four warps at least, eight at most."""
    return 8 if numbers > 2048 else 4
