"""Elman's recurrent layers over sequences, one operation per layer.

    h = tanh(x W + h R + b)        or a ReLU instead of tanh

As in `ops.gru`, the products of all time steps with W are one product, and so are the gradients of
W and R.
"""

from typing import Any

import numpy as np

from nnmpi.backend.array import Array, empty, namespace
from nnmpi.backend.gemm import gemm, multiplier
from nnmpi.base.errors import UsageError
from nnmpi.ops.embedding import TokenRows, opened
from nnmpi.ops.lstm import InputRows, Packing, RecurrentFunction, States, check_shapes, steps
from nnmpi.tensor.dtypes import may_meet
from nnmpi.tensor.function import Grads
from nnmpi.tensor.operand import given, require_floating
from nnmpi.tensor.tensor import Tensor

__all__ = ["rnn"]


class RNNFunction(RecurrentFunction):
    """One layer: h over time, (batch, time, features).

    Args:
        rectifies: whether a step ends in a ReLU instead of tanh.
    """

    __slots__ = ("rectifies",)

    captured = True

    def __init__(self, rectifies: bool) -> None:
        self.rectifies = rectifies

    def forward(
        self, x: Array, weight: Array, recurrent: Array, bias: Array, h: Any, table: Any
    ) -> Array:
        xp, (batch, time), features = namespace(x), x.shape[:2], len(recurrent)
        packing = Packing((batch,) * time)
        inputs = InputRows.of(packing, x, table)
        products = empty(xp, (len(inputs.rows), features), weight.dtype)
        gemm(inputs.rows, weight, out=products)
        xp.add(products, bias, out=products)
        sums = inputs.pick(products)
        times = multiplier(recurrent)
        hidden = States.of(xp, packing, False, sums, (batch, features), h)
        scratch = empty(xp, (batch, features), sums.dtype)
        for here, n, earlier in steps(packing.sizes, False):
            times(hidden.before(earlier, n), scratch)
            y = xp.add(sums[here], scratch, out=hidden.after[here])
            if self.rectifies:
                xp.maximum(y, 0, out=y)
            else:
                xp.tanh(y, out=y)
        if True in self.needs:
            self.saved = (inputs, weight, recurrent, hidden)
        return packing.padded(hidden.after)

    def backward(self, grad: Array) -> Grads:
        inputs, weight, recurrent, hidden = self.saved
        (batch, time, _) = grad.shape
        packing = Packing((batch,) * time)
        to_h, to_sums = np.zeros_like(hidden.first), packing.pack(grad.copy())
        times = multiplier(recurrent.T)
        for here, _, _ in reversed(list(steps(packing.sizes, False))):
            y, slopes = hidden.after[here], to_sums[here]
            slopes += to_h
            slopes *= y > 0 if self.rectifies else 1 - y * y
            times(slopes, to_h)
        *first, to_table = self.first_grads(packing, inputs, hidden, weight, to_sums)
        return *first, to_h if self.needs[4] else None, to_table


def rnn(
    x: Tensor | TokenRows,
    weight: Tensor,
    recurrent: Tensor,
    bias: Tensor,
    state: Any = None,
    nonlinearity: str = "tanh",
) -> Tensor:
    """Return h over time of a recurrent layer (Elman, "Finding structure in time", 1990).

    Args:
        x: (batch, time, in); or `TokenRows`, if they `are_many`.
        weight: (in, features).
        recurrent: (features, features).
        bias: (features,).
        state: the first h, (batch, features); None for 0.
        nonlinearity: "tanh" or "relu".

    Returns:
        (batch, time, features).

    Raises:
        ShapeError: when the shapes do not fit.
        DtypeError: when the dtypes differ.
        UsageError: for another nonlinearity.
    """
    if nonlinearity not in ("tanh", "relu"):
        raise UsageError(f"nonlinearity is 'tanh' or 'relu', not {nonlinearity!r}")
    parameters = weight, recurrent, bias
    values, table, rows = opened(x)
    arrays = *parameters, *given(state)
    may_meet("rnn", require_floating("rnn", rows), *arrays)
    n = recurrent.shape[0]
    expected = (x.shape[-1], n), (n, n), (n,), (x.shape[0], n)
    check_shapes("rnn", x, arrays, *expected)
    return RNNFunction(nonlinearity == "relu")(values, *parameters, state, table)
