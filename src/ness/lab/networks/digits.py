"""A small network for 8×8 digits: one convolution, BatchNorm, two linear layers."""

from collections.abc import Sequence

from torch import Tensor, nn

from ness.lab.networks.base import Network, NetworkSpec, Norms, Wire, heads, norm2d


class DigitsNet(Network):
    """Convolution 3×3 (32 maps), BatchNorm, ReLU, 2×2 pool, then 512 → 256 → 128."""

    wires = (Wire("conv", "pool", None, "norm"), Wire("fc1", "fc1", "pool"), Wire("fc2", "fc2", "fc1"))

    def __init__(self, shape: tuple[int, ...], classes: Sequence[int], norms: Norms) -> None:
        super().__init__()
        self.conv = nn.Conv2d(shape[0], 32, 3, padding=1, bias=False)
        self.norm = norm2d(32, norms)
        self.pool = nn.MaxPool2d(2)
        self.fc1 = nn.Linear(32 * (shape[1] // 2) * (shape[2] // 2), 256)
        self.fc2 = nn.Linear(256, 128)
        self.relu = nn.ReLU()
        self.heads = heads(128, classes)

    def features(self, x: Tensor) -> Tensor:
        """(n, 128)."""
        x = self.pool(self.relu(self.norm(self.conv(x)))).flatten(1)
        out: Tensor = self.relu(self.fc2(self.relu(self.fc1(x))))
        return out


NETWORKS = (NetworkSpec("digits", "One convolution, BatchNorm and two linear layers for 8×8 digits", DigitsNet),)
