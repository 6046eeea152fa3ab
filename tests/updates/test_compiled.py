"""torch.compile over many constrained layers: one graph, no recompile limit, the same numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ness
from helpers import low_rank
from ness._precision import product

pytestmark = pytest.mark.filterwarnings("ignore::ness.NessWarning")

WIDTHS = {"q": (16, 16), "k": (16, 8), "v": (16, 8), "o": (16, 16), "gate": (16, 40), "up": (16, 40), "down": (40, 16)}


class Block(nn.Module):
    """Seven layers of five shapes, with and without biases, as in a Llama."""

    def __init__(self) -> None:
        super().__init__()
        for name, (inputs, outputs) in WIDTHS.items():
            setattr(self, name, nn.Linear(inputs, outputs, bias=name in "qkv"))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.o((self.q(x) * (self.k(x) + self.v(x)).repeat(1, 2)).tanh())
        return x + self.down(self.gate(x).sigmoid() * self.up(x).tanh())


class Model(nn.Module):
    def __init__(self, blocks: int = 5, saving: bool = False) -> None:
        super().__init__()
        self.blocks, self.saving = nn.ModuleList(Block() for _ in range(blocks)), saving

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.saving else block(x)
        return x


@pytest.fixture
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield
    torch._dynamo.reset()


def constrained(saving: bool = False, blocks: int = 1, **options: Any) -> tuple[Model, ness.NullSpace]:
    torch.manual_seed(0)
    model = Model(blocks, saving)
    guard = ness.NullSpace(model, rule=ness.Rank(7))
    guard.observe(low_rank(80, 16, rank=9))
    guard.constrain(**options)
    for parameter in guard.parameters():
        nn.init.normal_(parameter, std=0.05)
    return model, guard


def gradients(run: Any, guard: ness.NullSpace, x: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(run(x).square().mean(), guard.parameters()))


@pytest.mark.parametrize(
    "options",
    [{"rank": 3}, {}, {"form": "sgd"}, {"rank": 3, "max_drift": 0.01}],
    ids=["rank", "full width", "sgd", "max drift"],
)
def test_thirty_five_layers_are_one_graph(fresh: None, options: dict[str, Any]) -> None:
    model, guard = constrained(blocks=1 if "max_drift" in options else 5, **options)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for x in (torch.randn(8, 16), torch.randn(8, 16)):
        assert torch.allclose(compiled(x), model(x), atol=1e-5)
        for mine, expected in zip(gradients(compiled, guard, x), gradients(model, guard, x), strict=True):
            assert torch.allclose(mine, expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("rank", [3, None])
def test_training_compiled_keeps_the_promise(fresh: None, rank: int | None) -> None:
    model, guard = constrained(rank=rank)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    optimizer = torch.optim.AdamW(guard.parameters(), lr=1e-2)
    for _ in range(4):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = compiled(torch.randn(8, 16)).float().square().mean()
        loss.backward()
        optimizer.step()
    assert math.isfinite(float(loss.detach()))
    assert guard.certificate().holds
    guard.merge()
    assert guard.certificate().holds


@pytest.mark.parametrize("rank", [3, None])
@pytest.mark.parametrize("compiles", [False, True])
def test_gradient_checkpointing_gives_the_same(fresh: None, rank: int | None, compiles: bool) -> None:
    model, guard = constrained(rank=rank)
    saving, other = constrained(saving=True, rank=rank)
    for mine, theirs in zip(guard.parameters(), other.parameters(), strict=True):
        theirs.data.copy_(mine)
    saving.train()
    run = torch.compile(saving, backend="aot_eager") if compiles else saving
    x = torch.randn(8, 16, requires_grad=True)
    expected = gradients(model, guard, x)
    for mine, wanted in zip(gradients(run, other, x), expected, strict=True):
        assert torch.allclose(mine, wanted, rtol=1e-3, atol=1e-6)


def test_a_product_of_its_own_has_the_gradients_of_a_product() -> None:
    """What code compiled for a GPU runs, tried here without one."""
    from ness._precision import _product

    for left, right in (((5, 3), (3, 4)), ((2, 5, 3), (3, 4)), ((2, 5, 3), (2, 3, 4)), ((2, 7, 5, 3), (3, 4))):
        a, b = torch.randn(left, dtype=torch.float64), torch.randn(right, dtype=torch.float64)
        a.requires_grad_(), b.requires_grad_()
        assert torch.equal(_product(a, b), a @ b)
        assert torch.equal(product(a, b), a @ b)
        torch.autograd.gradcheck(_product, (a, b))
    torch.library.opcheck(_product, (torch.randn(5, 3, requires_grad=True), torch.randn(3, 4, requires_grad=True)))


@pytest.mark.parametrize("rank", [3, None])
def test_autocast_rounds_nothing_into_protected_directions(rank: int | None) -> None:
    model, guard = constrained(rank=rank)
    old = low_rank(50, 16, rank=9)
    before = {name: gram.matrix.clone() for name, gram in guard.grams.items()}
    optimizer = torch.optim.AdamW(guard.parameters(), lr=1e-2, weight_decay=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(old).float().square().mean()
        loss.backward()
        optimizer.step()
    certificate = guard.certificate()
    assert certificate.holds
    assert all(row.relative_drift < 1 for row in certificate)
    assert all(torch.equal(gram.matrix, before[name]) for name, gram in guard.grams.items())
