"""What a constrained step costs against the same plain step: Linear 2048 × 2048, rank 1900, batch 64.

Prints ratios measured in one run, optimizer step included: all variants interleaved, the median of each.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import ness

WIDTH, RANK, BATCH, STEPS = 2048, 1900, 64, 25


class BuildEveryForward(nn.Module):
    """W + A Uᵀ built in every forward: what the paper's code does."""

    def __init__(self, basis: Tensor, outputs: int) -> None:
        super().__init__()
        self.register_buffer("basis", basis)
        self.update = nn.Parameter(torch.zeros(outputs, basis.shape[1]))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.update @ self.basis.mT


def plain() -> tuple[nn.Module, list[nn.Parameter]]:
    model = nn.Linear(WIDTH, WIDTH, bias=False)
    return model, list(model.parameters())


def constrained(form: str, rule: ness.Rule) -> tuple[nn.Module, list[nn.Parameter]]:
    model, _ = plain()
    guard = ness.NullSpace(model, rule=rule)
    with guard.observing():
        for _ in range(WIDTH * 2 // BATCH):
            model(torch.randn(BATCH, WIDTH))
    guard.constrain(form=form)  # type: ignore[arg-type]
    return model, guard.parameters()


def reference() -> tuple[nn.Module, list[nn.Parameter]]:
    model, _ = plain()
    model.requires_grad_(False)
    basis = torch.linalg.qr(torch.randn(WIDTH, RANK)).Q
    update = BuildEveryForward(basis, WIDTH)
    parametrize.register_parametrization(model, "weight", update)
    return model, [update.update]


def step_of(model: nn.Module, parameters: list[nn.Parameter], input_gradient: bool) -> Callable[[], None]:
    optimizer = torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, weight_decay=1e-4)
    x = torch.randn(BATCH, WIDTH, requires_grad=input_gradient)

    def step() -> None:
        x.grad = None
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


def median_ms(steps: dict[str, Callable[[], None]]) -> dict[str, float]:
    """Milliseconds a step, interleaved so that every variant sees the same machine."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for round_ in range(STEPS + 3):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if round_ >= 3:
                times[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    torch.manual_seed(0)
    variants = {
        "plain": plain(),
        'form="sgd"': constrained("sgd", ness.Rank(RANK)),
        'form="any"': constrained("any", ness.Rank(RANK)),
        "built every forward": reference(),
    }
    for input_gradient in (False, True):
        kind = "an inner layer (its input needs a gradient)" if input_gradient else "a first layer"
        print(f"Linear {WIDTH}×{WIDTH}, rank {RANK}, batch {BATCH}, {torch.get_num_threads()} threads, {kind}:")
        steps = {name: step_of(*variant, input_gradient) for name, variant in variants.items()}
        times = median_ms(steps)
        for name, value in times.items():
            print(f"  {name:22s} {value:8.2f} ms   {value / times['plain']:5.2f} × plain")


if __name__ == "__main__":
    main()
