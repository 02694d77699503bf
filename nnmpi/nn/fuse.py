"""Runs of layers that are computed as one operation.

    Linear, ReLU                  one GEMM and two passes in place          bit for bit the same as one by one
    Linear, GELU                  the same, in blocks that stay in cache    bit for bit the same
    Conv2d, ReLU                  the same                                  within rounding
    Conv2d, ReLU, MaxPool2d       bias and ReLU on what pooling left        within rounding

The layers stay what they are, with their names and parameters; only the calls are fewer. `nn.unfused()` runs them one
by one.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeGuard, TypeVar

from nnmpi.nn.activation import GELU, ReLU
from nnmpi.nn.conv import Conv2d, MaxPool2d
from nnmpi.nn.linear import Linear
from nnmpi.nn.module import Module
from nnmpi.ops.activation import linear_gelu
from nnmpi.ops.conv.conv2d import conv_relu, conv_relu_pool
from nnmpi.ops.linear import linear_relu
from nnmpi.tensor.tensor import Tensor

M = TypeVar("M", bound=Module)


class LinearRelu:
    """A linear layer and ReLU, as one call."""

    def __init__(self, linear: Linear) -> None:
        self._linear = linear

    def __call__(self, x: Tensor) -> Tensor:
        """Return max(x W + b, 0)."""
        return linear_relu(self._linear.enter(x), self._linear.weight, self._linear.bias)


class LinearGelu:
    """A linear layer and GELU, as one call."""

    def __init__(self, linear: Linear, gelu: GELU) -> None:
        self._linear, self._gelu = linear, gelu

    def __call__(self, x: Tensor) -> Tensor:
        """Return GELU(x W + b)."""
        return linear_gelu(self._linear.enter(x), self._linear.weight, self._linear.bias, self._gelu.approximate)


class ConvRelu:
    """A convolution, ReLU, and max-pooling where there is some, as one call."""

    def __init__(self, conv: Conv2d, pool: MaxPool2d | None) -> None:
        self._conv, self._pool = conv, pool

    def __call__(self, x: Tensor) -> Tensor:
        """Return max(conv(x), 0), pooled."""
        conv = self._conv
        x = conv.enter(x)
        settings = (conv.stride, conv.padding, conv.dilation, conv.groups)
        if self._pool is None:
            return conv_relu(x, conv.weight, conv.bias, *settings)
        return conv_relu_pool(x, conv.weight, conv.bias, *settings, pool=self._pool.over.kernel)


def fuse(layers: Sequence[Module]) -> list[Callable[..., Any]]:
    """Return the calls that compute these layers one after another: the layers, or one call for several of them.

    Only layers that compute as these classes do are put together: a subclass may have a forward of its own.
    """
    calls: list[Callable[..., Any]] = []
    i = 0
    while i < len(layers):
        layer, after = layers[i], [type(each) for each in layers[i + 1 : i + 3]]
        if _is(layer, Linear) and after[:1] == [ReLU]:
            calls.append(LinearRelu(layer))
            i += 2
        elif _is(layer, Linear) and i + 1 < len(layers) and type(gelu := layers[i + 1]) is GELU:
            calls.append(LinearGelu(layer, gelu))
            i += 2
        elif _is(layer, Conv2d) and after[:1] == [ReLU]:
            pool = layers[i + 2] if after == [ReLU, MaxPool2d] else None
            pool = pool if isinstance(pool, MaxPool2d) and _simple(pool) else None
            calls.append(ConvRelu(layer, pool))
            i += 2 if pool is None else 3
        else:
            calls.append(layer)
            i += 1
    return calls


def _is(layer: Module, kind: type[M]) -> TypeGuard[M]:
    """Return whether a layer is of this class, or of one that changes nothing but what comes before (`enter`)."""
    return isinstance(layer, kind) and type(layer).forward is kind.forward


def _simple(pool: MaxPool2d) -> bool:
    """Return whether the windows lie side by side, without a border."""
    return pool.over.stride == pool.over.kernel and pool.over.padding == (0, 0)
