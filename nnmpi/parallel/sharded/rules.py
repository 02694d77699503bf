"""Which rule says what takes a layer's place when a model is sharded, by the layer's type.

A rule is a function of the layer and its `LayerContext`; it stands beside the sharded layers that it makes.
"""

from collections.abc import Callable, Mapping
from math import prod
from types import MappingProxyType
from typing import Any, TypeAlias

from nnmpi.backend.windows import out_size
from nnmpi.nn.activation import GELU, Dropout, Flatten, LeakyReLU, ReLU, Sigmoid, SiLU, Softmax, Tanh
from nnmpi.nn.container import Branches
from nnmpi.nn.conv import AvgPool2d, Conv2d, GlobalAvgPool2d, MaxPool2d, Pool2d
from nnmpi.nn.linear import Embedding, Linear, TiedLinear
from nnmpi.nn.lstm import LSTM
from nnmpi.nn.module import Module
from nnmpi.nn.norm import BatchNorm, LayerNorm
from nnmpi.nn.sharding import Sharding, Units
from nnmpi.parallel.sharded.branches import place_branches
from nnmpi.parallel.sharded.context import LayerContext, Placed, divided
from nnmpi.parallel.sharded.conv import place_conv, place_global_pool, place_pool
from nnmpi.parallel.sharded.elementwise import place_dropout, place_elementwise, place_flatten, place_softmax
from nnmpi.parallel.sharded.embedding import place_embedding
from nnmpi.parallel.sharded.linear import place_linear, place_tied_linear
from nnmpi.parallel.sharded.norm import place_batch_norm, place_layer_norm
from nnmpi.tensor.placement import REPLICATED, Placement, features

Rule: TypeAlias = Callable[[Any, LayerContext], Placed]


def place_lstm(layer: LSTM, context: LayerContext) -> Placed:
    """Return the layer as it is, on whole sequences: each step needs all of h."""
    if context.sharding not in (None, Sharding.REPLICATED):
        raise context.refuse("is an LSTM, each step of which needs all of h; choose Sharding.REPLICATED")
    return context.on_replicated(layer, layer.layers[0].weight.shape[0])


RULES: Mapping[type[Module], Rule] = MappingProxyType(
    {
        **dict.fromkeys((ReLU, LeakyReLU, GELU, SiLU, Tanh, Sigmoid), place_elementwise),
        AvgPool2d: place_pool,
        BatchNorm: place_batch_norm,
        Branches: place_branches,
        Conv2d: place_conv,
        Dropout: place_dropout,
        Embedding: place_embedding,
        Flatten: place_flatten,
        GlobalAvgPool2d: place_global_pool,
        LSTM: place_lstm,
        LayerNorm: place_layer_norm,
        Linear: place_linear,
        MaxPool2d: place_pool,
        Softmax: place_softmax,
        TiedLinear: place_tied_linear,
    }
)


def assumed_placement(layer: Module, sharding: Sharding, units: Units | None = None) -> Placement:
    """Return the placement of a layer's input in a custom module, whose forward is unknown, as its sharding implies."""
    if sharding is Sharding.ROW and isinstance(layer, Linear):
        return divided(layer.weight.shape[0], units)
    if sharding is Sharding.ROW and isinstance(layer, Conv2d):
        return features(layer.weight.shape[2] * layer.groups)
    if sharding is Sharding.COLUMN and isinstance(layer, BatchNorm):
        return features(layer.weight.shape[-1])
    return REPLICATED


Shape: TypeAlias = tuple[int, ...]


def shape_after(layer: Module, shape: Shape | None) -> Shape | None:
    """Return a sample's shape after a layer; None when it is not known before it, or does not fit.

    Layers that are not named here leave the shape as it is.
    """
    if shape is None or isinstance(layer, Branches):
        return None
    if isinstance(layer, Linear):
        return (*shape[:-1], layer.weight.shape[1])
    if isinstance(layer, LSTM):
        return (*shape[:-1], layer.directions * layer.hidden_size)
    if isinstance(layer, TiedLinear):
        return (*shape[:-1], layer.weight.shape[0])
    if isinstance(layer, Embedding):
        return (*shape, layer.weight.shape[1])
    if isinstance(layer, Flatten):
        return (prod(shape),)
    if isinstance(layer, Conv2d | Pool2d | GlobalAvgPool2d):
        return _image_after(layer, shape) if len(shape) == 3 else None
    return shape


def _image_after(layer: Conv2d | Pool2d | GlobalAvgPool2d, shape: Shape) -> Shape:
    height, width, channels = shape
    if isinstance(layer, GlobalAvgPool2d):
        return (channels,)
    if isinstance(layer, Conv2d):
        kernel, stride, padding, dilation = layer.weight.shape[:2], layer.stride, layer.padding, layer.dilation
        channels = layer.weight.shape[3]
    else:
        (kernel, stride, padding), dilation = layer.over, (1, 1)
    return (
        out_size(height, kernel[0], stride[0], padding[0], dilation[0]),
        out_size(width, kernel[1], stride[1], padding[1], dilation[1]),
        channels,
    )
