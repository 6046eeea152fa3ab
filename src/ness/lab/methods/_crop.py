"""A slip of the NESS reference's GPM on MiniImageNet, kept for the preset `reference`.

Its patches are cut with the geometry of 32×32 images (maps 32, 16, 8, 4; first stride 1) from a network on 84×84 ones,
so that only the top left corner of every map is seen, and the first convolution's patches are not those it really has.
"""

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ness.errors import NessError
from ness.lab.methods._projection.rows import Layers
from ness.lab.networks.base import Network
from ness.layers import ConvLayer

MAPS = {"conv1": 32, "layer1": 32, "layer2": 16, "layer3": 8, "layer4": 4}  # positions a side, by the name's beginning


def corner_rows(model: Network, layers: Layers, images: Tensor, counts: tuple[int, ...]) -> dict[str, Tensor]:
    """The rows (n, d) of every layer, from the top left corner of its input; a layer's first `counts[i]` images."""
    seen: dict[str, Tensor] = {}

    def keep(name: str, most: int) -> RemovableHandle:
        return layers[name].module.register_forward_pre_hook(lambda _, inputs: seen.update({name: inputs[0][:most]}))

    handles = [keep(name, counts[number] if counts else len(images)) for number, name in enumerate(layers)]
    try:
        with torch.no_grad():
            model.features(images)
    finally:
        for handle in handles:
            handle.remove()
    return {name: corner(layers[name].module, name, x).to(torch.float64) for name, x in seen.items()}


def corner(module: nn.Module, name: str, x: Tensor) -> Tensor:
    """Patches (n · side², d) at the first side × side positions."""
    side = MAPS.get(name.split(".")[0])
    if side is None or not isinstance(module, nn.Conv2d):
        raise NessError(
            f"geometry is '32x32', but layer {name!r} is none of the reduced ResNet18's convolutions; "
            "leave geometry at 'true' for other networks"
        )
    stride = 1 if name == "conv1" else module.stride[0]
    kernel, padding = module.kernel_size[0], int(module.padding[0])
    shape = nn.Conv2d(x.shape[1], 1, kernel, stride, padding, bias=False, device="meta")
    reach = stride * (side - 1) + kernel - padding  # pixels that the first positions see
    patches = ConvLayer(name, shape).patches(shape, x[..., :reach, :reach])[0]
    grid = patches.reshape(len(x), -1, patches.shape[1])
    across = int(grid.shape[1] ** 0.5)
    return grid.reshape(len(x), across, across, -1)[:, :side, :side].reshape(-1, patches.shape[1])
