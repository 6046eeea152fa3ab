"""Files that survive a crash: written whole or not at all, and read only where they are ordinary files.

Everything that is persisted goes through here. A file is written under a temporary name in its own folder, flushed to
the disk, renamed, and the folder is flushed too, so that also after a power cut there is the old file or the new one.
A temporary file stays locked (`flock`) while its writer lives: the next writer removes those of killed ones alone.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from io import BufferedReader
from pathlib import Path

from ness.errors import NessError

if sys.platform != "win32":
    import fcntl

TEMPORARY = re.compile(r"\.ness-[0-9a-f]{16}\.tmp")
LOCK_SECONDS = 300.0  # how long to wait for another writer of the same folder
PIECE = 1 << 28  # bytes a call of `write`: systems limit it
_WITHOUT_WAITING = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)  # for a pipe's other end
# What file systems answer that cannot lock, or cannot flush a folder.
UNSUPPORTED = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF, errno.ENOLCK}


def reason(error: BaseException) -> str:
    """An error's own words, in one line."""
    text = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    return " ".join(str(text).split())


def write_bytes(path: Path, content: bytes, advice: str = "") -> None:
    """Write a file whole or not at all, and remove what killed writers left in its folder.

    Args:
        path: where to; missing folders are made. Whatever has that name is replaced.
        content: all of it.
        advice: what to do if it cannot be written.

    Raises:
        NessError: it could not be written; what was there is there still.
    """
    try:
        make_folder(path.parent)
        remove_abandoned(path.parent)
        _write(path, content)
    except (OSError, ValueError) as error:  # ValueError: a zero in the name
        then = advice or "nothing that was there is lost"
        raise NessError(f"{path}: could not be written ({reason(error)}); {then}") from error


def append_line(path: Path, line: bytes, *, flush: bool = True) -> None:
    """Append a line to a file that only grows; one that a killed writer left unfinished is ended first.

    Args:
        path: the file; made if it is missing.
        line: without its newline.
        flush: to the disk, before this returns.

    Raises:
        NessError: it could not be written; as far as the system lets, the file is as it was.
    """
    try:
        make_folder(path.parent)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | _WITHOUT_WAITING, 0o666)
        try:
            found = os.fstat(handle)
            if not stat.S_ISREG(found.st_mode):
                raise NessError(f"{path}: is no ordinary file; expected one that was written here, or none")
            _append(handle, line, found.st_size)
            if flush:
                os.fsync(handle)
                if not found.st_size:
                    sync_folder(path.parent)
        finally:
            os.close(handle)
    except (OSError, ValueError) as error:
        raise NessError(
            f"{path}: could not be written ({reason(error)}); make room or rights and start again"
        ) from error


def _append(handle: int, line: bytes, size: int) -> None:
    torn = False
    if size:
        os.lseek(handle, size - 1, os.SEEK_SET)
        torn = os.read(handle, 1) != b"\n"
    content, done = (b"\n" if torn else b"") + line + b"\n", 0
    try:
        while done < len(content):
            done += os.write(handle, content[done:])
    except OSError:
        with contextlib.suppress(OSError):
            if os.fstat(handle).st_size == size + done:  # nobody else has appended
                os.ftruncate(handle, size)
        raise


def _write(path: Path, content: bytes) -> None:
    temporary, handle = _create(path.parent)
    try:
        try:
            view = memoryview(content)
            while view:
                view = view[os.write(handle, view[:PIECE]) :]
            os.fsync(handle)
            if sys.platform == "win32":
                os.close(handle)
            _rename(temporary, path)
        finally:
            if sys.platform != "win32":  # only now: as long as it is open, nobody takes it for abandoned
                with contextlib.suppress(OSError):
                    os.close(handle)
    except BaseException:
        _unlink(temporary)
        raise


def write_together(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write several files of one folder: all of them, or none. Other files there stay as they are.

    All are on the disk under temporary names before the first gets its own; where one cannot, those before it get
    their old content back.

    Args:
        folder: made if it is missing.
        files: contents by name, in the order in which they take their places.

    Raises:
        NessError: nothing was written; what was there is there still.
    """
    staged: list[tuple[Path, int, Path]] = []
    try:
        make_folder(folder)
        remove_abandoned(folder)
        try:
            for name, content in files.items():
                if (folder / name).is_dir():
                    raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
                staged.append((*_create(folder), folder / name))
                view = memoryview(content)
                while view:
                    view = view[os.write(staged[-1][1], view[:PIECE]) :]
                os.fsync(staged[-1][1])
            _take_places([(temporary, path) for temporary, _, path in staged])
        finally:
            for temporary, handle, _ in staged:
                with contextlib.suppress(OSError):
                    os.close(handle)
                _unlink(temporary)
    except (OSError, ValueError) as error:
        raise NessError(f"{folder}: could not be written ({reason(error)}); nothing that was there is lost") from error


def _take_places(moves: Sequence[tuple[Path, Path]]) -> None:
    """Rename finished files; an error in between puts back what those before it replaced."""
    backups: list[tuple[Path, Path | None]] = []
    try:
        for temporary, path in moves:
            backup: Path | None = path.parent / f".ness-{secrets.token_hex(8)}.tmp"
            try:
                os.replace(path, backup)  # type: ignore[arg-type]  # noqa: PTH105
            except FileNotFoundError:
                backup = None
            backups.append((path, backup))
            os.replace(temporary, path)  # noqa: PTH105
        for folder in {path.parent for _, path in moves}:
            sync_folder(folder)
    except BaseException:
        for path, backup in reversed(backups):
            if backup is None:
                _unlink(path)
            else:
                with contextlib.suppress(OSError):
                    os.replace(backup, path)  # noqa: PTH105
        raise
    for _, backup in backups:
        if backup is not None:
            _unlink(backup)


def _create(folder: Path) -> tuple[Path, int]:
    """A new temporary file, open and locked."""
    while True:
        path = folder / f".ness-{secrets.token_hex(8)}.tmp"
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
        try:
            with contextlib.suppress(BlockingIOError):  # else taken for abandoned before it was locked
                _lock(handle)
                if sys.platform == "win32" or os.fstat(handle).st_nlink:
                    return path, handle
        except BaseException:
            os.close(handle)
            _unlink(path)
            raise
        os.close(handle)
        _unlink(path)


def _rename(temporary: Path, path: Path) -> None:
    """Give a finished file its name for good; where the folder cannot be flushed, put back what was there."""
    backup, existed = path.parent / f".ness-{secrets.token_hex(8)}.tmp", True
    try:
        os.link(path, backup, follow_symlinks=False)
    except FileNotFoundError:
        existed = False
    except (OSError, NotImplementedError, AttributeError):
        backup = path  # no second name: not every file system has them
    try:
        os.replace(temporary, path)  # noqa: PTH105
        try:
            sync_folder(path.parent)
        except OSError as error:
            _put_back(backup if existed else None, path, error)
            raise
    finally:
        if backup != path:
            _unlink(backup)


def _put_back(backup: Path | None, path: Path, error: OSError) -> None:
    try:
        if backup is None:
            path.unlink()
        elif backup == path:
            raise error
        else:
            os.replace(backup, path)  # noqa: PTH105
    except OSError:
        raise NessError(
            f"{path}: was replaced, and its folder could not be flushed to the disk ({reason(error)}): "
            "what is there is whole, but write it again before you rely on it"
        ) from error


def sync_folder(folder: Path) -> None:
    """Flush a folder's names to the disk, where the system can."""
    if sys.platform == "win32":
        return
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
    finally:
        os.close(handle)


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, each flushed to the disk."""
    missing = []
    while not folder.is_dir():
        missing.append(folder)
        if folder.parent == folder:
            break
        folder = folder.parent
    for path in reversed(missing):
        path.mkdir(exist_ok=True)
        sync_folder(path.parent)


def _lock(handle: int) -> bool:
    """Lock an open file, if nobody else has; False where its file system cannot."""
    if sys.platform == "win32":
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        return False
    return True


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """Be the only writer of a folder inside the `with`; yields False where its file system has no locks.

    The folder itself is locked, so that no lock file lies about. Readers need no lock.

    Raises:
        NessError: another writer had it for five minutes.
    """
    if sys.platform == "win32":
        yield False
        return
    handle, has = _wait_for(folder)
    try:
        yield has
    finally:
        with contextlib.suppress(OSError):
            if has:
                fcntl.flock(handle, fcntl.LOCK_UN)  # else a process forked meanwhile would hold it on
            os.close(handle)


def _wait_for(folder: Path) -> tuple[int, bool]:
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        make_folder(folder)
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            has = _lock(handle)
            if os.path.samestat(os.fstat(handle), os.stat(folder)):  # noqa: PTH116
                return handle, has
        except (BlockingIOError, FileNotFoundError):
            pass
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)
        if time.monotonic() > deadline:
            raise NessError(
                f"{folder}: another process has been writing into it for {LOCK_SECONDS:.0f} s; "
                "wait for it, end it, or write into another folder"
            )
        time.sleep(0.001 + secrets.randbelow(10) / 1000)


def remove_abandoned(folder: Path) -> None:
    """Remove the temporary files of killed writers: ours, and locked by nobody."""
    if sys.platform == "win32":
        return
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):  # noqa: PTH208
            if TEMPORARY.fullmatch(name):
                _remove_if_unlocked(folder / name)


def _remove_if_unlocked(path: Path) -> None:
    with contextlib.suppress(OSError):  # another one removes it, or its writer lives
        if not stat.S_ISREG(path.lstat().st_mode):
            return
        handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            if _lock(handle):
                path.unlink()
        finally:
            os.close(handle)


def _unlink(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def open_regular(path: Path) -> BufferedReader:
    """An ordinary file, or a link to one, open for reading; of a pipe or a device reading might never end.

    Raises:
        FileNotFoundError, NessError: as in `read_bytes`.
    """
    try:
        found = os.stat(path)  # noqa: PTH116
        if stat.S_ISREG(found.st_mode):
            handle = os.open(path, os.O_RDONLY | _WITHOUT_WAITING)
            file = os.fdopen(handle, "rb")
            found = os.fstat(handle)
            if stat.S_ISREG(found.st_mode):
                return file
            file.close()
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise NessError(f"{path}: could not be read ({reason(error)})") from error
    kind = "a folder" if stat.S_ISDIR(found.st_mode) else "a pipe, a device or the like"
    raise NessError(f"{path}: found {kind}, expected an ordinary file")


def read_bytes(path: Path, limit: int | None = None) -> bytes:
    """All of an ordinary file.

    Args:
        path: a file, or a link to one.
        limit: refuse a file of more bytes.

    Raises:
        FileNotFoundError: nothing has this name.
        NessError: it is no ordinary file, or too large, or unreadable.
    """
    with open_regular(path) as file:
        try:
            size = os.fstat(file.fileno()).st_size
            if limit is not None and size > limit:
                raise NessError(f"{path}: found {size} bytes, expected at most {limit}: not written here")
            return file.read()
        except (OSError, MemoryError) as error:
            raise NessError(f"{path}: could not be read ({reason(error)})") from error
