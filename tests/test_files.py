"""Faults, killed processes and several writers: what is persisted is at every moment one whole state."""

from __future__ import annotations

import errno
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ness
from folders import files_of, guard_of, refused, small
from ness import _files
from ness.storage import folder
from ness.storage import manifest as manifests
from ness.storage.folder import MANIFEST, load_folder, save_folder

pytestmark = pytest.mark.filterwarnings("ignore::ness.NessWarning")


CALLS = ("open", "write", "fsync", "replace", "mkdir", "close", "link", "unlink", "stat", "listdir", "fstat")
MUST_FAIL = {"write", "fsync", "replace", "mkdir"}


class Faults:
    """Counts calls of `os` functions, and lets those from the n-th on fail, or the n-th alone."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, code: int, at: int, lasting: bool) -> None:
        self.calls, real = 0, getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if self.calls == at or (lasting and self.calls >= at > 0):
                if name == "close":
                    real(*args, **kwargs)
                raise OSError(code, os.strerror(code))
            return real(*args, **kwargs)

        monkeypatch.setattr(os, name, call)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EACCES], ids=errno.errorcode.get)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("fresh", [True, False], ids=["first save", "second save"])
def test_a_fault_at_any_call_keeps_the_old_state(name: str, code: int, fresh: bool, tmp_path: Path) -> None:
    model = small()
    old, new = guard_of(model, 5), guard_of(model, 6)
    tried = 0
    for lasting in (False, True):
        for at in range(1, 40):
            folder = tmp_path / f"{lasting} {at}" / "guard"
            if not fresh:
                old.save(folder)
            failed = False
            with pytest.MonkeyPatch.context() as patch:
                faults = Faults(patch, name, code, at, lasting)
                try:
                    new.save(folder)
                except ness.NessError as error:
                    failed, said = True, str(error)
            if faults.calls < at:
                break
            tried += 1
            if failed:
                assert os.strerror(code) in said
                assert "\n" not in said
            assert failed or name not in MUST_FAIL, f"call {at} of {name} failed, and the save says it is done"
            if not failed:
                assert ness.NullSpace.load(folder, model).grams["a"].count == 6
            elif not fresh:
                assert ness.NullSpace.load(folder, model).grams["a"].count == 5
            else:
                refused(folder, model)
            new.save(folder)
            assert len(files_of(folder)) == 2, "what a failed save leaves is removed by the next one"
            assert ness.NullSpace.load(folder, model).grams["a"].count == 6
    assert tried or name in ("mkdir",)


def fork(work: Callable[[], None]) -> int:
    """Run `work` in a process of its own, which shares nothing with this one but the disk."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        work()
        code = 0
    finally:
        os._exit(code)


def state(writer: int, number: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """A state that shows whether it is of one writer and one save."""
    return {"x": torch.full((64,), float(1000 * writer + number))}, {"writer": writer, "number": number}


def check_whole(folder: Path) -> tuple[int, int]:
    tensors, manifest = load_folder(folder)
    expected, _ = state(manifest["writer"], manifest["number"])
    assert torch.equal(tensors["x"], expected["x"])
    return manifest["writer"], manifest["number"]


def test_readers_never_fail_beside_writers_and_the_folder_is_one_of_theirs(tmp_path: Path) -> None:
    save_folder(tmp_path, *state(9, 0))
    saves, writers = 60, 2

    def write(writer: int) -> None:
        for number in range(saves):
            save_folder(tmp_path, *state(writer, number))

    def read() -> None:
        seen = set()
        while not (tmp_path / "done").exists():
            seen.add(check_whole(tmp_path))
        assert len(seen) > 1

    readers = [fork(read)]
    working = [fork(lambda writer=writer: write(writer)) for writer in range(writers)]  # type: ignore[misc]
    ends = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in working]
    (tmp_path / "done").touch()
    ends += [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in readers]
    assert ends == [0] * (writers + 1)
    assert check_whole(tmp_path)[1] == saves - 1
    assert len(files_of(tmp_path)) == 3, "manifest, tensors, and the test's own file"


def test_threads_that_save_into_one_folder_take_turns(tmp_path: Path) -> None:
    models = [small() for _ in range(3)]
    guards = [guard_of(model, rows) for rows, model in enumerate(models, start=5)]
    problems: list[BaseException] = []

    def save(guard: ness.NullSpace) -> None:
        try:
            for _ in range(10):
                guard.save(tmp_path / "new" / "guard")
                ness.NullSpace.load(tmp_path / "new" / "guard", guard.model)
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=save, args=(guard,)) for guard in guards]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems
    assert ness.NullSpace.load(tmp_path / "new" / "guard", models[0]).grams["a"].count in (5, 6, 7)
    assert len(files_of(tmp_path / "new" / "guard")) == 2


def test_killed_saves_leave_one_state_and_the_next_save_cleans_up(tmp_path: Path) -> None:
    save_folder(tmp_path, *state(0, 0))
    draw, left = random.Random(0), 0
    for writer in range(1, 41):

        def write(writer: int = writer) -> None:
            for number in range(100_000):
                save_folder(tmp_path, *state(writer, number))

        pid = fork(write)
        time.sleep(0.01 + 0.03 * draw.random())
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        left += len(files_of(tmp_path)) > 2
        check_whole(tmp_path)
        if writer % 4 == 0:
            save_folder(tmp_path, *state(0, writer))
            assert len(files_of(tmp_path)) == 2
            assert check_whole(tmp_path) == (0, writer)
    assert left, "no process was killed in the middle of a save"


@pytest.mark.parametrize("name", ["open", "write", "fsync", "replace", "link", "unlink", "close", "listdir"])
def test_killed_at_any_call_of_a_save(name: str, tmp_path: Path) -> None:
    """SIGKILL before the n-th call of an `os` function, for every n."""
    for at in range(1, 60):
        folder = tmp_path / str(at)
        save_folder(folder, *state(0, 0))

        def write(folder: Path = folder, at: int = at) -> None:
            calls, real = 0, getattr(os, name)

            def call(*args: Any, **kwargs: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls == at:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*args, **kwargs)

            setattr(os, name, call)
            save_folder(folder, *state(1, 1))

        end = os.waitstatus_to_exitcode(os.waitpid(fork(write), 0)[1])
        assert check_whole(folder) in ((0, 0), (1, 1))
        save_folder(folder, *state(2, 2))
        assert check_whole(folder) == (2, 2)
        assert len(files_of(folder)) == 2
        if end == 0:
            break
    assert at > 1
    assert end == 0


def test_what_a_living_writer_has_open_is_not_taken_for_abandoned(tmp_path: Path) -> None:
    temporary, handle = _files._create(tmp_path)
    _files.write_bytes(tmp_path / "other", b"1")
    assert temporary.exists()
    os.close(handle)  # as when its writer is killed
    _files.write_bytes(tmp_path / "other", b"2")
    assert [path.name for path in files_of(tmp_path)] == ["other"]


def test_temporary_files_of_earlier_versions_are_removed(tmp_path: Path) -> None:
    guard = guard_of(small())
    guard.save(tmp_path)
    for name in (".manifest.json.a1b2c3_d", ".tensors-0123456789abcdef.safetensors.abcd1234"):
        (tmp_path / name).write_text("cut off")
    guard.save(tmp_path)
    assert len(files_of(tmp_path)) == 2


def test_without_locks_writers_lose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two saves interleaved at the worst place, on a file system that cannot lock."""
    monkeypatch.setattr(_files, "_lock", lambda handle: False)
    save_folder(tmp_path, *state(0, 0))
    write, inside = folder.write_bytes, False

    def interleaved(path: Path, content: bytes) -> None:
        nonlocal inside
        if not inside and path.name == MANIFEST:
            inside = True
            save_folder(tmp_path, *state(1, 1))
            assert check_whole(tmp_path) == (1, 1)
        write(path, content)

    monkeypatch.setattr(folder, "write_bytes", interleaved)
    save_folder(tmp_path, *state(2, 2))
    assert check_whole(tmp_path) == (2, 2)
    monkeypatch.undo()
    save_folder(tmp_path, *state(3, 3))
    assert len(files_of(tmp_path)) == 2


def test_a_writer_does_not_wait_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_folder(tmp_path, *state(0, 0))
    monkeypatch.setattr(_files, "LOCK_SECONDS", 0.05)
    with _files.locked(tmp_path) as alone:
        assert alone
        with pytest.raises(ness.NessError, match="another process has been writing into it"):
            save_folder(tmp_path, *state(1, 1))
        assert check_whole(tmp_path) == (0, 0)  # a reader needs no lock
    save_folder(tmp_path, *state(1, 1))
    assert check_whole(tmp_path) == (1, 1)


def test_a_reader_finds_the_state_that_a_writer_put_in_between(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_folder(tmp_path, *state(0, 0))
    decode, number = manifests.decode, 0

    def slow(content: bytes, path: Path) -> dict[str, Any]:
        nonlocal number
        if number < 5:
            number += 1
            with monkeypatch.context() as patch:
                patch.setattr(manifests, "decode", decode)
                save_folder(tmp_path, *state(1, number))  # the tensors that `content` names are gone now
        return decode(content, path)

    monkeypatch.setattr(manifests, "decode", slow)
    assert check_whole(tmp_path) == (1, 5)
