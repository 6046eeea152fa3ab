"""What `ness.repair` should do by default: where new rows are observed, and in how many passes.

stories15M (a Llama of 15 M numbers, fp32, published weights) is moved to film reviews by plain fine-tuning, then
repaired in every way. Old text is what the base wrote itself, and other such text is measured. Prints the loss on
held-out new text and KL(base ‖ model) on held-out old text; lower is better in both. Interpolation stands beside it.

    python benchmarks/repair_choices.py --data FOLDER_OF_PACKAGES --rate 5e-4 --steps 60 --seed 1
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import ness
from ness.lab.language import methods, study
from ness.lab.language.measure import loss_and_change


def batches(blocks: Tensor) -> list[dict[str, Tensor]]:
    return [{"input_ids": part} for part in blocks.split(8)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, default=None)
    parser.add_argument("--model", default="stories15m")
    parser.add_argument("--domain", default="reviews")
    parser.add_argument("--general", default="self")
    parser.add_argument("--rate", type=float, default=5e-4)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--strengths", type=float, nargs="+", default=[1.0, 3.0, 10.0])
    parser.add_argument(
        "--blocks", type=int, default=125, help="of 128 tokens of old text; of new text 1.5 times as many"
    )
    asked = parser.parse_args()
    torch.set_num_threads(1)
    plan = study.Plan(
        "", asked.model, asked.domain, asked.general, (asked.general,), (asked.seed,), (),
        new=240, old=asked.blocks, seen=3 * asked.blocks // 2, measured=32, steps=asked.steps,
    )  # fmt: skip
    text = study.prepare(plan, asked.data, torch.device("cpu"))
    base = text.language.model
    setup = methods.Setup(base, text.new, text.old, plan.batch, plan.steps, asked.seed)
    tuned = methods.full(setup, asked.rate).model
    old, new = batches(text.old), batches(text.new[: plan.seen])

    def show(name: str, model: nn.Module, seconds: float = 0.0) -> None:
        held = text.valid
        fresh, _ = loss_and_change(model, None, held["new"])
        old_held = held[asked.general]
        _, change = loss_and_change(model, text.of_base("valid", asked.general, old_held), old_held)
        print(f"{name:40} {fresh:8.3f} {change:8.4f} {seconds:8.1f}", flush=True)

    print(f"{asked.model}, {asked.domain}, rate {asked.rate:g}, {asked.steps} steps, seed {asked.seed}")
    print(f"{'':40} {'new loss':>8} {'KL old':>8} {'CPU s':>8}")
    show("base", base)
    show("tuned", tuned)
    for share in (0.3, 0.5, 0.7):
        show(f"interpolated {share:g}", methods.interpolated(base, tuned, share))
    ways: list[dict[str, Any]] = [{"new_under": under} for under in (0.0, 1 / 3, 1.0)]
    ways += [{"passes": count} for count in (2, 4, 7)]
    for options in ways:
        for strength in asked.strengths:
            began = time.process_time()
            done = ness.repair(
                tuned, base, old=old, new=new, strength=strength, statistics_dtype=torch.float32,
                exclude=["lm_head"], **options,
            )  # fmt: skip
            what = ", ".join(f"{key} {value:.2g}" for key, value in options.items())
            show(f"{what}, strength {strength:g}", done.model, time.process_time() - began)


if __name__ == "__main__":
    main()
