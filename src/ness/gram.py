"""The input Gram C = Xᵀ X of a layer: accumulate, add, save. No row of X is kept."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from ness.errors import NessError

CHUNK_ELEMENTS = 1 << 22  # entries of X widened to float64 at a time: 32 MB, whatever the number of samples
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
    for block in row_blocks(rows, dtype):
        wide = block.to(dtype)
        product = wide.mT @ wide
        total += product.to(torch.float64)
    return total


def row_blocks(rows: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
    """Blocks of rows (groups, ≤ m, d), small enough to be widened to `dtype` one at a time."""
    groups, _, width = rows.shape
    step = max(1, CHUNK_ELEMENTS // max(1, groups * width))
    if dtype != torch.float64:
        step = min(step, CHUNK_ROWS)
    return iter(torch.split(rows, step, dim=1))


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
        from ness.storage import write_tensors

        count = torch.tensor(self.count, dtype=torch.int64)
        write_tensors(Path(path), {"matrix": self.matrix, "count": count}, {"format": "ness-gram"})

    @classmethod
    def load(cls, path: str | Path) -> Gram:
        """Read what `save` wrote."""
        from ness.storage import read_tensors

        tensors, metadata = read_tensors(Path(path))
        if metadata.get("format") != "ness-gram" or set(tensors) != {"matrix", "count"}:
            raise NessError(f"{path}: not a Gram; expected a file written by Gram.save")
        return cls(tensors["matrix"], int(tensors["count"]))
