import errno
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ness import NessError
from ness.lab.runs import checkpoint

TENSORS = {
    "a": torch.arange(6.0).reshape(2, 3),
    "b/c": torch.tensor(5, dtype=torch.int64),
    "u": torch.tensor([1, 2], dtype=torch.uint8),
}


def test_what_goes_in_comes_out(tmp_path: Path) -> None:
    path = checkpoint.write(tmp_path, TENSORS, {"x": [1, None, 0.1]})
    tensors, manifest = checkpoint.read(path)
    assert manifest == {"x": [1, None, 0.1]}
    assert tensors.keys() == TENSORS.keys()
    assert all(
        torch.equal(tensors[name], value) and tensors[name].dtype == value.dtype for name, value in TENSORS.items()
    )


def test_views_of_one_storage_are_written_apart(tmp_path: Path) -> None:
    base = torch.arange(4.0)
    tensors, _ = checkpoint.read(
        checkpoint.write(tmp_path, {"all": base, "half": base[:2], "t": base.view(2, 2).T}, {})
    )
    assert torch.equal(tensors["t"], base.view(2, 2).T)


def test_the_layout_in_memory_is_kept_because_products_may_round_by_it(tmp_path: Path) -> None:
    columns = torch.arange(12.0).reshape(3, 4).T
    tensors, _ = checkpoint.read(
        checkpoint.write(tmp_path, {"t": columns, "part": columns[:2], "e": torch.ones(1).expand(3)}, {})
    )
    assert torch.equal(tensors["t"], columns)
    assert (tensors["t"].stride(), tensors["part"].stride()) == ((1, 4), (1, 4))
    assert torch.equal(tensors["e"], torch.ones(3))


def test_the_last_two_are_kept_in_order(tmp_path: Path) -> None:
    for number in range(12):
        checkpoint.write(tmp_path, {}, {"number": number})
    assert [checkpoint.read(path)[1]["number"] for path in checkpoint.paths(tmp_path)] == [10, 11]
    assert sorted(path.name for path in tmp_path.iterdir()) == [path.name for path in checkpoint.paths(tmp_path)]


@pytest.mark.parametrize("damage", ["cut", "flipped", "emptied", "foreign"])
def test_damage_is_noticed(damage: str, tmp_path: Path) -> None:
    path = checkpoint.write(tmp_path, TENSORS, {})
    raw = bytearray(path.read_bytes())
    if damage == "flipped":
        raw[-3] ^= 1
    path.write_bytes({"cut": raw[:-5], "flipped": raw, "emptied": b"", "foreign": b"hello" * 10}[damage])
    with pytest.raises(NessError, match="damaged"):
        checkpoint.read(path)


@pytest.mark.parametrize("call", ["open", "write", "fsync", "replace"])
def test_a_full_disk_is_one_line_and_leaves_the_last_good_one(call: str, tmp_path: Path, monkeypatch) -> None:
    checkpoint.write(tmp_path, TENSORS, {"good": True})

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        with pytest.raises(
            NessError, match=r"No space left on device.*last good checkpoint is checkpoint-000001"
        ) as caught:
            checkpoint.write(tmp_path, TENSORS, {})
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-000001.safetensors"]
    assert checkpoint.read(checkpoint.paths(tmp_path)[0])[1] == {"good": True}


def test_every_flipped_bit_is_noticed(tmp_path: Path, monkeypatch) -> None:
    """Header, manifest, checksum and tensors: 8 flips of every byte of a small checkpoint."""
    path = checkpoint.write(tmp_path, {"a": torch.arange(3.0), "t": torch.arange(4.0).view(2, 2).T}, {"at": 1})
    raw = path.read_bytes()
    for bit in range(8 * len(raw)):
        flipped = bytearray(raw)
        flipped[bit // 8] ^= 1 << bit % 8
        monkeypatch.setattr(checkpoint, "read_bytes", lambda path, now=bytes(flipped): now)
        with pytest.raises(NessError, match="damaged"):
            checkpoint.read(path)


def test_one_from_before_there_was_a_checksum_of_the_header_is_read(tmp_path: Path) -> None:
    held = {"a": torch.arange(6.0).reshape(3, 2)}
    metadata = {"manifest": '{"x": 1}', "checksum": str(checkpoint.checksum(held)), "strides": '{"a": [1, 3]}'}
    path = tmp_path / "checkpoint-000004.safetensors"
    save_file(held, path, metadata)
    tensors, manifest = checkpoint.read(path)
    assert torch.equal(tensors["a"], held["a"])
    assert tensors["a"].stride() == (1, 3)
    assert manifest == {"x": 1}
    save_file({"a": held["a"] + 1}, path, metadata)
    with pytest.raises(NessError, match="damaged: it does not match its checksum"):
        checkpoint.read(path)


def test_a_number_that_is_given_replaces_the_checkpoint_of_that_number(tmp_path: Path) -> None:
    for number in (1, 2, 2):
        checkpoint.write(tmp_path, {}, {"number": number}, number)
    assert [path.name for path in checkpoint.paths(tmp_path)] == [f"checkpoint-00000{n}.safetensors" for n in (1, 2)]


def test_what_is_only_called_like_a_checkpoint_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-last.safetensors").write_text("mine")
    (tmp_path / "checkpoint-000007.safetensors").mkdir()
    assert checkpoint.write(tmp_path, TENSORS, {}).name == "checkpoint-000008.safetensors"
    with pytest.raises(NessError, match="found a folder, expected an ordinary file"):
        checkpoint.read(tmp_path / "checkpoint-000007.safetensors")
    assert (tmp_path / "checkpoint-last.safetensors").exists()
