"""What follows a layer, run by the modules one by one and by the kernels, for tests of `nets.fused`."""

import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Generator, Tensor, nn

from ness.lab.gpu import fuse
from ness.lab.networks.base import Norms, norm1d, norm2d
from ness.lab.networks.dropout import Dropout

Found = dict[str, Tensor | None]


@dataclass(frozen=True)
class Case:
    """Shapes and steps of one comparison."""

    shape: tuple[int, ...]
    relu: bool = True
    dropout: float = 0.0
    pool: bool = False
    add: bool = False
    norms: Norms = "stored"
    affine: bool = True  # whether γ and β are trained
    x_trained: bool = True
    dtype: torch.dtype = torch.float32
    dy: str = "channels_last"  # or "contiguous", "expanded", "sliced"
    ties: bool = False  # x has few different values
    shift: float = 1.0
    parts: int = 1  # of the batch, normalised apart; they differ in how widely x is spread

    def modules(self, generator: Generator) -> tuple[nn.ReLU | None, Dropout | None, nn.MaxPool2d | None]:
        """What follows the norm."""
        dropout = Dropout(self.dropout)
        dropout.generator = generator
        return (
            nn.ReLU() if self.relu else None,
            dropout if self.dropout else None,
            nn.MaxPool2d(2) if self.pool else None,
        )

    def on(self, device: torch.device) -> "Made":
        torch.manual_seed(1)
        norm = (norm1d if len(self.shape) == 2 else norm2d)(self.shape[1], self.norms)
        norm.weight.data.normal_()
        norm.bias.data.normal_(0.3)
        norm.requires_grad_(self.affine)
        norm.parts = self.parts
        layout = torch.contiguous_format if len(self.shape) == 2 else torch.channels_last
        spread = 2.0 + torch.arange(self.parts).repeat_interleave(self.shape[0] // self.parts)
        x = torch.randn(self.shape) * spread.view(-1, *[1] * (len(self.shape) - 1)) + self.shift
        x = x.round() if self.ties else x
        size = (*self.shape[:2], *(side // 2 for side in self.shape[2:])) if self.pool else self.shape
        dy = torch.randn(size)
        if self.dy == "expanded":
            dy = dy[:1].expand(size)
        elif self.dy == "sliced":
            dy = torch.cat([dy, dy])[::2]
        elif self.dy == "channels_last":
            dy = dy.contiguous(memory_format=layout)
        x, dy, add = (each.to(device, self.dtype) for each in (x, dy, torch.randn(self.shape)))
        x, add = (each.contiguous(memory_format=layout) for each in (x, add))
        return Made(self, norm.to(device), x, dy, add)


@dataclass(frozen=True)
class Made:
    """A case on a device."""

    case: Case
    norm: nn.Module
    x: Tensor
    dy: Tensor
    add: Tensor

    def run(self) -> Found:
        """Result, gradients and running statistics, by whichever way is taken."""
        case, device = self.case, self.x.device
        x, add = self.x.clone().requires_grad_(case.x_trained), self.add.clone().requires_grad_()
        modules = case.modules(Generator(device).manual_seed(2))
        before = {name: value.clone() for name, value in self.norm.named_buffers()}
        for parameter in self.norm.parameters():
            parameter.grad = None
        y = fuse.after(x, self.norm, *modules, add=add if case.add else None, training=True)
        y.backward(self.dy)
        found = {"y": y.detach(), "dx": x.grad, "dadd": add.grad}
        found |= {f"d{name}": parameter.grad for name, parameter in self.norm.named_parameters()}
        found |= {name: value.clone() for name, value in self.norm.named_buffers() if value.is_floating_point()}
        for name, value in self.norm.named_buffers():
            value.copy_(before[name])
        return found


def both(case: Case, device: torch.device, patch: pytest.MonkeyPatch) -> tuple[Found, Found]:
    """What the kernels give and what the modules give."""
    made = case.on(device)
    patch.setattr(fuse, "on_gpu", lambda x: True)
    asked = []
    patch.setattr(fuse, "_together", lambda *args, real=fuse._together: asked.append(1) or real(*args))
    by_kernels = made.run()
    assert asked, "the modules ran"
    patch.undo()
    patch.setattr(fuse, "on_gpu", lambda x: False)
    by_modules = made.run()
    patch.undo()
    return by_kernels, by_modules


def together_and_apart(case: Case, device: torch.device) -> tuple[Found, Found]:
    """What the kernels give of a batch in parts, and of its parts one by one, whose gradients of γ and β are summed."""
    from ness.lab.gpu import launches

    made = case.on(device)
    _, dropout, _ = case.modules(Generator(device).manual_seed(2))
    kept = None if dropout is None else dropout.draw(made.x)
    steps = launches.Steps(case.add, case.relu, None if dropout is None else dropout.scale, case.pool)
    gamma, beta = (each.detach() for each in made.norm.parameters())

    def run(parts: int, x: Tensor, dy: Tensor, add: Tensor | None, kept: Tensor | None) -> list[Tensor | None]:
        found = launches.forward(x, gamma, beta, add, kept, None, 0.0, 1e-5, steps, parts)
        wanted = {"want_x": case.x_trained, "want_add": case.add, "want_affine": case.affine}
        return [*found, *launches.backward(dy, x, gamma, beta, found, steps, **wanted)]

    batch = made.x, made.dy, made.add if case.add else None, kept
    cut = [[None] * case.parts if each is None else each.chunk(case.parts) for each in batch]
    names = [*launches.Forward._fields, *(f"d{name}" for name in launches.Gradients._fields)]
    together = dict(zip(names, run(case.parts, *batch), strict=True))
    one_by_one = [run(1, *part) for part in zip(*cut, strict=True)]
    joined: Found = {}
    for name, (first, *more) in zip(names, zip(*one_by_one, strict=True), strict=True):
        join = sum if name in ("dgamma", "dbeta") else torch.cat
        joined[name] = None if first is None else join([first, *more])
    return together, joined


def assert_same(found: Found, expected: Found, tolerance: float, strays: float = 0.0) -> None:
    """Equal number by number to tolerance · (rms + |expected|), but for a share of `strays`.

    Where two places of a window are equal to the last bit but one, or a number is 0 to the last bit, rounding decides
    where a gradient goes.
    """
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        other = found[name]
        assert (other is None) == (value is None), name
        if value is None or other is None:
            continue
        assert (other.shape, other.stride(), other.dtype) == (value.shape, value.stride(), value.dtype), name
        value, other = value.double(), other.double()
        far = (other - value).abs() > tolerance * (value.square().mean().sqrt() + value.abs())
        wrong = far | other.isnan()
        assert int(wrong.sum()) <= math.ceil(strays * wrong.numel()), (name, float((other - value).abs().max()))


AFTER_CONV = Case((64, 64, 29, 29), dropout=0.2, pool=True)
ALEXNET = (
    AFTER_CONV,
    replace(AFTER_CONV, shape=(64, 128, 12, 12)),
    replace(AFTER_CONV, shape=(64, 256, 5, 5), dropout=0.5, dy="contiguous"),
    Case((64, 2048), dropout=0.5),
)
RESNET = tuple(
    Case(shape, relu=relu, add=add)
    for shape in ((64, 20, 42, 42), (64, 40, 21, 21), (64, 80, 11, 11), (64, 160, 6, 6))
    for relu, add in ((True, False), (True, True), (False, False))
)
