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

from ness._files import open_regular, reason
from ness.errors import NessError

_DEPTH = 5  # folders below the one asked for
_FILES = 300_000
_HEADER = 1 << 16  # bytes of a long name or of extended attributes
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
    else:
        open_regular(path).close()
        source = _zip(path) if zipfile.is_zipfile(path) else _tar(path)
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
            try:
                found = file.stat()
            except FileNotFoundError:
                raise NessError(f"{file}: is a link to nothing; remove it, or put the file there") from None
            if not stat.S_ISREG(found.st_mode):
                raise NessError(f"{file}: is a pipe, a device or the like, expected an ordinary file; remove it")
            yield Entry(file.relative_to(path).as_posix(), found.st_size, partial(open_regular, file))


def _tar(path: Path) -> Iterator[Entry]:
    try:
        opened = tarfile.open(path, tarinfo=_Plain)  # noqa: SIM115
    except tarfile.ReadError as error:
        raise NessError(
            f"{path}: found neither a folder nor a tar or zip archive ({reason(error)}); it may have been cut off"
        ) from error
    with opened as tar:
        for count in range(_FILES + 1):
            info = tar.next()
            if info is None:
                break
            tar.members.clear()  # type: ignore[attr-defined]  # else every header is kept
            if count == _FILES:
                raise NessError(f"{path}: holds more than {_FILES} members; this is not the published archive")
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


class _Plain(tarfile.TarInfo):
    """A member's header, of which nothing is read that could fill the memory or take for ever."""

    def _proc_member(self, tar: tarfile.TarFile) -> tarfile.TarInfo:
        if self.type not in tarfile.REGULAR_TYPES and not self.isdir() and self.size > _HEADER:
            raise NessError(f"a tar archive has a header of {self.size} bytes; refused as hostile")
        if self.type == tarfile.GNUTYPE_SPARSE:
            raise NessError("a tar archive has a sparse member, which published ones have not; refused")
        found: tarfile.TarInfo = super()._proc_member(tar)  # type: ignore[misc]
        return found

    def _sparse(self, *_: object) -> None:
        raise NessError("a tar archive has a sparse member, which published ones have not; refused")

    _proc_gnusparse_00 = _proc_gnusparse_01 = _proc_gnusparse_10 = _sparse


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
