"""Functional operations on tensors; arithmetic, shapes and indexing are in `nnmpi.tensor`."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from nnmpi.base.words import missing_from
from nnmpi.ops.activation import (
    gelu,
    leaky_relu,
    log_softmax,
    relu,
    sigmoid,
    silu,
    softmax,
    tanh,
)
from nnmpi.ops.attention import attention, scaled_dot_product_attention
from nnmpi.ops.conv.conv2d import conv2d, conv_relu, conv_relu_pool
from nnmpi.ops.conv.conv3d import conv3d
from nnmpi.ops.conv.transposed import conv_transpose2d
from nnmpi.ops.dropout import dropout
from nnmpi.ops.embedding import embedding
from nnmpi.ops.gru import gru
from nnmpi.ops.linear import linear, linear_gelu, linear_relu, linear_transposed
from nnmpi.ops.loss import (
    binary_cross_entropy,
    binary_nll,
    cross_entropy,
    huber,
    kl_div,
    mae,
    mse,
    nll,
)
from nnmpi.ops.lstm import lstm
from nnmpi.ops.norm import batch_norm, group_norm, layer_norm, rms_norm
from nnmpi.ops.pool import avg_pool2d, max_pool2d
from nnmpi.ops.rnn import rnn
from nnmpi.ops.soft import elu, softplus

if TYPE_CHECKING:
    from nnmpi.ops.collectives import all_gather, all_reduce, all_to_all, reduce_scatter

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "attention",
    "avg_pool2d",
    "batch_norm",
    "binary_cross_entropy",
    "binary_nll",
    "conv2d",
    "conv3d",
    "conv_relu",
    "conv_relu_pool",
    "conv_transpose2d",
    "cross_entropy",
    "dropout",
    "elu",
    "embedding",
    "gelu",
    "group_norm",
    "gru",
    "huber",
    "kl_div",
    "layer_norm",
    "leaky_relu",
    "linear",
    "linear_gelu",
    "linear_relu",
    "linear_transposed",
    "log_softmax",
    "lstm",
    "mae",
    "max_pool2d",
    "mse",
    "nll",
    "reduce_scatter",
    "relu",
    "rms_norm",
    "rnn",
    "scaled_dot_product_attention",
    "sigmoid",
    "silu",
    "softmax",
    "softplus",
    "tanh",
]


# Imported on first use: it imports `nnmpi.comm`, a seventh of an engine's import time.
_OF_RANKS = "nnmpi.ops.collectives"


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module(_OF_RANKS), name)
    return missing_from(__name__, name)
