"""What `ness repair` reads: lines, JSON lines and pictures, as batches that can be gone through again."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ness._files import read_bytes, reason
from ness.errors import NessError

BATCH_TOKENS = 1024  # of one batch
BATCH_PICTURES = 16
PICTURES = {".png", ".jpg", ".jpeg", ".webp", ".bmp"}


def texts_of(path: Path, field: str, tokenizer: Any) -> list[str]:
    """The texts of a file: a line each, or of JSON lines (.jsonl, .json) the named field, or its messages."""
    try:
        lines = read_bytes(path).decode("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise NessError(f"{path}: could not be read as text in UTF-8 ({reason(error)})") from error
    as_json = path.suffix in (".jsonl", ".json", ".ndjson")
    texts = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            where = f"{path}, line {number}"
            texts.append(_unicode(_text_of(line, where, field, tokenizer), where) if as_json else line)
    if not texts:
        raise NessError(f"{path}: there is no text in it")
    return texts


def _unicode(text: str, where: str) -> str:
    """The text, unless it holds half of a surrogate pair, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise NessError(f"{where}: found half of a surrogate pair, expected Unicode text") from error
    return text


def _text_of(line: str, where: str, field: str, tokenizer: Any) -> str:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:  # no JSON, numbers of thousands of digits, nested too deep
        raise NessError(f"{where}: no JSON ({reason(error)}); expected an object a line") from error
    if isinstance(entry, str):
        return entry
    if isinstance(entry, dict):
        if isinstance(entry.get(field), str):
            return str(entry[field])
        messages = entry.get("messages", entry.get("conversations"))
        if isinstance(messages, list) and messages:
            return _conversation(messages, where, tokenizer)
        if isinstance(entry.get("prompt"), str) and isinstance(entry.get("completion"), str):
            return f"{entry['prompt']}{entry['completion']}"
    keys = sorted(entry) if isinstance(entry, dict) else type(entry).__name__
    raise NessError(
        f"{where}: found {keys}, expected the field {field!r}, messages, or prompt and completion; see --field"
    )


def _conversation(messages: list[Any], where: str, tokenizer: Any) -> str:
    if not all(isinstance(one, dict) and isinstance(one.get("content"), str) for one in messages):
        raise NessError(f"{where}: messages need a role and a content each")
    if getattr(tokenizer, "chat_template", None):
        return str(tokenizer.apply_chat_template(messages, tokenize=False))
    return "\n".join(one["content"] for one in messages)


class TextBatches:
    """Texts as batches of tokens with a mask: chosen by a seed, at most so many tokens, of like length together."""

    def __init__(
        self,
        texts: Sequence[str],
        tokenizer: Any,
        tokens: int,
        length: int,
        seed: int,
        encoder_decoder: bool = False,
        path: str = "",
    ) -> None:
        order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(seed)).tolist()
        chosen: list[list[int]] = []
        used = 0
        for index in order:
            ids = [int(token) for token in tokenizer(texts[index])["input_ids"]]
            for start in range(0, len(ids), length):
                piece = ids[start : start + length][: tokens - used]
                if piece:
                    chosen.append(piece)
                    used += len(piece)
            if used >= tokens:
                break
        if not chosen:
            raise NessError(f"{path}: the tokenizer makes no token of its texts")
        self.tokens = used
        self.encoder_decoder = encoder_decoder
        pad = next((p for p in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if isinstance(p, int)), 0)
        self.batches = [self._batch(part, pad) for part in _parts(sorted(chosen, key=len))]

    def _batch(self, rows: Sequence[list[int]], pad: int) -> dict[str, Tensor]:
        width = max(map(len, rows))
        ids = torch.tensor([row + [pad] * (width - len(row)) for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
        batch = {"input_ids": ids, "attention_mask": mask}
        return batch | {"decoder_input_ids": ids, "decoder_attention_mask": mask} if self.encoder_decoder else batch

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return iter(self.batches)


def _parts(rows: Sequence[list[int]]) -> Iterator[list[list[int]]]:
    """Rows, shortest first, in batches that are at most `BATCH_TOKENS` wide and long together."""
    part: list[list[int]] = []
    for row in rows:
        if part and (len(part) + 1) * len(row) > BATCH_TOKENS:
            yield part
            part = []
        part.append(row)
    if part:
        yield part


def image_files(folder: Path) -> list[Path]:
    """All pictures of a folder and those below it."""
    found = sorted(path for path in folder.rglob("*") if path.suffix.lower() in PICTURES and path.is_file())
    if not found:
        raise NessError(f"{folder}: there is no picture in it; expected {', '.join(sorted(PICTURES))}")
    return found


class ImageBatches:
    """Pictures as batches of `pixel_values`, read when they are needed."""

    def __init__(self, files: Sequence[Path], processor: Any, most: int, seed: int) -> None:
        order = torch.randperm(len(files), generator=torch.Generator().manual_seed(seed)).tolist()
        self.files = [files[index] for index in order[:most]]
        self.processor = processor

    def __len__(self) -> int:
        return -(-len(self.files) // BATCH_PICTURES)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        from PIL import Image

        for start in range(0, len(self.files), BATCH_PICTURES):
            pictures = []
            for path in self.files[start : start + BATCH_PICTURES]:
                try:
                    with Image.open(path) as picture:
                        pictures.append(picture.convert("RGB"))
                except Exception as error:  # whatever a decoder makes of foreign bytes
                    raise NessError(f"{path}: no picture that could be read ({reason(error)})") from error
            yield {"pixel_values": self.processor(images=pictures, return_tensors="pt")["pixel_values"]}
