"""When the kernels stand in for the modules; in Triton's interpreter (TRITON_INTERPRET=1), that they do it right."""

import os
import sys
from dataclasses import replace

import pytest
import torch
from torch import Generator, Tensor, nn

from fusing import Case, assert_same, both
from ness import NessError, NessWarning
from ness.lab.nets import fused
from ness.lab.nets.alexnet import ConvBlock, WideBlock
from ness.lab.nets.base import norm2d
from ness.lab.nets.dropout import Dropout
from ness.lab.nets.norms import in_parts
from ness.lab.nets.resnet import Block

CPU = torch.device("cpu")
IMAGES = torch.randn(4, 3, 6, 6, generator=Generator().manual_seed(1)).contiguous(memory_format=torch.channels_last)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """As on a card: one entry a call that the kernels would have answered."""
    found: list[int] = []

    def together(x: Tensor, *modules: nn.Module | None) -> Tensor:
        found.append(1)
        return x

    monkeypatch.setattr(fused, "on_card", lambda x: True)
    monkeypatch.setattr(fused, "_together", together)
    return found


def block() -> ConvBlock:
    made = ConvBlock(3, 8, 1, 0.2, "stored").to(memory_format=torch.channels_last)
    made.dropout.generator = Generator().manual_seed(1)
    return made.train()


def test_a_training_block_is_fused(calls: list[int]) -> None:
    block()(IMAGES)
    wide = WideBlock(3, 5, 0.5, "batch")
    wide(torch.randn(4, 3))
    assert len(calls) == 2
    Block(3, 8, 2, "batch").to(memory_format=torch.channels_last)(IMAGES)
    assert len(calls) == 5  # two norms and the shortcut's


def test_a_block_whose_relu_is_hooked_takes_the_modules_there(calls: list[int]) -> None:
    made = Block(3, 8, 2, "batch").to(memory_format=torch.channels_last)
    made.relu2.register_forward_hook(lambda module, inputs, out: out * 0)
    assert not made(IMAGES).any()
    assert len(calls) == 2


def test_on_the_cpu_the_modules_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "_together", lambda *args: pytest.fail("fused"))
    made = block()
    found = made(IMAGES)
    made.dropout.generator.manual_seed(1)  # type: ignore[union-attr]
    assert torch.equal(found, made.pool(made.dropout(made.relu(made.norm(made.conv(IMAGES))))))


@pytest.mark.parametrize("part", ["norm", "relu", "dropout", "pool"])
@pytest.mark.parametrize("kind", ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"])
def test_a_hooked_module_is_called(calls: list[int], part: str, kind: str) -> None:
    made = block()
    handle = getattr(getattr(made, part), f"register_{kind}")(lambda *args: None)
    made(IMAGES)
    assert not calls
    handle.remove()
    made(IMAGES)
    assert calls


@pytest.mark.parametrize("part", ["norm", "relu", "dropout", "pool"])
def test_a_module_of_another_type_or_with_a_forward_of_its_own_is_called(calls: list[int], part: str) -> None:
    made = block()
    setattr(made, part, nn.Identity())
    made(IMAGES)
    made = block()
    getattr(made, part).forward = lambda x: x
    made(IMAGES)
    assert not calls


@pytest.mark.parametrize("part", ["", "norm"])
def test_a_block_or_norm_in_eval_mode_is_not_fused(calls: list[int], part: str) -> None:
    made = block()
    made.get_submodule(part).eval()
    made(IMAGES)
    if not part:
        made.norm.train()  # as statistics are measured
        made(IMAGES)
    assert not calls


def test_a_norm_in_parts_is_not_fused(calls: list[int]) -> None:
    made = block()
    with in_parts(made, 2):
        made(IMAGES)
    assert not calls
    made(IMAGES)
    assert calls


def test_what_the_kernels_cannot_read_is_left_to_the_modules(calls: list[int]) -> None:
    relu, good = nn.ReLU(), torch.randn(4, 8, 6, 6).contiguous(memory_format=torch.channels_last)
    norm = norm2d(8, "batch")

    def fuses(x: Tensor = good, **changes: object) -> bool:
        calls.clear()
        fused.after(x, **({"norm": norm, "relu": relu, "training": True} | changes))  # type: ignore[arg-type]
        return bool(calls)

    assert fuses()
    assert fuses(relu=None)
    assert fuses(add=good)
    assert fuses(pool=nn.MaxPool2d((2, 2), stride=2))
    assert not fuses(good.contiguous())
    assert not fuses(good[:, :, ::2])
    assert not fuses(add=good.contiguous())
    assert not fuses(add=good.double())
    assert not fuses(add=good, relu=None)
    assert not fuses(good[:0])
    assert not fuses(good.double(), norm=norm2d(8, "batch").double())
    assert not fuses(norm=nn.BatchNorm2d(8, affine=False))
    for pool in (nn.MaxPool2d(2, 1), nn.MaxPool2d(3, 2), nn.MaxPool2d(2, padding=1), nn.MaxPool2d(2, ceil_mode=True)):
        assert not fuses(pool=pool)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        fuses(good[:1, :, :1, :1])
    with pytest.raises(RuntimeError, match=r"running_mean should contain 8 elements not 4"):
        fuses(norm=norm2d(4, "stored"))


def test_without_triton_the_modules_run(monkeypatch: pytest.MonkeyPatch) -> None:
    import ness.lab.card

    monkeypatch.setitem(sys.modules, "triton", None)
    for name in ("kernels", "launches"):
        monkeypatch.delitem(sys.modules, f"ness.lab.card.{name}", raising=False)
        monkeypatch.delattr(ness.lab.card, name, raising=False)
    fused._launches.cache_clear()
    try:
        assert fused._launches() is None
    finally:
        fused._launches.cache_clear()


def test_triton_that_cannot_build_is_said_once_and_the_modules_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        @staticmethod
        def try_on(device: torch.device) -> None:
            raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(fused, "_launches", lambda: Broken)
    fused._built_on.cache_clear()
    try:
        with pytest.warns(NessWarning, match=r"cannot build kernels for cuda:0 .*Failed to find C compiler"):
            assert not fused._built_on(torch.device("cuda:0"))
        assert not fused._built_on(torch.device("cuda:0"))  # without another word
    finally:
        fused._built_on.cache_clear()


# In the interpreter ----------------------------------------------------------------------------------------------


@pytest.fixture(params=["whole", "split"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways of the kernels, whatever the number of rows."""
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("TRITON_INTERPRET is not 1")
    from ness.lab.card import launches

    monkeypatch.setattr(launches, "WHOLE", 2**31 if request.param == "whole" else 0)
    monkeypatch.setattr(launches, "PARTIALS", 3)  # several blocks a program, also where rows are few


CONV = Case((5, 20, 9, 8), dropout=0.3, pool=True)
CASES = {
    "conv": CONV,
    "even": replace(CONV, shape=(40, 32, 6, 6), norms="batch"),
    "no dropout": replace(CONV, dropout=0.0),
    "odd channels": replace(CONV, shape=(3, 33, 5, 7)),
    "gradient in another order": replace(CONV, dy="contiguous"),
    "expanded gradient": replace(CONV, dy="expanded"),
    "every second gradient": replace(CONV, dy="sliced"),
    "frozen affine": replace(CONV, affine=False),
    "only affine": replace(CONV, x_trained=False),
    "far from zero": replace(CONV, shift=100.0),
    "bfloat16": replace(CONV, dtype=torch.bfloat16),
    "ties": replace(CONV, ties=True, dropout=0.0),
    "norm and relu": Case((5, 20, 7, 7)),
    "norm alone": Case((3, 40, 9, 5), relu=False),
    "sum": Case((3, 33, 6, 5), add=True),
    "sum, many rows": Case((29, 20, 11, 11), add=True, dy="contiguous"),
    "sum, only it trained": Case((5, 24, 4, 4), add=True, x_trained=False, affine=False),
    "sum in bfloat16": Case((5, 20, 7, 7), add=True, dtype=torch.bfloat16),
    "relu, ties": Case((5, 8, 6, 6), ties=True, shift=0.0),
    "wide": Case((64, 40), dropout=0.5),
    "wide, other order": Case((30, 37), dropout=0.5, dy="expanded"),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("kernels")
def test_kernels_do_what_the_modules_do(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    found, expected = both(case, CPU, monkeypatch)
    assert found["y"] is not None
    narrow = case.dtype == torch.bfloat16
    assert_same(found, expected, 3e-2 if narrow else 2e-4 if case.shift > 10 else 1e-5, 1e-2 if narrow else 0.0)


@pytest.mark.parametrize("kind", ["conv", "residual"])
@pytest.mark.usefixtures("kernels")
def test_a_second_derivative_is_that_of_the_modules(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for way in (True, False):
        monkeypatch.setattr(fused, "on_card", lambda x, way=way: way)
        torch.manual_seed(1)
        made: nn.Module = block() if kind == "conv" else Block(3, 8, 2, "stored").to(memory_format=torch.channels_last)
        first = torch.autograd.grad(made(IMAGES).square().sum(), list(made.parameters()), create_graph=True)
        second = torch.autograd.grad(sum(each.square().sum() for each in first), list(made.parameters()))
        found.append([each.detach() for each in (*first, *second)])
    for one, two in zip(*found, strict=True):
        assert torch.allclose(one, two, rtol=1e-3, atol=1e-5 * float(two.abs().max()))


@pytest.mark.usefixtures("kernels")
def test_nan_comes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "on_card", lambda x: True)
    made, x = block(), IMAGES.clone()
    x[0, 0, 0, 0] = torch.nan
    assert made(x).isnan().all()


@pytest.mark.usefixtures("kernels")
def test_a_missing_generator_is_refused_by_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    for way in (True, False):
        monkeypatch.setattr(fused, "on_card", lambda x, way=way: way)
        made = block()
        made.dropout.generator = None
        with pytest.raises(NessError, match="generator"):
            made(IMAGES)


@pytest.mark.usefixtures("kernels")
def test_the_same_masks_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    states = []
    for way in (True, False):
        monkeypatch.setattr(fused, "on_card", lambda x, way=way: way)
        made = block()
        made(IMAGES)
        assert isinstance(made.dropout, Dropout)
        assert made.dropout.generator is not None
        states.append(made.dropout.generator.get_state())
    assert torch.equal(*states)
