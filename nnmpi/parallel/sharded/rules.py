"""Which rule says what takes a layer's place when a model is sharded, by the layer's type.

A rule is a function of the layer and its `Site`; it stands beside the sharded layers that it makes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

from nnmpi.nn.activation import GELU, Flatten, LeakyReLU, ReLU, Sigmoid, SiLU, Softmax, Tanh
from nnmpi.nn.conv import AvgPool2d, Conv2d, GlobalAvgPool2d, MaxPool2d
from nnmpi.nn.dropout import Dropout
from nnmpi.nn.linear import Embedding, Linear
from nnmpi.nn.module import Module
from nnmpi.nn.norm import BatchNorm, LayerNorm
from nnmpi.nn.sharding import Sharding
from nnmpi.parallel.sharded.batch_norm import place_batch_norm
from nnmpi.parallel.sharded.conv import place_conv
from nnmpi.parallel.sharded.dropout import place_dropout
from nnmpi.parallel.sharded.embedding import place_embedding
from nnmpi.parallel.sharded.layer_norm import place_layer_norm
from nnmpi.parallel.sharded.linear import place_linear
from nnmpi.parallel.sharded.placement import WHOLE, Placement, features
from nnmpi.parallel.sharded.plain import place_elementwise, place_flatten, place_softmax
from nnmpi.parallel.sharded.rows_pool import place_global_pool, place_pool
from nnmpi.parallel.sharded.site import Placed, Site

Rule: TypeAlias = Callable[[Any, Site], Placed]

RULES: Mapping[type[Module], Rule] = MappingProxyType(
    {
        **dict.fromkeys((ReLU, LeakyReLU, GELU, SiLU, Tanh, Sigmoid), place_elementwise),
        AvgPool2d: place_pool,
        BatchNorm: place_batch_norm,
        Conv2d: place_conv,
        Dropout: place_dropout,
        Embedding: place_embedding,
        Flatten: place_flatten,
        GlobalAvgPool2d: place_global_pool,
        LayerNorm: place_layer_norm,
        Linear: place_linear,
        MaxPool2d: place_pool,
        Softmax: place_softmax,
    }
)


def assumed_placement(layer: Module, sharding: Sharding) -> Placement:
    """Return how the input of a layer lies in a module whose forward nobody knows, by what the table says."""
    if sharding is Sharding.ROW and isinstance(layer, Linear):
        return features(layer.weight.shape[0])
    if sharding is Sharding.ROW and isinstance(layer, Conv2d):
        return features(layer.weight.shape[2] * layer.groups)
    if sharding is Sharding.COLUMN and isinstance(layer, BatchNorm | LayerNorm):
        return features(layer.weight.shape[-1])
    return WHOLE
