"""What a layer sees: the input rows X (n, d) of every layer of the backbone on a few images drawn from a task."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Generator, Tensor

from ness.errors import NessError
from ness.lab.networks.base import Network
from ness.lab.networks.norms import batches_at_once, in_parts
from ness.lab.training.loader import Batch, Samples, fixed_order
from ness.layers import Layer, Rows
from ness.layers.discovery import discover
from ness.statistics.gram import Gram, widened
from ness.statistics.moments import Moments
from ness.statistics.recorder import Recorder
from ness.statistics.watch import watching

Layers = Mapping[str, Layer]


def backbone_layers(model: Network) -> Layers:
    """Every linear layer and convolution that all tasks share, by name, in module order."""
    layers = discover(model, (), ("heads",)).layers
    for name, layer in layers.items():
        if layer.groups > 1 or layer.weight_part is not None:
            raise NessError(
                f"layer {name!r} is a {layer.kind} of {layer.groups} groups; this method keeps one set of directions "
                "a layer, so every layer needs one weight and groups=1: use ness, or another network"
            )
    return layers


def draw(samples: Samples, count: int, generator: Generator) -> Batch:
    """`count` different samples of a task, drawn at random."""
    order = torch.randperm(len(samples), generator=generator, device=generator.device)[:count]
    return samples.take(order.to(samples.labels.device))


def check_count(option: str, asked: int, samples: Samples) -> None:
    """Refuses to draw more images than a task has."""
    if asked > len(samples):
        raise NessError(
            f"{option} is {asked}, but task {samples.task + 1} has {len(samples)} training images; "
            "ask for at most as many"
        )


def check_images(images: Sequence[int], samples: int, layers: Layers) -> None:
    """Refuses a list of images per layer that does not fit the network."""
    if images and len(images) != len(layers):
        raise NessError(
            f"layer_images has {len(images)} numbers, but the network has {len(layers)} layers: {', '.join(layers)}; "
            "give one number per layer, or none"
        )
    if images and not all(1 <= count <= samples for count in images):
        raise NessError(f"layer_images is {tuple(images)}, expected numbers from 1 to samples, which is {samples}")


class _Collector:
    """Keeps the rows of the first `most[layer]` images of a pass."""

    def __init__(self, most: dict[str, int], images: int) -> None:
        self.most, self.images = most, images
        self.kept: dict[str, list[Tensor]] = {name: [] for name in most}

    def record(self, layer: Layer, rows: Rows, outputs: Tensor) -> None:
        """Add one forward call of one layer, as far as it is wanted."""
        count = self.most[layer.name] * rows.shape[1] // self.images  # of sentences as many rows as that is a share
        self.kept[layer.name].append(widened(rows.detach()[:, :count], layer.fan_in, layer.width, torch.float64)[0])


def input_rows(
    model: Network,
    layers: Layers,
    images: Tensor,
    counts: Sequence[int] = (),
    forward: Callable[[Tensor], object] | None = None,
) -> dict[str, Tensor]:
    """The rows X (n, d) of every layer in float64, from one forward pass in eval mode; [x; 1] where there is a bias.

    All images go through the network together (BatchNorm may use the statistics of the batch); a layer keeps the rows
    of its first `counts[i]` images, or of all. The representation matrix of the GPM lineage is R = Xᵀ. `forward` is the
    pass, where it is not that of the shared weights.
    """
    most = {name: (counts[number] if counts else len(images)) for number, name in enumerate(layers)}
    collector = _Collector(most, len(images))
    with watching(model, layers.values(), collector.record):
        (forward or model.features)(images)
    return {name: torch.cat(kept) for name, kept in collector.kept.items()}


def input_grams(model: Network, layers: Layers, samples: Samples, size: int) -> dict[str, Gram]:
    """The Gram Xᵀ X of every layer's inputs on all of a task's images, `size` at a time in a fixed random order."""
    device = samples.labels.device
    books = {name: Moments.zeros(1, layer.outputs, layer.width, device) for name, layer in layers.items()}
    recorder = Recorder(books.__getitem__)
    with watching(model, layers.values(), recorder.record):
        order = fixed_order(len(samples), samples.task, "train", device)
        for batch in samples.batches(order, size, batches_at_once(model, size)):
            with in_parts(model, batch.parts):
                model.features(batch.images)
            recorder.end(f"task {samples.task + 1}")
    recorder.check()
    return {name: held.gram for name, held in books.items()}
