"""LSTM layers over sequences, with backpropagation through time, one operation per layer.

    x (batch, time, in)  --the running sequences of each time step-->  packed (rows, in)
        gates = packed W + b                  one product for all steps
        gates += h R, then the gates          step by step

The gates, c and h of all steps are saved. Backward computes the gates' gradients step by step, and
then one product for each weight: products of a step's few rows would run at half the speed.

Rows are packed by time step, the longest sequences first, so that the running sequences are always
the first rows of a state:

    time      0         1         2       3        sizes (3, 3, 2, 1)
    packed  | a b c   | a b c   | a b   | a |      forward goes to the right, `reverse` to the left:
                                                   b then begins at time 2, with its initial state

    i, f, o = sigmoid        g = tanh        of x W + h R + b
    c = f c + i g            h = o tanh(c)

(Hochreiter and Schmidhuber, 1997; the forget gate is by Gers et al., 2000.)

The gates lie side by side in the order i, f, o, g. A sigmoid is (1 + tanh(x / 2)) / 2, so one tanh
computes all four. The weights of i, f and o are halved once for all steps, which is exact. The tanh
is saved instead of the sigmoids: a step then has a third fewer calls of NumPy, and takes 43 us
forward instead of 88, and 60 us backward instead of 109 (32 rows of 256 features).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from nnmpi.backend.array import Array, Shape, empty, namespace
from nnmpi.backend.gemm import gemm, multiplier
from nnmpi.backend.kernels import bias_grad, kernels_for
from nnmpi.base.errors import DtypeError, ShapeError
from nnmpi.ops.linear import place_for
from nnmpi.tensor.function import Function, Grads
from nnmpi.tensor.operand import in_float32, may_meet, require_floating
from nnmpi.tensor.tensor import Tensor


@dataclass(frozen=True)
class Packing:
    """The real rows of a padded batch, and their packed order.

    Attributes:
        sizes: the number of running sequences at each time step.
        order: (batch,), the sequences, the longest first; None if all have the same length, and no
            row moves.
        rows, times: (packed rows,), the sequence and time step of each; None likewise.
    """

    sizes: tuple[int, ...]
    order: Array | None = None
    rows: Array | None = None
    times: Array | None = None

    @classmethod
    def of(cls, batch: int, time: int, lengths: Any, xp: Any) -> Packing:
        """Return the packing of a batch.

        Args:
            batch, time: of the padded sequences.
            lengths: (batch,), integers on the host; None if no sequence is padded.
            xp: the arrays' module.
        """
        if lengths is None:
            return cls((batch,) * time)
        order = np.argsort(-lengths, kind="stable")
        running = lengths[order] > np.arange(time)[:, None]  # (time, batch)
        times, places = np.nonzero(running)
        sizes = tuple(int(n) for n in running.sum(1))
        return cls(sizes, xp.asarray(order), xp.asarray(order[places]), xp.asarray(times))

    def pack(self, xp: Any, x: Array) -> Array:
        """Return the real rows, (packed rows, n), of (batch, time, n)."""
        if self.rows is not None:
            return x[self.rows, self.times]
        batch, time, n = x.shape
        return xp.ascontiguousarray(x.swapaxes(0, 1)).reshape(batch * time, n)

    def unpack(self, rows: Array, into: Array) -> None:
        """Write packed rows to (time, batch, n), and 0 to the padding."""
        if self.rows is None:
            into[...] = rows.reshape(into.shape)
        else:
            into[...] = 0
            into[self.times, self.rows] = rows

    def sort(self, state: Array) -> Array:
        """Return (batch, n) in the order of the packed rows, as a new array."""
        return state.copy() if self.order is None else state[self.order]

    def unsort(self, state: Array) -> Array:
        """Return the inverse of `sort`."""
        if self.order is None:
            return state
        result = namespace(state).empty_like(state)
        result[self.order] = state
        return result


class LSTMFunction(Function):
    """One layer in one direction: (batch, time + 2, features), h over time, the last h, the last c.

    Args:
        reverse: whether to go from the last time step to the first.
        ends: whether to append the last h and c; otherwise the result is (batch, time, features).
    """

    __slots__ = ("ends", "reverse")

    captured = True

    def __init__(self, reverse: bool, ends: bool) -> None:
        self.reverse, self.ends = reverse, ends

    def forward(
        self,
        x: Array,
        weight: Array,
        recurrent: Array,
        bias: Array,
        h: Any,
        c: Any,
        lengths: Any = None,
    ) -> Array:
        xp, (batch, time), features = namespace(x), x.shape[:2], len(recurrent)
        packing = Packing.of(batch, time, lengths, xp)
        zeros = xp.zeros((batch, features), x.dtype)
        first_h, first_c = (zeros if state is None else packing.sort(state) for state in (h, c))
        rows, halved = packing.pack(xp, x), _halves(xp, recurrent)
        gates = empty(xp, (len(rows), 4 * features), x.dtype)
        gemm(xp, rows, xp.multiply(weight, halved), out=gates)
        xp.add(gates, xp.multiply(bias, halved), out=gates)
        times = multiplier(xp, xp.multiply(recurrent, halved))
        h, c = first_h.copy(), first_c.copy()
        hidden, cells = (empty(xp, (len(gates), features), c.dtype) for _ in range(2))
        scratch = empty(xp, (batch, 4 * features), c.dtype)
        for here, n, _ in steps(packing.sizes, self.reverse):
            product, new_c, new_h = scratch[:n], cells[here], hidden[here]
            times(h[:n], product)
            _step(xp, gates[here], product, c[:n], new_c, new_h)
            h[:n], c[:n] = new_h, new_c
        if True in self.needs:
            self.saved = (packing, rows, weight, recurrent, gates, hidden, cells, first_h, first_c)
        if packing.rows is None and not self.ends:
            return hidden.reshape(time, batch, features).swapaxes(0, 1)
        y = xp.empty((time + 2 * self.ends, batch, features), x.dtype)
        packing.unpack(hidden, y[:time])
        if self.ends:
            y[time], y[time + 1] = packing.unsort(h), packing.unsort(c)
        return y.swapaxes(0, 1)

    def backward(self, grad: Array) -> Grads:
        packing, rows, weight, recurrent, gates, hidden, cells, first_h, first_c = self.saved
        xp, time = namespace(grad), len(packing.sizes)
        # the gradients of the last h and c; step by step they become those of the initial state
        ends = [
            packing.sort(grad[:, time + i]) if self.ends else xp.zeros_like(first_c) for i in (0, 1)
        ]
        to_h, to_c = ends
        to_hidden = packing.pack(xp, grad[:, :time])
        to_gates, before_h = (empty(xp, like.shape, like.dtype) for like in (gates, hidden))
        times = multiplier(xp, recurrent.T)
        for here, n, earlier in reversed(list(steps(packing.sizes, self.reverse))):
            slopes, last_c = to_gates[here], _before(xp, first_c, cells, earlier, n)
            if self.needs[2]:
                before_h[here] = _before(xp, first_h, hidden, earlier, n)
            _step_grad(
                xp, gates[here], slopes, to_h[:n], to_hidden[here], cells[here], last_c, to_c[:n]
            )
            times(slopes, to_h[:n])
        to_x = to_bias = None
        if self.needs[0]:
            to_x = xp.empty((time, grad.shape[0], weight.shape[0]), grad.dtype)
            packing.unpack(gemm(xp, to_gates, weight.T), to_x)
            to_x = to_x.swapaxes(0, 1)
        to_weight, to_recurrent = (  # written into the parameter's gradient if there is one
            gemm(xp, left.T, to_gates, *self.sum_into(i)) if self.needs[i] else None
            for i, left in ((1, rows), (2, before_h))
        )
        if self.needs[3]:
            to_bias = place_for(self, 3, to_gates.shape[1:], grad.dtype)
            bias_grad(xp, to_gates, to_bias)
        first = (
            packing.unsort(end) if need else None
            for end, need in zip(ends, self.needs[4:6], strict=True)
        )
        return to_x, to_weight, to_recurrent, to_bias, *first, None


def _halves(xp: Any, recurrent: Array) -> Array:
    """Return (4 features,), 1/2 for the columns of the sigmoids and 1 for those of the tanh."""
    factors = np.full(recurrent.shape[1], 0.5, recurrent.dtype)
    factors[3 * len(recurrent) :] = 1
    return xp.asarray(factors)


def _step(xp: Any, g: Array, product: Array, c: Array, new_c: Array, new_h: Array) -> None:
    """Compute a step's gates and state after its product.

    Args:
        xp: the arrays' module.
        g: (n, 4 features), x W + b; overwritten by the tanh of the gates.
        product: (n, 4 features), h R.
        c: (n, features), before the step.
        new_c, new_h: (n, features), out.
    """
    kernels = kernels_for(g, "lstm_step")
    if kernels is not None:
        kernels.lstm_step(g, product, c, new_c, new_h)
        return
    i, f, o, candidate = _four(g)
    xp.tanh(xp.add(g, product, out=g), out=g)
    xp.multiply(xp.add(i, 1, out=new_h), candidate, out=new_h)
    xp.multiply(xp.add(f, 1, out=new_c), c, out=new_c)
    xp.multiply(xp.add(new_c, new_h, out=new_c), 0.5, out=new_c)
    t = xp.tanh(new_c)
    xp.multiply(xp.multiply(xp.add(o, 1, out=new_h), t, out=new_h), 0.5, out=new_h)


def _step_grad(
    xp: Any, g: Array, slopes: Array, h: Array, grad: Array, cell: Array, last_c: Array, c: Array
) -> None:
    """Compute the gradients of a step's gates, before its product.

    Args:
        xp: the arrays' module.
        g: (n, 4 features), the tanh of the gates.
        slopes: (n, 4 features), out: the gradient of the tanh's arguments.
        h, grad: (n, features), the two parts of the gradient of h; h may be overwritten.
        cell, last_c: (n, features), c after and before the step.
        c: (n, features), the gradient of c after the step; overwritten by the one before it.
    """
    kernels = kernels_for(g, "lstm_step_grad")
    if kernels is not None:
        kernels.lstm_step_grad(g, slopes, h, grad, cell, last_c, c)
        return
    (i, f, o, candidate), (to_i, to_f, to_o, to_g) = _four(g), _four(slopes)
    xp.subtract(1, xp.multiply(g, g, out=slopes), out=slopes)  # 4 times a sigmoid's slope
    xp.multiply(xp.add(h, grad, out=h), 0.25, out=h)
    t = xp.tanh(cell)
    part = xp.multiply(h, t)
    xp.multiply(to_o, part, out=to_o)
    xp.subtract(1, xp.multiply(t, t, out=t), out=t)
    xp.multiply(xp.multiply(t, h, out=t), xp.add(o, 1, out=part), out=t)
    xp.add(xp.multiply(c, 0.5, out=c), t, out=c)  # half of the gradient of c
    xp.multiply(to_g, xp.multiply(c, xp.add(i, 1, out=part), out=part), out=to_g)
    xp.multiply(c, 0.5, out=t)
    for to_gate, factor in ((to_i, candidate), (to_f, last_c)):
        xp.multiply(to_gate, xp.multiply(t, factor, out=part), out=to_gate)
    xp.multiply(c, xp.add(f, 1, out=part), out=c)


def steps(sizes: Sequence[int], reverse: bool) -> Iterator[tuple[slice, int, slice]]:
    """Yield each time step's packed rows, their number, and the previous step's rows, in order.

    The running sequences of the previous step come first; the others begin here.
    """
    ends, earlier = list(accumulate(sizes)), slice(0, 0)
    for time in reversed(range(len(sizes))) if reverse else range(len(sizes)):
        n = sizes[time]
        here = slice(ends[time] - n, ends[time])
        yield here, n, slice(earlier.start, earlier.start + min(n, earlier.stop - earlier.start))
        earlier = here


def _before(xp: Any, first: Array, rows: Array, earlier: slice, n: int) -> Array:
    """Return the state before a step: the previous step's; the initial one for new sequences.

    Args:
        xp: the arrays' module.
        first: (batch, features), the initial state.
        rows: (packed rows, features), the state after each step.
        earlier: the previous step's rows, see `steps`.
        n: the step's number of sequences.
    """
    running = earlier.stop - earlier.start
    return rows[earlier] if running == n else xp.concatenate((rows[earlier], first[running:n]))


def _four(gates: Array) -> tuple[Array, Array, Array, Array]:
    n = gates.shape[1] // 4
    return gates[:, :n], gates[:, n : 2 * n], gates[:, 2 * n : 3 * n], gates[:, 3 * n :]


def lstm(
    x: Tensor,
    weight: Tensor,
    recurrent: Tensor,
    bias: Tensor,
    state: tuple[Any, Any] | None = None,
    lengths: Any = None,
    reverse: bool = False,
    ends: bool = False,
) -> Tensor:
    """Return h over time of an LSTM layer (Hochreiter and Schmidhuber, 1997).

    Padding is not read, and h is 0 there: a sequence has the same result with or without padding,
    alone or in a batch. Mixed precision computes in float32.

    Args:
        x: (batch, time, in).
        weight: (in, 4 features), the gates i, f, o, g side by side.
        recurrent: (features, 4 features).
        bias: (4 features,).
        state: the first h and c, (batch, features) each; None for 0.
        lengths: (batch,), integers from 1 to time; None if no sequence is padded.
        reverse: whether to read each sequence from its end.
        ends: whether to append the last h and c.

    Returns:
        (batch, time, features), or with `ends` (batch, time + 2, features): h over time, the last
        h, the last c.

    Raises:
        ShapeError: when the shapes do not fit, or a length is not within 1..time.
        DtypeError: when the dtypes differ, or the lengths are no integers.
    """
    may_meet("lstm", require_floating("lstm", x), weight, recurrent, bias, *state or ())
    features = recurrent.shape[0]
    expected = ((x.shape[-1], 4 * features), (features, 4 * features), (4 * features,))
    if x.ndim != 3 or (weight.shape, recurrent.shape, bias.shape) != expected:
        raise ShapeError(
            f"lstm of x {x.shape}, weight {weight.shape}, recurrent {recurrent.shape} and bias"
            f" {bias.shape} needs (batch, time, in), (in, 4 features), (features, 4 features) and"
            " (4 features,)"
        )
    for item in state or ():
        if tuple(item.shape) != (x.shape[0], features):
            raise ShapeError(
                f"lstm's state needs two of shape {(x.shape[0], features)}, not {tuple(item.shape)}"
            )
    inputs = x, weight, recurrent, bias, *(state or (None, None))
    return in_float32(LSTMFunction(reverse, ends), *inputs, _checked(lengths, x.shape))


def _checked(lengths: Any, shape: Shape) -> Array | None:
    """Return lengths as a host array. Same errors as `lstm`."""
    if lengths is None:
        return None
    values = np.asarray(lengths.numpy() if isinstance(lengths, Tensor) else lengths)
    if values.dtype.kind not in "iu":
        raise DtypeError(f"lstm needs integer lengths, not {values.dtype}")
    if values.shape != shape[:1]:
        raise ShapeError(f"lstm of x {shape} needs {shape[0]} lengths, not {values.shape}")
    wrong = (values < 1) | (values > shape[1])
    if wrong.any():
        row = int(wrong.argmax())
        raise ShapeError(
            f"lstm's length {int(values[row])} of sequence {row} is outside 1..{shape[1]}"
        )
    return values.astype(np.int64)
