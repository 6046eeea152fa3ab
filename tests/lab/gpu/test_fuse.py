"""When the kernels stand in for the modules; in Triton's interpreter (TRITON_INTERPRET=1), that they do it right."""

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Generator, Tensor, nn

from fusing import ALEXNET, Case, assert_same, both, together_and_apart
from ness import NessError, NessWarning
from ness.lab.gpu import fuse
from ness.lab.networks.alexnet import ConvBlock, WideBlock
from ness.lab.networks.base import Norms, norm2d
from ness.lab.networks.dropout import Dropout
from ness.lab.networks.norms import in_parts
from ness.lab.networks.resnet import Block

CPU = torch.device("cpu")
IMAGES = torch.randn(4, 3, 6, 6, generator=Generator().manual_seed(1)).contiguous(memory_format=torch.channels_last)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """As on a GPU: one entry a call that the kernels would have answered."""
    found: list[int] = []

    def together(x: Tensor, *modules: nn.Module | None) -> Tensor:
        found.append(1)
        return x

    monkeypatch.setattr(fuse, "on_gpu", lambda x: True)
    monkeypatch.setattr(fuse, "_together", together)
    return found


def block(norms: Norms = "stored") -> ConvBlock:
    made = ConvBlock(3, 8, 1, 0.2, norms).to(memory_format=torch.channels_last)
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
    monkeypatch.setattr(fuse, "_together", lambda *args: pytest.fail("fused"))
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


def test_what_the_kernels_cannot_read_is_left_to_the_modules(calls: list[int]) -> None:
    relu, good = nn.ReLU(), torch.randn(4, 8, 6, 6).contiguous(memory_format=torch.channels_last)
    norm = norm2d(8, "batch")

    def fuses(x: Tensor = good, **changes: object) -> bool:
        calls.clear()
        fuse.after(x, **({"norm": norm, "relu": relu, "training": True} | changes))  # type: ignore[arg-type]
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


@pytest.mark.parametrize("norms", ["batch", "stored"])
def test_parts_are_fused_where_they_are_equal_and_move_no_running_statistics(calls: list[int], norms: Norms) -> None:
    made = block(norms)
    with in_parts(made, 2):
        made(IMAGES)
        assert bool(calls) == (norms == "batch")
    with in_parts(made, 3), pytest.raises(NessError, match="a batch of 4 in 3 parts"):
        made(IMAGES)
    made.conv = nn.Conv2d(3, 8, 6)
    made.pool = nn.Identity()
    with in_parts(made, 4), pytest.raises(NessError, match="at least 2 values"):
        made(IMAGES)


def test_without_triton_the_modules_run(monkeypatch: pytest.MonkeyPatch) -> None:
    import ness.lab.gpu

    monkeypatch.setitem(sys.modules, "triton", None)
    for name in ("kernels", "launches"):
        monkeypatch.delitem(sys.modules, f"ness.lab.gpu.{name}", raising=False)
        monkeypatch.delattr(ness.lab.gpu, name, raising=False)
    fuse._launches.cache_clear()
    try:
        assert fuse._launches() is None
    finally:
        fuse._launches.cache_clear()


def test_triton_that_cannot_build_is_said_once_and_the_modules_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        @staticmethod
        def try_on(device: torch.device) -> None:
            raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(fuse, "_launches", lambda: Broken)
    fuse._built_on.cache_clear()
    try:
        with pytest.warns(NessWarning, match=r"cannot build kernels for cuda:0 .*Failed to find C compiler"):
            assert not fuse._built_on(torch.device("cuda:0"))
        assert not fuse._built_on(torch.device("cuda:0"))  # without another word
    finally:
        fuse._built_on.cache_clear()


# In the interpreter ----------------------------------------------------------------------------------------------


@pytest.fixture(params=["whole", "split"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways of the kernels, whatever the number of rows."""
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("TRITON_INTERPRET is not 1")
    from ness.lab.gpu import launches

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


IN_PARTS = {
    name: replace(case, norms="batch")
    for name, case in {
        "conv": replace(CONV, shape=(6, 20, 9, 8)),
        "five channels": replace(CONV, shape=(12, 5, 7, 6)),
        "gradient in another order": replace(CONV, shape=(6, 20, 9, 8), dy="contiguous"),
        "every second gradient": replace(CONV, shape=(6, 8, 4, 4), dy="sliced"),
        "frozen affine": replace(CONV, shape=(6, 20, 4, 5), affine=False),
        "only affine": replace(CONV, shape=(6, 20, 4, 5), x_trained=False),
        "bfloat16": replace(CONV, shape=(6, 20, 9, 8), dtype=torch.bfloat16),
        "norm and relu": Case((6, 5, 7, 7)),
        "norm alone": Case((6, 40, 5, 3), relu=False),
        "sum": Case((6, 20, 6, 5), add=True),
        "sum, many rows": Case((12, 20, 11, 11), add=True, dy="contiguous"),
        "sum, five channels": Case((18, 5, 7, 7), add=True),
        "sum in bfloat16": Case((6, 20, 7, 7), add=True, dtype=torch.bfloat16),
        "wide": Case((66, 40), dropout=0.5),
        "wide, five channels": Case((24, 5), dropout=0.5, dy="expanded"),
    }.items()
}


@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("name", [name for name, case in IN_PARTS.items() if case.dtype == torch.float32])
@pytest.mark.usefixtures("kernels")
def test_kernels_do_what_the_modules_do_in_parts(name: str, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_same(*both(replace(IN_PARTS[name], parts=parts), CPU, monkeypatch), 1e-5)


@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("name", IN_PARTS)
@pytest.mark.usefixtures("kernels")
def test_parts_are_bit_for_bit_what_they_are_alone(name: str, parts: int) -> None:
    together, apart = together_and_apart(replace(IN_PARTS[name], parts=parts), CPU)
    for key, value in apart.items():
        found = together[key]
        assert (found is None) == (value is None), key
        if value is not None and found is not None:
            assert torch.equal(found, value) if key not in ("dgamma", "dbeta") else torch.allclose(found, value), key


@pytest.mark.usefixtures("kernels")
def test_running_statistics_of_parts_are_refused() -> None:
    from ness.lab.gpu import launches

    one = torch.ones(8)
    with pytest.raises(AssertionError, match="running statistics"):
        launches.forward(torch.randn(4, 8), one, one, None, None, (one, one), 0.1, 1e-5, launches.Steps(), 2)


LAUNCHED = {  # for a batch as one: programs, tile sizes as the kernel names them, warps
    (64, 64, 29, 29): [
        ("statistics", (421, 2), (128, 32), 8),
        ("finish_statistics", (8,), (512, 8), 8),
        ("put_windows", (784, 1), (16, 64), 4),
        ("sums", (196, 2), (64, 32), 4),
        ("finish_sums", (8,), (256, 8), 4),
        ("give_windows", (900, 1), (16, 64), 4),
    ],
    (64, 128, 12, 12): [
        ("statistics", (72, 4), (128, 32), 8),
        ("finish_statistics", (16,), (128, 8), 4),
        ("put_windows", (144, 2), (16, 64), 4),
        ("sums", (36, 4), (64, 32), 4),
        ("finish_sums", (16,), (64, 8), 4),
        ("give_windows", (144, 2), (16, 64), 4),
    ],
    (64, 256, 5, 5): [("whole_forward", (32,), (1024, 256, 8), 8), ("whole_backward", (32,), (1024, 256, 8), 8)],
    (64, 2048): [("whole_forward", (128,), (64, 64, 16), 4), ("whole_backward", (128,), (64, 64, 16), 4)],
}


@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("case", ALEXNET, ids=lambda case: str(case.shape))
def test_parts_are_more_programs_of_the_same_kind(case: Case, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One part is launched as a batch always was: the bits of a seed depend on it."""
    pytest.importorskip("triton")
    from ness.lab.gpu import kernels

    seen: list[tuple[str, tuple[int, ...], dict[str, object], object]] = []

    class Recorded:
        def __init__(self, name: str) -> None:
            self.name, self.arguments = name, getattr(kernels, name).arg_names

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return partial(self.launch, grid)

        def launch(self, grid: tuple[int, ...], *values: object, num_warps: int) -> None:
            given = dict(zip(self.arguments, values, strict=True))
            seen.append((self.name, grid, {key: x for key, x in given.items() if not isinstance(x, Tensor)}, num_warps))

    for name in {launched[0] for each in LAUNCHED.values() for launched in each}:
        monkeypatch.setattr(kernels, name, Recorded(name))
    together_and_apart(replace(case, shape=(parts * 64, *case.shape[1:]), parts=parts, norms="batch"), CPU)
    together, one = seen[: len(LAUNCHED[case.shape])], seen[-len(LAUNCHED[case.shape]) :]
    assert [
        (name, grid[:-1], tuple(given[key] for key in given if key in ("TALL", "TALL_POOLED", "FEW", "LANES")), warps)
        for name, grid, given, warps in one
    ] == LAUNCHED[case.shape]
    assert [
        (name, (*grid[:-1], parts), given | {"APART": parts > 1}, warps) for name, grid, given, warps in one
    ] == together
    assert {given["APART"] for _, _, given, _ in one} == {False}


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("kind", ["conv", "residual"])
@pytest.mark.usefixtures("kernels")
def test_a_second_derivative_is_that_of_the_modules(kind: str, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    norms: Norms = "stored" if parts == 1 else "batch"
    found = []
    for way in (True, False):
        monkeypatch.setattr(fuse, "on_gpu", lambda x, way=way: way)
        torch.manual_seed(1)
        made: nn.Module = block(norms) if kind == "conv" else Block(3, 8, 2, norms)
        made.to(memory_format=torch.channels_last)
        with in_parts(made, parts):
            out = made(IMAGES)
        first = torch.autograd.grad(out.square().sum(), list(made.parameters()), create_graph=True)
        second = torch.autograd.grad(sum(each.square().sum() for each in first), list(made.parameters()))
        found.append([each.detach() for each in (*first, *second)])
    for one, two in zip(*found, strict=True):
        assert torch.allclose(one, two, rtol=1e-3, atol=1e-5 * float(two.abs().max()))


@pytest.mark.usefixtures("kernels")
def test_nan_comes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuse, "on_gpu", lambda x: True)
    made, x = block(), IMAGES.clone()
    x[0, 0, 0, 0] = torch.nan
    assert made(x).isnan().all()


@pytest.mark.usefixtures("kernels")
def test_a_missing_generator_is_refused_by_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    for way in (True, False):
        monkeypatch.setattr(fuse, "on_gpu", lambda x, way=way: way)
        made = block()
        made.dropout.generator = None
        with pytest.raises(NessError, match="generator"):
            made(IMAGES)


@pytest.mark.usefixtures("kernels")
def test_the_same_masks_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    states = []
    for way in (True, False):
        monkeypatch.setattr(fuse, "on_gpu", lambda x, way=way: way)
        made = block()
        made(IMAGES)
        assert isinstance(made.dropout, Dropout)
        assert made.dropout.generator is not None
        states.append(made.dropout.generator.get_state())
    assert torch.equal(*states)
