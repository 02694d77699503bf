"""GRU layers over sequences, with backpropagation through time, one operation per layer.

    r, z = sigmoid(x W + h R + b)
    n = tanh(x W_n + b_n + r * (h R_n + bias_n))
    h = n + z * (h - n)

As in `ops.lstm`, the products of all time steps with W are one product, and so are the gradients of
W and R. On a device a step is a product and a kernel, each way.
"""

from typing import Any

from nnmpi.backend.array import Array, empty, namespace
from nnmpi.backend.gemm import multiplier
from nnmpi.backend.kernels import bias_grad, kernels_of
from nnmpi.ops.embedding import TokenRows, opened
from nnmpi.ops.linear import place_for
from nnmpi.ops.lstm import InputRows, Packing, RecurrentFunction, States, check_shapes, steps
from nnmpi.tensor.dtypes import may_meet
from nnmpi.tensor.function import Grads
from nnmpi.tensor.operand import given, require_floating
from nnmpi.tensor.tensor import Tensor

__all__ = ["gru"]


class GRUFunction(RecurrentFunction):
    """One layer: h over time, (batch, time, features)."""

    __slots__ = ()

    captured = True

    def forward(
        self,
        x: Array,
        weight: Array,
        recurrent: Array,
        bias: Array,
        bias_n: Array,
        h: Any,
        table: Any,
    ) -> Array:
        xp, (batch, time), features = namespace(x), x.shape[:2], len(recurrent)
        packing = Packing((batch,) * time)
        inputs = InputRows.of(packing, x, table)
        kernels = kernels_of(weight)
        weights = weight, recurrent, bias, 2 * features
        products, factor, shift = kernels.recurrent_gates(inputs.rows, *weights)
        gates = inputs.pick(products)
        bias_n = xp.ascontiguousarray(bias_n)
        times = multiplier(factor)
        hidden = States.of(xp, packing, False, gates, (batch, features), h)
        inner = empty(xp, hidden.after.shape, gates.dtype)
        scratch = empty(xp, (batch, 3 * features), gates.dtype)
        for here, n, earlier in steps(packing.sizes, False):
            before = hidden.before(earlier, n)
            times(before, scratch)
            after = bias_n, inner[here], before, hidden.after[here]
            kernels.gru_step(gates[here], scratch, shift, *after)
        if True in self.needs:
            self.saved = (inputs, weight, recurrent, gates, inner, hidden, kernels)
        return packing.padded(hidden.after)

    def backward(self, grad: Array) -> Grads:
        inputs, weight, recurrent, gates, inner, hidden, kernels = self.saved
        xp, (batch, time, features) = namespace(grad), grad.shape
        packing = Packing((batch,) * time)
        to_hidden, to_h = packing.pack(grad), xp.zeros_like(hidden.first)
        # the gradients of x W + b and of h R, which differ in n's columns
        to_gates, to_product = (empty(xp, gates.shape, gates.dtype) for _ in range(2))
        times = multiplier(recurrent.T)
        for here, n, earlier in reversed(list(steps(packing.sizes, False))):
            before, product = hidden.before(earlier, n), to_product[here]
            after = inner[here], before, to_hidden[here], to_h
            kernels.gru_step_grad(gates[here], to_gates[here], product, *after)
            times(product, to_h, True)
        to_inner = None
        rest = hidden, weight, to_gates, to_product
        *first, to_table = self.first_grads(packing, inputs, *rest)
        if self.needs[4]:
            to_inner = place_for(self, 4, (features,), grad.dtype)
            bias_grad(to_product[:, 2 * features :], to_inner)
        return *first, to_inner, to_h if self.needs[5] else None, to_table


def gru(
    x: Tensor | TokenRows,
    weight: Tensor,
    recurrent: Tensor,
    bias: Tensor,
    bias_n: Tensor,
    state: Any = None,
) -> Tensor:
    """Return h over time of a GRU layer (Cho et al., 2014), in the form of cuDNN and PyTorch.

    Mixed precision computes in float32, a device's products in tf32.

    Args:
        x: (batch, time, in); or `TokenRows`, if they `are_many`.
        weight: (in, 3 features), the gates r, z, n side by side.
        recurrent: (features, 3 features).
        bias: (3 features,).
        bias_n: (features,), added to the product of n's gate before r multiplies it.
        state: the first h, (batch, features); None for 0.

    Returns:
        (batch, time, features).

    Raises:
        ShapeError: when the shapes do not fit.
        DtypeError: when the dtypes differ.
    """
    parameters = weight, recurrent, bias, bias_n
    values, table, rows = opened(x)
    arrays = *parameters, *given(state)
    may_meet("gru", require_floating("gru", rows), *arrays)
    n = recurrent.shape[0]
    expected = (x.shape[-1], 3 * n), (n, 3 * n), (3 * n,), (n,), (x.shape[0], n)
    check_shapes("gru", x, arrays, *expected)
    return GRUFunction()(values, *parameters, state, table)
