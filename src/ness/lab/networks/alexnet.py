"""The AlexNet variant of the GPM lineage for 32×32 images: three convolutions, two wide layers."""

from collections.abc import Sequence

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
    """Maps 32 → 14 → 6 → 2, then 1024 → 2048 → 2048; 6 713 216 parameters with ten heads of ten classes."""

    wires = (
        Wire("conv1.conv", "conv1", None, "conv1.norm"),
        Wire("conv2.conv", "conv2", "conv1", "conv2.norm"),
        Wire("conv3.conv", "conv3", "conv2", "conv3.norm"),
        Wire("fc1.linear", "fc1", "conv3", "fc1.norm"),
        Wire("fc2.linear", "fc2", "fc1", "fc2.norm"),
    )

    def __init__(self, shape: tuple[int, ...], classes: Sequence[int], norms: Norms) -> None:
        super().__init__()
        side = shape[1]
        for kernel in (4, 3, 2):
            side = (side - kernel + 1) // 2
        self.conv1 = ConvBlock(shape[0], 64, 4, 0.2, norms)
        self.conv2 = ConvBlock(64, 128, 3, 0.2, norms)
        self.conv3 = ConvBlock(128, 256, 2, 0.5, norms)
        self.fc1 = WideBlock(256 * side * side, 2048, 0.5, norms)
        self.fc2 = WideBlock(2048, 2048, 0.5, norms)
        self.heads = heads(2048, classes)

    def features(self, x: Tensor) -> Tensor:
        """(n, 2048)."""
        out: Tensor = self.fc2(self.fc1(self.conv3(self.conv2(self.conv1(x))).flatten(1)))
        return out


NETWORKS = (NetworkSpec("alexnet", "AlexNet variant of the GPM lineage, 32×32", AlexNet),)
