"""`ness repair`: folders in, a folder of the same kind out, and every mistake in one line."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

from ness.cli.main import main
from ness.cli.repair_data import TextBatches, texts_of
from ness.errors import NessError
from ness.integrations.folders import _locked, load_pair, write_model

WORDS = [f"w{i}" for i in range(60)]


class Words:
    """A tokenizer of whole words."""

    pad_token_id, eos_token_id = 0, 1
    chat_template = None

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [int(word[1:]) for word in text.split()]}


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["repair", "--help"]) == 0
    said = capsys.readouterr().out
    assert "ness repair base/ tuned/ --new mails.txt --old general.jsonl --out repaired/" in said
    assert "Exit codes" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "required"),
        (["base/"], "required"),
        (["base", "tuned"], "--out"),
        (["./nothing", "tuned", "--dry-run"], "no such folder"),
        (["base", "tuned", "--new", "missing.txt", "--dry-run"], "no such file"),
        (["base", "tuned", "--strength", "-1", "--dry-run"], "at least 0"),
        (["base", "tuned", "--strength", "much", "--dry-run"], "invalid float"),
        (["base", "tuned", "--others", "drop", "--dry-run"], "--others"),
        (["base", "tuned", "--at-most", "0.1", "--dry-run"], "--probe"),
        (["base", "tuned", "--length", "0", "--dry-run"], "at least 1"),
        (["base", "tuned", "--out", "."], "something already"),
        (["base", "tuned", "--probe", ".", "--at-most", "nan", "--dry-run"], "--at-most"),
        (["base", "tuned", "--tokens-old", "9" * 40, "--dry-run"], "--tokens-old"),
        (["base", "tuned", "--seed", "-1", "--dry-run"], "--seed"),
        (["base", "tuned", "--seed", "9" * 40, "--dry-run"], "--seed"),
        (["base", "tuned", "--memory", "much", "--dry-run"], "--memory"),
        (["base", "tuned", "--device", "\x1b[31m", "--dry-run"], "--device"),
        (["base", "tuned", "--device", "cuda:77", "--dry-run"], "--device"),
        (["base", "tuned", "--old", "/dev/zero", "--dry-run"], "ordinary file"),
        (["base", "tuned", "--new", "x" * 5000, "--dry-run"], "--new"),
        (["base", "tuned", "--out", "x" * 5000], "--out"),
        (["base", "tuned", "--dry-run", "--passes", "2"], "in one go"),
        (["base", "tuned", "--dry-run", "--memory", "4GB"], "in one go"),
        (["base", "tuned", "--out", "x", "--memory", "much"], "--memory"),
    ],
)
def test_wrong_use_is_exit_code_2(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["repair", *arguments]) == 2
    found = capsys.readouterr().err
    assert said in found
    assert found.count("\n") == 1
    assert "\x1b" not in found


def test_what_is_hostile_in_a_file_of_texts_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    for line in ("[" * 100_000, '{"text": "w1", "n": ' + "9" * 5000 + "}", '{"text": "\\ud800"}', "[1]"):
        path.write_text(line)
        with pytest.raises(NessError) as caught:
            texts_of(path, "text", Words())
        assert "\n" not in str(caught.value)
        assert "line 1" in str(caught.value)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(NessError, match="ordinary file"):
        texts_of(path, "text", Words())


class Model(torch.nn.Module):
    """Has `save_pretrained`, as a model of transformers has."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.error = error

    def save_pretrained(self, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"weights")
        if self.error is not None:
            raise self.error


def test_a_full_disk_leaves_nothing_and_says_so_in_one_line(tmp_path: Path) -> None:
    full = SafetensorError("Error while serializing: I/O error: No space left on device\n(os error 28)")
    with pytest.raises(NessError, match="could not be written") as caught:
        write_model(Model(full), str(tmp_path / "tuned"), tmp_path / "out", {})
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_writer_left_is_removed_by_the_next_and_what_lives_is_not(tmp_path: Path) -> None:
    left, living = (tmp_path / f".out.ness-{digit * 16}.tmp" for digit in "ab")
    for folder in (left, living):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"half")
    handle = _locked(living)
    write_model(Model(), str(tmp_path / "tuned"), tmp_path / "out", {"note": "x"})
    os.close(handle)
    assert not left.exists()
    assert living.exists()
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"model.safetensors", "note"}


@pytest.mark.parametrize("kind", ["pipe", "nothing", "device"])
def test_what_is_no_file_in_a_model_folder_is_refused_at_once(kind: str, tmp_path: Path) -> None:
    if kind == "pipe":
        os.mkfifo(tmp_path / "model.safetensors")
    else:
        (tmp_path / "model.safetensors").symlink_to("/dev/zero" if kind == "device" else "missing")
    with pytest.raises(NessError, match="expected an ordinary file"):
        load_pair("base", str(tmp_path))


def test_lines_and_json_lines(tmp_path: Path) -> None:
    lines = tmp_path / "a.txt"
    lines.write_text("w1 w2\n\nw3\n")
    assert texts_of(lines, "text", Words()) == ["w1 w2", "w3"]
    objects = tmp_path / "a.jsonl"
    entries: list[Any] = [
        {"text": "w1"},
        "w2",
        {"messages": [{"role": "user", "content": "w3"}, {"role": "assistant", "content": "w4"}]},
        {"prompt": "w5", "completion": " w6"},
    ]
    objects.write_text("\n".join(json.dumps(entry) for entry in entries))
    assert texts_of(objects, "text", Words()) == ["w1", "w2", "w3\nw4", "w5 w6"]
    objects.write_text('{"body": "w1"}')
    assert texts_of(objects, "body", Words()) == ["w1"]
    with pytest.raises(NessError, match=r"line 1: found \['body'\]"):
        texts_of(objects, "text", Words())
    objects.write_text('{"text": "w1"}\n{"text": ')
    with pytest.raises(NessError, match="line 2: no JSON"):
        texts_of(objects, "text", Words())
    objects.write_text("\n \n")
    with pytest.raises(NessError, match="no text"):
        texts_of(objects, "text", Words())
    objects.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(NessError, match="UTF-8"):
        texts_of(objects, "text", Words())


def test_texts_become_masked_batches_of_so_many_tokens() -> None:
    texts = [" ".join(WORDS[: 3 + i % 9]) for i in range(400)]
    batches = TextBatches(texts, Words(), tokens=900, length=8, seed=0)
    assert sum(int(batch["attention_mask"].sum()) for batch in batches) == 900 == batches.tokens
    assert len(batches) == len(list(batches))
    for batch in batches:
        assert batch["input_ids"].shape == batch["attention_mask"].shape
        assert batch["input_ids"].shape[1] <= 8
    again = TextBatches(texts, Words(), tokens=900, length=8, seed=0)
    assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(batches, again, strict=True))
    short = TextBatches(texts[:1], Words(), tokens=10, length=8, seed=0, encoder_decoder=True)
    assert "decoder_input_ids" in next(iter(short))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, a tuned model, an adapter, and two files of text."""
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    tokenizers = pytest.importorskip("tokenizers")
    root = tmp_path_factory.mktemp("folders")
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({**{w: i + 3 for i, w in enumerate(WORDS)}, "<s>": 0, "</s>": 1, "?": 2}, "?")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=63, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    base = transformers.LlamaForCausalLM(config)
    base.save_pretrained(root / "base")
    tokenizer.save_pretrained(root / "base")
    adapted = peft.get_peft_model(
        base, peft.LoraConfig(r=3, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    )
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    adapted.save_pretrained(root / "adapter")
    tuned = transformers.LlamaForCausalLM.from_pretrained(root / "base")
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if "proj" in name:
                parameter.add_(0.05 * torch.randn_like(parameter))
    tuned.save_pretrained(root / "tuned")
    tokenizer.save_pretrained(root / "tuned")
    (root / "tuned" / "README.md").write_text("the tuned model's own card")
    (root / "tuned" / "training_args.bin").write_bytes(b"a pickle")
    (root / "old.txt").write_text("\n".join(" ".join(WORDS[(i + j) % 30] for j in range(12)) for i in range(60)))
    lines = [{"text": " ".join(WORDS[30 + (3 * i + j) % 30] for j in range(12))} for i in range(60)]
    (root / "new.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return root


def paths(root: Path, tuned: str, out: str | None = None) -> list[str]:
    parts = ["repair", str(root / "base"), str(root / tuned), "--new", str(root / "new.jsonl"), "--length", "32"]
    return parts + (["--out", str(root / out)] if out else [])


@pytest.mark.transformers
def test_a_model_folder_in_and_out(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import transformers

    assert main([*paths(folders, "tuned", "out"), "--old", str(folders / "old.txt"), "--strength", "5"]) == 0
    printed = capsys.readouterr()
    assert "old inputs, end to end" in printed.out
    out = folders / "out"
    repaired = transformers.AutoModelForCausalLM.from_pretrained(out)
    tuned, base = (transformers.AutoModelForCausalLM.from_pretrained(folders / name) for name in ("tuned", "base"))
    assert [*repaired.state_dict()] == [*tuned.state_dict()]
    tokens = transformers.AutoTokenizer.from_pretrained(out)("w1 w2 w3 w4 w5 w6 w7 w8", return_tensors="pt")
    with torch.no_grad():
        there, then, now = (model(**tokens).logits for model in (base, tuned, repaired))
    assert (now - there).norm() < (then - there).norm()
    assert not (out / "training_args.bin").exists()
    card = (out / "README.md").read_text()
    assert "strength: 5" in card
    assert "old before" in card
    assert card.startswith("---\nbase_model:")
    assert json.loads((out / "ness-repair.json").read_text())["strength"] == 5
    assert [path.name for path in folders.iterdir() if path.name.startswith(".")] == []
    assert main([*paths(folders, "tuned", "out"), "--old", str(folders / "old.txt")]) == 2


@pytest.mark.transformers
def test_an_adapter_in_and_one_of_the_same_rank_out(folders: Path) -> None:
    import peft
    import safetensors.torch
    import transformers

    assert main([*paths(folders, "adapter", "adapter-out"), "--old", str(folders / "old.txt")]) == 0
    before, after = (
        safetensors.torch.load_file(folders / name / "adapter_model.safetensors") for name in ("adapter", "adapter-out")
    )
    assert [(key, value.shape) for key, value in before.items()] == [(key, value.shape) for key, value in after.items()]
    for key, value in before.items():
        assert torch.equal(value, after[key]) == ("lora_B" in key)
    base = transformers.AutoModelForCausalLM.from_pretrained(folders / "base")
    loaded = peft.PeftModel.from_pretrained(base, folders / "adapter-out")
    assert loaded.peft_config["default"].r == 3
    assert "LoRA adapter" in (folders / "adapter-out" / "README.md").read_text()


@pytest.mark.transformers
@pytest.mark.parametrize("tuned", ["tuned", "adapter"])
def test_self_and_dry_run(folders: Path, tuned: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(path.name for path in folders.iterdir())
    assert main([*paths(folders, tuned), "--dry-run", "--tokens-old", "600", "--old", "self"]) == 0
    said = capsys.readouterr()
    assert "strength 10" in said.out
    assert "interpolated 0.5" in said.out
    assert "the base writes 600 tokens" in said.err
    assert sorted(path.name for path in folders.iterdir()) == before


@pytest.mark.transformers
def test_what_fails_is_one_line_exit_code_1_and_nothing_written(
    folders: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    old = ["--old", str(folders / "old.txt")]
    same = ["repair", str(folders / "base"), str(folders / "base"), "--out", str(folders / "x"), *old]
    assert main(same) == 1
    assert "nothing to repair" in capsys.readouterr().err
    assert main([*paths(folders, "tuned", "x"), "--old", str(folders / "new.jsonl")]) == 1
    assert "same data" in capsys.readouterr().err
    (folders / "empty").mkdir(exist_ok=True)
    assert main([*paths(folders, "empty", "x"), *old]) == 1
    assert "config.json" in capsys.readouterr().err

    import safetensors.torch

    shutil.copytree(folders / "tuned", folders / "half")
    held = safetensors.torch.load_file(folders / "half" / "model.safetensors")
    held.pop("model.layers.1.mlp.up_proj.weight")
    safetensors.torch.save_file(held, folders / "half" / "model.safetensors", {"format": "pt"})
    assert main([*paths(folders, "half", "x"), *old]) == 1
    assert "lack 'model.layers.1.mlp.up_proj.weight'" in capsys.readouterr().err

    def broken(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ness.integrations.folders.sync_folder", broken)
    monkeypatch.setattr("ness.integrations.folders.shutil.copyfile", broken)
    assert main([*paths(folders, "tuned", "x"), *old]) == 130
    assert "interrupted; nothing was written" in capsys.readouterr().err
    assert not (folders / "x").exists()
    assert [path.name for path in folders.iterdir() if path.name.startswith(".")] == []


@pytest.mark.transformers
def test_pictures(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    image = pytest.importorskip("PIL.Image")
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        image_size=16, patch_size=4, hidden_size=24, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    base = transformers.ViTForImageClassification(config)
    try:
        processor = transformers.ViTImageProcessor(size={"height": 16, "width": 16})
    except ImportError:
        pytest.skip("this transformers reads pictures with torchvision alone")
    base.save_pretrained(tmp_path / "base")
    with torch.no_grad():
        for name, parameter in base.named_parameters():
            if name.startswith("vit.") and name.endswith("weight"):
                parameter.add_(0.05 * torch.randn_like(parameter))
    base.save_pretrained(tmp_path / "tuned")
    processor.save_pretrained(tmp_path / "tuned")
    generator = torch.Generator().manual_seed(0)
    for kind, low in (("old", 0), ("new", 128)):
        (tmp_path / kind).mkdir()
        for number in range(6):
            pixels = torch.randint(low, low + 128, (20, 20, 3), generator=generator, dtype=torch.uint8)
            image.fromarray(pixels.numpy()).save(tmp_path / kind / f"{number}.png")
    arguments = ["repair", str(tmp_path / "base"), str(tmp_path / "tuned"), "--out", str(tmp_path / "out")]
    assert main([*arguments, "--old", str(tmp_path / "old"), "--new", str(tmp_path / "new")]) == 0
    assert transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "out") is not None
