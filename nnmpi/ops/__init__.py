"""Functional operations on tensors. The basic ones (arithmetic, shapes, indexing ...) are in `nnmpi.tensor`."""

from nnmpi.ops.activation import gelu, leaky_relu, relu, sigmoid, silu, tanh
from nnmpi.ops.conv import conv2d
from nnmpi.ops.dropout import dropout
from nnmpi.ops.embedding import embedding
from nnmpi.ops.linear import linear
from nnmpi.ops.loss import binary_cross_entropy, cross_entropy, mse
from nnmpi.ops.norm import batch_norm, layer_norm
from nnmpi.ops.pool import avg_pool2d, max_pool2d
from nnmpi.ops.softmax import log_softmax, softmax

__all__ = [
    "avg_pool2d",
    "batch_norm",
    "binary_cross_entropy",
    "conv2d",
    "cross_entropy",
    "dropout",
    "embedding",
    "gelu",
    "layer_norm",
    "leaky_relu",
    "linear",
    "log_softmax",
    "max_pool2d",
    "mse",
    "relu",
    "sigmoid",
    "silu",
    "softmax",
    "tanh",
]
