"""All or nothing: wherever a repair breaks off, model and base are as before it, or the model is as after it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ness
from interrupting import differences, of_model, run_traced
from ness.statistics.watch import FAST_PATH

pytestmark = pytest.mark.filterwarnings("ignore::ness.NessWarning")


class Attending(nn.Module):
    """A convolution, a norm with running statistics, attention and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(2, 4, 2), nn.BatchNorm1d(4)
        self.attention, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.conv(x)).relu().mT
        return self.head((h + self.attention(h, h, h, need_weights=False)[0]).mean(1))


def models(kind: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    base = kind()
    tuned = copy.deepcopy(base)
    with torch.no_grad():
        for value in (*tuned.parameters(), *tuned.buffers()):
            if value.is_floating_point():
                value.add_(0.1 * torch.rand_like(value))
    next(tuned.parameters()).requires_grad_(False)  # so that flags differ
    next(iter(tuned.children())).eval()  # and modes
    return tuned, base


OLD, NEW = torch.randn(2, 5, 2, 4, generator=torch.Generator().manual_seed(1))
OPTIONS: dict[str, dict[str, Any]] = {
    "one go": {"others": "base"},
    "a copy": {"inplace": False},
    "passes": {"passes": 2, "others": 0.5},
    "memory": {"memory": "4KB"},
    "a probe": {"probe": [OLD], "at_most": 0.3, "others": "base"},
}


def sweep(options: dict[str, Any], how: str, every: int) -> tuple[int, int]:
    """Interrupt a repair at every so many-th line; returns how often the model was as before, and as after."""
    x = torch.cat([OLD, NEW])
    arguments: dict[str, Any] = {"old": [OLD], "new": [NEW], "inplace": True, **options}
    tuned, base = models(Attending)
    start, beside = of_model(tuned, x), of_model(base, x)
    ness.repair(tuned, base, **arguments)
    end = of_model(tuned, x)
    assert bool(differences(start, end)) == arguments["inplace"]
    tuned, _ = models(Attending)
    counts, at = [0, 0], 1
    while True:
        broken = False
        try:
            seen = run_traced(lambda: ness.repair(tuned, base, **arguments), at, how)  # noqa: B023
            assert seen < at, f"line event {at}: the interrupt was lost"
        except KeyboardInterrupt:
            broken = True
        assert not FAST_PATH.watches
        assert not differences(of_model(base, x), beside), at
        now = of_model(tuned, x)
        before, after = differences(now, start), differences(now, end)
        assert not before or not after, f"line event {at}: not as before ({before[:9]}), not as after ({after[:9]})"
        if not broken:
            return counts[0], counts[1]
        counts[bool(before)] += 1
        if before:
            tuned, _ = models(Attending)
        at += every


@pytest.mark.parametrize("how", ["raise", "signal"])
def test_an_interrupt_here_and_there(how: str) -> None:
    before, _ = sweep(OPTIONS["one go"], how, 211)
    assert before > 10


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_an_interrupt_at_any_line_leaves_all_as_before_or_as_after(name: str) -> None:
    before, after = sweep(OPTIONS[name], "raise", 3 if name == "one go" else 11)
    assert before
    assert bool(after) == OPTIONS[name].get("inplace", True)


@pytest.mark.slow
def test_ctrl_c_at_any_line_leaves_all_as_before_or_as_after() -> None:
    before, after = sweep(OPTIONS["one go"], "signal", 11)
    assert before
    assert after
