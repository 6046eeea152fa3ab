"""The AlexNet variant of the GPM lineage for 32×32 images: three convolutions, two wide layers."""

from collections.abc import Sequence
from functools import partial

from torch import Tensor, nn

from ness.lab.gpu.fuse import after
from ness.lab.networks.base import Network, NetworkSpec, Norms, Wire, heads, norm1d, norm2d
from ness.lab.networks.dropout import Dropout


class ConvBlock(nn.Module):
    """Convolution, BatchNorm, ReLU, dropout, max-pool, in this order; maps of side s become (s - kernel + 1) // 2."""

    def __init__(self, channels: int, width: int, kernel: int, dropout: float, norms: Norms) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, width, kernel, bias=False)
        self.norm = norm2d(width, norms)
        self.relu = nn.ReLU()
        self.dropout = Dropout(dropout)
        self.pool = nn.MaxPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        """(n, channels, s, s) to (n, width, s', s')."""
        return after(self.conv(x), self.norm, self.relu, self.dropout, self.pool, training=self.training)


class WideBlock(nn.Module):
    """Linear layer, BatchNorm, ReLU, dropout."""

    def __init__(self, inputs: int, width: int, dropout: float, norms: Norms) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, width, bias=False)
        self.norm = norm1d(width, norms)
        self.relu = nn.ReLU()
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(n, inputs) to (n, width)."""
        return after(self.linear(x), self.norm, self.relu, self.dropout, training=self.training)


class AlexNet(Network):
    """Maps 32 → 14 → 6 → 2, then 1024 → 2048 → 2048; 6 713 216 parameters with ten heads of ten classes.

    With `share` below 1 every layer has that share of these maps and units.
    """

    wires = (
        Wire("conv1.conv", "conv1", None, "conv1.norm"),
        Wire("conv2.conv", "conv2", "conv1", "conv2.norm"),
        Wire("conv3.conv", "conv3", "conv2", "conv3.norm"),
        Wire("fc1.linear", "fc1", "conv3", "fc1.norm"),
        Wire("fc2.linear", "fc2", "fc1", "fc2.norm"),
    )

    def __init__(self, shape: tuple[int, ...], classes: Sequence[int], norms: Norms, share: float = 1.0) -> None:
        super().__init__()
        maps, wide = [round(share * width) for width in (64, 128, 256)], round(share * 2048)
        side = shape[1]
        for kernel in (4, 3, 2):
            side = (side - kernel + 1) // 2
        self.conv1 = ConvBlock(shape[0], maps[0], 4, 0.2, norms)
        self.conv2 = ConvBlock(maps[0], maps[1], 3, 0.2, norms)
        self.conv3 = ConvBlock(maps[1], maps[2], 2, 0.5, norms)
        self.fc1 = WideBlock(maps[2] * side * side, wide, 0.5, norms)
        self.fc2 = WideBlock(wide, wide, 0.5, norms)
        self.heads = heads(wide, classes)

    def features(self, x: Tensor) -> Tensor:
        """(n, 2048), or that share of it."""
        out: Tensor = self.fc2(self.fc1(self.conv3(self.conv2(self.conv1(x))).flatten(1)))
        return out


NETWORKS = (
    NetworkSpec("alexnet", "AlexNet variant of the GPM lineage, 32×32", AlexNet),
    NetworkSpec("alexnet-eighth", "The same with an eighth of its maps and units", partial(AlexNet, share=0.125)),
)
