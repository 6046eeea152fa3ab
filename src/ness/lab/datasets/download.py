"""One published file, downloaded: to a partial file that a later call resumes; checked, and only then named."""

import http.client
import logging
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import filelock
import pooch

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
    with filelock.FileLock(lock):
        if target.exists():
            _check(target, file, data_set)
            return target
        reasons = []
        for url in file.urls:
            try:
                _retrieve(url, file, folder, progress)
                return target
            except (OSError, http.client.HTTPException, ValueError) as error:
                reasons.append(f"{url}: {error}")
    with suppress(OSError):  # an attempt that brought nothing leaves nothing: no lock, no empty folder
        lock.unlink()
        folder.rmdir()
    raise NessError(
        f"{file.name} could not be downloaded ({'; '.join(reasons)}). Run the same command again to go on where it "
        f"stopped, or get the file by other means and put it into {folder}"
    )


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise NessError(f"{folder}: cannot be made ({error}); name a folder you may write to with --data") from error


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
    """Let pooch fetch, check and rename; the downloading itself is ours, because it has to resume."""
    part = folder / f"{file.name}.part"

    def download(url: str, output: str, _: Any) -> None:
        _resume(url, part, file, progress)
        part.replace(output)

    with _quiet_pooch():
        pooch.retrieve(
            url,
            known_hash=f"md5:{file.md5}" if file.md5 else None,
            fname=file.name,
            path=folder,
            downloader=download,
        )


@contextmanager
def _quiet_pooch() -> Iterator[None]:
    logger = pooch.get_logger()
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)


def _resume(url: str, part: Path, file: Remote, progress: Progress) -> None:
    """Bring `part` to its full size, asking again from where it broke off as long as every try brings something."""
    failures = 0
    while (done := part.stat().st_size if part.exists() else 0) != file.size:
        if done > file.size:
            part.unlink()  # ours, and not a beginning of this file
            continue
        reason: Exception | None = None
        try:
            _append(url, part, done, file, progress)
        except urllib.error.HTTPError as error:
            if error.code == 416 and done:
                part.unlink()
            elif 400 <= error.code < 500:
                raise
            reason = error
        except (OSError, http.client.HTTPException) as error:
            reason = error
        now = part.stat().st_size if part.exists() else 0
        failures = 0 if now > done else failures + 1
        if failures >= _TRIES:
            raise OSError(f"it broke off at {now} of {file.size} bytes ({reason or 'the server sent no more'})")


def _append(url: str, part: Path, done: int, file: Remote, progress: Progress) -> None:
    """One request for the bytes from `done` on; a server that cannot do that sends, and we take, the whole file."""
    headers = {"User-Agent": f"ness/{__version__}", "Accept-Encoding": "identity"}
    if done:
        headers["Range"] = f"bytes={done}-"
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=_TIMEOUT) as answer:
        going_on = answer.status == 206 and str(answer.headers.get("Content-Range", "")).startswith(f"bytes {done}-")
        if not going_on:
            done = 0
        with part.open("ab" if going_on else "wb") as output:
            while chunk := answer.read(_CHUNK):
                output.write(chunk)
                done += len(chunk)
                if done > file.size:
                    raise ValueError(f"more than the {file.size} bytes of {file.name} were sent")
                progress(file.name, done, file.size)
