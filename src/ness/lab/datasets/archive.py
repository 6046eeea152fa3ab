"""The files in a folder, a tar or a zip, read in place: nothing is written out, and no name may leave the folder."""

import os
import stat
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO

from ness.errors import NessError

_DEPTH = 5  # folders below the one asked for
_FILES = 1_000_000
_PADDING = 1 << 20  # bytes that may follow a tar's end


@dataclass(frozen=True)
class Entry:
    """One file: its path inside the folder or archive, its size, how to open it (before the next entry is taken)."""

    name: str
    size: int
    open: Callable[[], IO[bytes]]

    @property
    def parts(self) -> tuple[str, ...]:
        """The path, cut at the slashes."""
        return PurePosixPath(self.name).parts


def entries(path: Path, limit: int) -> Iterator[Entry]:
    """Files in a folder or archive, in its own order (folders: sorted); more than `limit` bytes in all is refused."""
    if path.is_dir():
        source = _folder(path)
    elif zipfile.is_zipfile(path):
        source = _zip(path)
    elif tarfile.is_tarfile(path):
        source = _tar(path)
    else:
        raise NessError(f"{path}: found neither a folder nor a tar or zip archive; it may have been cut off")
    total = 0
    for count, entry in enumerate(source):
        total += entry.size
        if total > limit or count >= _FILES:
            raise NessError(
                f"{path}: holds more than the {limit} bytes or {_FILES} files expected (at {entry.name!r}); "
                "this is not the published archive, and it was not unpacked"
            )
        yield entry


def check_name(path: Path, name: str) -> str:
    """The member's name, if it stays inside the folder; an error otherwise.

    >>> check_name(Path("a.tar"), "cifar/train")
    'cifar/train'
    >>> check_name(Path("a.tar"), "../../etc/passwd")
    Traceback (most recent call last):
        ...
    ness.errors.NessError: a.tar: the member '../../etc/passwd' leads out of the archive's folder; refused as hostile
    """
    plain = name.replace("\\", "/")
    outside = plain.startswith("/") or ".." in plain.split("/") or plain[1:2] == ":" or "\0" in plain
    if outside or not plain.strip("./"):
        raise NessError(f"{path}: the member {name!r} leads out of the archive's folder; refused as hostile")
    return name


def _folder(path: Path) -> Iterator[Entry]:
    for folder, folders, files in os.walk(path, followlinks=True):
        here = Path(folder)
        depth = len(here.relative_to(path).parts)
        folders[:] = sorted(folders) if depth < _DEPTH else []
        for name in sorted(files):
            file = here / name
            yield Entry(file.relative_to(path).as_posix(), file.stat().st_size, partial(_bytes, file))


def _bytes(file: Path) -> IO[bytes]:
    return file.open("rb")


def _tar(path: Path) -> Iterator[Entry]:
    with tarfile.open(path) as tar:
        for info in tar:
            if info.isdir() and not info.name.strip("./"):
                continue
            check_name(path, info.name)
            if not (info.isfile() or info.isdir()):
                raise NessError(
                    f"{path}: the member {info.name!r} is a link or a device, expected files and folders only; "
                    "refused as hostile"
                )
            if info.isfile():
                yield Entry(info.name, info.size, partial(_opened, tar, info))
        _drain(path, tar)


def _drain(path: Path, tar: tarfile.TarFile) -> None:
    """Read past the archive's end, because that is where gzip keeps the checksum of all that came before."""
    assert tar.fileobj is not None
    if len(tar.fileobj.read(_PADDING + 1)) > _PADDING:
        raise NessError(f"{path}: goes on after its end; this is not the published archive")


def _opened(tar: tarfile.TarFile, info: tarfile.TarInfo) -> IO[bytes]:
    file = tar.extractfile(info)
    assert file is not None  # only regular files get here
    return file


def _zip(path: Path) -> Iterator[Entry]:
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            check_name(path, info.filename)
            if stat.S_ISLNK(info.external_attr >> 16) or info.flag_bits & 1:
                raise NessError(f"{path}: the member {info.filename!r} is a link or encrypted; refused as hostile")
            if not info.is_dir():
                yield Entry(info.filename, info.file_size, partial(archive.open, info))
