"""Automatic differentiation: Tensor, Function, the tape, flat storage, and the gradient check.

To read, in this order: function (what a graph is made of), backward (how gradients travel back),
elementwise, reduce and shape (the operations and their derivatives), tensor (what users hold: each
operation is a method), parameter (where a model's values lie). operand says what may stand beside
what, and how half precision is raised; recorded how an operation runs while a step is recorded.
placement and cut: what a rank's part of a tensor is, and what may be done with it; not needed to
understand the rest.

To add an operation: a `Function` with forward and backward and a method or function that calls it,
here or in `ops`; `check` compares its gradient with differences.
"""

from nnmpi.tensor.check import GradientError, check_gradients
from nnmpi.tensor.cut import whole
from nnmpi.tensor.function import Function, enable_grad, no_grad, recording
from nnmpi.tensor.parameter import FlatStorage, Parameter, Span
from nnmpi.tensor.tensor import Tensor, concatenate, maximum, minimum, stack, where

__all__ = [
    "FlatStorage",
    "Function",
    "GradientError",
    "Parameter",
    "Span",
    "Tensor",
    "check_gradients",
    "concatenate",
    "enable_grad",
    "maximum",
    "minimum",
    "no_grad",
    "recording",
    "stack",
    "where",
    "whole",
]
