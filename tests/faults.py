"""Files that fail, processes killed at a counted call, and a disk that loses power: for tests and campaigns."""

# What is patched here are functions of os.
# ruff: noqa: PTH100, PTH116, PTH118, PTH120

import contextlib
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CALLS = ("open", "write", "fsync", "replace", "link", "unlink", "mkdir", "ftruncate")


@dataclass
class Step:
    """One call that changed a file or a folder under the root."""

    name: str
    path: str = ""
    other: str = ""
    inode: int = 0
    data: bytes = b""


@dataclass
class Watched:
    """What was seen of the calls under a root; the n-th may fail, half a write may be done before it."""

    root: str
    at: int = 0  # which call fails; 0: none
    code: int = 0  # errno of the failure; 0: SIGKILL
    failing: str = ""  # the name of the call that failed
    lasting: bool = False  # all calls of that name after it fail too
    torn: bool = False  # a write that fails or is killed has written half of its bytes
    count: int = 0
    steps: list[Step] = field(default_factory=list)
    names: list[str] = field(default_factory=list)  # of each call
    ids: dict[int, int] = field(default_factory=dict)  # inodes are used again, ids are not
    open_files: dict[int, tuple[str, int]] = field(default_factory=dict)

    def due(self, name: str) -> bool:
        """Counts the call; whether it is the one."""
        self.count += 1
        self.names.append(name)
        if self.count == self.at:
            self.failing = name
            return True
        return self.lasting and 0 < self.at < self.count and name == self.failing

    def inside(self, path: Any) -> str | None:
        text = os.path.abspath(os.fspath(path)) if isinstance(path, str | os.PathLike) else None
        return text if text is not None and (text == self.root or text.startswith(self.root + os.sep)) else None


@contextlib.contextmanager
def watched(root: Path, at: int = 0, code: int = 0, lasting: bool = False, torn: bool = False) -> Iterator[Watched]:
    """Counts and records the calls of `os` that concern files under the root, and lets the `at`-th fail."""
    seen = Watched(os.path.abspath(root), at, code, lasting=lasting, torn=torn)
    real = {name: getattr(os, name) for name in CALLS} | {"close": os.close}
    lock = threading.RLock()

    def fail(path: str) -> None:
        if not code:
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(code, os.strerror(code), path)

    def of_path(name: str) -> Callable[..., Any]:
        def call(path: Any, *args: Any, **kwargs: Any) -> Any:
            here = seen.inside(path)
            if here is None:
                return real[name](path, *args, **kwargs)
            with lock:
                if seen.due(name):
                    fail(here)
                other = seen.inside(args[0]) if name in ("replace", "link") and args else None
                existed = os.path.lexists(here)
                found = real[name](path, *args, **kwargs)
                if name == "open":
                    number = os.fstat(found).st_ino
                    if not existed:
                        seen.ids[number] = 10**15 + len(seen.steps)
                    inode = seen.ids.get(number, number)
                    seen.open_files[found] = (here, inode)
                    flags = args[0] if args else kwargs.get("flags", 0)
                    if not existed:
                        seen.steps.append(Step("create", here, inode=inode))
                    elif flags & os.O_TRUNC:
                        seen.steps.append(Step("cut", here, inode=inode))
                else:
                    seen.steps.append(Step(name, here, other or ""))
                return found

        return call

    def of_handle(name: str) -> Callable[..., Any]:
        def call(handle: int, *args: Any) -> Any:
            if handle not in seen.open_files:
                return real[name](handle, *args)
            with lock:
                here, inode = seen.open_files[handle]
                if seen.due(name):
                    if torn and name == "write":
                        done = real[name](handle, bytes(args[0])[: len(args[0]) // 2])
                        seen.steps.append(Step("write", here, inode=inode, data=bytes(args[0])[:done]))
                    fail(here)
                found = real[name](handle, *args)
                data = bytes(args[0])[:found] if name == "write" else b""
                seen.steps.append(Step(name, here, inode=inode, data=data))
                return found

        return call

    def close(handle: int) -> None:
        seen.open_files.pop(handle, None)
        real["close"](handle)

    for name in CALLS:
        setattr(os, name, (of_handle if name in ("write", "fsync", "ftruncate") else of_path)(name))
    os.close = close
    try:
        yield seen
    finally:
        for name, function in real.items():
            setattr(os, name, function)


@dataclass
class _File:
    now: bytes = b""
    safe: bytes | None = None  # what was flushed


class Disk:
    """A disk that loses power: what was flushed is sure; the rest is there in any order, in part, or not at all."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.now: dict[str, int | None] = {root: None}  # path -> inode, None for a folder: as processes see it
        self.safe: dict[str, int | None] = {root: None}
        self.waiting: dict[str, list[list[tuple[str, int | None, bool]]]] = {}  # by folder: (path, inode, is there)
        self.files: dict[int, _File] = {}

    @classmethod
    def holding(cls, root: Path) -> "Disk":
        """A disk on which everything under the root is flushed."""
        disk = cls(os.path.abspath(root))
        for place, folders, files in os.walk(root):
            for name in folders:
                disk.now[os.path.join(place, name)] = None
            for name in files:
                path = os.path.join(place, name)
                inode = os.stat(path).st_ino
                content = Path(path).read_bytes()
                disk.files[inode], disk.now[path] = _File(content, content), inode
        disk.safe = dict(disk.now)
        return disk

    def do(self, step: Step) -> None:
        """One call."""
        if step.name in ("create", "cut"):
            self.files[step.inode] = _File(safe=self.files[step.inode].safe if step.name == "cut" else None)
            if step.name == "create":
                self._enter([(step.path, step.inode, True)])
        elif step.name == "write":
            self.files[step.inode].now += step.data
        elif step.name == "mkdir":
            self._enter([(step.path, None, True)])
        elif step.name == "replace":
            self._enter([(step.other, self.now[step.path], True), (step.path, None, False)])
        elif step.name == "link":
            self._enter([(step.other, self.now[step.path], True)])
        elif step.name == "unlink":
            self._enter([(step.path, None, False)])
        elif step.name == "fsync" and step.inode in self.files:
            self.files[step.inode].safe = self.files[step.inode].now
        elif step.name == "fsync":
            for changes in self.waiting.pop(step.path, []):
                self._apply(self.safe, changes)

    def _enter(self, changes: list[tuple[str, int | None, bool]]) -> None:
        self._apply(self.now, changes)
        self.waiting.setdefault(os.path.dirname(changes[0][0]), []).append(changes)

    @staticmethod
    def _apply(entries: dict[str, int | None], changes: list[tuple[str, int | None, bool]]) -> None:
        for path, inode, there in changes:
            if there:
                entries[path] = inode
            else:
                entries.pop(path, None)

    def after_power_loss(self, draw: random.Random, to: Path) -> None:
        """Writes into the folder `to` what may be there when the power is back."""
        entries = dict(self.safe)
        for waiting in self.waiting.values():
            how = draw.choice(["none", "all", "beginning", "some", "some, in another order"])
            chosen = {"none": [], "all": waiting, "beginning": waiting[: draw.randint(0, len(waiting))]}.get(how)
            if chosen is None:
                chosen = [changes for changes in waiting if draw.random() < 0.5]
                if how.endswith("order"):
                    draw.shuffle(chosen)
            for changes in chosen:
                self._apply(entries, changes)
        to.mkdir(parents=True, exist_ok=True)
        for path in sorted(entries):
            above = os.path.dirname(path)
            if path == self.root or any(up not in entries for up in self._above(above)):
                continue  # a folder that is lost takes along what is in it
            target = to / os.path.relpath(path, self.root)
            inode = entries[path]
            if inode is None:
                target.mkdir(exist_ok=True)
            else:
                target.write_bytes(self._content(self.files[inode], draw))

    def _above(self, path: str) -> Iterator[str]:
        while len(path) > len(self.root):
            yield path
            path = os.path.dirname(path)

    @staticmethod
    def _content(file: _File, draw: random.Random) -> bytes:
        if file.safe == file.now:
            return file.now
        old = file.safe or b""
        kept = draw.randint(len(old) if file.now.startswith(old) else 0, len(file.now))
        return draw.choice([old, file.now, file.now[:kept], file.now[:kept] + bytes(len(file.now) - kept)])


def fork(work: Callable[[], None]) -> int:
    """Runs `work` in a process of its own; its exit code, negative for a signal."""
    pid = os.fork()
    if not pid:
        code = 1
        try:
            work()
            code = 0
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
