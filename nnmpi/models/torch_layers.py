"""The arrays of each layer in PyTorch: names, layouts, and the conversions there and back.

Where images lie behind a linear layer, `torch_order` tells.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, TypeAlias

import numpy as np

from nnmpi.backend.array import Array, Shape
from nnmpi.nn.conv import Conv1d, Conv2d, Conv3d, ConvTranspose2d
from nnmpi.nn.linear import Linear
from nnmpi.nn.module import Module
from nnmpi.nn.norm import BatchNorm, LayerNorm
from nnmpi.nn.recurrent import (
    GRU,
    LSTM,
    GRUCell,
    GRULayer,
    LSTMCell,
    LSTMDirection,
    RNNCell,
)
from nnmpi.nn.transformer import MultiheadAttention

Write: TypeAlias = Callable[[Array], tuple[Array, ...]]
Read: TypeAlias = Callable[..., Array]


class Conversion(NamedTuple):
    """An array in PyTorch's layout, and back.

    Attributes:
        write: converts to PyTorch's arrays, one or more.
        read: converts PyTorch's arrays back.
    """

    write: Write
    read: Read


@dataclass(frozen=True)
class NamedWeight:
    """An array of a model, and its conversion to PyTorch and back.

    Attributes:
        name: in nnmpi.
        theirs: the names in PyTorch, of one or more arrays.
        conversion: writes one array per name, and reads them.
    """

    name: str
    theirs: tuple[str, ...]
    conversion: Conversion

    def inside(self, path: str) -> "NamedWeight":
        """Return it with the names that it has in a model; its own are relative to this module."""
        if not path:
            return self
        theirs = tuple(f"{path}.{name}" for name in self.theirs)
        return replace(self, name=f"{path}.{self.name}", theirs=theirs)


SAME = Conversion(lambda x: (x,), lambda x: x)
TRANSPOSED = Conversion(lambda x: (x.T,), lambda x: x.T)
# (1, kernel, in, out) <-> (out, in, kernel)
CONV_1D = Conversion(lambda x: (x[0].transpose(2, 1, 0),), lambda x: x.transpose(2, 1, 0)[None])
# (*kernel, in, out) <-> (out, in, *kernel)
CONV = Conversion(
    lambda x: (x.transpose(-1, -2, *range(x.ndim - 2)),),
    lambda x: x.transpose(*range(2, x.ndim), 1, 0),
)
# (..., channels) <-> (channels, ...)
CHANNELS_FIRST = Conversion(
    lambda x: (np.moveaxis(x, -1, 0),),
    lambda x: np.moveaxis(x, 0, -1),
)
# PyTorch counts batches beside the running variance
VARIANCE = Conversion(lambda x: (x, np.zeros((), np.int64)), lambda x: x)


def layer_weights(module: Module, image: Shape | None = None) -> Iterator[NamedWeight]:
    """Yield a module's arrays that PyTorch names or lays out differently.

    Args:
        module: its own arrays, not those of modules within, but a recurrent layer's.
        image: the shape of the images that it reads flattened, see `torch_order`; None for none.
    """
    if isinstance(module, Linear):
        conversion = TRANSPOSED if image is None else flattened(image)
        yield NamedWeight("weight", ("weight",), conversion)
    elif isinstance(module, Conv1d):
        yield NamedWeight("weight", ("weight",), CONV_1D)
    elif isinstance(module, Conv2d | ConvTranspose2d | Conv3d):
        yield NamedWeight("weight", ("weight",), CONV)
    elif isinstance(module, LayerNorm) and (module.weight.ndim > 2 or image):
        for name in ("weight", "bias"):
            yield NamedWeight(name, (name,), CHANNELS_FIRST)
    elif isinstance(module, BatchNorm):
        yield NamedWeight("running_variance", ("running_var", "num_batches_tracked"), VARIANCE)
    elif isinstance(module, MultiheadAttention):
        for ours, theirs in (("qkv", "in_proj_"), ("proj", "out_proj.")):
            yield NamedWeight(f"{ours}.weight", (f"{theirs}weight",), TRANSPOSED)
            yield NamedWeight(f"{ours}.bias", (f"{theirs}bias",), SAME)
    elif isinstance(module, GRU | LSTM):
        yield from _stacked_weights(module)
    elif isinstance(module, GRUCell | LSTMCell | RNNCell):
        yield from _recurrent_weights(module)


def flattened(image: Shape) -> Conversion:
    """Return the conversion of a linear layer's weight whose inputs are flattened images.

    Its rows are in the order of (..., channels); PyTorch's columns in that of (channels, ...).

    Args:
        image: (..., channels).
    """
    return Conversion(partial(_to_columns, image), partial(_to_rows, image))


def _to_columns(image: Shape, weight: Array) -> tuple[Array, ...]:
    outputs = weight.shape[1]
    axes = (-1, -2, *range(len(image) - 1))
    return (weight.reshape(*image, outputs).transpose(axes).reshape(outputs, -1),)


def _to_rows(image: Shape, weight: Array) -> Array:
    *sides, channels = image
    outputs, inputs = weight.shape
    axes = (*range(2, len(image) + 1), 1, 0)
    return weight.reshape(outputs, channels, *sides).transpose(axes).reshape(inputs, outputs)


def _stacked_weights(module: GRU | LSTM) -> Iterator[NamedWeight]:
    """Yield the arrays of recurrent layers, which PyTorch numbers in their names."""
    directions = getattr(module, "directions", 1)
    for number, inner in enumerate(module.layers):
        layer, reverse = divmod(number, directions)
        end = f"_l{layer}_reverse" if reverse else f"_l{layer}"
        for item in _recurrent_weights(inner):
            theirs = tuple(name + end for name in item.theirs)
            yield replace(item, name=f"layers.{number}.{item.name}", theirs=theirs)


def _recurrent_weights(layer: Module) -> Iterator[NamedWeight]:
    """Yield the arrays of a recurrent layer in one direction, or of a cell."""
    is_lstm, is_gru = isinstance(layer, LSTMDirection), isinstance(layer, GRULayer)
    weight = GATES_TRANSPOSED if is_lstm else TRANSPOSED
    yield NamedWeight("weight", ("weight_ih",), weight)
    yield NamedWeight("recurrent", ("weight_hh",), weight)
    if is_gru:
        yield NamedWeight("bias", ("bias_ih", "bias_hh"), GRU_BIAS)
        yield NamedWeight("bias_n", ("bias_hh",), GRU_BIAS_N)
    else:
        yield NamedWeight("bias", ("bias_ih", "bias_hh"), GATES_BIAS if is_lstm else TWO_BIASES)


def _exchanged(x: Array) -> Array:
    """Exchange the last two gates of rows (4 * features, ...): i f o g <-> i f g o."""
    i, f, o, g = np.split(x, 4)
    return np.concatenate((i, f, g, o))


def _first_gates(ih: Array, hh: Array) -> Array:
    """Return a GRU's bias: the sum of PyTorch's two for r and z.

    For n they differ, since r multiplies the second one alone (`bias_n`).
    """
    return ih + np.where(np.arange(len(hh)) < 2 * len(hh) // 3, hh, 0)


GATES_TRANSPOSED = Conversion(lambda x: (_exchanged(x.T),), lambda x: _exchanged(x).T)
# PyTorch adds two biases; nnmpi's is written as the first of them
TWO_BIASES = Conversion(lambda x: (x, np.zeros_like(x)), lambda ih, hh: ih + hh)
GATES_BIAS = Conversion(
    lambda x: (_exchanged(x), np.zeros_like(x)),
    lambda ih, hh: _exchanged(ih + hh),
)
GRU_BIAS = Conversion(lambda x: (x, np.zeros_like(x)), _first_gates)
# of the three gates the last one
GRU_BIAS_N = Conversion(lambda x: (np.r_[x * 0, x * 0, x],), lambda hh: hh[2 * len(hh) // 3 :])
