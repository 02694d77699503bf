"""Long short-term memory over sequences, backward through time included, as one operation for each layer.

    x (batch, time, in) --rows of a time together, running ones alone--> packed (rows, in)
        gates = packed W + b                  one product for all steps
        gates += h R, then the gates          step by step, see `backend.kernels.recurrent`

Of all steps the gates, c and h are kept. Backward goes through the steps for the gates' gradients, and then takes one
product for each weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from nnmpi.backend.array import Array, namespace
from nnmpi.backend.gemm import gemm
from nnmpi.backend.kernels.base import Kernels
from nnmpi.backend.kernels.lookup import kernels_for
from nnmpi.backend.kernels.recurrent import carry, steps
from nnmpi.errors import DtypeError, ShapeError
from nnmpi.tensor.convert import in_float32
from nnmpi.tensor.function import Function
from nnmpi.tensor.operand import may_meet, require_floating
from nnmpi.tensor.tensor import Tensor


@dataclass(frozen=True)
class Packing:
    """Which rows of a padded batch are real, and in which order they lie packed.

    Attributes:
        sizes: how many sequences run at each time.
        order: (batch,), the sequences, the longest first; None where all are equally long, and nothing moves.
        rows, times: (packed rows,), where each comes from; None likewise.
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
            lengths: (batch,), integers on the host; None where all are whole.
            xp: the module of the arrays.
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
        rows: Array
        if self.rows is None:
            rows = xp.ascontiguousarray(x.swapaxes(0, 1)).reshape(x.shape[0] * x.shape[1], x.shape[2])
        else:
            rows = x[self.rows, self.times]
        return rows

    def unpack(self, rows: Array, into: Array) -> None:
        """Write packed rows to their places in (time, batch, n), and 0 to all others."""
        if self.rows is None:
            into[...] = rows.reshape(into.shape)
        else:
            into[...] = 0
            into[self.times, self.rows] = rows

    def sort(self, state: Array) -> Array:
        """Return (batch, n) in the order of the packed rows, as a new array."""
        taken: Array = state.copy() if self.order is None else state[self.order]
        return taken

    def unsort(self, state: Array) -> Array:
        """Return the inverse of `sort`."""
        if self.order is None:
            return state
        result: Array = namespace(state).empty_like(state)
        result[self.order] = state
        return result


class LSTMFunction(Function):
    """One layer in one direction: (batch, time + 2, features), h of each time, then the last h and the last c.

    Args:
        reverse: whether time runs backwards.
        ends: whether the last two are wanted; otherwise (batch, time, features).
        kernels: those for x.
    """

    __slots__ = ("ends", "kernels", "reverse")

    def __init__(self, reverse: bool, ends: bool, kernels: Kernels) -> None:
        self.reverse, self.ends, self.kernels = reverse, ends, kernels

    def forward(
        self, x: Array, weight: Array, recurrent: Array, bias: Array, h: Any, c: Any, lengths: Any = None
    ) -> Array:
        xp = namespace(x)
        batch, time = x.shape[:2]
        features = recurrent.shape[0]
        packing = Packing.of(batch, time, lengths, xp)
        zeros = xp.zeros((batch, features), x.dtype)
        first_h, first_c = (zeros if state is None else packing.sort(state) for state in (h, c))
        rows = packing.pack(xp, x)
        gates = gemm(xp, rows, weight)
        self.kernels.bias_add(xp, gates, bias)
        last_h, last_c = first_h.copy(), first_c.copy()
        hidden, cells = self.kernels.lstm(xp, gates, recurrent, last_h, last_c, packing.sizes, self.reverse)
        if True in self.needs:
            self.saved = (packing, rows, weight, recurrent, gates, hidden, cells, first_h, first_c)
        if packing.rows is None and not self.ends:
            return hidden.reshape(time, batch, features).swapaxes(0, 1)
        y: Array = xp.empty((time + 2 * self.ends, batch, features), x.dtype)
        packing.unpack(hidden, y[:time])
        if self.ends:
            y[time], y[time + 1] = packing.unsort(last_h), packing.unsort(last_c)
        return y.swapaxes(0, 1)

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        packing, rows, weight, recurrent, gates, hidden, cells, first_h, first_c = self.saved
        xp, time = namespace(grad), len(packing.sizes)
        ends = [packing.sort(grad[:, time + i]) if self.ends else xp.zeros_like(first_c) for i in (0, 1)]
        to_hidden = packing.pack(xp, grad[:, :time])
        sizes, reverse = packing.sizes, self.reverse
        to_gates = self.kernels.lstm_grad(
            xp, to_hidden, (ends[0], ends[1]), gates, cells, first_c, recurrent, sizes, reverse
        )
        to_x = to_recurrent = to_bias = None
        if self.needs[0]:
            to_x = xp.empty((time, grad.shape[0], weight.shape[0]), grad.dtype)
            packing.unpack(gemm(xp, to_gates, weight.T), to_x)
            to_x = to_x.swapaxes(0, 1)
        to_weight = self._product(xp, 1, rows, to_gates) if self.needs[1] else None
        if self.needs[2]:
            before = xp.empty_like(hidden)
            for here, _, earlier in steps(sizes, reverse):
                carry(before[here], first_h, hidden, earlier)
            to_recurrent = self._product(xp, 2, before, to_gates)
        if self.needs[3]:
            place = self.into(3)
            to_bias = xp.empty(to_gates.shape[1:], grad.dtype) if place is None else place
            self.kernels.bias_grad(xp, to_gates, to_bias)
        to_h, to_c = (packing.unsort(end) if need else None for end, need in zip(ends, self.needs[4:6], strict=True))
        return to_x, to_weight, to_recurrent, to_bias, to_h, to_c, None

    def _product(self, xp: Any, i: int, rows: Array, to_gates: Array) -> Array:
        """Return rows^T to_gates, the gradient of input i, computed where it belongs, if that place is known."""
        place, add = self.sum_into(i)
        return gemm(xp, rows.T, to_gates, out=place, add=add)


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
    """Return h of each time of a layer of long short-term memory (Hochreiter and Schmidhuber, 1997).

    What lies behind a sequence's length is not read, and h is 0 there: with or without padding, alone or in a batch, a
    sequence has the same result. In mixed precision it is computed in float32.

    Args:
        x: (batch, time, in).
        weight: (in, 4 features), the gates i, f, o, g side by side.
        recurrent: (features, 4 features).
        bias: (4 features,).
        state: the first h and c, (batch, features) each; None for 0.
        lengths: (batch,), integers from 1 to time; None where all sequences are whole.
        reverse: whether to read each sequence from its end.
        ends: whether the last h and c are added to the result.

    Returns:
        (batch, time, features), or with `ends` (batch, time + 2, features), of which the last two are the last h and c.

    Raises:
        ShapeError: when the shapes do not fit, or a length is not within 1..time.
        DtypeError: when the dtypes differ, or the lengths are no integers.
    """
    features = recurrent.shape[0]
    wanted = ((x.shape[-1], 4 * features), (features, 4 * features), (4 * features,))
    if x.ndim != 3 or (weight.shape, recurrent.shape, bias.shape) != wanted:
        raise ShapeError(
            f"lstm of x {x.shape}, weight {weight.shape}, recurrent {recurrent.shape} and bias {bias.shape} needs "
            "(batch, time, in), (in, 4 features), (features, 4 features) and (4 features,)"
        )
    h, c = (None, None) if state is None else state
    for each in state or ():
        if tuple(each.shape) != (x.shape[0], features):
            raise ShapeError(f"lstm's state needs two of shape {(x.shape[0], features)}, not {tuple(each.shape)}")
    may_meet("lstm", x, weight, recurrent, bias, h, c)
    kernels = kernels_for(require_floating("lstm", x).data)
    function = LSTMFunction(reverse, ends, kernels)
    return in_float32(function, x, weight, recurrent, bias, h, c, _checked(lengths, x.shape))


def _checked(lengths: Any, shape: tuple[int, ...]) -> Array | None:
    """Return lengths as an array on the host. Errors are those of `lstm`."""
    if lengths is None:
        return None
    values = np.asarray(lengths.numpy() if isinstance(lengths, Tensor) else lengths)
    if values.dtype.kind not in "iu":
        raise DtypeError(f"lstm needs integer lengths, not {values.dtype}")
    if values.shape != shape[:1]:
        raise ShapeError(f"lstm of x {shape} needs {shape[0]} lengths, not {values.shape}")
    wrong = (values < 1) | (values > shape[1])
    if wrong.any():
        place = int(wrong.argmax())
        raise ShapeError(f"lstm's length {int(values[place])} of sequence {place} is outside 1..{shape[1]}")
    return values.astype(np.int64)
