"""Normalization: over the batch (per channel), over an image's groups, over a row's features.

Batch statistics may span several ranks: `all_reduce` then sums float64 arrays over them. The
forward pass calls it twice: for counts and sums, then for squared deviations from the resulting
mean, which avoids cancellation. The backward pass calls it once, for the two sums of the
derivative. A rank's squared deviations are converted to the global mean by the formula of Chan,
Golub and LeVeque ("Updating formulae and a pairwise algorithm for computing sample variances",
1979).
"""

from collections.abc import Callable
from functools import lru_cache, partial
from math import isfinite, prod
from typing import Any, TypeAlias

import numpy as np

from nnmpi.backend.array import Array, Residuals, namespace, ones
from nnmpi.backend.kernels import bias_grad, kernels_for
from nnmpi.backend.precision import FLOAT32, is_low
from nnmpi.backend.program.tile import ELEMENTS
from nnmpi.backend.recording import record_call, record_launch
from nnmpi.backend.sums import LONG, WIDE, in_blocks, repeated, row_blocks, row_dots, row_sum
from nnmpi.base.errors import ShapeError, check_int, number
from nnmpi.ops.linear import place_for, with_kernels
from nnmpi.tensor.function import Function, Grads
from nnmpi.tensor.operand import converted, in_float32, may_meet, refuse_parts, require_floating
from nnmpi.tensor.placement import Placement, elementwise_placement, placement_if_uncut
from nnmpi.tensor.tensor import Tensor
from nnmpi.tensor.turns import in_turn

AllReduce: TypeAlias = Callable[[Array], Array]
Count: TypeAlias = "float | Array"  # a 0-d array over ranks on a device: the host need not wait
Observe: TypeAlias = Callable[[Array, Array, Count], None]


def overflows(values: Array) -> bool:
    """Return whether narrow numbers, or their squares, are not finite: float64's might be."""
    flat = values.reshape(-1)
    return values.dtype != np.float64 and not isfinite(flat.dot(flat))


class Again:
    """A pass whose statistics overflow, computed again in float64: the result may be finite.

    The squares of numbers of 1.8e19 and more do in float32. On a device the host would have to wait
    for the statistics, so such a pass stays NaN there.

    Args:
        make: returns the operation.
    """

    def __init__(self, make: Callable[[], Function]) -> None:
        self._make = make
        self.function: Function | None = None

    def forward(self, y: Array, inverse: Array, needs: tuple[bool, ...], *inputs: Array) -> None:
        """Write the result again, unless the inverse deviations are finite."""
        self.function = None
        if not overflows(inverse):
            return
        function = self.function = self._make()
        function.xp, function.needs, function.edges = np, needs, None
        with np.errstate(all="ignore"):
            y[...] = function.forward(*(item.astype(np.float64) for item in inputs)).reshape(
                y.shape
            )

    def backward(self, grad: Array, *targets: Array | None) -> None:
        """Write the gradients again, if the result was."""
        if self.function is None:
            return
        with np.errstate(all="ignore"):
            grads = self.function.backward(grad.astype(np.float64))
        for target, item in zip(targets, grads, strict=True):
            if target is not None and item is not None:
                target[...] = item.reshape(target.shape)


def at_least_one(count: Count) -> Count:
    """Return the larger of a count and 1; of an array on its device."""
    if isinstance(count, int | float):
        return max(count, 1)
    return namespace(count).maximum(count, 1)


# an overflow shows in the statistics
_quiet = np.errstate(over="ignore", invalid="ignore")


class BatchNormFunction(Function):
    """(x - mean) / sqrt(variance + eps) * scale + shift, with the statistics of the batch.

    Compiled kernels read x three times: for the mean, for the squares, for the result. NumPy reads
    it once, in blocks that fit the cache, and keeps the differences from the mean of the first
    block for the other passes: computing them again would cost backward a pass. This takes an array
    more where another operation keeps x anyway. After `forward`, `statistics` is (mean, variance
    with divisor n, n) of the global batch; the caller deletes it. Backward, for the normalized x^
    and the gradient g:

        dx = scale / sqrt(variance + eps) * (g - mean(g) - x^ mean(g x^))      means over the batch
    """

    __slots__ = ("all_reduce", "eps", "observe", "statistics")

    def __init__(self, eps: float, all_reduce: AllReduce | None, observe: Observe | None) -> None:
        self.eps, self.all_reduce, self.observe = eps, all_reduce, observe

    @_quiet
    def forward(self, x: Array, scale: Array, shift: Array) -> Array:
        xp, channels, kernels = self.xp, scale.size, kernels_for(x, "norm")
        rows = _widened(xp, x, channels, LONG if kernels is None else WIDE)
        kept = xp.empty(rows.shape, x.dtype) if kernels is None else xp.ascontiguousarray(rows)
        mean, variance, offset = (xp.empty((channels,), x.dtype) for _ in range(3))
        # an array: in a replay other ranks may have other numbers of rows
        n = xp.empty((), np.float64)
        results = mean, variance, offset, n
        record = record_launch if self.all_reduce is None else record_call
        count = record(_measure, rows, kept, results, kernels, self.all_reduce, self.observe)
        self.statistics = (mean, variance, count)
        steady = variance + self.eps
        # NaN for infinity; 1 / sqrt would hide it as 0
        inverse = xp.sqrt(steady) / steady
        factor = inverse * scale
        if kernels is not None:
            y = xp.empty(rows.shape, x.dtype)
            kernels.norm(kept, *_repeated(xp, rows, offset, factor, shift), y)
        else:
            factors, shifts = _repeated(xp, rows, factor, shift - offset * factor)
            y = in_blocks(lambda kept: (kept * factors + shifts,), kept)[0]
        again = None
        if isinstance(x, np.ndarray):
            make = partial(BatchNormFunction, self.eps, self.all_reduce, self.observe)
            again = Again(make)
            record_call(again.forward, y, inverse, self.needs, x, scale, shift)
            if again.function is not None:
                self.statistics = again.function.statistics  # type: ignore[attr-defined]
        self.saved = (kept, offset, inverse, scale, n, kernels, again)
        return y.reshape(x.shape)

    @_quiet
    def backward(self, grad: Array) -> Grads:
        (kept, offset, inverse, scale, n, kernels, again), xp = self.saved, self.xp
        rows = xp.ascontiguousarray(xp.reshape(grad, kept.shape))
        to_shift, to_scale = (place_for(self, i, scale.shape, scale.dtype) for i in (2, 1))
        if kernels is not None:
            _sum_by_kernels(xp, kernels, kept, offset, rows, to_scale)
            _sum_blocks(xp, rows, lambda part, _: (rows[part],), to_shift)
        else:
            _sum_blocks(
                xp,
                rows,
                lambda part, out: (rows[part], xp.multiply(kept[part], rows[part], out=out)),
                to_shift,
                to_scale,
            )
            xp.subtract(to_scale, xp.multiply(to_shift, offset), out=to_scale)
        xp.multiply(to_scale, inverse, out=to_scale)
        to_x = None
        if self.needs[0]:
            sums = xp.concatenate([to_shift, to_scale])
            if self.all_reduce is not None:
                record_call(_all_reduce, self.all_reduce, sums)
            xp.divide(sums, n, out=sums)
            center, slope = sums[: scale.size], xp.multiply(sums[scale.size :], inverse)
            factor = scale * inverse
            if kernels is not None:
                to_x = xp.empty(kept.shape, kept.dtype)
                offsets, *operands = _repeated(xp, kept, offset, slope, center, factor)
                kernels.norm_grad(kept, offsets, rows, *operands, to_x)
            else:
                moved = center - offset * slope
                slopes, centers, factors = _repeated(xp, kept, slope, moved, factor)
                to_x = in_blocks(
                    lambda kept, rows: ((rows - (kept * slopes + centers)) * factors,), kept, rows
                )[0]
            to_x = to_x.reshape(grad.shape)
        if again is not None:
            record_call(again.backward, grad, to_x, to_scale, to_shift)
        return to_x, to_scale, to_shift


class DeviceBatchNormFunction(Function):
    """`BatchNormFunction` by a device's kernels, which read x once for the statistics.

    In half precision x, the result and their gradients alone have 16 bits.
    """

    __slots__ = ("all_reduce", "eps", "observe", "statistics")

    def __init__(self, eps: float, all_reduce: AllReduce | None, observe: Observe | None) -> None:
        self.eps, self.all_reduce, self.observe = eps, all_reduce, observe

    def forward(self, x: Array, scale: Array, shift: Array) -> Array:
        xp, kernels = self.xp, kernels_for(x, "moments")
        rows = _samples(xp, kernels, x, 1, scale.size)
        scale, shift = map(xp.ascontiguousarray, (scale, shift))
        local = rows.shape[1]
        offset, variance, mean = (item[0] for item in kernels.moments(xp, rows))
        count: Count = local
        n = None
        if self.all_reduce is not None:
            # an array: in a replay other ranks may have other numbers of rows
            n = xp.empty((), np.float64)
            results = mean, variance, offset
            count = record_call(_count_ranks, self.all_reduce, local, results, n)
        if self.observe is not None:
            (record_launch if n is None else record_call)(self.observe, mean, variance, count)
        self.statistics = (mean, variance, count)
        self.saved = (rows, offset, variance, scale, n, kernels)
        return kernels.normalize(xp, rows, offset, variance, scale, shift, self.eps).reshape(
            x.shape
        )

    def backward(self, grad: Array) -> Grads:
        (rows, offset, variance, scale, n, kernels), xp = self.saved, self.xp
        given = kernels.contiguous(xp, grad).reshape(rows.shape)
        to_shift, to_scale = (place_for(self, i, scale.shape, scale.dtype) for i in (2, 1))
        saved = rows, offset, variance
        kernels.norm_sums(xp, given, *saved, self.eps, (to_shift, to_scale))
        to_x = None
        if self.needs[0]:
            sums, share = (to_shift, to_scale), 1 / max(rows.shape[1], 1)
            if n is not None:
                both = xp.concatenate(sums)
                record_call(_all_reduce, self.all_reduce, both)
                xp.divide(both, n, out=both)
                sums, share = (both[: scale.size], both[scale.size :]), 1.0
            to_x = kernels.norm_grad(xp, given, *saved, scale, sums, self.eps, share, False)
            to_x = to_x.reshape(grad.shape)
        return to_x, to_scale, to_shift


def _count_ranks(
    all_reduce: AllReduce, local: int, results: tuple[Array, Array, Array], n: Array
) -> Count:
    count = _over_ranks(all_reduce, local, *results)
    n[...] = at_least_one(count)
    return count


class FixedNormFunction(Function):
    """Normalization by given means and variances, by a device's kernels, for `fixed_norm`."""

    __slots__ = ("eps",)

    def __init__(self, eps: float) -> None:
        self.eps = eps

    def forward(self, x: Array, scale: Array, shift: Array, mean: Array, variance: Array) -> Array:
        xp, kernels = self.xp, kernels_for(x, "moments")
        rows = _samples(xp, kernels, x, 1, scale.size)
        scale, shift = map(xp.ascontiguousarray, (scale, shift))
        self.saved = (rows, mean, variance, scale, kernels)
        return kernels.normalize(xp, rows, mean, variance, scale, shift, self.eps, False).reshape(
            x.shape
        )

    def backward(self, grad: Array) -> Grads:
        (rows, mean, variance, scale, kernels), xp = self.saved, self.xp
        given = kernels.contiguous(xp, grad).reshape(rows.shape)
        sums = to_shift, to_scale = tuple(
            place_for(self, i, scale.shape, scale.dtype) for i in (2, 1)
        )
        saved = rows, mean, variance
        kernels.norm_sums(xp, given, *saved, self.eps, sums, False)
        to_x = None
        if self.needs[0]:
            to_x = kernels.norm_grad(xp, given, *saved, scale, sums, self.eps, 0.0, False)
            to_x = to_x.reshape(grad.shape)
        return to_x, to_scale, to_shift, None, None


def _samples(xp: Any, kernels: Any, x: Array, count: int, channels: int) -> Array:
    """Return x as (count, rows, channels), contiguous."""
    rows = x.size // max(count * channels, 1)
    result: Array = kernels.contiguous(xp, x).reshape(count, rows, channels)
    return result


def _by_kernels(function: Function, x: Tensor, *parameters: Tensor) -> Tensor:
    """Apply an operation of a device's kernels: parameters are float32, or as wide as x."""
    wide = FLOAT32 if is_low(x.dtype) else x.dtype
    return function(x, *(converted(item, wide) for item in parameters))


def _measure(
    rows: Array,
    kept: Array,
    results: tuple[Array, Array, Array, Array],
    kernels: Any,
    all_reduce: AllReduce | None,
    observe: Observe | None,
) -> Count:
    """Write the batch's statistics, and without kernels the differences from a first mean.

    One pass sums the differences from the mean of the first block, and their squares. The squares
    exceed the sum of squared deviations at most by the factor 1 / p, if the first block has the
    fraction p of the elements. So does the rounding of a block's sum in float32, relative to it.

    Args:
        rows: (count, repeats * channels).
        kept: like rows, for the differences; x itself with kernels.
        results: the mean; the variance; the offset, to subtract from `kept` for x minus the mean,
            (channels,) each; the number of elements per channel, at least 1.
        kernels: the compiled kernels in use, or None.
        all_reduce, observe: see `batch_norm`.

    Returns:
        The number of elements per channel, which may be 0.
    """
    (mean, variance, offset, n), xp = results, namespace(rows)
    local = rows.size // mean.size
    first = rows if kernels is not None else rows[row_blocks(rows)[0]]
    _sum_blocks(xp, first, lambda part, _: (first[part],), mean)
    mean /= max(first.size // mean.size, 1)
    if kernels is not None:
        offset[...] = mean
        _sum_by_kernels(xp, kernels, kept, offset, None, variance)
    else:
        (means,), sums = _repeated(xp, rows, mean), xp.empty((2, mean.size), np.float64)

        def squares(part: slice, out: Array) -> tuple[Array, Array]:
            block = xp.subtract(rows[part], means, out=kept[part])
            return block, xp.multiply(block, block, out=out)

        _sum_blocks(xp, rows, squares, *sums)
        offset[...] = further = sums[0] / max(local, 1)
        variance[...] = xp.maximum(sums[1] - further * sums[0], 0)
        mean += offset
    variance /= max(local, 1)
    count: Count = local
    if all_reduce is not None:
        count = _over_ranks(all_reduce, local, mean, variance, offset)
    n[...] = at_least_one(count)
    # an overflow is observed in the second computation
    if observe is not None and not (isinstance(rows, np.ndarray) and overflows(variance)):
        observe(mean, variance, count)
    return count


def _over_ranks(
    all_reduce: AllReduce, local: int, mean: Array, variance: Array, offset: Array
) -> Count:
    """Turn a rank's statistics of `local` elements into those of all ranks; return their number."""
    xp = namespace(mean)
    ours = mean.astype(xp.float64)
    total = all_reduce(xp.concatenate([xp.full(1, local, xp.float64), local * ours]))
    count: Count = float(total[0]) if xp.__name__ == "numpy" else total[0]
    wide_mean = total[1:] / at_least_one(count)
    squares = local * (variance + (ours - wide_mean) ** 2)
    variance[...] = all_reduce(squares) / at_least_one(count)
    mean[...] = wide_mean
    offset += wide_mean - ours
    return count


def _all_reduce(all_reduce: AllReduce, sums: Array) -> None:
    sums[...] = all_reduce(sums.astype(np.float64))


def _widened(xp: Any, x: Array, channels: int, width: int) -> Array:
    """Return x (..., channels) reshaped to (count / m, m channels); NumPy is slow on short rows."""
    count = x.size // channels
    repeats = _repeats(count, channels, width) if isinstance(x, np.ndarray) else 1
    return xp.reshape(x, (count // repeats, repeats * channels))


@lru_cache(1024)
def _repeats(count: int, channels: int, width: int) -> int:
    """Return how many of `count` rows of channels make a row of at least `width` elements.

    The result divides `count`. If no such divisor fits `ELEMENTS`, it is the largest one below.
    """
    least = max(1, width // channels)
    divisors = (m for m in range(-(-width // channels), ELEMENTS // channels) if count % m == 0)
    return next(divisors, None) or next(m for m in range(least, 0, -1) if count % m == 0)


def _repeated(xp: Any, rows: Array, *values: Array) -> list[Array]:
    """Return values (channels,) as operands of rows (count, repeats * channels)."""
    return [repeated(xp, item, rows.shape[1] // item.size) for item in values]


def _sum_blocks(
    xp: Any, rows: Array, terms: Callable[[slice, Array], tuple[Array, ...]], *outs: Array
) -> None:
    """Write each channel's sums of some terms, accumulated over blocks in float64.

    Args:
        xp: the array library, or a recorder's stand-in for it.
        rows: (count, repeats * channels).
        terms: called with a slice of the rows and a scratch array like these rows; returns an array
            like it for each of `outs`.
        outs: (channels,).
    """
    blocks, channels = row_blocks(rows), outs[0].size
    repeats = rows.shape[1] // channels
    # rows short enough that a sum is of many of them, which is a faster product
    most = max(1, WIDE // channels)
    width = channels * next(m for m in range(most, 0, -1) if repeats % m == 0)
    scratch = xp.empty((blocks[0].stop, rows.shape[1]), rows.dtype)
    parts = [xp.empty((len(blocks), width), rows.dtype) for _ in outs]
    for i, part in enumerate(blocks):
        for sums, term in zip(parts, terms(part, scratch[: part.stop - part.start]), strict=True):
            bias_grad(xp, xp.reshape(term, (term.size // width, width)), sums[i])
    for sums, out in zip(parts, outs, strict=True):
        _fold(xp, sums, out)


def _sum_by_kernels(
    xp: Any, kernels: Any, kept: Array, offset: Array, factors: Array | None, out: Array
) -> None:
    """Write each channel's sum of (kept - offset) * factors, or without factors of the squares."""
    (offsets,), parts = _repeated(xp, kept, offset), xp.empty((1, kept.shape[1]), kept.dtype)
    second = (kept, offsets) if factors is None else (factors, xp.zeros_like(offsets))
    kernels.norm_products(kept, offsets, *second, parts[0])
    _fold(xp, parts, out)


def _fold(xp: Any, parts: Array, out: Array) -> None:
    """Sum over blocks and repeats: (blocks, repeats * c) -> (c,), accumulated in float64."""
    xp.add.reduce(
        parts.reshape(parts.size // out.size, out.size), axis=0, dtype=np.float64, out=out
    )


class LayerNormFunction(Function):
    """(x - mean) / sqrt(variance + eps) * scale + shift, over the last axes of each row.

    Backward, for the normalized x^ and h = scale times the gradient:

        dx = (h - mean(h) - x^ mean(h x^)) / sqrt(variance + eps)              means over the row

    Args:
        eps: added to the variance.
        centered: False leaves mean and shift out, for `rms_norm`.
    """

    __slots__ = ("centered", "eps")

    def __init__(self, eps: float, centered: bool = True) -> None:
        self.eps, self.centered = eps, centered

    def placed(self, *inputs: Any) -> Placement:
        """Return the input's placement; sharded rows are refused."""
        x, *parameters = inputs
        refuse_parts(self, *parameters, why="needs a whole scale and shift")
        return placement_if_uncut(
            self, x, range(-parameters[0].ndim, 0), "averages over whole rows"
        )

    @_quiet
    def forward(self, x: Array, scale: Array, *shift: Array) -> Array:
        xp, n = self.xp, scale.size
        rows = xp.reshape(x, (x.size // n, n))
        scale_row = xp.reshape(scale, (n,))
        shift_row = xp.reshape(shift[0], (n,)) if shift else None
        kernels = kernels_for(x, "layer_norm")
        if kernels is not None:
            y, residuals = kernels.layer_norm(xp, rows, scale_row, shift_row, self.eps)
        else:
            y, residuals = self._normalize(rows, scale_row, shift_row)
        again = None
        if isinstance(x, np.ndarray):
            again = Again(partial(LayerNormFunction, self.eps, self.centered))
            record_call(again.forward, y, residuals[1], self.needs, x, scale, *shift)
        self.saved = (scale, residuals, kernels, again)
        return y.reshape(x.shape)

    @_quiet
    def backward(self, grad: Array) -> Grads:
        scale, residuals, kernels, again = self.saved
        xp, n = self.xp, scale.size
        rows = xp.reshape(grad, (grad.size // n, n))
        to_x = xp.empty(rows.shape, grad.dtype) if self.needs[0] else None
        to_scale, to_shift = (
            place_for(self, i, scale.shape, scale.dtype) if True in self.needs[i : i + 1] else None
            for i in (1, 2)
        )
        sums = [None if item is None else item.reshape(n) for item in (to_scale, to_shift)]
        write = self._write_gradients if kernels is None else partial(kernels.layer_norm_grad, xp)
        write(rows, residuals, xp.reshape(scale, (n,)), to_x, *sums)
        if again is not None:
            record_call(again.backward, grad, *(to_x, to_scale, to_shift)[: len(self.needs)])
        to_x = None if to_x is None else to_x.reshape(grad.shape)
        return (to_x, to_scale, to_shift)[: len(self.needs)]

    def _normalize(self, rows: Array, scale: Array, shift: Array | None) -> tuple[Array, Residuals]:
        """Return the result for rows (rows, n), and the residuals for the gradient."""
        xp, n = self.xp, scale.size

        def normalize(x: Array) -> tuple[Array, ...]:
            # not a product with 1 / n: the mean of equal numbers must be that number exactly
            away = x - x.sum(axis=1, keepdims=True) / n if self.centered else x
            steady = row_dots(xp, away, away) * (1 / n) + self.eps
            # NaN for infinity; 1 / sqrt would hide it as 0
            inverse = xp.sqrt(steady) / steady
            normal = away * inverse
            y = normal * scale
            return y if shift is None else y + shift, normal, inverse

        y, normal, inverse = in_blocks(normalize, rows)
        return y, (normal, inverse)

    def _write_gradients(
        self,
        grad: Array,
        residuals: Residuals,
        scale: Array,
        to_x: Array | None,
        to_scale: Array | None,
        to_shift: Array | None,
    ) -> None:
        """Write the gradients of x (rows, n), scale and shift, each unless its target is None."""
        xp, (normal, inverse) = self.xp, residuals
        weights = scale * (1 / scale.size)
        if to_shift is not None:
            row_sum(xp, grad, out=to_shift)
        if to_scale is not None:
            row_sum(xp, grad * normal, out=to_scale)

        def derive(grad: Array, normal: Array, inverse: Array) -> tuple[Array, ...]:
            h = grad * scale
            if self.centered:
                h = h - row_dots(xp, grad, weights)
            return ((h - normal * row_dots(xp, grad * normal, weights)) * inverse,)

        if to_x is not None:
            to_x[...] = in_blocks(derive, grad, normal, inverse)[0]


class GroupNormFunction(Function):
    """(x - mean) / sqrt(variance + eps) * scale + shift, over each image's groups of channels.

    Images are taken in blocks that stay in the cache through all passes, or one by one if they are
    larger. Sums over pixels are products with ones, a number for each channel; a group's channels
    are then added. Backward, for
    the normalized x^ and h = scale times the gradient:

        dx = (h - mean(h) - x^ mean(h x^)) / sqrt(variance + eps)         means over the group

    Args:
        count: channels of a group.
        eps: added to the variance.
    """

    __slots__ = ("count", "eps")

    broadcasts = True  # of sharded channels, each rank uses its slice of scale and shift

    def __init__(self, count: int, eps: float) -> None:
        self.count, self.eps = count, eps

    def placed(self, *inputs: Any) -> Placement:
        """Return the input's placement; refuse a part of an image or of a group."""
        x, *parameters = inputs
        refuse_parts(self, *parameters, why="needs a whole scale and shift")
        placement_if_uncut(self, x, range(1, x.ndim - 1), "averages over whole images")
        placement, ranks = elementwise_placement(self, inputs, scatters=True), x.shard.group.size
        widths = {placement.width(ranks, rank) for rank in range(ranks)}
        if x.shard.axis and (placement.repeats != 1 or any(n % self.count for n in widths)):
            raise x.shard.error(self, "averages over whole groups of channels")
        return placement

    @_quiet
    def forward(self, x: Array, scale: Array, shift: Array) -> Array:
        xp, n, channels = self.xp, len(x), scale.size
        if not x.size:
            return xp.empty(x.shape, x.dtype)
        kernels = kernels_for(x, "moments")
        if kernels is not None:
            images = _samples(xp, kernels, x, n, channels)
            scale, shift = map(xp.ascontiguousarray, (scale, shift))
            saved = images, *kernels.moments(xp, images, self.count)[:2], scale
            self.saved = (*saved, kernels)
            return kernels.normalize(xp, *saved, shift, self.eps).reshape(x.shape)
        pixels = x.size // (n * channels)
        repeats = _repeats(pixels, channels, LONG) if isinstance(x, np.ndarray) else 1
        images = xp.reshape(x, (n, pixels // repeats, repeats * channels))
        kept = xp.empty(images.shape, x.dtype)
        y = xp.empty(images.shape, x.dtype) if True in self.needs else kept
        inverse = xp.empty((n, channels), x.dtype)
        scratch = self._scratch(images)
        for part in row_blocks(images):
            mean = self._means(self._sums(images[part], channels), pixels)
            block = xp.subtract(images[part], self._wide(mean, images), out=kept[part])
            squares = xp.multiply(block, block, out=scratch[: len(block)])
            steady = xp.add(self._means(self._sums(squares, channels), pixels), self.eps)
            # NaN for infinity; 1 / sqrt would hide it as 0
            xp.divide(xp.sqrt(steady), steady, out=inverse[part])
            factors = self._wide(xp.multiply(inverse[part], scale), images)
            xp.multiply(block, factors, out=y[part])
            xp.add(y[part], self._wide(shift, images), out=y[part])
        again = None
        if isinstance(x, np.ndarray):
            again = Again(partial(GroupNormFunction, self.count, self.eps))
            record_call(again.forward, y, inverse, self.needs, x, scale, shift)
        self.saved = (kept, inverse, scale, pixels, again, None)
        return y.reshape(x.shape)

    @_quiet
    def backward(self, grad: Array) -> Grads:
        xp = self.xp
        if not grad.size:
            return grad, *(xp.zeros(grad.shape[-1:], grad.dtype) for _ in range(2))
        if self.saved[-1] is not None:
            return self._gradients(grad)
        kept, inverse, scale, pixels, again, _ = self.saved
        given = xp.reshape(grad, kept.shape)
        to_x, scratch = xp.empty(kept.shape, grad.dtype), self._scratch(kept)
        sums, products = (xp.empty(inverse.shape, grad.dtype) for _ in range(2))
        for part in row_blocks(kept):
            block, place, inner = given[part], scratch[: len(given[part])], inverse[part]
            xp.copyto(sums[part], self._sums(block, scale.size))
            xp.multiply(block, kept[part], out=place)
            xp.multiply(self._sums(place, scale.size), inner, out=products[part])
            if self.needs[0]:
                means, slopes = (
                    xp.multiply(self._means(xp.multiply(item[part], scale), pixels), inner)
                    for item in (sums, products)
                )
                slopes = self._wide(xp.multiply(slopes, inner), kept)
                result = xp.multiply(kept[part], slopes, out=to_x[part])
                xp.add(result, self._wide(means, kept), out=result)
                xp.multiply(block, self._wide(xp.multiply(inner, scale), kept), out=place)
                xp.subtract(place, result, out=result)
        to_scale, to_shift = (
            row_sum(xp, item, out=place_for(self, i, scale.shape, scale.dtype))
            for i, item in ((1, products), (2, sums))
        )
        if again is not None:
            record_call(again.backward, grad, to_x, to_scale, to_shift)
        return to_x.reshape(grad.shape) if self.needs[0] else None, to_scale, to_shift

    def _gradients(self, grad: Array) -> Grads:
        """Return the gradients, by a device's kernels."""
        (*saved, scale, kernels), xp = self.saved, self.xp
        images = saved[0]
        given = kernels.contiguous(xp, grad).reshape(images.shape)
        sums = tuple(xp.empty((len(images), scale.size), scale.dtype) for _ in range(2))
        kernels.norm_sums(xp, given, *saved, self.eps, sums)
        to_x = None
        if self.needs[0]:
            means = kernels.group_sums(xp, sums, scale, self.count, images)
            share = 1 / images.shape[1]
            to_x = kernels.norm_grad(xp, given, *saved, scale, means, self.eps, share, True)
            to_x = to_x.reshape(grad.shape)
        to_scale, to_shift = (place_for(self, i, scale.shape, scale.dtype) for i in (1, 2))
        for item, target in zip(sums, (to_shift, to_scale), strict=True):
            bias_grad(xp, item, target)
        return to_x, to_scale, to_shift

    def _scratch(self, images: Array) -> Array:
        return self.xp.empty(images[row_blocks(images)[0]].shape, images.dtype)

    def _sums(self, images: Array, channels: int) -> Array:
        """Return each channel's sum, (block, channels), of images (block, rows, repeats channels)."""
        xp, (n, rows, width) = self.xp, images.shape
        sums = xp.empty((n, 1, width), images.dtype)
        xp.matmul(ones(xp, rows, images.dtype)[None], images, out=sums)
        parts = sums.reshape(n, width // channels, channels)
        return xp.add.reduce(parts, axis=1, dtype=np.float64)

    def _means(self, sums: Array, pixels: int) -> Array:
        """Return each channel's mean over its group, (block, channels), of sums over pixels."""
        xp, (n, channels) = self.xp, sums.shape
        groups = sums.reshape(n, channels // self.count, self.count)
        totals = xp.add.reduce(groups, axis=2, keepdims=True)
        result = xp.empty(groups.shape, np.float64)
        xp.copyto(result, xp.divide(totals, pixels * self.count))
        return result.reshape(n, channels)

    def _wide(self, values: Array, images: Array) -> Array:
        """Return values (block, channels) or (channels,) as operands of images."""
        xp, channels = self.xp, values.shape[-1]
        rows = values.reshape(values.size // channels, 1, channels)
        result = xp.empty((len(rows), images.shape[2] // channels, channels), images.dtype)
        xp.copyto(result, rows, casting="unsafe")
        return result.reshape(len(rows), 1, images.shape[2])


def group_norm(x: Tensor, scale: Tensor, shift: Tensor, groups: int, eps: float = 1e-5) -> Tensor:
    """Normalize each group of channels of each image (Wu and He, 2018).

    Args:
        x: (batch, ..., channels).
        scale, shift: (channels,).
        groups: divides the channels.
        eps: added to the variance.

    Raises:
        ShapeError: when scale or shift do not fit x, or the groups do not divide the channels.
        DtypeError: when x, scale and shift differ in dtype.
    """
    _check("group_norm", x, scale, shift)
    groups = check_int("group_norm's groups", groups)
    if x.ndim < 2 or scale.size % groups:
        raise ShapeError(f"group_norm of {groups} groups does not fit shape {x.shape}")
    apply = in_float32 if kernels_for(x.data, "moments") is None else _by_kernels
    return apply(GroupNormFunction(scale.size // groups, number("eps", eps)), x, scale, shift)


def batch_norm(
    x: Tensor,
    scale: Tensor,
    shift: Tensor,
    eps: float = 1e-5,
    all_reduce: AllReduce | None = None,
    observe: Observe | None = None,
) -> tuple[Tensor, Array, Array, Count]:
    """Normalize each channel by the batch's statistics (Ioffe and Szegedy, 2015).

    On a device a channel whose variance is too large for the dtype is NaN.

    Args:
        x: (..., channels); the statistics run over all other axes, and with `all_reduce` over all
            ranks.
        scale, shift: (channels,).
        all_reduce: sums a float64 array over the ranks and returns the sum. Every rank must call
            it, even without rows: twice in forward and, if x needs a gradient, once in backward.
            With an attribute `turns` (see `tensor.turns`) not every rank's loss must use the result.
        observe: called as observe(mean, variance, elements) in every pass, also in replays of a
            compiled step.

    Returns:
        The result, and the batch's mean, variance (divisor n) and number of elements n per channel.
        Over ranks, n is a 0-d array if x is on a device.

    Raises:
        ShapeError: when scale or shift do not fit x.
        DtypeError: when x, scale and shift differ in dtype.
    """
    _check("batch_norm", x, scale, shift)
    has_kernels = kernels_for(x.data, "moments") is not None
    make = DeviceBatchNormFunction if has_kernels else BatchNormFunction
    function = make(number("eps", eps), all_reduce, observe)
    turns = getattr(all_reduce, "turns", None) if x.requires_grad else None
    apply = _by_kernels if has_kernels else in_float32
    y = in_turn(turns, function, x, scale, shift, apply=apply)
    statistics = function.statistics
    del function.statistics  # the tape should hold only what backward needs
    return y, *statistics


def fixed_norm(
    x: Tensor, scale: Tensor, shift: Tensor, mean: Array, variance: Array, eps: float
) -> Tensor | None:
    """Normalize each channel by a given mean and variance in one pass; None without kernels for x.

    Args:
        x: (..., channels).
        scale, shift, mean, variance: (channels,).
        eps: added to the variance.
    """
    if x.shard is not None or kernels_for(x.data, "moments") is None:
        return None
    may_meet("batch_norm", x, scale, shift)
    wide = FLOAT32 if is_low(x.dtype) else x.dtype
    parameters = (converted(item, wide) for item in (scale, shift))
    return FixedNormFunction(eps)(x, *parameters, mean, variance)


def layer_norm(x: Tensor, scale: Tensor, shift: Tensor, eps: float = 1e-5) -> Tensor:
    """Normalize each row over its last axes (Ba, Kiros and Hinton, 2016).

    On a device a row with an overflowing variance becomes NaN (in float32 from differences of
    1.8e19 on).

    Args:
        x: (..., *features).
        scale, shift: (*features); their number of axes is that of the normalized axes.

    Raises:
        ShapeError: when scale or shift do not fit the last axes of x.
        DtypeError: when x, scale and shift differ in dtype.
    """
    _check("layer_norm", x, scale, shift, None)
    return with_kernels("layer_norm", LayerNormFunction(number("eps", eps)), x, scale, shift)


def rms_norm(x: Tensor, scale: Tensor, eps: float = 1e-6) -> Tensor:
    """Divide each row by the root of its mean square (Zhang and Sennrich, 2019).

    Args:
        x: (..., features).
        scale: (features,).
        eps: added to the mean square.

    Raises:
        ShapeError: when the scale does not fit x.
        DtypeError: when x and scale differ in dtype.
    """
    _check("rms_norm", x, scale, scale)
    return with_kernels("layer_norm", LayerNormFunction(number("eps", eps), False), x, scale)


def _check(name: str, x: Tensor, scale: Tensor, shift: Tensor, axes: int | None = 1) -> None:
    """Refuse what does not fit; `axes` are normalized, or those of the scale (None)."""
    may_meet(name, require_floating(name, x), scale, shift)
    shape = x.shape[x.ndim - (scale.ndim if axes is None else axes) :]
    if prod(shape) == 0 or not shape or not scale.shape == shift.shape == shape:
        raise ShapeError(
            f"{name} of shape {x.shape} does not fit scale {scale.shape} and shift {shift.shape}"
        )
