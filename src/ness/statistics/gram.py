"""The input Gram C = Xᵀ X of a layer: accumulate, add, save. No row of X is kept.

C is symmetric, so it is kept and multiplied as strips: rows s to e of C from their own diagonal block on. That is a
little more than half of C in memory and in FLOPs; files hold the triangle alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from ness._precision import full_precision
from ness.errors import NessError
from ness.statistics.on_disk import zeros_on_disk
from ness.statistics.windows import gram_of_windows

CHUNK_ELEMENTS = 1 << 22  # entries of X widened to float64 at a time: 32 MB, whatever the number of samples
CHUNK_ON_A_GPU = 8  # times as many there: a GPU waits for nothing but the next launch
GPU_TILES = 256  # products of tiles that keep a large GPU busy, about
TILE = 64  # their edge in float64
STRIPS = 16  # strips at most: C then takes 17/32 of its entries
NARROWEST = 64  # their least height: products of fewer rows cost more than they save
NARROW_ON_A_GPU = 1024  # narrower ones are one product there, since a GPU waits for launches
CHUNK_ROWS = 1 << 12  # rows summed in float32 at a time in the fast mode: keeps 1e-6 against float64


def gram_of_rows(rows: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """C = Xᵀ X of rows X (groups, n, d) as float64 (groups, d, d).

    With `dtype=torch.float32` blocks are multiplied in float32 and summed in float64: faster on GPUs with slow
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

    Rows may be a view of more dimensions, (groups, n, …) with n·d entries per group in the order of the rows: patches
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

    A product of few columns and many rows is a few tiles to a GPU, each a long sum: most of it would stand idle.
    """
    if parts == 1:
        total.baddbmm_(rows.mT, rows)
        return
    groups, count, width = rows.shape
    cut = rows.reshape(groups * parts, count // parts, width)
    total += (cut.mT @ cut).view(groups, parts, width, width).sum(1)


def parts_of(rows: Tensor) -> int:
    """Into how many parts of equal length rows (groups, n, d) are cut so that a GPU is busy with their product.

    The parts' products together are never larger than the rows.

    >>> [parts_of(torch.empty(1, n, d, device="meta")) for n, d in ((64 * 841, 48), (64 * 144, 576), (64, 2048))]
    [232, 3, 1]
    """
    groups, count, width = rows.shape
    wanted = min(GPU_TILES // (groups * (-(-width // TILE)) ** 2), count // max(1, width))
    return next((parts for parts in range(wanted, 1, -1) if count % parts == 0), 1)


def row_blocks(rows: Tensor) -> Iterator[Tensor]:
    """Blocks (groups, ≤ m, …) of rows, small enough to be widened one at a time."""
    limit = CHUNK_ELEMENTS * (CHUNK_ON_A_GPU if rows.is_cuda else 1)
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


def strip_edges(width: int) -> list[tuple[int, int]]:
    """First and last row of every strip of C (width, width).

    >>> strip_edges(100), strip_edges(200)
    ([(0, 100)], [(0, 67), (67, 134), (134, 200)])
    """
    height = -(-width // max(1, min(STRIPS, width // NARROWEST)))
    return [(start, min(start + height, width)) for start in range(0, max(1, width), height or 1)]


def strip_entries(width: int) -> int:
    """Numbers that C (width, width) is kept in.

    >>> strip_entries(100), strip_entries(1024) / 1024**2
    (10000, 0.53125)
    """
    return sum((end - start) * (width - start) for start, end in strip_edges(width))


class Gram:
    """What a layer's inputs look like: C = Σ x xᵀ (groups, d, d) and `count`, the rows in it.

    A layer with a bias has rows [x; 1], so its d is the fan-in plus one. Grams of the same layer add up, in any
    order and from any number of machines. `matrix` is C in float64, made of what is kept: ask for it once.

    >>> a = Gram.of(torch.tensor([[3.0, 0.0]]))
    >>> b = Gram.of(torch.tensor([[0.0, 4.0]]))
    >>> (a + b).matrix
    tensor([[[ 9.,  0.],
             [ 0., 16.]]], dtype=torch.float64)
    >>> (a + b).count
    2

    Args:
        matrix: C (groups, d, d), float64 and symmetric.
        count: its rows.
    """

    def __init__(self, matrix: Tensor, count: int) -> None:
        if matrix.ndim != 3 or matrix.shape[1] != matrix.shape[2] or matrix.dtype != torch.float64:
            raise NessError(
                f"a Gram needs a float64 matrix of shape (groups, d, d); found {matrix.dtype} {tuple(matrix.shape)}"
            )
        if count < 0:
            raise NessError(f"a Gram counts its rows; found {count}, expected 0 or more")
        groups, width, _ = matrix.shape
        self._describe(groups, width, matrix.device, matrix.dtype, None)
        self.count = count  # n
        self.opened()
        for (start, end), strip in self.strips():
            strip.copy_(matrix[:, start:end, start:])

    def _describe(self, groups: int, width: int, device: torch.device, dtype: torch.dtype, folder: Path | None) -> None:
        self.groups, self.width, self.device, self.dtype, self.folder = groups, width, device, dtype, folder
        self.count = 0
        self.kept: Tensor | None = None  # the strips one after the other (entries,); None: C is 0

    @classmethod
    def of(cls, rows: Tensor) -> Gram:
        """The Gram of rows (n, d), or (groups, n, d)."""
        grouped = rows if rows.ndim == 3 else rows.unsqueeze(0)
        return cls(gram_of_rows(grouped), grouped.shape[1])

    @classmethod
    def zeros(
        cls,
        groups: int,
        width: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float64,
        folder: Path | None = None,
    ) -> Gram:
        """The Gram of no rows, which takes no memory yet.

        Args:
            groups: of the layer.
            width: d.
            device: where C will be.
            dtype: what C will be kept in.
            folder: where C will be on a disk, if it is not to be in memory.
        """
        gram = cls.__new__(cls)
        gram._describe(groups, width, torch.device(device), dtype, folder)
        return gram

    # -- what is kept -----------------------------------------------------------------------------------------------

    @property
    def entries(self) -> int:
        """Numbers that are kept."""
        return self.groups * strip_entries(self.width)

    @property
    def whole(self) -> bool:
        """Whether C is one strip."""
        return len(strip_edges(self.width)) == 1

    def opened(self) -> Tensor:
        """The strips, to be written to; zeros if there were none."""
        if self.kept is None:
            if self.folder is None:
                self.kept = torch.zeros(self.entries, dtype=self.dtype, device=self.device)
            else:
                self.kept = zeros_on_disk(self.folder, (self.entries,), self.dtype)
        return self.kept

    def strips(self) -> list[tuple[tuple[int, int], Tensor]]:
        """Every strip (groups, end − start, d − start), and its rows (start, end) of C."""
        kept, found, first = self.opened(), [], 0
        for start, end in strip_edges(self.width):
            size = self.groups * (end - start) * (self.width - start)
            strip = kept[first : first + size].view(self.groups, end - start, self.width - start)
            found.append(((start, end), strip))
            first += size
        return found

    def equals(self, other: Gram) -> bool:
        """Whether both are the same, bit for bit."""
        same = (self.groups, self.width, self.dtype, self.device, self.count)
        if same != (other.groups, other.width, other.dtype, other.device, other.count):
            return False
        return torch.equal(self.opened(), other.opened())

    def like(self) -> Gram:
        """The Gram of no rows, for the same layer."""
        return Gram.zeros(self.groups, self.width, self.device, self.dtype, self.folder)

    def copy(self) -> Gram:
        """The same in memory, or a file, of its own."""
        twin = self.like()
        twin.count = self.count
        if self.kept is not None:
            twin.kept = self.kept.clone() if self.folder is None else twin.opened().copy_(self.kept)
        return twin

    # -- reading it -------------------------------------------------------------------------------------------------

    @property
    def matrix(self) -> Tensor:
        """C (groups, d, d) in float64, a new tensor."""
        whole = torch.zeros(self.groups, self.width, self.width, dtype=torch.float64, device=self.device)
        if self.kept is None:
            return whole
        for (start, end), strip in self.strips():
            block, rest = strip[..., : end - start], strip[..., end - start :]
            whole[:, start:end, start:end] = block.triu() + block.triu(1).mT  # products are symmetric up to rounding
            whole[:, start:end, end:] = rest
            whole[:, end:, start:end] = rest.mT
        return whole

    def diagonal(self) -> Tensor:
        """The diagonal of C (groups, d) in float64."""
        if self.kept is None:
            return torch.zeros(self.groups, self.width, dtype=torch.float64, device=self.device)
        parts = [strip.diagonal(dim1=-2, dim2=-1) for _, strip in self.strips()]
        return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)).to(torch.float64)

    # -- adding to it -----------------------------------------------------------------------------------------------

    def add_rows_(self, rows: Tensor, fan_in: int, spoilt: Tensor | None = None) -> None:
        """C += Xᵀ X in place, of rows as `add_gram_` takes them; where `spoilt` (), bool, is True C stays as it is."""
        exact = spoilt is None and self.dtype == torch.float64 and self.device.type == "cpu"
        if exact and (overlapping := gram_of_windows(rows, self.width)) is not None:
            for (start, end), strip in self.strips():
                strip.add_(overlapping[:, start:end, start:])
            return
        for block in row_blocks(rows):
            wide = widened(block, fan_in, self.width, self.dtype)
            if spoilt is not None:
                wide = wide.masked_fill(spoilt.to(wide.device), 0)  # a product with NaN would be NaN
            for part in torch.split(wide, wide.shape[1] if self.dtype == torch.float64 else CHUNK_ROWS, dim=1):
                self._add_block_(part)

    def _add_block_(self, rows: Tensor) -> None:
        if self.kept is None and self.folder is None and self.whole and rows.device == self.device:
            with full_precision(rows):
                self.kept = (rows.mT @ rows).flatten() if not rows.is_cuda or parts_of(rows) == 1 else None
            if self.kept is not None:
                return
        strips = self.strips()
        with full_precision(rows):
            if len(strips) == 1 and rows.device == self.device:
                add_product_(strips[0][1], rows, parts_of(rows) if rows.is_cuda else 1)
            elif rows.is_cuda and self.width < NARROW_ON_A_GPU:
                whole = rows.new_zeros(self.groups, self.width, self.width)
                add_product_(whole, rows, parts_of(rows))
                for (start, end), strip in strips:
                    strip.add_(whole[:, start:end, start:].to(self.device))
            else:
                for (start, end), strip in strips:
                    left, right = rows[..., start:end].mT, rows[..., start:]
                    if rows.device == self.device:
                        strip.baddbmm_(left, right)
                    else:
                        strip.add_((left @ right).to(self.device))

    def add_(self, other: Gram, weight: float = 1.0, spoilt: Tensor | None = None) -> None:
        """C += weight · C' in place, without its count; where `spoilt` (), bool, is True C stays as it is."""
        if other.kept is None:
            return
        added = other.kept.to(self.device, self.dtype)
        if spoilt is not None:
            added = added.masked_fill(spoilt.to(self.device), 0)
        self.opened().add_(added, alpha=weight)

    def plus(self, other: Gram, weight: float = 1.0) -> Gram:
        """C + weight · C', each row of the other's `weight` times; its own memory."""
        if (self.groups, self.width) != (other.groups, other.width):
            raise NessError(
                f"Grams of {(self.groups, self.width, self.width)} and {(other.groups, other.width, other.width)} do "
                "not add; both must come from the same layer"
            )
        total = self.copy()
        total.add_(other, weight)
        total.count += other.count
        return total

    def __add__(self, other: Gram) -> Gram:
        return self.plus(other) if isinstance(other, Gram) else NotImplemented

    def __repr__(self) -> str:
        return f"Gram(groups={self.groups}, d={self.width}, count={self.count})"

    # -- files ------------------------------------------------------------------------------------------------------

    def triangle(self) -> Tensor:
        """The upper triangle of C row by row (groups, d (d + 1) / 2), as it is kept.

        >>> Gram(torch.tensor([[[1.0, 2.0], [2.0, 3.0]]], dtype=torch.float64), 2).triangle()
        tensor([[1., 2., 3.]], dtype=torch.float64)
        """
        if self.kept is None:
            return torch.zeros(self.groups, self.width * (self.width + 1) // 2, dtype=self.dtype, device=self.device)
        return torch.cat([strip[:, _upper(strip)] for _, strip in self.strips()], dim=-1)

    @classmethod
    def from_triangle(cls, triangle: Tensor, like: Gram, count: int) -> Gram:
        """The Gram that `triangle` was of, kept as `like` is."""
        gram, first = like.like(), 0
        gram.count = count
        for _, strip in gram.strips():
            where = _upper(strip)
            size = int(where.sum())
            part = triangle[:, first : first + size].to(strip)
            strip[:, where] = part
            first += size
        return gram

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


def _upper(strip: Tensor) -> Tensor:
    """Which entries of a strip (…, h, w) are in the triangle (h, w)."""
    return torch.ones(strip.shape[-2:], dtype=torch.bool, device=strip.device).triu()
