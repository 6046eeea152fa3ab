"""The base under an update, bit for bit, from the weights as they run: what rounding took is kept beside them.

W + ΔW − ΔW, rounded, is W again but for some of the entries that have a larger exponent in W + ΔW, and fewer low bits.
Which these may be is seen from W + ΔW and ΔW alone; their lower bits are kept. In float32 that is 0.2 % of the size of
W for updates of a thousandth of W, 0.9 % for a hundredth, 7 % where the two are of one size (W and ΔW Gaussian).
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

EXPONENT = {torch.float32: 0x7F800000, torch.float64: 0x7FF0000000000000}  # its bits
_WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes: numbers with an entry's bits


def correction(base: Mapping[str, Tensor], running: Mapping[str, Tensor], change: Mapping[str, Tensor]) -> Tensor:
    """What `recovered` needs besides, as a tensor of bytes.

    Args:
        base: W and b by name.
        running: W + ΔW and b + Δb, in the dtype of the base.
        change: ΔW and Δb, in a dtype at least as fine.

    >>> w, change = {"w": torch.tensor([1.0, 2.0, 3e-5])}, {"w": torch.tensor([1e-9, 0.5, 4.0])}
    >>> running = {"w": w["w"] + change["w"]}
    >>> kept = correction(w, running, change)
    >>> torch.equal(recovered(kept, running, change, w)["w"], w["w"])
    True
    """
    parts = []
    for name, value in base.items():
        guess, short = _guess(running[name], change[name], value.dtype)
        bits = _bits(value.detach())
        rare = ((bits != guess) & ~short).nonzero().flatten()
        parts += [len(rare).to_bytes(8, "little"), rare.cpu().numpy().tobytes()]
        parts += [_planes(_ordered(bits[at]) - _ordered(guess[at])) for at in (rare, short)]
    content = zlib.compress(b"".join(parts))
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).clone()


def recovered(
    kept: Tensor, running: Mapping[str, Tensor], change: Mapping[str, Tensor], like: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """W and b by name, if `running` and `change` are the very same as in `correction`; compare a hash.

    Args:
        kept: what `correction` returned.
        running: see `correction`.
        change: see `correction`.
        like: tensors of the shapes and dtypes that the base has, in the order it had.

    Raises:
        ValueError: `kept` is damaged.
    """
    try:
        content = zlib.decompress(kept.detach().cpu().to(torch.uint8).numpy().tobytes())
    except zlib.error as error:
        raise ValueError(str(error)) from error
    found: dict[str, Tensor] = {}
    for name, tensor in like.items():
        guess, short = _guess(running[name].to(tensor.device), change[name], tensor.dtype)
        count = int.from_bytes(content[:8], "little", signed=True)
        sizes = [8, 8 * count, tensor.itemsize * count, tensor.itemsize * int(short.sum())]
        ends = np.cumsum(sizes)
        if count < 0 or len(content) < ends[-1]:
            raise ValueError("it is too short")
        rare = torch.from_numpy(np.frombuffer(content[8 : ends[1]], dtype=np.int64).copy()).to(guess.device)
        if count and not 0 <= int(rare.min()) <= int(rare.max()) < guess.numel():
            raise ValueError("a place outside the tensor")
        for at, start, end in ((rare, ends[1], ends[2]), (short, ends[2], ends[3])):
            guess[at] = _ordered(_ordered(guess[at]) + _numbers(content[start:end], guess))
        found[name] = guess.view(tensor.dtype).view(tensor.shape)
        content = content[ends[3] :]
    return found


def _guess(running: Tensor, change: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The bits of (W + ΔW) − ΔW, and where it has a smaller exponent than W + ΔW."""
    change = change.detach()
    running = running.detach().to(change.dtype)
    guess = (running - change).to(dtype)
    exponents = [_bits(values.to(change.dtype)) & EXPONENT[change.dtype] for values in (running, guess)]
    return _bits(guess), exponents[0] > exponents[1]


def _bits(tensor: Tensor) -> Tensor:
    """Its entries as whole numbers with the same bits."""
    return tensor.contiguous().flatten().view(_WHOLE[tensor.itemsize])


def _ordered(bits: Tensor) -> Tensor:
    """Bits of floats as whole numbers in the order of the floats, -0 next to 0; a second time takes that back."""
    return torch.where(bits < 0, bits ^ torch.iinfo(bits.dtype).max, bits)


def _planes(numbers: Tensor) -> bytes:
    """Signed numbers, numbered 0, -1, 1, -2, …: all lowest bytes, then all second ones, and so on."""
    signed = numbers.cpu().numpy()
    small: np.ndarray[Any, Any] = (signed << 1) ^ (signed >> (8 * signed.itemsize - 1))
    return small.view(np.uint8).reshape(-1, signed.itemsize).T.tobytes()


def _numbers(content: bytes, like: Tensor) -> Tensor:
    """What `_planes` was given."""
    size = like.itemsize
    small = np.frombuffer(content, dtype=np.uint8).reshape(size, -1).T.copy().view(f"u{size}").reshape(-1)
    signed = (small >> 1) ^ (0 - (small & 1))
    return torch.from_numpy(signed.astype(f"u{size}").view(f"i{size}")).to(like.device)
