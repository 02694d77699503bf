"""The long short-term memory's recurrence, step after step, on the rows that are still running.

Rows lie packed, all those of a time together, the longest sequences first; so the running ones are a beginning:

    time      0         1         2       3             sizes (3, 3, 2, 1)
    packed  | a b c   | a b c   | a b   | a |           forward goes to the right, `reverse` to the left:
                                                        then b begins at time 2, from its initial state

    i, f, o = sigmoid        g = tanh        of x W + h R + b          (Hochreiter and Schmidhuber, 1997; the forget
    c = f c + i g            h = o tanh(c)                              gate is Gers et al.'s, 2000)

The products with x, which can be taken for all steps at once, are the caller's. The gates lie side by side, in the
order i, f, o, g. The sigmoids are computed as (1 + tanh(x / 2)) / 2, so that a step takes one tanh for all four.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from nnmpi.backend.array import Array
from nnmpi.backend.gemm import gemm


class RecurrentKernels:
    """The recurrence by the array library's functions. It is not recorded call by call: `xp` is a module."""

    __slots__ = ()

    def lstm(
        self, xp: Any, gates: Array, recurrent: Array, h: Array, c: Array, sizes: Sequence[int], reverse: bool
    ) -> tuple[Array, Array]:
        """Return h and c of all steps, (rows, features) each.

        Args:
            xp: the arrays' module.
            gates: (rows, 4 features), x W + b of all steps, which the gates replace.
            recurrent: (features, 4 features), R.
            h, c: (batch, features), the initial state, which the last one replaces.
            sizes: how many sequences run at each time, not increasing.
            reverse: whether time runs backwards.
        """
        features = c.shape[1]
        hidden, cells = (xp.empty((len(gates), features), c.dtype) for _ in range(2))
        scratch = xp.empty((len(c), 4 * features), c.dtype)
        for here, n, _ in steps(sizes, reverse):
            product, new_c, new_h = scratch[:n], cells[here], hidden[here]
            gemm(xp, h[:n], recurrent, out=product)
            self.lstm_step(xp, gates[here], product, c[:n], new_c, new_h)
            h[:n], c[:n] = new_h, new_c
        return hidden, cells

    def lstm_step(self, xp: Any, g: Array, product: Array, c: Array, new_c: Array, new_h: Array) -> None:
        """Compute what comes after the product of one step.

        Args:
            xp: the arrays' module.
            g: (n, 4 features), x W + b, which the gates replace.
            product: (n, 4 features), h R.
            c: (n, features), before the step.
            new_c, new_h: (n, features), where the results go.
        """
        features = c.shape[1]
        xp.add(g, product, out=g)
        sigmoids = g[:, : 3 * features]
        xp.multiply(sigmoids, 0.5, out=sigmoids)
        xp.tanh(g, out=g)
        xp.multiply(sigmoids, 0.5, out=sigmoids)
        xp.add(sigmoids, 0.5, out=sigmoids)
        i, f, o, candidate = four(g)
        xp.multiply(i, candidate, out=new_h)
        xp.multiply(f, c, out=new_c)
        xp.add(new_c, new_h, out=new_c)
        xp.tanh(new_c, out=new_h)
        xp.multiply(new_h, o, out=new_h)

    def lstm_grad(
        self,
        xp: Any,
        grad: Array,
        to_state: tuple[Array, Array],
        gates: Array,
        cells: Array,
        first_c: Array,
        recurrent: Array,
        sizes: Sequence[int],
        reverse: bool,
    ) -> Array:
        """Return the gradient of x W + h R + b of all steps, (rows, 4 features).

        Args:
            xp: the arrays' module.
            grad: (rows, features), the gradient of h of all steps.
            to_state: (batch, features) each, the gradients of the last h and c, which those of the initial state
                replace.
            gates: as `lstm` left them.
            cells: from `lstm`.
            first_c: (batch, features), the initial c.
            recurrent, sizes, reverse: those of `lstm`.
        """
        to_h, to_c = to_state
        to_gates: Array = xp.empty(gates.shape, gates.dtype)
        before = xp.empty(to_c.shape, to_c.dtype)
        turned = xp.empty(to_h.size, to_h.dtype)
        for here, n, earlier in reversed(list(steps(sizes, reverse))):
            g, slopes, h, c = gates[here], to_gates[here], to_h[:n], to_c[:n]
            last_c = before[:n]
            carry(last_c, first_c, cells, earlier)
            self.lstm_step_grad(xp, g, slopes, h, grad[here], cells[here], last_c, c)
            product = turned[: h.size].reshape(len(recurrent), n)
            gemm(xp, recurrent, slopes.T, out=product)  # for few rows OpenBLAS is a third quicker this way round
            h[...] = product.T
        return to_gates

    def lstm_step_grad(
        self,
        xp: Any,
        g: Array,
        slopes: Array,
        h: Array,
        grad: Array,
        cell: Array,
        last_c: Array,
        c: Array,
    ) -> None:
        """Compute what comes before the product of one step backward.

        Args:
            xp: the arrays' module.
            g: (n, 4 features), the gates.
            slopes: (n, 4 features), where the gradient of what goes into them goes.
            h, grad: (n, features), the two parts of the gradient of h; h may be written to.
            cell, last_c: (n, features), c after and before the step.
            c: (n, features), the gradient of c after the step, which that before the step replaces.
        """
        (i, f, o, candidate), (to_i, to_f, to_o, to_g) = four(g), four(slopes)
        _slopes(xp, g, slopes)
        xp.add(h, grad, out=h)
        t = xp.tanh(cell)
        xp.multiply(to_o, t, out=to_o)
        xp.multiply(to_o, h, out=to_o)
        xp.multiply(t, t, out=t)
        xp.subtract(1, t, out=t)
        xp.multiply(t, o, out=t)
        xp.multiply(t, h, out=t)
        xp.add(c, t, out=c)
        xp.multiply(to_i, candidate, out=to_i)
        xp.multiply(to_f, last_c, out=to_f)
        xp.multiply(to_g, i, out=to_g)
        for each in (to_i, to_f, to_g):
            xp.multiply(each, c, out=each)
        xp.multiply(c, f, out=c)


def steps(sizes: Sequence[int], reverse: bool) -> Iterator[tuple[slice, int, slice]]:
    """Yield the steps in the order in which they are computed: their rows, how many, and those of the step before.

    Of the sequences that run, the ones that the step before had come first; the others begin here.
    """
    ends, end = [], 0
    for n in sizes:
        end += n
        ends.append(end)
    earlier = slice(0, 0)
    for time in reversed(range(len(sizes))) if reverse else range(len(sizes)):
        n = sizes[time]
        here = slice(ends[time] - n, ends[time])
        yield here, n, slice(earlier.start, earlier.start + min(n, earlier.stop - earlier.start))
        earlier = here


def carry(out: Array, first: Array, rows: Array, earlier: slice) -> None:
    """Write the state before a step: of the step before where there was one, else the initial one.

    Args:
        out: (n, features).
        first: (batch, features), the initial state.
        rows: (all rows, features), the state after each step.
        earlier: from `steps`.
    """
    n, running = len(out), earlier.stop - earlier.start
    out[:running] = rows[earlier]
    out[running:] = first[running:n]


def four(gates: Array) -> tuple[Array, Array, Array, Array]:
    """Return the parts i, f, o and g of (rows, 4 features)."""
    n = gates.shape[1] // 4
    return gates[:, :n], gates[:, n : 2 * n], gates[:, 2 * n : 3 * n], gates[:, 3 * n :]


def _slopes(xp: Any, gates: Array, slopes: Array) -> None:
    """Write the derivatives of the gates by what goes into them: s (1 - s) of sigmoids, 1 - t^2 of tanh."""
    n = gates.shape[1] // 4 * 3
    xp.subtract(1, gates[:, :n], out=slopes[:, :n])
    xp.multiply(slopes[:, :n], gates[:, :n], out=slopes[:, :n])
    xp.multiply(gates[:, n:], gates[:, n:], out=slopes[:, n:])
    xp.subtract(1, slopes[:, n:], out=slopes[:, n:])
