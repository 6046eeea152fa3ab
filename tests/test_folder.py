"""A saved guard's folder: every damage is refused, whatever was done to it."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

import ness
from folders import files_of, guard_of, refused, small
from helpers import save_as_before
from ness.storage import manifest as manifests
from ness.storage.folder import MANIFEST

pytestmark = pytest.mark.filterwarnings("ignore::ness.NessWarning")


def test_every_flipped_bit_is_refused(tmp_path: Path) -> None:
    model = small()
    guard_of(model).save(tmp_path)
    assert sum(file.stat().st_size for file in files_of(tmp_path)) <= 4096
    for file in files_of(tmp_path):
        content = file.read_bytes()
        with file.open("r+b", buffering=0) as handle:
            for at, byte in enumerate(content):
                for bit in range(8):
                    os.pwrite(handle.fileno(), bytes([byte ^ 1 << bit]), at)
                    try:
                        ness.NullSpace.load(tmp_path, model)
                    except ness.NessError:
                        continue
                    pytest.fail(f"{file.name}: bit {bit} of byte {at} was flipped, and it loaded")
                os.pwrite(handle.fileno(), bytes([byte]), at)
    ness.NullSpace.load(tmp_path, model)


def test_every_cut_and_anything_appended_is_refused(tmp_path: Path) -> None:
    model = small()
    guard_of(model).save(tmp_path)
    for file in files_of(tmp_path):
        content = file.read_bytes()
        for length in reversed(range(len(content))):
            os.truncate(file, length)
            refused(tmp_path, model)
        for more in (b"\0", b"\n", b" ", b"}", content):
            file.write_bytes(content + more)
            refused(tmp_path, model)
        file.write_bytes(content)
    ness.NullSpace.load(tmp_path, model)


def test_files_of_two_saves_do_not_mix(tmp_path: Path) -> None:
    model = small()
    guard_of(model, 5).save(tmp_path / "a")
    guard_of(model, 6).save(tmp_path / "b")
    (manifest_a, tensors_a), (manifest_b, tensors_b) = files_of(tmp_path / "a"), files_of(tmp_path / "b")
    a, b = tensors_a.read_bytes(), tensors_b.read_bytes()
    tensors_a.write_bytes(b)
    tensors_b.write_bytes(a)
    refused(tmp_path / "a", model)
    refused(tmp_path / "b", model)
    tensors_a.write_bytes(a)
    tensors_b.write_bytes(b)
    mine, other = manifest_a.read_bytes(), manifest_b.read_bytes()
    manifest_a.write_bytes(other)
    refused(tmp_path / "a", model)
    for line in range(len(mine.splitlines())):  # lines of one manifest in the other
        mixed = mine.splitlines(keepends=True)
        mixed[line] = other.splitlines(keepends=True)[line]
        if b"".join(mixed) != mine:
            manifest_a.write_bytes(b"".join(mixed))
            refused(tmp_path / "a", model)


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("what", ["folder", "pipe", "dangling link", "device", "empty", "missing", "loop"])
def test_only_ordinary_files_are_read(which: int, what: str, tmp_path: Path) -> None:
    model = small()
    guard_of(model).save(tmp_path)
    file = files_of(tmp_path)[which]
    file.unlink()
    put: dict[str, Callable[[], object]] = {
        "folder": file.mkdir,
        "pipe": lambda: os.mkfifo(file),
        "dangling link": lambda: file.symlink_to(tmp_path / "nowhere"),
        "device": lambda: file.symlink_to("/dev/zero"),
        "empty": file.touch,
        "missing": lambda: None,
        "loop": lambda: file.symlink_to(file),
    }
    put[what]()
    refused(tmp_path, model)


@pytest.mark.parametrize("which", [0, 1])
def test_saving_over_what_is_no_file_of_ours(which: int, tmp_path: Path) -> None:
    model = small()
    guard = guard_of(model)
    guard.save(tmp_path)
    file = files_of(tmp_path)[which]
    file.unlink()
    os.mkfifo(file)
    guard.save(tmp_path)  # a pipe is replaced, or passed over
    ness.NullSpace.load(tmp_path, model)
    (tmp_path / "g").mkdir()
    (tmp_path / "g" / MANIFEST).mkdir()
    with pytest.raises(ness.NessError, match="could not be written"):
        guard.save(tmp_path / "g")
    assert [path.name for path in files_of(tmp_path / "g")] == [MANIFEST]


def test_other_files_in_the_folder_stay(tmp_path: Path) -> None:
    mine = ["tensors-mine.safetensors", "model.safetensors", ".ness-mine.tmp", "tensors-0123456789abcdef.txt"]
    for name in mine:
        (tmp_path / name).write_text("mine")
    guard = guard_of(small())
    for _ in range(2):
        guard.save(tmp_path)
    assert all((tmp_path / name).read_text() == "mine" for name in mine)
    assert len(files_of(tmp_path)) == len(mine) + 2


#: texts that a manifest may become: no traceback, whatever is done with the signature
ODD: dict[str, str] = {
    "deep list": "[" * 100_000,
    "deep object": '{"a":' * 100_000,
    "deep and closed": "[" * 5_000 + "]" * 5_000,
    "huge": '{"format": "ness-guard", "schema": 1' + "0" * 400 + "}",
    "too many digits": '{"format": "ness-guard", "schema": ' + "9" * 5_000 + "}",
    "huge float": '{"format": "ness-guard", "schema": 1e999}',
    "twice": '{"format": "ness-guard", "format": "ness-guard", "schema": 2}',
    "nan": '{"format": "ness-guard", "schema": NaN}',
    "infinity": '{"format": "ness-guard", "schema": -Infinity}',
    "surrogate": '{"format": "ness-guard", "schema": 2, "\\ud800": 1}',
    "true": '{"format": "ness-guard", "schema": true}',
    "negative": '{"format": "ness-guard", "schema": -1}',
    "zero byte": '{"format": "ness-guard", "schema": 2, "tensors": {"file": "a\\u0000", "bytes": 1, "sha256": "0"}}',
    "elsewhere": '{"format": "ness-guard", "schema": 2, "tensors": {"file": "../m", "bytes": 1, "sha256": "0"}}',
    "byte order mark": '\ufeff{"format": "ness-guard"}',
}


@pytest.mark.parametrize("case", sorted(ODD))
def test_odd_manifests_are_refused(case: str, tmp_path: Path) -> None:
    model = small()
    guard_of(model).save(tmp_path)
    (tmp_path / MANIFEST).write_text(ODD[case], encoding="utf-8")
    refused(tmp_path, model)
    (tmp_path / MANIFEST).write_bytes(b"\xff\xfe" + ODD[case].encode())
    refused(tmp_path, model)


def test_mutated_folders_load_equal_or_are_refused(tmp_path: Path) -> None:
    model = small()
    guard = guard_of(model)
    guard.save(tmp_path)
    sound = {file: file.read_bytes() for file in files_of(tmp_path)}
    handles = {file: os.open(file, os.O_RDWR) for file in sound}
    draw = random.Random(0)

    def put(file: Path, content: bytes) -> None:
        os.pwrite(handles[file], content, 0)
        os.ftruncate(handles[file], len(content))

    for _ in range(3000):
        file = draw.choice(list(sound))
        content = bytearray(sound[file])
        for _ in range(draw.randint(1, 3)):
            first, last = sorted(draw.randrange(len(content) + 1) for _ in range(2))
            match draw.randrange(5):
                case 0:
                    del content[first : first + draw.randint(1, 9)]
                case 1:
                    content[first:first] = draw.randbytes(draw.randint(1, 9))
                case 2:
                    content[first : first + 4] = draw.randbytes(4)
                case 3:
                    content[first:first] = content[first:last]
                case 4:
                    content[first : first + 1] = draw.choice([b"0", b"9", b'"', b"{", b"}", b",", b" ", b"\n", b""])
            if not content:
                break
        put(file, bytes(content))
        try:
            again = ness.NullSpace.load(tmp_path, model)
        except ness.NessError:
            assert bytes(content) != sound[file]
        else:
            assert bytes(content) == sound[file]
            assert again.certificate().to_dicts() == guard.certificate().to_dicts()
        put(file, sound[file])
    for handle in handles.values():
        os.close(handle)


def test_a_signature_cannot_be_left_out(tmp_path: Path) -> None:
    model = small()
    guard_of(model).save(tmp_path)
    path = tmp_path / MANIFEST
    manifest = json.loads(path.read_text())
    for schema in (1, 2, 3):
        for drop in ([], ["sha256"]):
            path.write_text(json.dumps({k: v for k, v in manifest.items() if k not in drop} | {"schema": schema}))
            refused(tmp_path, model)


@pytest.mark.parametrize("schema", [1, 2])
def test_folders_of_earlier_versions_load_and_are_renewed(schema: int, tmp_path: Path) -> None:
    model = small()
    guard = guard_of(model)
    tensors, manifest = guard.state()
    if schema == 1:
        del manifest["private_basis"], manifest["tasks"]["private"]
    save_as_before(tmp_path, tensors, manifest, schema)
    again = ness.NullSpace.load(tmp_path, model)
    assert again.certificate().to_dicts() == guard.certificate().to_dicts()
    again.save(tmp_path)
    assert len(files_of(tmp_path)) == 2
    assert json.loads((tmp_path / MANIFEST).read_text())["schema"] == manifests.SCHEMA
    save_as_before(tmp_path, tensors, manifest | {"layres": 1}, schema)
    with pytest.raises(ness.NessError, match=f"schema {schema} knew no 'layres'"):
        ness.NullSpace.load(tmp_path, model)
