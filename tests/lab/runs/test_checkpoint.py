import errno
import json
from pathlib import Path

import pytest
import torch

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


@pytest.mark.parametrize("where", ["save", "rename"])
def test_a_full_disk_is_one_line_and_leaves_the_last_good_one(where: str, tmp_path: Path, monkeypatch) -> None:
    checkpoint.write(tmp_path, TENSORS, {"good": True})

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file" if where == "save" else "replace_durably", full)
    with pytest.raises(
        NessError, match=r"No space left on device.*last good checkpoint is checkpoint-000001"
    ) as caught:
        checkpoint.write(tmp_path, TENSORS, {})
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-000001.safetensors"]
    assert checkpoint.read(checkpoint.paths(tmp_path)[0])[1] == {"good": True}


def test_json_is_all_or_nothing(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "result.json"
    checkpoint.write_json(path, {"a": 1})

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "replace_durably", full)
    with pytest.raises(NessError, match="No space left"):
        checkpoint.write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 1}
    with pytest.raises(ValueError, match="JSON"):
        checkpoint.write_json(path, float("nan"))
