"""Kernels in the array library's own functions: the arithmetic of operations, complete.

`PlainKernels` is the class that numba's kernels (`jit.kernels`) and a device's (`cuda.kernels`)
derive from: they override what they have faster. `kernels.kernels_of` returns the one for an array.
It computes with NumPy, and with CuPy inside `jit(False)`.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from math import prod
from typing import Any, ClassVar

import numpy as np

from nnmpi.backend.activations import Activation, Saves
from nnmpi.backend.array import (
    Array,
    Dtype,
    Residuals,
    Shape,
    empty,
    namespace,
    ones,
    steps,
)
from nnmpi.backend.attend import attend, attend_grad
from nnmpi.backend.planes import Planes, flattened
from nnmpi.backend.precision import FLOAT32, is_low
from nnmpi.backend.random import least_kept, random_bits
from nnmpi.backend.recording import call, to_library
from nnmpi.backend.sums import (
    ELEMENTS,
    LONG,
    WIDE,
    add_rows,
    in_blocks,
    repeated,
    row_blocks,
    row_dots,
    row_sum,
    row_totals,
    slices,
)
from nnmpi.backend.trace import is_printable
from nnmpi.backend.windows import bordered

SQUARES = 1 << 22  # elements of a gradient that are converted at a time
TAPS = 9  # most pixels of a window whose sum is fastest pixel by pixel, measured
PLANES_BYTES = 1 << 19  # of a block of planes: half of a typical L2 cache


class PlainKernels:
    """Kernels on arrays of one library. `xp` is the library, or a recorder's stand-in for it.

    Gradients take the values that the operation saved. Rows are (rows, n), images (n, h, w, c).

    Attributes:
        of_device: whether these are a device's: an operation is one pass, which reads half
            precision and computes in float32 or more; an update knows a guard; squares add up in
            float64.
        convolves: whether they have convolutions of their own: numba's, a device's depthwise ones.
    """

    of_device: ClassVar[bool] = False
    convolves: ClassVar[bool] = False

    # ---- row formulas

    def rows(
        self,
        formula: Callable[..., Any],
        *operands: Any,
        sums: Sequence[Array] = (),
        reuse: bool = False,
        blocks: bool = True,
    ) -> tuple[Array, ...]:
        """Return a formula of rows; compiled kernels are printed from the trace of nnmpi's own.

        A user's formula is called with these operands, and nothing else is done to it.

        Args:
            formula: written as one writes NumPy, of whole rows; it returns rows, and numbers of
                each row, or None if it writes to rows in place. One of nnmpi's own reads nothing
                but its operands and constants.
            operands: rows (..., n) first. Others of that shape; (..., 1), a number of each row;
                (n,), repeated for each row; floats. Bools and NumPy's functions are settings: a
                formula is printed anew for each value of theirs.
            sums: (n,) each, receive the sums over the rows of the last results, which are not
                returned; then rows have two axes. What is printed knows samples, too, the first of
                three axes: a vector (samples, 1, n) and a sum (samples, n) have each its own.
            reuse: whether the first result may overwrite the first rows.
            blocks: whether NumPy computes it block by block: copying the results of a block costs
                what a pass or two do.
        """
        if blocks and operands[0].size > ELEMENTS and is_printable(formula):
            results = in_blocks(formula, *operands)
        else:
            results = formula(*operands)
        if not sums:
            return results
        count = len(results) - len(sums)
        for x, target in zip(results[count:], sums, strict=True):
            self.bias_grad(x, target)
        return results[:count]

    # ---- activations

    def activation(
        self, form: Activation, x: Array, keep: bool, *settings: float
    ) -> tuple[Array, Any]:
        """Return an activation of x, and what its gradient reads (see `Saves`).

        Args:
            keep: whether a gradient will be needed.
        """
        if form.saves is not Saves.DERIVATIVE:
            (y,) = self.rows(form.forward, x, *settings, blocks=False)
            return y, x if form.saves is Saves.INPUT else y
        dtype, width = x.dtype, x.shape[-1] if x.ndim else 1
        rows = np.reshape(x, (x.size // max(width, 1), width))
        if is_low(dtype):  # of a device without its kernels
            rows = self.cast(rows, FLOAT32)
        results = self.rows(form.forward, rows, keep, *settings)
        y, saved = (self.cast(results[i], dtype) for i in (0, -1))
        return y.reshape(x.shape), saved

    def activation_grad(self, form: Activation, grad: Array, saved: Any, *settings: float) -> Array:
        """Return the gradient of x."""
        if form.backward is None:
            return self.multiply(grad, saved.reshape(grad.shape))
        return self.rows(form.backward, grad, saved, *settings, blocks=False)[0]

    # ---- any shape

    def contiguous(self, x: Array) -> Array:
        """Return x itself if it is C-contiguous, else a copy."""
        return np.ascontiguousarray(x, like=x)

    def copy(self, target: Array, x: Array) -> None:
        """Write x to `target`, rounded to its dtype. Both may have any strides."""
        # NumPy's casting rules do not cover bfloat16
        np.copyto(target, x, casting="unsafe")

    def cast(self, x: Array, dtype: Dtype) -> Array:
        """Return x in another dtype, rounded to the nearest; x itself if it has that dtype."""
        if x.dtype == dtype:
            return x
        result = np.empty_like(x, dtype, order="C")
        self.copy(result, x)
        return result

    def _pair(self, function: Any, a: Any, b: Any, out: Array | None = None) -> Array:
        """Return a + b or a * b."""
        return function(a, b) if out is None else function(a, b, out=out)

    def add(self, *args: Any) -> Array:
        """Return a + b for a, b and perhaps `out`."""
        return self._pair(np.add, *args)

    def multiply(self, *args: Any) -> Array:
        """Return a * b, likewise."""
        return self._pair(np.multiply, *args)

    def add_low(self, a: Array, b: Array) -> Array:
        """Return a + b for float32 and half precision of one shape, in float32."""
        return a + self.cast(b, FLOAT32)

    def concatenate(self, arrays: Sequence[Array], axis: int) -> Array:
        """Return arrays joined along an axis."""
        return np.concatenate(arrays, axis=axis)

    def dropout(self, x: Array, rate: float, key: Any, columns: Array | None) -> tuple[Array, Any]:
        """Return x with elements dropped at random, the others divided by 1 - rate.

        Args:
            key: as for `random_bits`; a row is x's.
            columns: (elements of a row,) uint32, their numbers; None for 0, 1 ...
        """
        xp = namespace(x)
        rows = x.shape[0] if x.ndim else 1
        bits = random_bits(xp, 0, rows, prod(x.shape[1:]) if columns is None else columns, key)
        mask = (bits >= np.uint32(least_kept(rate))).reshape(x.shape)
        factor = mask * xp.full((), 1 / (1 - rate), x.dtype)
        return x * factor, factor

    def dropout_grad(self, grad: Array, saved: Any) -> Array:
        """Return the gradient."""
        return grad * saved

    # ---- optimizers

    def updater(
        self, formula: Callable[..., None], arrays: Sequence[Array], numbers: Sequence[float]
    ) -> Callable[[Sequence[float], Array | None], None]:
        """Return a function of other numbers and a guard that computes an own optimizer's formula.

        To find a loop for some operands, as `rows` does, takes as long as a small update.

        Args:
            formula: of rows, to which it writes in place.
            arrays: flat and contiguous, of one size and dtype.
            numbers: its last operands, see `rows`. Their types and the bools stay as they are.

        Returns:
            The guard is None, or a number on the device: a device's kernels change nothing if it is
            not finite.
        """
        return lambda numbers, guard: formula(*arrays, *numbers)

    def squares(self, grad: Array, to: Array, dtype: Any) -> None:
        """Add the squares of all elements, in this dtype, to a number on their device."""
        flat = grad.reshape(-1)
        for start in range(0, flat.size, SQUARES):
            part = flat[start : start + SQUARES].astype(dtype, copy=False)
            np.add(to, np.dot(part, part), out=to)

    def track(
        self,
        running: tuple[Array, Array],
        values: tuple[Array, Array],
        fraction: float,
        factor: float,
    ) -> None:
        """Move running means and variances towards a batch's, whose variances count `factor`."""
        mean, variance = values
        for data, value in zip(running, (mean, variance * factor), strict=True):
            data += fraction * (value - data)

    # ---- dense layers

    def add_bias(self, y: Array, bias: Array) -> None:
        """Add bias (n,) to contiguous y (..., n) in place; images are rows of all their pixels."""
        if y.ndim != 2:
            bias = repeated(bias, prod(y.shape[1:-1]))
            y = y.reshape(len(y), prod(y.shape[1:]))
        np.add(y, bias, out=y, casting="unsafe")

    def bias_grad(self, grad: Array, to_bias: Array) -> None:
        """Write the sum over rows of a gradient, in at least float32."""
        if is_low(grad.dtype):
            grad = self.cast(grad, FLOAT32)
        if grad.dtype == to_bias.dtype:
            row_sum(grad, out=to_bias)
        else:  # on a device, in jit(False): the sum is in float32, the bias may not be
            self.copy(to_bias, row_sum(grad))

    # ---- recurrent layers: a step beside its product

    def lstm_step(self, *arrays: Array) -> None:
        """Compute a step's gates and state after its product.

        NumPy multiplies gates of their own memory two to four times as fast as gates side by side,
        so each gate's tanh lies in one piece.

        Args:
            g: (n, 4 features), from `RecurrentFunction.begin`; overwritten by the gates' tanh.
            product: (n, 4 features), h R; overwritten.
            bias: (4 features,). It and R are those of `RecurrentFunction.begin`.
            c: (n, features), before the step.
            new_c, new_h: (n, features), out.
        """
        g, product, bias, c, new_c, new_h = arrays
        gates, memory = _pieces(g, 4), _pieces(product, 4)
        product += g
        product += bias
        np.tanh(_side_by_side(product, 4), out=gates)
        i, f, o = np.add(gates[:3], 1, out=memory[:3])  # twice the sigmoids
        i *= gates[3]
        np.multiply(f, c, out=new_c)
        new_c += i
        new_c *= 0.5
        o *= np.tanh(new_c, out=f)
        np.multiply(o, 0.5, out=new_h)

    def lstm_step_grad(self, *arrays: Array) -> None:
        """Compute the gradients of a step's gates, before its product.

        Args:
            g: (n, 4 features), what `lstm_step` left there.
            slopes: (n, 4 features), out: the gradient of the tanh's arguments.
            h, grad: (n, features), the two parts of the gradient of h; h may be overwritten.
            cell, last_c: (n, features), c after and before the step.
            c: (n, features), the gradient of c after the step; overwritten by the one before it.
        """
        g, slopes, h, grad, cell, last_c, c = arrays
        xp, gates, (to_i, to_f, to_o, to_g) = namespace(g), _pieces(g, 4), _side_by_side(slopes, 4)
        memory = empty(xp, (8, *c.shape), c.dtype)
        slope, (i, f, o), t = memory[:4], xp.add(gates[:3], 1, out=memory[4:7]), memory[7]
        xp.multiply(gates, gates, out=slope)
        xp.subtract(1, slope, out=slope)  # 4 times a sigmoid's
        h += grad
        h *= 0.25
        o *= h
        h *= xp.tanh(cell, out=t)
        xp.multiply(slope[2], h, out=to_o)
        t *= t
        o *= xp.subtract(1, t, out=t)
        c *= 0.5
        c += o  # half of the gradient of c
        i *= c
        xp.multiply(slope[3], i, out=to_g)
        f *= c
        c *= 0.5
        slope[:2] *= c
        xp.multiply(slope[0], gates[3], out=to_i)
        xp.multiply(slope[1], last_c, out=to_f)
        c[...] = f

    def gru_step(self, *arrays: Array) -> None:
        """Compute a step's gates and state after its product.

        Args:
            g: (n, 3 features), from `RecurrentFunction.begin`; overwritten by the gates, as
                `gru_step_grad` takes them: here the tanh of r, z and n, each in one piece.
            product: (n, 3 features), h R; overwritten.
            bias: (3 features,). It and R are those of `RecurrentFunction.begin`.
            bias_n: (features,).
            inner: (n, features), out: h R_n + bias_n.
            h, new_h: (n, features), before the step, and out: after it.
        """
        g, product, bias, bias_n, inner, h, new_h = arrays
        gates, sums = _pieces(g, 3), _side_by_side(product, 3)
        r, z, new = gates
        np.add(sums[2], bias_n, out=inner)
        sums[2] = 0
        product += g
        product += bias
        np.tanh(sums[:2], out=gates[:2])
        np.add(r, 1, out=new_h)
        new_h *= inner
        new_h *= 0.5
        new_h += sums[2]
        np.tanh(new_h, out=new)
        change = np.subtract(h, new, out=_pieces(product, 3)[0])
        change *= 0.5
        np.add(z, 1, out=new_h)
        new_h *= change
        new_h += new

    def gru_step_grad(self, *arrays: Array) -> None:
        """Compute the gradients of a step, before its product.

        Args:
            g: (n, 3 features), what `gru_step` left there.
            to_gates, to_product: (n, 3 features), out: the gradients of x W + b and of h R.
            inner, h: (n, features), h R_n + bias_n, and h before the step.
            grad: (n, features), the gradient of the step's result.
            to_h: (n, features), the gradient of h from later steps; overwritten by that of h before
                the step, without what the product adds.
        """
        g, to_gates, to_product, inner, h, grad, to_h = arrays
        xp, gates = namespace(g), _pieces(g, 3)
        memory = empty(xp, (5, *h.shape), h.dtype)
        slope, (r, z), t = memory[:2], xp.add(gates[:2], 1, out=memory[2:4]), memory[4]
        xp.multiply(gates[:2], gates[:2], out=slope)
        xp.subtract(0.5, xp.multiply(slope, 0.5, out=slope), out=slope)  # twice a sigmoid's
        to_h += grad
        to_h *= 0.5
        slope[1] *= to_h
        slope[1] *= xp.subtract(h, gates[2], out=t)
        xp.multiply(gates[2], gates[2], out=t)
        xp.subtract(1, t, out=t)
        t *= to_h
        to_h *= z
        t *= xp.subtract(1, gates[1], out=z)
        parts, products = _side_by_side(to_gates, 3), _side_by_side(to_product, 3)
        parts[2] = t
        t *= 0.5
        xp.multiply(r, t, out=products[2])
        t *= inner
        slope[0] *= t
        parts[:2] = products[:2] = slope

    # ---- attention, see `backend.attend`

    attend, attend_grad = staticmethod(attend), staticmethod(attend_grad)

    # ---- rows

    def along(self, formula: Any, axis: int, *arrays: Array) -> Array:
        """Return a formula's rows, which are along an axis of arrays of one shape."""
        if arrays[0].ndim == 1:
            return self.rows(formula, *(x[None] for x in arrays))[0][0]
        if axis == arrays[0].ndim - 1:
            return self.rows(formula, *arrays, blocks=False)[0]
        moved = (np.moveaxis(x, axis, -1) for x in arrays)
        (y,) = self.rows(formula, *moved, blocks=False)
        return np.ascontiguousarray(np.moveaxis(y, -1, axis), like=y)

    def softmax_loss(
        self, logits: Array, labels: Array, ignore_index: int | None, smoothing: float
    ) -> tuple[Array, Residuals]:
        """Return the loss of each row; saved are e^(logit - largest) and their sums.

        Blocks of rows are computed one by one, each while it is in the cache.
        """
        xp = namespace(logits)
        (count, classes), used = logits.shape, None
        if ignore_index is not None:
            used = labels != ignore_index
            labels = xp.where(used, labels, 0)
        logits = xp.ascontiguousarray(logits)
        # the flat indices of the labels' logits
        targets = xp.add(steps(labels, count, classes), labels, dtype="int64", casting="unsafe")

        powers, *rest = self.rows(_powers, logits, smoothing > 0)
        sums, top, *means = (x.reshape(count) for x in rest)
        target = _take(logits, targets) - top
        if means:
            target = target * (1 - smoothing) + means[0] * smoothing
        losses = xp.log(sums) - target
        if used is not None:
            losses = xp.where(used, losses, 0)  # not a product: an ignored row may be NaN
        return losses, (powers, sums, targets, used)

    def softmax_loss_grad(
        self, grad: Array, saved: Residuals, ignore_index: int | None, smoothing: float
    ) -> Array:
        """Return (softmax(logits) - target) * grad, for the losses' gradients (rows,) or (1,).

        It takes the place of the saved powers: of a large vocabulary they are a model's largest
        arrays.
        """
        powers, sums, targets, used = saved
        result = np.multiply(powers, (grad / sums)[:, None], out=powers)
        hit = grad
        if smoothing:
            hit = grad * (1 - smoothing)
            np.subtract(result, (grad * (smoothing / powers.shape[1]))[:, None], out=result)
        np.put(result, targets, _take(result, targets) - hit)
        if used is not None:
            np.copyto(result, 0, where=np.logical_not(used)[:, None])
        return result

    def layer_norm(
        self, x: Array, eps: float, scale: Array, shift: Array | None = None
    ) -> tuple[Array, Residuals]:
        """Return x normalized over the scale's axes, times the scale plus the shift.

        Without a shift the mean counts as 0. Saved first and second: normalized rows, or a
        device's, which it normalizes again rather than writes; and the inverse deviations.
        """
        n = scale.size
        rows = x.reshape(x.size // n, n)
        vectors = [item.reshape(n) for item in (scale, shift) if item is not None]
        y, *saved = self.rows(_layer_norm, rows, float(eps), self.of_device, *vectors)
        kept = (rows,) if self.of_device else ()
        return y, (*kept, *saved, vectors[0])

    def layer_norm_grad(
        self, grad: Array, saved: Residuals, needs: tuple[bool, ...], *targets: Array
    ) -> Array | None:
        """Return the gradient of x, and write those of scale and shift; each if it is needed."""
        xp = namespace(grad)
        (kept, inverse, *means, scale), learns = saved, any(needs[1:])
        sums = [
            x.reshape(scale.size) if need else xp.empty(scale.shape, scale.dtype)
            for x, need in zip(targets if learns else (), needs[1:], strict=False)
        ]
        given = grad.reshape(kept.shape), kept, inverse, scale, len(targets) == 2, learns
        settings = needs[0], self.of_device
        found = self.rows(_layer_norm_grad, *given, *settings, *means, sums=sums)
        return found[0] if found else None

    # ---- tables and labels

    def check(self, function: Callable[..., None], integers: Array, *args: Any) -> None:
        """Call a function that refuses integers out of range.

        It is not called for those on a device, since the host would have to wait for them: there
        the results are NaN.
        """
        call(function, (integers, *args))

    def embedding(self, table: Array, indices: Array, dtype: Dtype) -> Array:
        """Return rows of a table in this dtype."""
        return self.cast(table[indices], dtype)

    def embedding_grad(
        self,
        grad: Array,
        indices: Array,
        shape: Shape,
        dtype: Dtype,
        into: Array | None,
        add: bool,
    ) -> Array:
        """Return the table's gradient: rows added in order, to `into` if it is given."""
        wide = FLOAT32 if is_low(dtype) else dtype
        spread = np.zeros(shape, wide, like=grad) if into is None or wide != dtype else into
        if spread is into and not add:
            spread[...] = 0
        add_rows(spread, indices, self.cast(grad, wide))
        return self.cast(spread, dtype)

    # ---- pooling: `over` is an operation's `PoolWindows`

    def max_pool(self, x: Array, over: Any, keep: bool) -> tuple[Array, Array | None]:
        """Return each window's maximum and its position, the first of ties."""
        xp = namespace(x)
        rows, columns = over.out(*x.shape[1:3])
        x = bordered(x, over.padding, -float("inf"))
        y = xp.empty((len(x), rows, columns, x.shape[3]), x.dtype)
        planes = Planes(xp, prod(over.kernel), _count(y, over) * y[:1].size)
        winner = xp.empty(y.shape, planes.dtype) if keep else None
        if y.size:
            view = over.positions(x)
            if winner is not None:  # of a window that is -infinity alone
                first: Any = 0
                if over.padding != (0, 0):
                    first = to_library(xp, over.firsts((rows, columns)).astype(winner.dtype))
                np.copyto(winner, first)
            for images, block in _blocks(y, over):
                np.copyto(block, view[:, :, images])
                winners = None if winner is None else flattened(winner[images])
                planes.largest(_stacked(block), flattened(y[images]), winners)
        return y, winner

    def max_pool_grad(self, grad: Array, winner: Array, shape: Shape, over: Any) -> Array:
        """Return the gradient of images of this shape."""
        xp = namespace(grad)
        grad, padded = xp.ascontiguousarray(grad), over.padded(shape)
        seen = grad.shape[1] * over.kernel[0], grad.shape[2] * over.kernel[1]
        make = xp.empty if seen == padded[1:3] and not over.overlap else xp.zeros
        result = make(padded, grad.dtype)
        planes = Planes(xp, prod(over.kernel), _count(grad, over) * grad[:1].size)
        if grad.size:
            view = over.positions(result)
            for images, block in _blocks(grad, over):
                won = flattened(winner[images])
                planes.gradient(flattened(grad[images]), won, _stacked(block))
                if not over.overlap:
                    np.copyto(view[:, :, images], block)
                else:
                    # one position at a time: in a single addition to overlapping windows, a shared
                    # pixel would get only one of its summands
                    for i in np.ndindex(*over.kernel):
                        np.add(view[i][images], block[i], out=view[i][images])
        return over.inside(result)

    def avg_pool(self, x: Array, over: Any, share: float) -> Array:
        """Return each window's sum times `share`; the border counts as 0."""
        (n, h, w, c), (kh, kw) = x.shape, over.kernel
        if over.tiles(h, w) and kh * kw > TAPS:  # products with ones, first over a window's rows
            rows = x.reshape(n * h // kh, kh, w * c)
            columns = (ones(x, kh)[None] @ rows).reshape(-1, kw, c)
            sums = ones(x, kw)[None] @ columns
            return np.multiply(sums, share, out=sums).reshape(n, h // kh, w // kw, c)
        first, *others = over.taps(bordered(x, over.padding, 0.0))
        y = first.copy()
        for values in others:
            np.add(y, values, out=y)
        return np.multiply(y, share, out=y)

    def avg_pool_grad(self, grad: Array, shape: Shape, over: Any, share: float) -> Array:
        """Return for each pixel the sum of the windows that contain it, times `share`."""
        (n, h, w, c), (kh, kw), each = shape, over.kernel, grad * share
        if over.tiles(h, w):
            windows = n, h // kh, kh, w // kw, kw, c
            return np.broadcast_to(each[:, :, None, :, None], windows).reshape(shape)
        result = np.zeros(over.padded(shape), grad.dtype, like=grad)
        for tap in over.taps(result):
            np.add(tap, each, out=tap)
        return over.inside(result)

    # ---- normalization

    def channel_rows(self, x: Array, channels: int) -> Array:
        """Return x (..., channels) in rows of several pixels."""
        return widened(x, channels, LONG)

    def batch_moments(self, x: Array, channels: int) -> tuple[Array, Array, Array, Array]:
        """Return the channels' statistics of x (..., channels), and what is saved of x.

        One pass sums the differences from the mean of the first block, and their squares. The
        squares exceed the sum of squared deviations at most by the factor 1 / p, if the first block
        has the fraction p of the elements. So does the rounding of a block's sum in float32,
        relative to it.

        Returns:
            The differences, in rows of several pixels; the offset, to subtract from them for x
            minus the mean; the variance with divisor n; the mean.
        """
        xp = namespace(x)
        rows = self.channel_rows(x, channels)
        kept = xp.empty(rows.shape, x.dtype)
        results = [xp.empty((channels,), x.dtype) for _ in range(3)]
        call(self._moments, (rows,), (kept, *results))
        return kept, *results

    def _moments(
        self, rows: Array, kept: Array, offset: Array, variance: Array, mean: Array
    ) -> None:
        xp, local = namespace(rows), max(rows.size // mean.size, 1)
        first = rows[row_blocks(rows)[0]]
        self._sum_blocks(first, lambda part, _: (first[part],), mean)
        mean /= max(first.size // mean.size, 1)
        (means,), sums = repeated_in(rows, mean), xp.empty((2, mean.size), np.float64)

        def terms(part: slice, out: Array) -> tuple[Array, Array]:
            block = xp.subtract(rows[part], means, out=kept[part])
            return block, xp.multiply(block, block, out=out)

        self._sum_blocks(rows, terms, *sums)
        offset[...] = further = sums[0] / local
        variance[...] = xp.maximum(sums[1] - further * sums[0], 0)
        variance /= local
        mean += offset

    def normalize(self, moments: Residuals, scale: Array, shift: Array) -> Array:
        """Return (x - mean) / sqrt(variance + eps) * scale + shift.

        Args:
            moments: the first three of `batch_moments`, and eps; or the rows of x, given means and
                variances, eps, and True.
        """
        kept, offset, variance, eps, *_ = moments
        factor = inverse_root(variance, eps) * scale
        factors, shifts = repeated_in(kept, factor, shift - offset * factor)
        return self.rows(_affine, kept, factors, shifts)[0]

    def norm_sums(self, grad: Array, moments: Residuals, targets: tuple[Array, Array]) -> None:
        """Write the channels' sums of the gradient, and of its product with the normalized x."""
        (kept, offset, variance, eps, *_), (to_shift, to_scale) = moments, targets
        self._sum_blocks(
            grad,
            lambda part, out: (grad[part], np.multiply(kept[part], grad[part], out=out)),
            *targets,
        )
        np.subtract(to_scale, to_shift * offset, out=to_scale)
        np.multiply(to_scale, inverse_root(variance, eps), out=to_scale)

    def norm_grad(
        self,
        grad: Array,
        moments: Residuals,
        scale: Array,
        sums: tuple[Array, Array],
        count: float,
    ) -> Array:
        """Return the gradient of x; the sums of `norm_sums` are of `count` elements.

        An infinite count stands for given means and variances, which are constant.
        """
        kept, offset, variance, eps, *given = moments
        inverse = inverse_root(variance, eps)
        if given:
            (factors,) = repeated_in(kept, scale * inverse)
            return self.rows(_scaled, grad, factors)[0]
        center, slope = (item / count for item in sums)
        slope = slope * inverse
        operands = slope, center - offset * slope, scale * inverse
        slopes, centers, factors = repeated_in(kept, *operands)
        return self.rows(_norm_grad, kept, grad, slopes, centers, factors)[0]

    def _sum_blocks(
        self,
        rows: Array,
        terms: Callable[[slice, Array], tuple[Array, ...]],
        *outs: Array,
    ) -> None:
        """Write each channel's sums of some terms, accumulated over blocks in float64.

        Args:
            rows: (count, repeats * channels).
            terms: called with a slice of the rows and a scratch array like these rows; returns an
                array like it for each of `outs`.
            outs: (channels,).
        """
        xp = namespace(rows)
        if not rows.size:
            for out in outs:
                out[...] = 0
            return
        blocks, channels = row_blocks(rows), outs[0].size
        repeats = rows.shape[1] // channels
        # rows short enough that a sum is of many of them, which is a faster product
        most = max(1, WIDE // channels)
        width = channels * next(m for m in range(most, 0, -1) if repeats % m == 0)
        scratch = xp.empty((blocks[0].stop, rows.shape[1]), rows.dtype)
        parts = [xp.empty((len(blocks), width), rows.dtype) for _ in outs]
        for i, part in enumerate(blocks):
            for sums, term in zip(
                parts, terms(part, scratch[: part.stop - part.start]), strict=True
            ):
                self.bias_grad(term.reshape(term.size // width, width), sums[i])
        for sums, out in zip(parts, outs, strict=True):
            fold(sums, out)

    def group_norm(
        self, x: Array, eps: float, count: int, scale: Array, shift: Array
    ) -> tuple[Array, Residuals]:
        """Return images normalized over groups of `count` channels; saved second are the inverse
        deviations.

        Sums over pixels are products with ones, a number for each channel; a group's channels are
        then added.
        """
        xp = namespace(x)
        if not x.size:  # also without channels, of a shard
            return xp.empty(x.shape, x.dtype), (x, x, scale, 0, count)
        n, channels, pixels = len(x), scale.size, prod(x.shape[1:-1])
        repeats = _repeats(pixels, channels, LONG) if isinstance(x, np.ndarray) else 1

        images = xp.reshape(x, (n, pixels // repeats, repeats * channels))
        y, away = (xp.empty(images.shape, x.dtype) for _ in range(2))
        inverse = xp.empty((n, channels), x.dtype)

        def normalize(images: Array, y: Array, away: Array, inverse: Array) -> None:
            means = group_means(_image_sums(images, channels), pixels, count)
            np.subtract(images, wide_for(means, images), out=away)
            squares = _image_sums(np.multiply(away, away, out=y), channels)
            inverse[...] = inverse_root(group_means(squares, pixels, count), eps)
            np.multiply(away, wide_for(inverse * scale, images), out=y)
            y += wide_for(shift, images)

        in_blocks(normalize, images, y, away, inverse)
        return y, (away, inverse, scale, pixels, count)

    def group_norm_grad(
        self, grad: Array, saved: Residuals, needs: tuple[bool, ...], *targets: Array
    ) -> Array | None:
        """Return the gradient of x if it is needed, and write those of scale and shift."""
        away, inverse, scale, pixels, count = saved
        if not grad.size:
            for target in targets:
                target[...] = 0
            return grad

        sums, products = (np.empty_like(inverse) for _ in range(2))
        to_x = [np.empty_like(away)] if needs[0] else []

        def derive(
            grad: Array, away: Array, inverse: Array, sums: Array, products: Array, *to_x: Array
        ) -> None:
            sums[...] = _image_sums(grad, scale.size)
            weighted = np.multiply(grad, away, *to_x)
            products[...] = _image_sums(weighted, scale.size) * inverse
            for out in to_x:
                center, slope = (
                    group_means(item * scale, pixels, count) * inverse for item in (sums, products)
                )
                np.multiply(grad, wide_for(inverse * scale, away), out=out)
                out -= away * wide_for(slope * inverse, away) + wide_for(center, away)

        given = np.reshape(grad, away.shape)
        in_blocks(derive, given, away, inverse, sums, products, *to_x)
        for item, target in zip((products, sums), targets, strict=True):
            row_sum(item, out=target)
        return to_x[0] if to_x else None


def _side_by_side(rows: Array, count: int) -> Array:
    """View rows (n, count k) as (count, n, k)."""
    return rows.reshape(len(rows), count, rows.shape[1] // count).swapaxes(0, 1)


def _pieces(rows: Array, count: int) -> Array:
    """Return the contiguous memory of rows (n, count k) as (count, n, k)."""
    return rows.reshape(count, len(rows), rows.shape[1] // count)


def _take(array: Array, indices: Array) -> Array:
    """Return the elements at flat indices, which must be within the array.

    The mode is "clip" although no index is outside. With the default, which raises, NumPy fills a
    buffer and copies it to `out`, which recorded steps pass.

    Args:
        array: C-contiguous, any shape.
        indices: integers of any shape; the result has the same.
    """
    if type(array) is np.ndarray:
        return array.take(indices, None, None, "clip")  # the method: np.take detours in Python
    if isinstance(array, np.ndarray):
        return np.take(array, indices, mode="clip")
    return np.take(array, indices)


def largest(rows: Array) -> Array:
    """Return the largest element of each row (..., n), as (..., 1); NaN if the row has one.

    NumPy's argmax along a contiguous axis is five times as fast as its max.
    """
    if not isinstance(rows, np.ndarray):
        return rows.max(axis=-1, keepdims=True)
    *lead, n = rows.shape
    rows = rows.reshape(rows.size // n, n)
    top = _take(rows, steps(rows, *rows.shape) + np.argmax(rows, axis=1))
    return top.reshape(*lead, 1)


def _count(y: Array, over: Any) -> int:
    bytes_each = y.nbytes // max(1, len(y)) * prod(over.kernel)
    return max(1, min(len(y), PLANES_BYTES // max(1, bytes_each)))


def _blocks(y: Array, over: Any) -> Iterator[tuple[slice, Array]]:
    """Yield a few images at a time, with memory for their planes.

    The memory has the shape (kernel_h, kernel_w, images, out_h, out_w, c).
    """
    n, count = len(y), _count(y, over)
    memory = np.empty((count * y[:1].size * prod(over.kernel),), y.dtype, like=y)
    for images in slices(n, count):
        shape = (*over.kernel, *y[images].shape)
        yield images, memory[: prod(shape)].reshape(shape)


def _stacked(planes: Array) -> Array:
    # a view (kernel_h * kernel_w, elements)
    return planes.reshape(prod(planes.shape[:2]), prod(planes.shape[2:]))


def inverse_root(variance: Array, eps: Any) -> Array:
    """Return 1 / sqrt(variance + eps); NaN for infinity, which 1 / sqrt would hide as 0."""
    steady = variance + eps
    return np.sqrt(steady) / steady


def widened(x: Array, channels: int, width: int) -> Array:
    """Return x (..., channels) reshaped to (count / m, m channels); NumPy is slow on short rows."""
    count = x.size // max(channels, 1)  # a rank's shard may have none
    repeats = _repeats(count, max(channels, 1), width) if isinstance(x, np.ndarray) else 1
    return x.reshape(count // repeats, repeats * channels)


@lru_cache(1024)
def _repeats(count: int, channels: int, width: int) -> int:
    """Return how many of `count` rows of channels make a row of at least `width` elements.

    The result divides `count`. If no such divisor fits `ELEMENTS`, it is the largest one below.
    """
    least = max(1, width // channels)
    divisors = (m for m in range(-(-width // channels), ELEMENTS // channels) if count % m == 0)
    return next(divisors, None) or next(m for m in range(least, 0, -1) if count % m == 0)


def repeated_in(rows: Array, *values: Array) -> list[Array]:
    """Return values (channels,) as operands of rows (count, repeats * channels)."""
    return [repeated(item, rows.shape[1] // max(item.size, 1)) for item in values]


def fold(parts: Array, out: Array) -> None:
    """Sum over blocks and repeats: (blocks, repeats * c) -> (c,), accumulated in float64."""
    namespace(parts).add.reduce(
        parts.reshape(parts.size // out.size, out.size), axis=0, dtype=np.float64, out=out
    )


def _image_sums(images: Array, channels: int) -> Array:
    """Return each channel's sum, (block, channels), of images (block, rows, repeats channels)."""
    xp = namespace(images)
    n, rows, width = images.shape
    sums = xp.empty((n, 1, width), images.dtype)
    xp.matmul(ones(images, rows)[None], images, out=sums)
    parts = sums.reshape(n, width // channels, channels)
    return xp.add.reduce(parts, axis=1, dtype=np.float64)


def group_means(sums: Array, pixels: int, count: int) -> Array:
    """Return each channel's mean over its group, (block, channels), of sums over pixels."""
    xp = namespace(sums)
    n, channels = sums.shape
    groups = sums.reshape(n, channels // count, count)
    totals = xp.add.reduce(groups, axis=2, keepdims=True)
    result = xp.empty(groups.shape, np.float64)
    np.copyto(result, totals / (pixels * count))
    return result.reshape(n, channels)


def wide_for(values: Array, images: Array) -> Array:
    """Return values (block, channels) or (channels,) as operands of images."""
    channels = values.shape[-1]
    rows = values.reshape(values.size // channels, 1, channels)
    result = np.empty((len(rows), images.shape[2] // channels, channels), images.dtype, like=values)
    np.copyto(result, rows, casting="unsafe")
    return result.reshape(len(rows), 1, images.shape[2])


# ---- row formulas, see `PlainKernels.rows`


def _powers(logits: Array, smooth: bool) -> tuple[Array, ...]:
    """e^(logit - largest), their sum and the largest; and the mean of the differences."""
    top = largest(logits)
    below = logits - top
    powers = np.exp(below)
    sums = row_totals(powers)
    return (powers, sums, top, *([below.mean(axis=-1, keepdims=True)] if smooth else []))


def _layer_norm(
    x: Array, eps: float, again: bool, scale: Array, *shift: Array
) -> tuple[Array, ...]:
    n = x.shape[-1]
    # not a product with 1 / n: the mean of equal numbers must be that number exactly
    means = (row_totals(x) / n,) if shift else ()
    away = x - means[0] if means else x
    inverse = inverse_root(row_dots(away, away) / n, eps)
    normal = away * inverse
    y = normal * scale
    return y + shift[0] if shift else y, *((inverse, *means) if again else (normal, inverse))


def _layer_norm_grad(
    grad: Array,
    kept: Array,
    inverse: Array,
    scale: Array,
    is_centered: bool,
    learns: bool,
    needed: bool,
    again: bool,
    *means: Array,
) -> tuple[Array, ...]:
    n, h = grad.shape[-1], grad * scale
    normal = (kept - means[0] if means else kept) * inverse if again else kept
    products = grad * normal
    if is_centered:
        h = h - row_dots(grad, scale) / n
    to_x = (h - normal * (row_dots(products, scale) / n)) * inverse
    return *((to_x,) if needed else ()), *(products, grad)[: learns * (1 + is_centered)]


def _affine(x: Array, factors: Array, shifts: Array) -> tuple[Array]:
    return (x * factors + shifts,)


def _scaled(x: Array, factors: Array) -> tuple[Array]:
    return (x * factors,)


def _norm_grad(
    kept: Array, grad: Array, slopes: Array, centers: Array, factors: Array
) -> tuple[Array]:
    return ((grad - (kept * slopes + centers)) * factors,)
