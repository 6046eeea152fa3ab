"""One published file, downloaded: to a partial file that a later call resumes; checked, and only then named."""

import http.client
import logging
import os
import stat
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import filelock

from ness._files import make_folder, reason, sync_folder
from ness._version import __version__
from ness.errors import NessError
from ness.lab.datasets.catalogue import Remote
from ness.lab.datasets.reading import check_md5, file_md5

Progress = Callable[[str, int, int], None]  # file name, bytes so far, bytes in all

_CHUNK = 1 << 18
_TRIES = 4  # in a row without a single new byte
_TIMEOUT = 30  # seconds without an answer
_LOG = logging.getLogger(__name__)


def log_progress(name: str, done: int, total: int) -> None:
    """Say how far a download is at every tenth of it, to the log `ness.lab.datasets.download`."""
    if at_tenth(done, total):
        _LOG.info("downloading %s: %d of %d MB", name, done // 10**6, total // 10**6)


def at_tenth(done: int, total: int) -> bool:
    """Whether the last chunk brought a download of `total` bytes past another tenth, or to its end."""
    tenth = max(1, total // 10)
    return done >= total or done // tenth != max(0, done - _CHUNK) // tenth


def fetch(file: Remote, folder: Path, data_set: str, progress: Progress = log_progress) -> Path:
    """The file's path in `folder`, downloaded from the first of its addresses that answers.

    A file of that name that is there already is kept: right, it is used; wrong, that is an error. What a download
    that broke off has left in NAME.part is gone on with.
    """
    target = folder / file.name
    _make(folder)
    lock = folder / f".{file.name}.lock"
    with _alone(lock):
        if target.exists():
            _check(target, file, data_set)
            return target
        reasons = []
        for url in file.urls:
            try:
                _retrieve(url, file, folder, progress)
                return target
            except (OSError, http.client.HTTPException, ValueError) as error:
                reasons.append(f"{url}: {reason(error)}")
    with suppress(OSError):  # an attempt that brought nothing leaves nothing: no lock, no empty folder
        lock.unlink()
        folder.rmdir()
    raise NessError(
        f"{file.name} could not be downloaded ({'; '.join(reasons)}). Run the same command again to go on where it "
        f"stopped, or get the file by other means and put it into {folder}"
    )


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """One process a file: another one waits."""
    held = filelock.FileLock(lock)
    try:
        held.acquire()
    except (OSError, NotImplementedError) as error:
        raise NessError(f"{lock}: cannot be locked ({reason(error)}); name another folder with --data") from error
    try:
        yield
    finally:
        with suppress(OSError):
            held.release()


def _make(folder: Path) -> None:
    try:
        make_folder(folder)
    except OSError as error:
        text = f"{folder}: cannot be made ({reason(error)}); name a folder you may write to with --data"
        raise NessError(text) from error


def _check(target: Path, file: Remote, data_set: str) -> None:
    """Refuse a file that has the right name and the wrong bytes."""
    if file.md5 is not None:
        check_md5(str(target), file_md5(target), file.md5, data_set)
    elif target.stat().st_size != file.size:
        raise NessError(
            f"{target}: found {target.stat().st_size} bytes, expected {file.size}: not the published file. "
            f"Nothing was changed: move it away and run `ness data get {data_set}`"
        )


def _retrieve(url: str, file: Remote, folder: Path, progress: Progress) -> None:
    """Download to the partial file, check it, flush it to the disk, and only then give it its name."""
    part = folder / f"{file.name}.part"
    _resume(url, part, file, progress)
    if file.md5 is not None and (found := file_md5(part)) != file.md5:
        part.unlink()  # ours, and nothing that could be gone on with
        raise ValueError(f"found MD5 {found}, expected {file.md5}")
    with _opened(part, os.O_WRONLY) as output:
        os.fsync(output)
    os.replace(part, folder / file.name)  # noqa: PTH105
    sync_folder(folder)


@contextmanager
def _opened(part: Path, flags: int) -> Iterator[int]:
    """The partial file's handle, for writing; a pipe or a device of that name is refused."""
    handle = os.open(part, flags | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0), 0o666)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise ValueError(f"{part} is no ordinary file; remove it")
        yield handle
    finally:
        os.close(handle)


def _resume(url: str, part: Path, file: Remote, progress: Progress) -> None:
    """Bring `part` to its full size, asking again from where it broke off as long as every try brings something."""
    failures = 0
    while (done := part.stat().st_size if part.exists() else 0) != file.size:
        if done > file.size:
            part.unlink()  # ours, and not a beginning of this file
            continue
        said: Exception | None = None
        try:
            _append(url, part, done, file, progress)
        except urllib.error.HTTPError as error:
            if error.code == 416 and done:
                part.unlink()
            elif 400 <= error.code < 500:
                raise
            said = error
        except (OSError, http.client.HTTPException) as error:
            said = error
        now = part.stat().st_size if part.exists() else 0
        failures = 0 if now > done else failures + 1
        if failures >= _TRIES:
            raise OSError(f"it broke off at {now} of {file.size} bytes ({said or 'the server sent no more'})")


def _append(url: str, part: Path, done: int, file: Remote, progress: Progress) -> None:
    """One request for the bytes from `done` on; a server that cannot do that sends, and we take, the whole file."""
    headers = {"User-Agent": f"ness/{__version__}", "Accept-Encoding": "identity"}
    if done:
        headers["Range"] = f"bytes={done}-"
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=_TIMEOUT) as answer:
        going_on = answer.status == 206 and str(answer.headers.get("Content-Range", "")).startswith(f"bytes {done}-")
        if not going_on:
            done = 0
        with _opened(part, os.O_WRONLY | os.O_CREAT | (os.O_APPEND if going_on else os.O_TRUNC)) as output:
            while chunk := answer.read(_CHUNK):
                written = 0
                while written < len(chunk):
                    written += os.write(output, chunk[written:])
                done += len(chunk)
                if done > file.size:
                    raise ValueError(f"more than the {file.size} bytes of {file.name} were sent")
                progress(file.name, done, file.size)
