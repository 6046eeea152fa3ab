"""The input Gram C = Xᵀ X of a layer: accumulate, add, save. No row of X is kept."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from ness._precision import full_precision
from ness.errors import NessError

CHUNK_ELEMENTS = 1 << 22  # entries of X widened to float64 at a time: 32 MB, whatever the number of samples
CHUNK_ON_A_CARD = 8  # times as many there: a card waits for nothing but the next launch
CARD_TILES = 256  # products of tiles that keep a large card busy, about
TILE = 64  # their edge in float64
CHUNK_ROWS = 1 << 12  # rows summed in float32 at a time in the fast mode: keeps 1e-6 against float64


def gram_of_rows(rows: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """C = Xᵀ X of rows X (groups, n, d) as float64 (groups, d, d).

    With `dtype=torch.float32` blocks are multiplied in float32 and summed in float64: faster on cards with slow
    float64, and right to 1e-6 instead of 1e-10.

    >>> gram_of_rows(torch.tensor([[[3.0, 0.0], [0.0, 4.0]]]))
    tensor([[[ 9.,  0.],
             [ 0., 16.]]], dtype=torch.float64)
    """
    groups, _, width = rows.shape
    total = torch.zeros(groups, width, width, dtype=torch.float64, device=rows.device)
    add_gram_(total, rows, width, dtype)
    return total


def add_gram_(total: Tensor, rows: Tensor, fan_in: int, dtype: torch.dtype = torch.float64) -> None:
    """C += Xᵀ X for rows (groups, n, d), or [x; 1] where C (groups, width, width) has a column more than the fan-in.

    Rows may be a view of more dimensions, (groups, n, …) with n·d entries a group in the order of the rows: patches
    that overlap are then copied once, straight into the precision they are multiplied in.
    """
    for block in row_blocks(rows):
        wide = widened(block, fan_in, total.shape[-1], dtype)
        if dtype == torch.float64 and total.device == wide.device:
            add_product_(total, wide, parts_of(wide) if wide.is_cuda else 1)
            continue
        for part in torch.split(wide, wide.shape[1] if dtype == torch.float64 else CHUNK_ROWS, dim=1):
            with full_precision(part):
                product = part.mT @ part
            total += product.to(total.device)


def add_product_(total: Tensor, rows: Tensor, parts: int) -> None:
    """C += Xᵀ X (groups, d, d) of rows (groups, n, d), multiplied in so many parts side by side, which divide n.

    A product of few columns and many rows is a few tiles to a card, each a long sum: most of it would stand idle.
    """
    if parts == 1:
        total.baddbmm_(rows.mT, rows)
        return
    groups, count, width = rows.shape
    cut = rows.reshape(groups * parts, count // parts, width)
    total += (cut.mT @ cut).view(groups, parts, width, width).sum(1)


def parts_of(rows: Tensor) -> int:
    """Into how many parts of equal length rows (groups, n, d) are cut so that a card is busy with their product.

    The parts' products together are never larger than the rows.

    >>> [parts_of(torch.empty(1, n, d, device="meta")) for n, d in ((64 * 841, 48), (64 * 144, 576), (64, 2048))]
    [232, 3, 1]
    """
    groups, count, width = rows.shape
    wanted = min(CARD_TILES // (groups * (-(-width // TILE)) ** 2), count // max(1, width))
    return next((parts for parts in range(wanted, 1, -1) if count % parts == 0), 1)


def row_blocks(rows: Tensor) -> Iterator[Tensor]:
    """Blocks (groups, ≤ m, …) of rows, small enough to be widened one at a time."""
    limit = CHUNK_ELEMENTS * (CHUNK_ON_A_CARD if rows.is_cuda else 1)
    return iter(torch.split(rows, max(1, limit // max(1, rows[:, :1].numel())), dim=1))


def widened(rows: Tensor, fan_in: int, width: int, dtype: torch.dtype) -> Tensor:
    """Rows (groups, n, d), or a view of them, as (groups, n, width) of `dtype`, [x; 1] where width is the fan-in + 1.

    >>> widened(torch.zeros(1, 2, 3), 3, 4, torch.float64)
    tensor([[[0., 0., 0., 1.],
             [0., 0., 0., 1.]]], dtype=torch.float64)
    """
    if rows.ndim == 3 and width == fan_in:
        return rows.to(dtype)
    groups = rows.shape[0]
    wide = rows.new_empty(groups, rows.numel() // (groups * fan_in), width, dtype=dtype)
    wide[..., :fan_in].view(rows.shape).copy_(rows)
    if width > fan_in:
        wide[..., fan_in].fill_(1)
    return wide


def with_ones(rows: Tensor) -> Tensor:
    """Rows [x; 1]: (groups, n, d) to (groups, n, d + 1), so that a bias is one more weight.

    >>> with_ones(torch.zeros(1, 2, 3)).shape
    torch.Size([1, 2, 4])
    """
    return torch.cat([rows, rows.new_ones(*rows.shape[:-1], 1)], dim=-1)


class Gram:
    """What a layer's inputs look like: `matrix` C = Σ x xᵀ (groups, d, d) in float64 and `count`, the rows in it.

    A layer with a bias has rows [x; 1], so its d is the fan-in plus one. Grams of the same layer add up, in any
    order and from any number of machines.

    >>> a = Gram.of(torch.tensor([[3.0, 0.0]]))
    >>> b = Gram.of(torch.tensor([[0.0, 4.0]]))
    >>> (a + b).matrix
    tensor([[[ 9.,  0.],
             [ 0., 16.]]], dtype=torch.float64)
    >>> (a + b).count
    2
    """

    def __init__(self, matrix: Tensor, count: int) -> None:
        if matrix.ndim != 3 or matrix.shape[1] != matrix.shape[2] or matrix.dtype != torch.float64:
            raise NessError(
                f"a Gram needs a float64 matrix of shape (groups, d, d); found {matrix.dtype} {tuple(matrix.shape)}"
            )
        if count < 0:
            raise NessError(f"a Gram counts its rows; found {count}, expected 0 or more")
        self.matrix = matrix  # C, (groups, d, d)
        self.count = count  # n

    @classmethod
    def of(cls, rows: Tensor) -> Gram:
        """The Gram of rows (n, d), or (groups, n, d)."""
        grouped = rows if rows.ndim == 3 else rows.unsqueeze(0)
        return cls(gram_of_rows(grouped), grouped.shape[1])

    @classmethod
    def zeros(cls, groups: int, width: int, device: torch.device | str = "cpu") -> Gram:
        """The Gram of no rows."""
        return cls(torch.zeros(groups, width, width, dtype=torch.float64, device=device), 0)

    def __add__(self, other: Gram) -> Gram:
        if not isinstance(other, Gram):
            return NotImplemented
        if self.matrix.shape != other.matrix.shape:
            raise NessError(
                f"Grams of {tuple(self.matrix.shape)} and {tuple(other.matrix.shape)} do not add; "
                "both must come from the same layer"
            )
        return Gram(self.matrix + other.matrix.to(self.matrix.device), self.count + other.count)

    def __repr__(self) -> str:
        groups, width, _ = self.matrix.shape
        return f"Gram(groups={groups}, d={width}, count={self.count})"

    def save(self, path: str | Path) -> None:
        """Write it as one safetensors file, under a temporary name first."""
        from ness._files import write_bytes
        from ness._sealed import seal_tensors

        count = torch.tensor(self.count, dtype=torch.int64)
        held = {"matrix": self.matrix, "count": count}
        write_bytes(Path(path), seal_tensors(held, {"format": "ness-gram"}, str(path)))

    @classmethod
    def load(cls, path: str | Path) -> Gram:
        """Read what `save` wrote."""
        from ness._files import read_bytes
        from ness._sealed import unseal_tensors

        try:
            tensors, metadata, _ = unseal_tensors(read_bytes(Path(path)), str(path))
        except FileNotFoundError as error:
            raise NessError(f"{path}: missing; expected a file written by Gram.save") from error
        if metadata != {"format": "ness-gram"} or set(tensors) != {"matrix", "count"} or tensors["count"].numel() != 1:
            raise NessError(f"{path}: not a Gram; expected a file written by Gram.save")
        return cls(tensors["matrix"], int(tensors["count"]))
