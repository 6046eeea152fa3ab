"""Numeric arrays of MATLAB's version 5 .mat files, read without taking more memory than the arrays expected need."""

import math
import struct
import zlib
from collections.abc import Callable, Mapping
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from ness.errors import NessError

_MATRIX, _COMPRESSED = 14, 15
_TYPES = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
_NUMBERS = range(6, 16)  # classes of a matrix: double to uint64
_COMPLEX = 0x0800
_CHUNK = 1 << 20
_NAME = 256  # bytes of a name, and of the list of dimensions
_ELEMENTS = 1000

Read = Callable[[int], bytes]


def read(file: IO[bytes], wanted: Mapping[str, tuple[int, ...]]) -> dict[str, NDArray[Any]]:
    """The arrays of these names and shapes, in Fortran order.

    Args:
        file: open for reading, at its beginning, seekable.
        wanted: the shape of each array by its name; arrays of other names are passed over.

    Raises:
        NessError: an array is missing, or not of that shape; ValueError, EOFError and zlib.error for a broken file.
    """
    head = _exactly(file.read, 128)
    order = {b"IM": "<", b"MI": ">"}.get(head[126:])
    if order is None:
        raise NessError(
            f"found a header that ends in {head[124:].hex(' ')}, expected a .mat file of MATLAB's version 5"
        )
    found: dict[str, NDArray[Any]] = {}
    for _ in range(_ELEMENTS):
        tag = file.read(8)
        if not tag:
            break
        kind, size = struct.unpack(f"{order}II", tag.ljust(8, b"\0"))
        start = file.tell()
        if kind == _COMPRESSED:
            _matrix(_inflated(file, size), order, wanted, found)
        elif kind == _MATRIX:
            file.seek(start - 8)
            _matrix(file.read, order, wanted, found)
        file.seek(start + size)
    missing = ", ".join(sorted(wanted.keys() - found.keys()))
    if missing:
        raise NessError(f"holds no array {missing}")
    return found


def _matrix(take: Read, order: str, wanted: Mapping[str, tuple[int, ...]], found: dict[str, NDArray[Any]]) -> None:
    kind, _ = struct.unpack(f"{order}II", _exactly(take, 8))
    if kind != _MATRIX:
        return
    flags = _element(take, order, _NAME)
    shape = tuple(int(n) for n in _element(take, order, _NAME))
    name = bytes(_element(take, order, _NAME).tobytes()).decode("latin-1")
    if name not in wanted:
        return
    if shape != wanted[name] or len(flags) < 1 or int(flags[0]) & 0xFF not in _NUMBERS or int(flags[0]) & _COMPLEX:
        raise NessError(f"found {name} of shape {shape}, expected {wanted[name]} of numbers")
    if name in found:
        raise NessError(f"holds {name} twice")
    values = _element(take, order, 8 * math.prod(shape))
    if len(values) != math.prod(shape):
        raise NessError(f"found {len(values)} numbers in {name}, expected {math.prod(shape)}")
    found[name] = values.reshape(shape, order="F")


def _element(take: Read, order: str, limit: int) -> NDArray[Any]:
    """The numbers of a data element; more than `limit` bytes of them are refused before they are read."""
    tag = _exactly(take, 8)
    kind, size = struct.unpack(f"{order}II", tag)
    if kind >> 16:  # a small one, inside its tag
        kind, size = kind & 0xFFFF, kind >> 16
        data = tag[4 : 4 + size] if size <= 4 else b""
    elif size > limit:
        raise NessError(f"found {size} bytes where at most {limit} belong")
    else:
        data = _exactly(take, size)
        _exactly(take, -size % 8)
    if kind not in _TYPES or len(data) != size:
        raise ValueError(f"data of kind {kind} and {size} bytes is not understood")
    return np.frombuffer(data, np.dtype(order + _TYPES[kind]))


def _exactly(take: Read, count: int) -> bytes:
    data = take(count) if count else b""
    if len(data) != count:
        raise EOFError(f"{count} bytes announced, {len(data)} left")
    return data


def _inflated(file: IO[bytes], size: int) -> Read:
    """Reads on in a compressed element of so many bytes."""
    machine, left, held = zlib.decompressobj(), size, bytearray()

    def take(count: int) -> bytes:
        nonlocal left
        while len(held) < count and not machine.eof:
            packed = machine.unconsumed_tail
            if not packed:
                packed = file.read(min(_CHUNK, left))
                left -= len(packed)
                if not packed:
                    break
            held.extend(machine.decompress(packed, max(1, count - len(held))))
        data = bytes(held[:count])
        del held[:count]
        return data

    return take
