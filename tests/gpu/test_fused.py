"""On a GPU: the kernels do what the modules do, on the networks' shapes, the same bits every time."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Generator, Tensor

from fusing import AFTER_CONV, ALEXNET, RESNET, Case, Found, assert_same, both, together_and_apart
from ness.lab import registry
from ness.lab.gpu import fuse
from ness.lab.networks.base import Network, Norms, build
from ness.lab.networks.dropout import Dropout
from ness.lab.networks.norms import passed_apart
from ness.lab.runs.environment import repeatable

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]
CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    pytest.importorskip("triton")
    with repeatable(CUDA):
        yield


SHAPES = {str(case.shape): case for case in ALEXNET}
RESIDUAL = {f"{case.shape} {'sum' if case.add else 'relu' if case.relu else 'norm'}": case for case in RESNET}
CHANGES: dict[str, dict[str, object]] = {
    "stored": {},
    "batch": {"norms": "batch"},
    "frozen affine": {"affine": False},
    "only affine": {"x_trained": False},
    "gradient in another order": {"dy": "contiguous"},
    "expanded gradient": {"dy": "expanded"},
    "no dropout": {"dropout": 0.0},
    "ties": {"ties": True},
    "bfloat16": {"dtype": torch.bfloat16},
}


def assert_as_modules(case: Case, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changed: Case = replace(case, **CHANGES[change])  # type: ignore[arg-type]
    tolerances = (3e-2, 1e-2) if changed.dtype == torch.bfloat16 else (2e-5, 1e-5)
    assert_same(*both(changed, CUDA, monkeypatch), *tolerances)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("shape", SHAPES)
def test_kernels_do_what_the_modules_do(shape: str, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_as_modules(SHAPES[shape], change, monkeypatch)


@pytest.mark.parametrize("change", [key for key in CHANGES if key != "no dropout"])
@pytest.mark.parametrize("shape", RESIDUAL)
def test_kernels_do_what_a_residual_block_does(shape: str, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_as_modules(RESIDUAL[shape], change, monkeypatch)


@pytest.mark.parametrize("size", [2, 17, 36, 512])
def test_any_size_of_batch(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for case in (*ALEXNET, *RESNET):
        case = replace(case, shape=(size, *case.shape[1:]))
        found, expected = both(case, CUDA, monkeypatch)
        assert_same(found, expected, 5e-4 if size == 2 and len(case.shape) == 2 else 2e-5, 1e-5)


def in_parts(case: Case, parts: int, **changes: object) -> Case:
    """As many images a part as the case has."""
    shape = parts * case.shape[0], *case.shape[1:]
    return replace(case, shape=shape, parts=parts, norms="batch", **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("shape", [*SHAPES, *RESIDUAL])
def test_kernels_do_what_the_modules_do_in_parts(shape: str, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for change in ("batch", "frozen affine", "only affine", "gradient in another order"):
        assert_as_modules(in_parts((SHAPES | RESIDUAL)[shape], parts), change, monkeypatch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("shape", [*SHAPES, *RESIDUAL])
def test_parts_are_what_they_are_alone(shape: str, parts: int, dtype: torch.dtype) -> None:
    """Bit for bit where a part begins at 16 bytes for all that is known of it when a kernel is built."""
    case = in_parts((SHAPES | RESIDUAL)[shape], parts, dtype=dtype)
    together, apart = together_and_apart(case, CUDA)
    assert_same(together, apart, 1e-2 if dtype == torch.bfloat16 else 1e-5, 1e-3)
    if case.shape[1] * dtype.itemsize % 16 == 0:
        for key in together.keys() - {"dgamma", "dbeta"}:
            one, two = together[key], apart[key]
            assert one is two is None or (one is not None and two is not None and torch.equal(one, two)), key


@pytest.mark.parametrize("channels", [5, 20])
@pytest.mark.parametrize("images", [2, 3, 70])
def test_parts_that_begin_anywhere(images: int, channels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Odd numbers of rows and channels, both ways of the kernels."""
    for case in (
        Case((images, channels, 9, 7), dropout=0.3, pool=True),
        Case((images, channels, 9, 7), dropout=0.3, pool=True, dy="contiguous"),
        Case((images, channels, 9, 7), add=True),
        Case((10 * images, channels), dropout=0.5),
    ):
        for parts in (2, 3):
            assert_same(*both(in_parts(case, parts), CUDA, monkeypatch), 1e-4, 1e-3)
            assert_same(*together_and_apart(in_parts(case, parts, dtype=torch.bfloat16), CUDA), 1e-2, 1e-2)


@pytest.mark.parametrize("shape", [*SHAPES, *RESIDUAL])
def test_a_second_derivative_in_parts_is_that_of_the_modules(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = replace(in_parts((SHAPES | RESIDUAL)[shape], 2), dropout=0.0).on(CUDA)
    relu, _, pool = made.case.modules(Generator(CUDA))
    found = []
    for way in (True, False):
        with monkeypatch.context() as patch:
            patch.setattr(fuse, "on_gpu", lambda x, way=way: way)
            x = made.x.clone().requires_grad_()
            wanted = [x, *made.norm.parameters()]
            add = made.add if made.case.add else None
            y = fuse.after(x, made.norm, relu, None, pool, add=add, training=True)
            first = torch.autograd.grad(y, wanted, made.dy, create_graph=True)
            squares = sum(each.square().sum() for each in first)
            second = torch.autograd.grad(squares, wanted, materialize_grads=True)  # β's is 0, with or without a graph
            found.append([each.detach() for each in (*first, *second)])
    for one, two in zip(*found, strict=True):
        assert float((one - two).norm()) <= 1e-3 * float(two.norm())


def captured(case: Case) -> Found:
    """What a graph of forward and backward gives, replayed twice on the same numbers."""
    made = case.on(CUDA)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        generator = Generator(CUDA).manual_seed(2)
        x, add = made.x.clone().requires_grad_(), made.add.clone().requires_grad_() if case.add else None
        relu, dropout, pool = case.modules(generator)
        parameters = [x, *made.norm.parameters(), *([] if add is None else [add])]

        def work() -> list[Tensor]:
            y = fuse.after(x, made.norm, relu, dropout, pool, add=add, training=True)
            return [y.detach(), *torch.autograd.grad(y, parameters, made.dy)]

        work()
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(generator)
        with torch.cuda.graph(graph, stream=stream):
            results = work()
        replays = []
        for _ in range(2):
            generator.manual_seed(3)
            for name, value in made.norm.named_buffers():
                value.fill_(1 if name == "running_var" else 0)
            graph.replay()
            replays.append([each.clone() for each in (*results, *made.norm.buffers())])
    torch.cuda.synchronize()
    assert all(torch.equal(one, two) for one, two in zip(*replays, strict=True))
    return {str(number): value for number, value in enumerate(replays[0])}


@pytest.mark.parametrize("shape", [*SHAPES, *RESIDUAL])
def test_captured_twice_it_is_bit_equal(shape: str) -> None:
    whole = (SHAPES | RESIDUAL)[shape]
    for case in (whole, in_parts(whole, 2)):
        one, two = captured(case), captured(case)
        assert all(torch.equal(one[name], two[name]) for name in one)  # type: ignore[arg-type]


def test_a_step_of_the_kernels_does_not_wait_for_the_gpu() -> None:
    made = AFTER_CONV.on(CUDA)
    made.run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        made.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def network(name: str, norms: Norms) -> Network:
    """On the GPU, the same every time."""
    return build(
        registry.all_networks()[name],
        (3, 84, 84) if name.endswith("84") else (3, 32, 32),
        [10],
        norms,
        weights=Generator().manual_seed(1),
        dropout=Generator(CUDA).manual_seed(1),
        device=CUDA,
    )


@pytest.mark.parametrize("norms", ["batch", "stored"])
@pytest.mark.parametrize("name", ["alexnet", "resnet18-32", "resnet18-84"])
def test_a_whole_network_is_the_same_to_rounding(name: str, norms: Norms, monkeypatch: pytest.MonkeyPatch) -> None:
    """And once more by the kernels to the bit. Without TF32, whose rounding would make more of a difference."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    found: list[dict[str, Tensor]] = []
    for way in ("modules", "kernels", "kernels"):
        with monkeypatch.context() as patch:
            if way == "modules":
                patch.setattr(fuse, "on_gpu", lambda x: False)
            net = network(name, norms).train()
            side = 84 if name.endswith("84") else 32
            images = torch.randn(64, 3, side, side, generator=Generator().manual_seed(3)).to(CUDA)
            logits = net(images.contiguous(memory_format=torch.channels_last), 0)
            torch.nn.functional.cross_entropy(logits, torch.arange(64, device=CUDA) % 10).backward()
            gradients = {key: value.grad for key, value in net.named_parameters() if value.grad is not None}
            running = {key: value.clone() for key, value in net.named_buffers() if value.is_floating_point()}
            found.append({"logits": logits.detach(), **gradients, **running})
    plain, first, second = found
    assert plain.keys() == first.keys()
    for key, value in plain.items():
        assert torch.equal(first[key], second[key]), key
        assert float((first[key] - value).norm() / value.norm()) < 1e-2, key


@pytest.mark.parametrize("name", ["alexnet", "resnet18-32", "resnet18-84"])
def test_a_network_in_parts_is_two_passes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks by the kernels. Without TF32, whose rounding would make more of a difference."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    side, calls, real = 84 if name.endswith("84") else 32, [], fuse._together
    monkeypatch.setattr(fuse, "_together", lambda *args: calls.append(1) or real(*args))
    images = torch.randn(128, 3, side, side, generator=Generator().manual_seed(3)).to(CUDA)
    images = images.contiguous(memory_format=torch.channels_last)
    found, counted = [], []
    for apart in (True, False):
        net = network(name, "batch").train()
        for module in net.modules():
            if isinstance(module, Dropout):
                module.p = 0.0
        calls.clear()
        one_by_one = [] if apart else [net.features(each) for each in images.chunk(2)]
        features = passed_apart(net, images, [64, 64]) if apart else torch.cat(one_by_one)
        counted.append(len(calls))
        features.square().mean().backward()
        gradients = [value.grad for value in net.parameters() if value.grad is not None]
        found.append([features.detach(), *gradients])
    assert counted[1] == 2 * counted[0] > 0
    for one, two in zip(*found, strict=True):
        assert float((one - two).norm() / two.norm()) < 1e-2


@pytest.mark.parametrize("name", ["alexnet", "resnet18-32", "resnet18-84"])
def test_every_block_of_a_training_network_is_fused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32 and in bfloat16: convolutions put out what the kernels can read."""
    net, real, calls = network(name, "batch").train(), fuse._together, []
    monkeypatch.setattr(fuse, "_together", lambda *args: calls.append(args[0].dtype) or real(*args))
    side = 84 if name.endswith("84") else 32
    images = torch.randn(64, 3, side, side, device=CUDA).contiguous(memory_format=torch.channels_last)
    norms = sum(isinstance(module, fuse.BatchNorm1d | fuse.BatchNorm2d) for module in net.modules())
    for narrow in (False, True):
        calls.clear()
        with torch.autocast("cuda", torch.bfloat16, enabled=narrow):
            net(images, 0).float().sum().backward()
        assert calls == [torch.bfloat16 if narrow else torch.float32] * norms
