"""Recurrent layers over sequences, with backpropagation through time, one operation per layer.

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
computes all four. The host halves the weights of i, f and o once for all steps, which is exact, and
saves the tanh instead of the sigmoids: NumPy's steps then have a third fewer calls.

On a device a step is a product and a kernel, each way. The states lie beside the initial one (see
`States`), so that a step reads the one before it in place.

A GRU's and Elman's layers are computed in the same way:

    r, z = sigmoid(x W + h R + b)                         h = tanh(x W + h R + b)
    n = tanh(x W_n + b_n + r * (h R_n + bias_n))              or a ReLU instead of tanh
    h = n + z * (h - n)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from nnmpi.backend.array import Array, Dtype, Shape, empty, is_array, namespace
from nnmpi.backend.gemm import gemm, multiplier, rounded_once
from nnmpi.backend.kernels import bias_grad, copy, kernels_of
from nnmpi.backend.precision import rounds_products
from nnmpi.base.errors import DtypeError, ShapeError, UsageError
from nnmpi.ops.embedding import TokenRows, opened
from nnmpi.ops.linear import place_for
from nnmpi.tensor.dtypes import may_meet
from nnmpi.tensor.function import Function, Grads
from nnmpi.tensor.operand import given, require_floating, values_or_refuse
from nnmpi.tensor.tensor import Tensor
from nnmpi.tensor.traits import WRITTEN, Channels, Sample, Traits

__all__ = ["gru", "lstm", "rnn"]


def _products(f: Function, y: Array, x: Array, weight: Array, recurrent: Array, *_: Any) -> int:
    """See `Traits.products`."""
    return x.shape[0] * x.shape[1] * (weight.size + recurrent.size)


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

    def pack(self, x: Array) -> Array:
        """Return the real rows, (packed rows, ...), of (batch, time, ...)."""
        if self.rows is not None:
            return x[self.rows, self.times]
        x = x.swapaxes(0, 1)
        if not x.flags.c_contiguous:
            rows = empty(namespace(x), x.shape, x.dtype)
            copy(rows, x)
            x = rows
        return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])

    def unpack(self, rows: Array, into: Array) -> None:
        """Write packed rows to (time, batch, n), and 0 to the padding."""
        if self.rows is None:
            into[...] = rows.reshape(into.shape)
        else:
            into[...] = 0
            into[self.times, self.rows] = rows

    def padded(self, rows: Array) -> Array:
        """Return packed rows as (batch, time, n), a view if no sequence is padded."""
        shape = len(self.sizes), self.sizes[0], rows.shape[1]
        if self.rows is None:
            return rows.reshape(shape).swapaxes(0, 1)
        result = np.empty(shape, rows.dtype, like=rows)
        self.unpack(rows, result)
        return result.swapaxes(0, 1)

    def sort(self, state: Array) -> Array:
        """Return (batch, n) in the order of the packed rows, as a new array."""
        return state.copy() if self.order is None else state[self.order]

    def unsort(self, state: Array) -> Array:
        """Return the inverse of `sort`."""
        if self.order is None:
            return state
        result = np.empty_like(state)
        result[self.order] = state
        return result


class InputRows(NamedTuple):
    """What a layer's weight multiplies for all time steps.

    Of tokens this is the table of their embedding, which has fewer rows than the batch has tokens:

        x                     x W                       dx = d W^T            dW = x^T d
        rows of a table T     rows of T W               dT = s W^T            dW = T^T s

    s has for each entry the sum of d over its rows, as one product.

    Attributes:
        rows: (packed rows, in) or (entries, in).
        picks: (packed rows,), each row's entry; None if the rows are those of x.
    """

    rows: Array
    picks: Array | None

    @classmethod
    def of(cls, packing: Packing, x: Array, table: Any) -> InputRows:
        """Return x (batch, time, in), or a table's rows at x (batch, time)."""
        rows = packing.pack(x)
        return cls(rows, None) if table is None else cls(table, rows)

    def pick(self, products: Array) -> Array:
        """Return the products of x, given those of `rows`."""
        return products if self.picks is None else products[self.picks]

    def sums(self, grad: Array) -> Array:
        """Return the gradient of the products of `rows`, given that of x's."""
        if self.picks is None:
            return grad
        xp = namespace(grad)
        is_entry = xp.zeros((len(self.rows), len(grad)), grad.dtype)
        is_entry[self.picks, xp.arange(len(grad))] = 1
        return gemm(is_entry, grad)


class States(NamedTuple):
    """A state before and after every step, in one array: the initial one beside the packed rows.

        forward    | initial | after step 0 | after step 1 | ...
        reverse    | after step 0 | ... | after the last step | initial |

    Attributes:
        packing: of the batch.
        reverse: whether the last time step is the first.
        after: (packed rows, features), the states after each step.
        first: (batch, features), the initial state, in the packed rows' order.
        shifted: (packed rows, features), the states before each step, if no sequence is padded.
        end: (batch, features), the last state, likewise or if it goes in reverse.
    """

    packing: Packing
    reverse: bool
    after: Array
    first: Array
    shifted: Array
    end: Array

    @classmethod
    def of(
        cls, xp: Any, packing: Packing, reverse: bool, like: Array, shape: Shape, initial: Any
    ) -> States:
        """Return states of which only the first is known.

        Args:
            xp: the arrays' module.
            like: (packed rows, any), for the dtype.
            shape: (batch, features), of one state.
            initial: the first state; None for 0.
        """
        (batch, features), count = shape, len(like)
        memory = empty(xp, (batch + count, features), like.dtype)
        early, late, head, tail = memory[:count], memory[count:], memory[:batch], memory[batch:]
        parts = (early, late, tail, head) if reverse else (tail, head, early, late)
        states = cls(packing, reverse, *parts)
        if initial is None:
            states.first.fill(0)
        else:
            copy(states.first, initial if packing.order is None else initial[packing.order])
        return states

    def before(self, earlier: slice, n: int) -> Array:
        """Return the state before a step: the previous step's; the initial one for new sequences.

        Args:
            earlier: the previous step's rows, see `steps`.
            n: the step's number of sequences.
        """
        running = earlier.stop - earlier.start
        if running == n:
            return self.after[earlier]
        new = self.first[running:n]
        return np.concatenate((self.after[earlier], new)) if running else new

    def all_before(self) -> Array:
        """Return the states before all steps, (packed rows, features)."""
        packing = self.packing
        if packing.rows is None:
            return self.shifted
        result = np.empty_like(self.after)
        for here, n, earlier in steps(packing.sizes, self.reverse):
            result[here] = self.before(earlier, n)
        return result

    def last(self) -> Array:
        """Return the state after each sequence's last step, (batch, features), in its order."""
        packing, stop = self.packing, 0
        if packing.rows is None or self.reverse:
            return packing.unsort(self.end)
        result = np.empty_like(self.first)
        for n, later in zip(packing.sizes, (*packing.sizes[1:], 0), strict=True):
            stop += n
            if later < n:
                result[later:n] = self.after[stop - n + later : stop]
        return packing.unsort(result)


def checked_inputs(
    name: str, x: Any, arrays: Sequence[Any], gates: int, vectors: int = 0, states: int = 1
) -> tuple[Any, Any]:
    """Return x's values, and the table that they pick from; None without one.

    Args:
        arrays: W (in, gates features), R (features, gates features), b (gates features,), more
            vectors (features,), and the states (batch, features) if they are given.

    Raises:
        ShapeError: with all shapes, for an x without three axes, or other shapes of the arrays.
        DtypeError: when the dtypes differ.
    """
    values, table, rows = opened(x)
    may_meet(name, require_floating(name, rows), *arrays)
    n = arrays[1].shape[0]
    expected = [(x.shape[-1], gates * n), (n, gates * n), (gates * n,), *[(n,)] * vectors]
    expected += [(x.shape[0], n)] * states
    shapes = [tuple(item.shape) for item in arrays]
    if x.ndim != 3 or shapes != expected[: len(shapes)]:
        given, needed = (", ".join(map(str, item)) for item in (shapes, expected))
        raise ShapeError(
            f"{name} of x {x.shape} has parameters and a state of shapes {given}; give x (batch,"
            f" time, in), and with a recurrent of {n} features {needed}"
        )
    return values, table


class RecurrentFunction(Function):
    """A layer in one direction.

    Its inputs begin with x, W, R and b, and end with a table or None.
    """

    __slots__ = ()

    computes = "float32"
    is_call = True
    captured = True

    def raised(self, inputs: tuple[Any, ...]) -> tuple[tuple[Any, ...], Dtype | None]:
        """See `Function.raised`; note the precision, which replays of the call may not find."""
        self.rounds = rounds_products(inputs[1]._data)
        return super().raised(inputs)

    def begin(
        self,
        packing: Packing,
        x: Array,
        table: Any,
        sigmoids: int,
        weight: Array,
        recurrent: Array,
        bias: Array,
    ) -> tuple[InputRows, Any, Array, Callable[..., Any], Array]:
        """Return the rows that W multiplies, kernels, x W, the product with R, and b.

        Args:
            sigmoids: the first columns, of the gates that are sigmoids: sums and results are
                halved, exactly, since a sigmoid is (1 + tanh(x / 2)) / 2.
        """
        xp, kernels, gates = namespace(weight), kernels_of(weight), weight.shape[1]
        if self.rounds:  # never of a table, see `TokenRows.are_many`
            x = rounded_once(x, x.size * gates)
        inputs = InputRows.of(packing, x, table)
        if sigmoids and not kernels.of_device:  # whose steps halve
            halves = xp.ones(len(bias), weight.dtype)
            halves[:sigmoids] = 0.5
            weight, recurrent, bias = (w * halves for w in (weight, recurrent, bias))
        products = empty(xp, (len(inputs.rows), gates), weight.dtype)
        gemm(inputs.rows, weight, products, rounds=self.rounds)
        bias = xp.ascontiguousarray(bias)
        return inputs, kernels, inputs.pick(products), self.times(recurrent), bias

    def times(self, recurrent: Array) -> Callable[..., Any]:
        """Return the function that multiplies states, or their gradients, step by step."""
        return multiplier(recurrent, self.rounds)

    def first_grads(
        self,
        packing: Packing,
        inputs: InputRows,
        hidden: States,
        weight: Array,
        to_gates: Array,
        to_product: Array | None = None,
    ) -> Grads:
        """Return the gradients of x, W, R and b, and the table's, where they are needed.

        Args:
            to_gates: (packed rows, gates), the gradient of x W + b.
            to_product: that of h R, if it is another.
        """
        to_x = to_bias = to_table = None
        sums = inputs.sums(to_gates)
        right = to_gates if to_product is None else to_product
        if self.needs[3]:
            to_bias = place_for(self, 3, sums.shape[1:], sums.dtype)
            bias_grad(sums, to_bias)
        if self.rounds:  # for all of its products
            is_same, features = right is sums, hidden.after.shape[1]
            sums = rounded_once(sums, sums.size * min(len(weight), features))
            right = sums if is_same else right
        if self.needs[-1]:
            to_table = gemm(sums, weight.T, *self.sum_into(-1), rounds=self.rounds)
        if self.needs[0]:
            to_x = packing.padded(gemm(sums, weight.T, rounds=self.rounds))
        to_weight, to_recurrent = (  # written into the parameter's gradient if there is one
            gemm(left.T, grad, *self.sum_into(i), rounds=self.rounds) if self.needs[i] else None
            for i, left, grad in ((1, inputs.rows, sums), (2, hidden.all_before(), right))
        )
        return to_x, to_weight, to_recurrent, to_bias, to_table


class LSTMFunction(RecurrentFunction):
    """One layer in one direction: (batch, time + 2, features), h over time, the last h, the last c.

    Args:
        reverse: whether to go from the last time step to the first.
        ends: whether to append the last h and c; otherwise the result is (batch, time, features).
        padded: whether the input before the last is the sequences' lengths, (batch,); else None.
    """

    __slots__ = ("ends", "padded", "reverse")

    traits = Traits(
        onnx=WRITTEN,
        channels=Channels.LAST,
        products=_products,
        samples=(
            Sample(
                "lstm",
                lambda *given: lstm(*given),
                ((3, 4, 2), (2, 12), (3, 12), (12,)),
                parameters=3,
            ),
        ),
    )

    def __init__(self, reverse: bool, ends: bool, padded: bool) -> None:
        self.reverse, self.ends, self.padded = reverse, ends, padded

    @property
    def captured(self) -> bool:  # type: ignore[override]
        """Whether nothing is copied from the host, as the packed order is."""
        return not self.padded

    def forward(
        self,
        x: Array,
        weight: Array,
        recurrent: Array,
        bias: Array,
        h: Any,
        c: Any,
        lengths: Any,
        table: Any,
    ) -> Array:
        xp, (batch, time), features = namespace(x), x.shape[:2], len(recurrent)
        # here, since a replay has others
        packing = Packing.of(batch, time, _checked(lengths, time), xp)
        given = packing, x, table, 3 * features, weight, recurrent, bias
        inputs, kernels, gates, times, shift = self.begin(*given)
        states = packing, self.reverse, gates, (batch, features)
        hidden, cells = (States.of(xp, *states, initial) for initial in (h, c))
        scratch = empty(xp, (batch, 4 * features), gates.dtype)
        for here, n, earlier in steps(packing.sizes, self.reverse):
            times(hidden.before(earlier, n), scratch[:n])
            last_c, new = cells.before(earlier, n), (cells.after[here], hidden.after[here])
            kernels.lstm_step(gates[here], scratch[:n], shift, last_c, *new)
        if True in self.needs:
            self.saved = (packing, inputs, weight, recurrent, gates, hidden, cells, kernels)
        if packing.rows is None and not self.ends:
            return packing.padded(hidden.after)
        y = xp.empty((time + 2 * self.ends, batch, features), gates.dtype)
        packing.unpack(hidden.after, y[:time])
        if self.ends:
            y[time], y[time + 1] = hidden.last(), cells.last()
        return y.swapaxes(0, 1)

    def backward(self, grad: Array) -> Grads:
        packing, inputs, weight, recurrent, gates, hidden, cells, kernels = self.saved
        xp, time = namespace(grad), len(packing.sizes)
        # the gradients of the last h and c; step by step they become those of the initial state
        ends = [
            packing.sort(grad[:, time + i]) if self.ends else xp.zeros_like(cells.first)
            for i in (0, 1)
        ]
        to_h, to_c = ends
        to_hidden = packing.pack(grad[:, :time])
        to_gates = empty(xp, gates.shape, gates.dtype)
        times = self.times(recurrent.T)
        for here, n, earlier in reversed(list(steps(packing.sizes, self.reverse))):
            slopes, last_c = to_gates[here], cells.before(earlier, n)
            states = cells.after[here], last_c, to_c[:n]
            kernels.lstm_step_grad(gates[here], slopes, to_h[:n], to_hidden[here], *states)
            times(slopes, to_h[:n])
        *first, to_table = self.first_grads(packing, inputs, hidden, weight, to_gates)
        last = (
            packing.unsort(end) if need else None
            for end, need in zip(ends, self.needs[4:6], strict=True)
        )
        return *first, *last, None, to_table


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


def lstm(
    x: Tensor | TokenRows,
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
    alone or in a batch. Mixed precision computes in float32, a device's products in tf32.

    Args:
        x: (batch, time, in); or `TokenRows`, if they `are_many`.
        weight: (in, 4 features), the gates i, f, o, g side by side.
        recurrent: (features, 4 features).
        bias: (4 features,).
        state: the first h and c, (batch, features) each; None for 0.
        lengths: (batch,), integers from 1 to time; None if no sequence is padded. A compiled step
            gets them as an argument, and each replay those of its call.
        reverse: whether to read each sequence from its end.
        ends: whether to append the last h and c.

    Returns:
        (batch, time, features), or with `ends` (batch, time + 2, features): h over time, the last
        h, the last c.

    Raises:
        ShapeError: when the shapes do not fit, or a length is not within 1..time.
        DtypeError: when the dtypes differ, or the lengths are no integers.
    """
    arrays = weight, recurrent, bias, *(state or ())
    values, table = checked_inputs("lstm", x, arrays, 4, states=2)
    if lengths is not None:
        lengths = values_or_refuse("lstm's lengths", lengths)
        lengths = lengths if is_array(lengths) else np.asarray(lengths)
        if lengths.dtype.kind not in "iu":
            raise DtypeError(f"lstm needs integer lengths, not {lengths.dtype}")
        if lengths.shape != x.shape[:1]:
            raise ShapeError(f"lstm of x {x.shape} needs {x.shape[0]} lengths, not {lengths.shape}")
    function = LSTMFunction(reverse, ends, lengths is not None)
    return function(values, weight, recurrent, bias, *(state or (None, None)), lengths, table)


def _checked(lengths: Array | None, time: int) -> Array | None:
    """Return lengths as a host array; refuse those outside 1..time."""
    if lengths is None:
        return None
    values = Tensor(lengths).numpy().astype(np.int64)
    wrong = (values < 1) | (values > time)
    if wrong.any():
        row = int(wrong.argmax())
        raise ShapeError(f"lstm's length {values[row]} of sequence {row} is outside 1..{time}")
    return values


class GRUFunction(RecurrentFunction):
    """One layer: h over time, (batch, time, features)."""

    __slots__ = ()

    traits = Traits(
        onnx=WRITTEN,
        channels=Channels.LAST,
        products=_products,
        samples=(
            Sample(
                "gru",
                lambda *given: gru(*given),
                ((3, 4, 2), (2, 9), (3, 9), (9,), (3,)),
                parameters=4,
            ),
        ),
    )

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
        given = packing, x, table, 2 * features, weight, recurrent, bias
        inputs, kernels, gates, times, shift = self.begin(*given)
        bias_n = xp.ascontiguousarray(bias_n)
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
        times = self.times(recurrent.T)
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
    values, table = checked_inputs("gru", x, (*parameters, *given(state)), 3, vectors=1)
    return GRUFunction()(values, *parameters, state, table)


class RNNFunction(RecurrentFunction):
    """One layer: h over time, (batch, time, features).

    Args:
        rectifies: whether a step ends in a ReLU instead of tanh.
    """

    __slots__ = ("rectifies",)

    traits = Traits(
        onnx=WRITTEN,
        channels=Channels.LAST,
        products=_products,
        samples=(
            Sample(
                "rnn", lambda *given: rnn(*given), ((3, 4, 2), (2, 3), (3, 3), (3,)), parameters=3
            ),
        ),
    )

    def __init__(self, rectifies: bool) -> None:
        self.rectifies = rectifies

    def forward(
        self, x: Array, weight: Array, recurrent: Array, bias: Array, h: Any, table: Any
    ) -> Array:
        xp, (batch, time), features = namespace(x), x.shape[:2], len(recurrent)
        packing = Packing((batch,) * time)
        inputs, _, sums, times, shift = self.begin(packing, x, table, 0, weight, recurrent, bias)
        sums += shift
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
        times = self.times(recurrent.T)
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
    values, table = checked_inputs("rnn", x, (*parameters, *given(state)), 1)
    return RNNFunction(nonlinearity == "relu")(values, *parameters, state, table)
