"""Automatic differentiation: Tensor, Function, the tape, flat storage, and the gradient check.

Reading order:

    function                     the nodes of a graph, the tape, recording one operation for replay
    backward                     the walk back along the tape
    elementwise, reduce, shape   the operations and their derivatives
    traits                       what the exporter, PyTorch's weights and the tests know of them
    dtypes, operand              which dtypes and shapes may meet, and what a product reads
    tensor                       the public class: each operation is a method
    einsum                       products and sums by the names of axes
    parameter                    a model's parameters as views into flat arrays
    turns                        ranks agree on operations of a backward pass that need them all
    placement, sharded           sharded tensors; the rest does not depend on them

To add an operation, write a `Function` with forward, backward and `traits`, here or in `ops`, and a
method or function that calls it. `check` compares its gradient with finite differences.
"""

from sys import modules
from types import ModuleType
from typing import Any, NoReturn

from nnmpi.base.words import instead, offer
from nnmpi.tensor.check import GradientError, check_gradients
from nnmpi.tensor.einsum import einsum
from nnmpi.tensor.function import Function, enable_grad, grad_enabled, no_grad
from nnmpi.tensor.parameter import FlatStorage, Parameter, Span
from nnmpi.tensor.sharded import gather_shards
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
    "einsum",
    "enable_grad",
    "gather_shards",
    "grad_enabled",
    "maximum",
    "minimum",
    "no_grad",
    "stack",
    "where",
]


class _Package(ModuleType):
    """The package, which PyTorch's users call."""

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError(f"the package nnmpi.tensor is not callable{instead('tensor')}")


modules[__name__].__class__ = _Package

offer(__name__)
