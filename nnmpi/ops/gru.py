"""GRU layers over sequences, with backpropagation through time, one operation per layer.

    r, z = sigmoid(x W + h R + b)
    n = tanh(x W_n + b_n + r * (h R_n + bias_n))
    h = n + z * (h - n)

As in `ops.lstm`, the products of all time steps with W are one product, and so are the gradients of
W and R. On a device a step is a product and a kernel, each way.
"""

from functools import partial
from typing import Any

from nnmpi.backend.array import Array, empty, namespace
from nnmpi.backend.gemm import gemm, multiplier
from nnmpi.backend.kernels import bias_grad, kernels_for
from nnmpi.base.errors import ShapeError
from nnmpi.ops.linear import place_for
from nnmpi.ops.lstm import Packing, States, steps
from nnmpi.tensor.function import Function, Grads
from nnmpi.tensor.operand import given, in_float32, may_meet, require_floating
from nnmpi.tensor.tensor import Tensor


class GRUFunction(Function):
    """One layer: h over time, (batch, time, features)."""

    __slots__ = ()

    is_call = captured = True

    def forward(
        self, x: Array, weight: Array, recurrent: Array, bias: Array, bias_n: Array, h: Any
    ) -> Array:
        xp, (batch, time), features = namespace(x), x.shape[:2], len(recurrent)
        packing = Packing((batch,) * time)
        rows = packing.pack(xp, x)
        gates = empty(xp, (len(rows), 3 * features), x.dtype)
        gemm(xp, rows, weight, out=gates)
        kernels, shift = kernels_for(gates, "gru_step"), xp.ascontiguousarray(bias)
        bias_n = xp.ascontiguousarray(bias_n)
        if kernels is None:
            xp.add(gates, shift, out=gates)
        times = multiplier(xp, recurrent)
        hidden = States.of(xp, packing, False, gates, (batch, features), h)
        inner = empty(xp, hidden.after.shape, x.dtype)
        scratch = empty(xp, (batch, 3 * features), x.dtype)
        for here, n, earlier in steps(packing.sizes, False):
            before = hidden.before(xp, earlier, n)
            times(before, scratch)
            after = bias_n, inner[here], before, hidden.after[here]
            if kernels is None:
                _step(xp, gates[here], scratch, *after)
            else:
                kernels.gru_step(gates[here], scratch, shift, *after)
        if True in self.needs:
            self.saved = (rows, weight, recurrent, gates, inner, hidden)
        return hidden.after.reshape(time, batch, features).swapaxes(0, 1)

    def backward(self, grad: Array) -> Grads:
        rows, weight, recurrent, gates, inner, hidden = self.saved
        xp, (batch, time, features) = namespace(grad), grad.shape
        packing = Packing((batch,) * time)
        to_hidden, to_h = packing.pack(xp, grad), xp.zeros_like(hidden.first)
        # the gradients of x W + b and of h R, which differ in n's columns
        to_gates, to_product = (empty(xp, gates.shape, gates.dtype) for _ in range(2))
        kernels = kernels_for(gates, "gru_step_grad")
        step = partial(_step_grad, xp) if kernels is None else kernels.gru_step_grad
        for here, n, earlier in reversed(list(steps(packing.sizes, False))):
            before, product = hidden.before(xp, earlier, n), to_product[here]
            step(gates[here], to_gates[here], product, inner[here], before, to_hidden[here], to_h)
            gemm(xp, product, recurrent.T, to_h, True)
        to_x = to_bias = to_inner = None
        if self.needs[0]:
            to_x = gemm(xp, to_gates, weight.T).reshape(time, batch, len(weight)).swapaxes(0, 1)
        to_weight, to_recurrent = (
            gemm(xp, left.T, right, *self.sum_into(i)) if self.needs[i] else None
            for i, left, right in ((1, rows, to_gates), (2, hidden.all_before(xp), to_product))
        )
        if self.needs[3]:
            to_bias = place_for(self, 3, to_gates.shape[1:], grad.dtype)
            bias_grad(xp, to_gates, to_bias)
        if self.needs[4]:
            to_inner = place_for(self, 4, (features,), grad.dtype)
            bias_grad(xp, to_product[:, 2 * features :], to_inner)
        return to_x, to_weight, to_recurrent, to_bias, to_inner, to_h if self.needs[5] else None


def _step(
    xp: Any, g: Array, product: Array, bias_n: Array, inner: Array, h: Array, new_h: Array
) -> None:
    """Compute a step's gates and state after its product.

    Args:
        xp: the arrays' module.
        g: (n, 3 features), x W + b; overwritten by the gates r, z, n.
        product: (n, 3 features), h R.
        bias_n: (features,).
        inner: (n, features), out: h R_n + bias_n.
        h, new_h: (n, features), before the step, and out: after it.
    """
    (r, z, new), (more_r, more_z, more) = (xp.split(item, 3, axis=1) for item in (g, product))
    for gate, argument in ((r, r + more_r), (z, z + more_z)):
        gate[...] = 0.5 + 0.5 * xp.tanh(0.5 * argument)  # a sigmoid
    inner[...] = more + bias_n
    new[...] = xp.tanh(new + r * inner)
    new_h[...] = new + z * (h - new)


def _step_grad(
    xp: Any,
    g: Array,
    to_gates: Array,
    to_product: Array,
    inner: Array,
    h: Array,
    grad: Array,
    to_h: Array,
) -> None:
    """Compute the gradients of a step, before its product.

    Args:
        xp: the arrays' module.
        g: (n, 3 features), the gates r, z, n.
        to_gates, to_product: (n, 3 features), out: the gradients of x W + b and of h R.
        inner, h: (n, features), h R_n + bias_n, and h before the step.
        grad: (n, features), the gradient of the step's result.
        to_h: (n, features), the gradient of h from later steps; overwritten by that of h before the
            step, without what the product adds.
    """
    r, z, new = xp.split(g, 3, axis=1)
    total = to_h + grad
    to_new = total * (1 - z) * (1 - new * new)
    to_r, to_z = to_new * inner * r * (1 - r), total * (h - new) * z * (1 - z)
    for target, last in ((to_gates, to_new), (to_product, to_new * r)):
        for part, value in zip(xp.split(target, 3, axis=1), (to_r, to_z, last), strict=True):
            part[...] = value
    to_h[...] = total * z


def gru(
    x: Tensor,
    weight: Tensor,
    recurrent: Tensor,
    bias: Tensor,
    bias_n: Tensor,
    state: Any = None,
) -> Tensor:
    """Return h over time of a GRU layer (Cho et al., 2014), in the form of cuDNN and PyTorch.

    Mixed precision computes in float32, a device's products in tf32.

    Args:
        x: (batch, time, in).
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
    may_meet("gru", require_floating("gru", x), *parameters, *given(state))
    n, shapes = recurrent.shape[0], [tuple(item.shape) for item in (*parameters, *given(state))]
    expected = [(x.shape[-1], 3 * n), (n, 3 * n), (3 * n,), (n,), (x.shape[0], n)]
    if x.ndim != 3 or shapes != expected[: len(shapes)]:
        words = ", ".join(map(str, shapes))
        raise ShapeError(
            f"gru of x {x.shape} and {words} needs (batch, time, in), (in, 3 features), (features,"
            " 3 features), (3 features,), (features,) and a state (batch, features)"
        )
    return in_float32(GRUFunction(), x, *parameters, state)
