"""What guarding models of 1B, 7B and 70B parameters needs, from their shapes alone: the table of docs/scale.md.

`--write` puts the table into the document; a test compares the two. Models are on the meta device, without memory.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn

import ness
from ness.costs import Cost, size

#: name -> width, inner width, blocks, width of keys and values, vocabulary
MODELS = {
    "1B (Llama-3.2-1B)": (2048, 8192, 16, 512, 128256),
    "7B (Llama-2-7B)": (4096, 11008, 32, 4096, 32000),
    "70B (Llama-3.1-70B)": (8192, 28672, 80, 1024, 128256),
}
SHARED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
RANK, TOKENS, FREE = 16, 1_000_000, 0.9
CORE, GPU = 4e10, 1e14  # FLOPs a second: float64 on one CPU core as measured, bfloat16 on a GPU as assumed
BEGIN, END = "<!-- scale: begin -->\n", "<!-- scale: end -->\n"


def llama(width: int, inner: int, blocks: int, keys: int, vocabulary: int) -> nn.Module:
    """A Llama's shapes on the meta device, in bfloat16."""
    shapes = {"q_proj": (width, width), "k_proj": (width, keys), "v_proj": (width, keys), "o_proj": (width, width)}
    shapes |= {"gate_proj": (width, inner), "up_proj": (width, inner), "down_proj": (inner, width)}
    with torch.device("meta"):
        model = nn.ModuleDict({"embed_tokens": nn.Embedding(vocabulary, width)})
        model["layers"] = nn.ModuleList(
            nn.ModuleDict({name: nn.Linear(*shape, bias=False) for name, shape in shapes.items()})
            for _ in range(blocks)
        )
    return model.to(torch.bfloat16)


def hours(value: float) -> str:
    return f"{value:.0f} h" if value >= 10 else f"{value:.1f} h" if value >= 1 else f"{value * 60:.0f} min"


def figures(name: str) -> list[str]:
    model = llama(*MODELS[name])

    def takes(dtype: torch.dtype) -> Cost:
        return ness.cost(model, RANK, free=FREE, shared=SHARED, statistics_dtype=dtype, rate=CORE)

    exact, half = takes(torch.float64), takes(torch.float32)
    anchor = 2 * exact.guarded  # bfloat16
    observing = half.observe_flops(TOKENS)
    return [
        name,
        size(exact.model),
        size(exact.statistics - anchor),
        size(half.statistics - anchor),
        size(anchor),
        size(exact.bases),
        f"{size(exact.updates)} + {size(exact.optimizer)}",
        f"{observing:.1e} ({1 + half.gram_flops / half.forward_flops:.2f} × forward), {hours(observing / GPU / 3600)}",
        f"{exact.decompositions:.1e}, {hours(exact.hours())}",
        f"{exact.largest}: {hours(exact.hours(exact.largest_decomposition))}, {size(exact.workspace)}",
    ]


ROWS = (
    "model",
    "its weights, bfloat16",
    "Grams, float64",
    "Grams, float32",
    "weights they were taken under",
    f"what confines the updates, {1 - FREE:.0%} of directions protected",
    f"trained at rank {RANK} + AdamW",
    f"observe {TOKENS // 10**6} M tokens: FLOPs, time at {GPU / 1e12:.0f} TFLOP/s",
    f"decompose all of every Gram: FLOPs, core hours at {CORE / 1e9:.0f} GFLOP/s",
    "widest Gram: its core hours, memory at work",
)


def table() -> str:
    """The table, a column for each model."""
    columns = [ROWS, *(figures(name) for name in MODELS)]
    lines = ["| " + " | ".join(cells) + " |" for cells in zip(*columns, strict=True)]
    return "\n".join([lines[0], "|---|" + "--:|" * len(MODELS), *lines[1:]]) + "\n"


def written(text: str) -> str:
    """The document with the table as it is now."""
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return head + BEGIN + table() + END + tail


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the table between its marks in this document")
    options = parser.parse_args()
    if options.write is None:
        print(table(), end="")
    else:
        options.write.write_text(written(options.write.read_text()))


if __name__ == "__main__":
    main()
