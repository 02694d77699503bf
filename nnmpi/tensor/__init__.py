"""Automatic differentiation: Tensor, Function, the tape, flat storage, and the gradient check.

To read, in this order: tape (how gradients travel back), function (what an operation is), tensor (what users hold),
then any operation: elementwise, arithmetic, reduce, matmul, shape, index. parameter and flat say where a model's values
lie, variable what of a tensor the tape knows, operand what may stand beside what, convert how half precision is raised,
recorded how an operation runs while a step is recorded. placement and cut: what a rank's part of a tensor is, and what
may be done with it; not needed to understand the rest.

To add an operation: a `Function` with forward and backward and a function that calls it, here or in `ops`; `check`
compares its gradient with differences.
"""

from nnmpi.tensor.arithmetic import maximum, minimum, where
from nnmpi.tensor.check import GradientError, check_gradients
from nnmpi.tensor.cut import whole
from nnmpi.tensor.elementwise import absolute, astype, clip, cos, exp, log, sin, sqrt, tanh
from nnmpi.tensor.flat import FlatStorage, Span
from nnmpi.tensor.function import Function, enable_grad, no_grad, recording
from nnmpi.tensor.index import getitem, take_along_axis
from nnmpi.tensor.matmul import matmul
from nnmpi.tensor.parameter import Parameter
from nnmpi.tensor.reduce import largest, mean, smallest, total, variance
from nnmpi.tensor.shape import (
    broadcast_to,
    concatenate,
    expand_dims,
    flatten,
    flip,
    pad,
    reshape,
    squeeze,
    stack,
    swapaxes,
    transpose,
)
from nnmpi.tensor.tensor import Tensor

__all__ = [
    "FlatStorage",
    "Function",
    "GradientError",
    "Parameter",
    "Span",
    "Tensor",
    "absolute",
    "astype",
    "broadcast_to",
    "check_gradients",
    "clip",
    "concatenate",
    "cos",
    "enable_grad",
    "exp",
    "expand_dims",
    "flatten",
    "flip",
    "getitem",
    "largest",
    "log",
    "matmul",
    "maximum",
    "mean",
    "minimum",
    "no_grad",
    "pad",
    "recording",
    "reshape",
    "sin",
    "smallest",
    "sqrt",
    "squeeze",
    "stack",
    "swapaxes",
    "take_along_axis",
    "tanh",
    "total",
    "transpose",
    "variance",
    "where",
    "whole",
]
