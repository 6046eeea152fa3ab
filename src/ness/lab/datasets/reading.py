"""Reading a file that nobody vouches for: any failure becomes an error of ours, and bytes are hashed on the way."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from ness._files import open_regular
from ness.errors import NessError, printable

_CHUNK = 1 << 20


@contextmanager
def guarded(path: Path, data_set: str) -> Iterator[None]:
    """Turn any failure to read `path` into a NessError that names it; the file itself is left as it is."""
    try:
        yield
    except NessError as error:
        if (plain := printable(str(error))) != str(error):  # a name from the file
            raise NessError(plain) from error
        raise
    except Exception as error:  # a hostile file may raise anything: this is the border
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        raise NessError(
            f"{path}: cannot be read as a file of {data_set} ({reason}); it is broken or something else. "
            f"Nothing was changed: move it away and run `ness data get {data_set}`, or put a good copy in its place"
        ) from error


class Hashing:
    """A binary file of known size, read forwards, that keeps the MD5 of what was read."""

    def __init__(self, file: IO[bytes], size: int) -> None:
        self._file = file
        self._unread = size  # bytes still in the file
        self._block = b""  # bytes taken from it, of which the first `_at` were handed out
        self._at = 0
        self._md5 = hashlib.md5(usedforsecurity=False)

    @property
    def left(self) -> int:
        """How many bytes can still be read."""
        return self._unread + len(self._block) - self._at

    def read(self, count: int) -> bytes:
        """Exactly `count` bytes."""
        end = self._at + count
        if count >= 0 and end <= len(self._block):
            data = self._block[self._at : end]
            self._at = end
            return data
        return self.read_array(count).tobytes()

    def read_array(self, count: int) -> NDArray[np.uint8]:
        """Exactly `count` bytes, as an array that may be written to, without a second copy of them."""
        if not 0 <= count <= self.left:
            raise EOFError(f"{count} bytes announced, {self.left} left")
        result = np.empty(count, np.uint8)
        done = 0
        while done < count:
            if self._at == len(self._block):
                self._refill()
            piece = self._block[self._at : self._at + count - done]
            result[done : done + len(piece)] = np.frombuffer(piece, np.uint8)
            done += len(piece)
            self._at += len(piece)
        return result

    def read_line(self) -> bytes:
        """Everything up to the next newline, which is dropped."""
        pieces = []
        while (end := self._block.find(b"\n", self._at)) < 0:
            pieces.append(self._block[self._at :])
            self._refill()
        pieces.append(self._block[self._at : end])
        self._at = end + 1
        return b"".join(pieces)

    def finish(self) -> str:
        """Read what is left and return the MD5 of the whole file."""
        while self._unread:
            self._refill()
        return self._md5.hexdigest()

    def _refill(self) -> None:
        block = self._file.read(min(_CHUNK, self._unread))
        if not block:
            raise EOFError(f"the file ends {self._unread} bytes early")
        self._md5.update(block)
        self._unread -= len(block)
        self._block, self._at = block, 0


def check_md5(path: str, found: str, expected: str | None, data_set: str) -> None:
    """Refuse contents that are not the published ones; nothing is deleted."""
    if expected is not None and found != expected:
        raise NessError(
            f"{path}: found MD5 {found}, expected {expected}: not the published file of {data_set} (a broken download, "
            f"or something made from it). Nothing was changed: move it away and run `ness data get {data_set}`; to use "
            f"data of your own making, save it as {data_set}.npz, which is checked by shapes and counts"
        )


def file_md5(path: Path) -> str:
    """MD5 of a file's bytes."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
