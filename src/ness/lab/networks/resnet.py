"""The reduced ResNet18 (nf = 20) of the GPM lineage: stem stride 1 at 32×32, 2 at 84×84."""

from collections.abc import Iterator, Sequence
from functools import partial

from torch import Tensor, nn
from torch.nn import functional as F

from ness.lab.gpu.fuse import after
from ness.lab.networks.base import Network, NetworkSpec, Norms, Wire, heads, norm2d

WIDTHS = (20, 40, 80, 160)


def conv3x3(inputs: int, outputs: int, stride: int) -> nn.Conv2d:
    """A bias-free 3×3 convolution with padding 1."""
    return nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)


class Shortcut(nn.Module):
    """What skips a block whose output has another shape: a strided 1×1 convolution and BatchNorm."""

    def __init__(self, inputs: int, outputs: int, stride: int, norms: Norms) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
        self.norm = norm2d(outputs, norms)

    def forward(self, x: Tensor) -> Tensor:
        """(n, inputs, s, s) to (n, outputs, s', s')."""
        return after(self.conv(x), self.norm, training=self.training)


class Block(nn.Module):
    """conv-BN-ReLU-conv-BN plus the shortcut, then ReLU."""

    def __init__(self, inputs: int, outputs: int, stride: int, norms: Norms) -> None:
        super().__init__()
        self.conv1 = conv3x3(inputs, outputs, stride)
        self.norm1 = norm2d(outputs, norms)
        self.relu1 = nn.ReLU()
        self.conv2 = conv3x3(outputs, outputs, 1)
        self.norm2 = norm2d(outputs, norms)
        same = stride == 1 and inputs == outputs
        self.shortcut: nn.Module = nn.Identity() if same else Shortcut(inputs, outputs, stride, norms)
        self.relu2 = nn.ReLU()
        self.units1, self.units2 = nn.Identity(), nn.Identity()  # where units come out, for who gates them

    def forward(self, x: Tensor) -> Tensor:
        """(n, inputs, s, s) to (n, outputs, s', s')."""
        inner = self.conv2(self.units1(after(self.conv1(x), self.norm1, self.relu1, training=self.training)))
        out: Tensor = self.units2(after(inner, self.norm2, self.relu2, add=self.shortcut(x), training=self.training))
        return out


def block_wires(block: str, reads: str, *, shortcut: bool) -> list[Wire]:
    """The wires of a block; its units are those after the first ReLU and those after the sum's."""
    inner, outer = f"{block}.units1", f"{block}.units2"
    wires = [
        Wire(f"{block}.conv1", inner, reads, f"{block}.norm1"),
        Wire(f"{block}.conv2", outer, inner, f"{block}.norm2"),
    ]
    return [*wires, Wire(f"{block}.shortcut.conv", outer, reads, f"{block}.shortcut.norm")] if shortcut else wires


class ResNet18(Network):
    """Stem of stride `stem`, four stages of two blocks, 2×2 average pool.

    1 125 140 parameters with five heads of ten classes at 32×32 and stem 1, 1 237 140 with twenty of five at 84×84
    and stem 2.
    """

    def __init__(self, shape: tuple[int, ...], classes: Sequence[int], norms: Norms, stem: int) -> None:
        super().__init__()
        self.conv1 = conv3x3(shape[0], WIDTHS[0], stem)
        self.norm1 = norm2d(WIDTHS[0], norms)
        self.relu1 = nn.ReLU()
        self.units1 = nn.Identity()
        stages, inputs = [], WIDTHS[0]
        for width, stride in zip(WIDTHS, (1, 2, 2, 2), strict=True):
            stages.append(nn.Sequential(Block(inputs, width, stride, norms), Block(width, width, 1, norms)))
            inputs = width
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.wires = tuple(self._wires())
        high, wide = (((side - 1) // stem // 8 + 1) // 2 for side in shape[1:])
        self.heads = heads(WIDTHS[-1] * high * wide, classes)

    def _wires(self) -> Iterator[Wire]:
        yield Wire("conv1", "units1", None, "norm1")
        before = "units1"
        for name, block in self.named_modules():
            if isinstance(block, Block):
                yield from block_wires(name, before, shortcut=isinstance(block.shortcut, Shortcut))
                before = f"{name}.units2"

    def features(self, x: Tensor) -> Tensor:
        """(n, 640) from 32×32, (n, 1440) from 84×84."""
        x = self.units1(after(self.conv1(x), self.norm1, self.relu1, training=self.training))
        for stage in (self.layer1, self.layer2, self.layer3, self.layer4):
            x = stage(x)
        return F.avg_pool2d(x, 2).flatten(1)


NETWORKS = (
    NetworkSpec("resnet18-32", "Reduced ResNet18 (nf = 20), stem stride 1, for 32×32", partial(ResNet18, stem=1)),
    NetworkSpec("resnet18-84", "Reduced ResNet18 (nf = 20), stem stride 2, for 84×84", partial(ResNet18, stem=2)),
)
