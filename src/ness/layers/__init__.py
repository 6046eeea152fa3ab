"""Layer kinds, a file each: what a layer's input rows are, and how a matrix (groups, o, d) becomes its weight."""

from torch import nn

from ness.layers.attention import AttentionInput, AttentionOutput
from ness.layers.base import Layer, Record, Rows
from ness.layers.conv import ConvLayer
from ness.layers.linear import LinearLayer, TransposedLinearLayer

__all__ = [
    "AttentionInput",
    "AttentionOutput",
    "ConvLayer",
    "Layer",
    "LinearLayer",
    "Record",
    "Rows",
    "TransposedLinearLayer",
    "layers_of",
]


def layers_of(name: str, module: nn.Module) -> list[Layer]:
    """All layers that one module holds: none where its kind is not supported."""
    return [layer for kind in Layer.kinds for layer in kind.find(name, module)]
