"""What a constrained step of a transformer's Linear costs: full width against its counted floor, rank 16 against LoRA.

A layer inside a network (its input needs a gradient), 512 tokens, AdamW; PEFT's LoRA of the same rank where peft is
installed. All variants of a shape run in turn, a step each, and the median counts; CPU time of the process, so that
others on the machine disturb less. The floor of full width is counted: the plain step's FLOPs and those of the cheapest
form that confines the update, at the speed at which the plain step ran. `--protected 0.1` is the share of directions
that are protected, `--memory` measures each variant's memory in a process of its own.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

import ness

SHAPES = ((768, 768), (768, 3072), (3072, 768), (4096, 4096))
TOKENS, RANK = 512, 16
Variant = tuple[nn.Module, list[nn.Parameter]]


class Block(nn.Module):
    """One Linear below a name, as PEFT wants it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.fc = nn.Linear(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)


def plain(shape: tuple[int, int], protected: int) -> Variant:
    model = Block(*shape)
    return model, list(model.parameters())


def guarded(shape: tuple[int, int], protected: int, rank: int | None) -> Variant:
    inputs = shape[0]
    model = Block(*shape)
    guard = ness.NullSpace(model, rule=ness.Rank(inputs - protected))
    old = torch.randn(TOKENS, max(1, protected)) @ torch.randn(max(1, protected), inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ness.NessWarning)
        guard.observe(old)
        guard.constrain(rank=rank)
    parameters = guard.parameters()
    for parameter in parameters:
        if not parameter.detach().any():
            nn.init.normal_(parameter, std=1e-3)
    return model, parameters


def lora(shape: tuple[int, int], protected: int) -> Variant | None:
    try:
        import peft
    except ImportError:
        return None
    config = peft.LoraConfig(r=RANK, lora_alpha=RANK, target_modules=["fc"])
    model = peft.get_peft_model(Block(*shape), config)
    return model, [p for p in model.parameters() if p.requires_grad]


def step_of(model: nn.Module, parameters: list[nn.Parameter], inputs: int) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(parameters, lr=1e-4)
    x = torch.randn(1, TOKENS, inputs, requires_grad=True)

    def step() -> None:
        x.grad = None
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


def median_ms(steps: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """CPU milliseconds a step, interleaved so that every variant sees the same machine."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for round_ in range(rounds + 2):
        for name, step in steps.items():
            start = time.process_time()
            step()
            if round_ >= 2:
                times[name].append((time.process_time() - start) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def floor_flops(shape: tuple[int, int], protected: int) -> tuple[float, float]:
    """FLOPs of the plain step, and of the cheapest step at full width that is confined."""
    d, o = shape
    n, k, r = TOKENS, protected, shape[0] - protected
    own = 6 * n * o * d  # y = x Wᵀ, and the gradients of x and W
    forms = {
        "y = x Wᵀ + (x B) Aᵀ": 4 * n * o * d + 2 * n * r * (2 * d + 3 * o),
        "W + A Bᵀ": own + 4 * o * r * d,
        "W + V (I − P Pᵀ)": own + 4 * o * d * k + 4 * min(n, o) * d * k,
    }
    return own, min(forms.values())


VARIANTS: dict[str, Callable[[tuple[int, int], int], Variant | None]] = {
    "plain": plain,
    "full width": lambda shape, protected: guarded(shape, protected, None),
    f"rank {RANK}": lambda shape, protected: guarded(shape, protected, RANK),
    f"LoRA {RANK}": lora,
}


def measure(shape: tuple[int, int], share: float, rounds: int) -> None:
    inputs, outputs = shape
    protected = round(share * inputs)
    built = {name: make(shape, protected) for name, make in VARIANTS.items()}
    steps = {name: step_of(*variant, inputs) for name, variant in built.items() if variant is not None}
    times = median_ms(steps, rounds)
    own, least = floor_flops(shape, protected)
    floor = times["plain"] * least / own
    print(f"{inputs} → {outputs}, {TOKENS} tokens, {protected} of {inputs} directions protected:")
    for name, value in times.items():
        notes = [f"{value / times['plain']:5.2f} × plain"]
        if name == "full width":
            notes.append(f"{value / floor:5.2f} × its floor ({least / own:.2f} × plain, {least / 1e9:.1f} GFLOP)")
        if name == f"rank {RANK}" and f"LoRA {RANK}" in times:
            notes.append(f"{value / times[f'LoRA {RANK}']:5.2f} × LoRA")
        print(f"  {name:12s} {value:9.2f} ms   {',  '.join(notes)}")


def memory(shape: tuple[int, int], share: float) -> None:
    """Peak memory that three steps add, each variant in a process of its own."""
    for name in VARIANTS:
        sizes = ["--shapes", f"{shape[0]}x{shape[1]}", "--protected", str(share), "--peak", name]
        done = subprocess.run([sys.executable, __file__, *sizes], capture_output=True, text=True, check=True)
        print(f"  {name:12s} {done.stdout.strip()}")


def peak(name: str, shape: tuple[int, int], share: float) -> None:
    built = VARIANTS[name](shape, round(share * shape[0]))
    if built is None:
        print("not installed")
        return
    model, parameters = built
    kept = sum(p.numel() * 4 for p in model.parameters())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step = step_of(model, parameters, shape[0])
    for _ in range(3):
        step()
    more = max(0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    trained = sum(p.numel() for p in parameters)
    print(f"{trained / 1e6:8.3f} M trained, {kept / 2**20:7.1f} MiB of parameters, steps add {more:7.1f} MiB at most")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=[f"{d}x{o}" for d, o in SHAPES], help="inputs x outputs")
    parser.add_argument("--protected", type=float, nargs="+", default=[0.1])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.manual_seed(0)
    for text in options.shapes:
        inputs, outputs = (int(part) for part in text.split("x"))
        for share in options.protected:
            if options.peak:
                peak(options.peak, (inputs, outputs), share)
                continue
            measure((inputs, outputs), share, options.rounds)
            if options.memory:
                memory((inputs, outputs), share)


if __name__ == "__main__":
    main()
