"""The shape of a whole sample after each layer, where it can be told without running the model."""

from __future__ import annotations

from math import prod
from typing import TypeAlias

from nnmpi.backend.windows import out_size
from nnmpi.nn.activation import Flatten
from nnmpi.nn.conv import AvgPool2d, Conv2d, GlobalAvgPool2d, MaxPool2d
from nnmpi.nn.linear import Embedding, Linear
from nnmpi.nn.module import Module
from nnmpi.ops.conv import pair

Shape: TypeAlias = tuple[int, ...]


def shape_after(layer: Module, shape: Shape | None) -> Shape | None:
    """Return a sample's shape after a layer; None when it is not known before it, or does not fit.

    Layers that are not named here leave the shape as it is.
    """
    if shape is None:
        return None
    if isinstance(layer, Linear):
        return (*shape[:-1], layer.weight.shape[1])
    if isinstance(layer, Embedding):
        return (*shape, layer.weight.shape[1])
    if isinstance(layer, Flatten):
        return (prod(shape),)
    if isinstance(layer, Conv2d | MaxPool2d | AvgPool2d | GlobalAvgPool2d):
        return _image_after(layer, shape) if len(shape) == 3 else None
    return shape


def _image_after(layer: Conv2d | MaxPool2d | AvgPool2d | GlobalAvgPool2d, shape: Shape) -> Shape:
    height, width, channels = shape
    if isinstance(layer, GlobalAvgPool2d):
        return (channels,)
    if isinstance(layer, Conv2d):
        kernel, stride, padding, dilation = layer.weight.shape[:2], layer.stride, layer.padding, layer.dilation
        channels = layer.weight.shape[3]
    else:
        kernel, padding, dilation = pair("kernel", layer.kernel, 1), pair("padding", layer.padding, 0), (1, 1)
        stride = kernel if layer.stride is None else pair("stride", layer.stride, 1)
    return (
        out_size(height, kernel[0], stride[0], padding[0], dilation[0]),
        out_size(width, kernel[1], stride[1], padding[1], dilation[1]),
        channels,
    )
