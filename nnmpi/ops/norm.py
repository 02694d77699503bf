"""Normalization: over the batch (per channel), and over the features (per row).

Batch statistics can be taken over several ranks: `all_reduce` adds a float64 array up over them, twice in the forward
pass (counts and sums; then squared deviations from the mean that these give, so that nothing cancels) and once in the
backward pass (the two sums of the derivative). A rank's squares move to the common mean as Chan, Golub and LeVeque have
it ("Updating formulae and a pairwise algorithm for computing sample variances", 1979).
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias

from nnmpi.backend.array import Array, namespace
from nnmpi.backend.casting import FLOAT32, device_kernels
from nnmpi.backend.kernels.active import kernels_for
from nnmpi.backend.precision import is_low
from nnmpi.errors import ShapeError
from nnmpi.ops.blocks import row_blocks
from nnmpi.tensor.convert import widely
from nnmpi.tensor.function import Function
from nnmpi.tensor.operand import may_meet, real
from nnmpi.tensor.tensor import Tensor

if TYPE_CHECKING:
    from nnmpi.backend.kernels.table import Kernels

AllReduce: TypeAlias = Callable[[Array], Array]
Count: TypeAlias = "float | Array"  # on a device, and over ranks, an array () that nobody waits for
Observe: TypeAlias = Callable[[Array, Array, Count], None]


def at_least_one(count: Count) -> Count:
    """Return the larger of a count and 1, where the count is."""
    if isinstance(count, int | float):
        return max(count, 1)
    larger: Array = namespace(count).maximum(count, 1)
    return larger


def column_sums(xp: Any, a: Array, b: Array | None = None, out: Array | None = None) -> Array:
    """Return the sums over the rows of a, or of a * b; a device's kernels are the quickest with few columns."""
    table = device_kernels(a)
    if table is None:
        result: Array = xp.sum(a, axis=0, out=out) if b is None else xp.einsum("ij,ij->j", a, b)
        return result
    place: Array = xp.empty(a.shape[1:], a.dtype) if out is None else out
    table.column_sum(xp.ascontiguousarray(a if b is None else a * b), place)
    return place


class BatchNorm(Function):
    """(x - mean) / sqrt(variance + eps) * scale + shift, the statistics being those of the batch.

    After `forward`, `statistics` holds (mean, variance with divisor n, n) of the global batch.
    """

    __slots__ = ("all_reduce", "eps", "observe", "statistics")

    def __init__(self, eps: float, all_reduce: AllReduce | None, observe: Observe | None = None) -> None:
        self.eps, self.all_reduce, self.observe = eps, all_reduce, observe

    def _moments(self, rows: Array) -> tuple[Array, Array, Count]:
        """Return the mean and variance of each channel and the number of rows, over all ranks."""
        xp = namespace(rows)
        n, channels = rows.shape
        if device_kernels(rows) is not None:
            mean = column_sums(xp, rows) / max(n, 1)
        else:
            mean = rows.mean(axis=0) if n else xp.zeros(channels, dtype=rows.dtype)
        centred = rows - mean
        squares = column_sums(xp, centred, centred)
        if self.all_reduce is None:
            return mean, squares / max(n, 1), n
        ours = mean.astype(xp.float64)
        total = self.all_reduce(xp.concatenate([xp.full(1, n, dtype=xp.float64), n * ours]))
        count: Count = float(total[0]) if xp.__name__ == "numpy" else total[0]
        divisor = at_least_one(count)
        wide = total[1:] / divisor
        variance = self.all_reduce(squares + n * (ours - wide) ** 2) / divisor
        return wide.astype(rows.dtype), variance.astype(rows.dtype), count

    def forward(self, x: Array, scale: Array, shift: Array) -> Array:
        xp = namespace(x)
        rows = x.reshape(-1, x.shape[-1])
        mean, variance, count = self._moments(rows)
        self.statistics = (mean, variance, count)
        if self.observe is not None:
            self.observe(mean, variance, count)
        steady = variance + self.eps
        inverse = xp.sqrt(steady) / steady  # NaN of infinity, where 1 / sqrt would be 0
        normal = (rows - mean) * inverse
        self.saved = (normal, inverse, scale, at_least_one(count))
        y: Array = normal * scale
        y += shift
        return y.reshape(x.shape)

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        normal, inverse, scale, count = self.saved
        xp = namespace(grad)
        rows = grad.reshape(normal.shape)
        to_shift = column_sums(xp, rows, out=self.into(2))
        to_scale = column_sums(xp, rows, normal)
        to_x = None
        if self.needs[0]:
            sums = xp.concatenate([to_shift, to_scale])
            if self.all_reduce is not None:
                sums = self.all_reduce(sums.astype(xp.float64)).astype(rows.dtype)
            sums /= count if isinstance(count, int | float) else count.astype(sums.dtype)
            channels = normal.shape[1]
            to_x = (rows - sums[:channels] - normal * sums[channels:]) * (scale * inverse)
            to_x = to_x.reshape(grad.shape)
        return to_x, to_scale if self.needs[1] else None, to_shift if self.needs[2] else None


class LayerNorm(Function):
    """(x - mean) / sqrt(variance + eps) * scale + shift, over the last axes of each row.

    All passes over a block of rows are made while it lies in the cache. Sums are products with vectors, which BLAS
    computes faster than NumPy adds; the mean, from which differences are taken, is summed pairwise.
    """

    __slots__ = ("eps",)

    replayable = True

    def __init__(self, eps: float) -> None:
        self.eps = eps

    def forward(self, x: Array, scale: Array, shift: Array) -> Array:
        xp, n = self.xp, scale.size
        rows = xp.reshape(x, (x.size // n, n))
        y, inverse = xp.empty(rows.shape, x.dtype), xp.empty((len(rows), 1), x.dtype)
        normal = xp.empty(rows.shape, x.dtype) if True in self.needs else y
        flat_scale, flat_shift = xp.reshape(scale, (n,)), xp.reshape(shift, (n,))
        for part in row_blocks(rows):
            block, moment = normal[part], inverse[part]
            xp.add.reduce(rows[part], axis=1, keepdims=True, out=moment)
            xp.divide(moment, n, out=moment)  # of equal numbers this gives the number, a product with 1 / n may not
            xp.subtract(rows[part], moment, out=block)
            xp.multiply(xp.einsum("ij,ij->i", block, block)[:, None], 1 / n, out=moment)
            xp.add(moment, self.eps, out=moment)
            xp.divide(xp.sqrt(moment), moment, out=moment)  # NaN of infinity, where 1 / sqrt would be 0
            xp.multiply(block, moment, out=block)
            xp.multiply(block, flat_scale, out=y[part])
            xp.add(y[part], flat_shift, out=y[part])
        self.saved = (normal, inverse, scale)
        result: Array = y.reshape(x.shape)
        return result

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        normal, inverse, scale = self.saved
        xp, (count, n) = self.xp, normal.shape
        rows, flat = xp.reshape(grad, normal.shape), xp.reshape(scale, (n,))
        ones, weights = xp.ones((1, count), grad.dtype), xp.multiply(flat, 1 / n)
        to_x = xp.empty(normal.shape, grad.dtype) if self.needs[0] else None
        to_scale, to_shift = (self._place(i, scale) if self.needs[i] else None for i in (1, 2))
        if to_shift is not None:
            xp.matmul(ones, rows, out=to_shift.reshape(1, n))
        blocks = row_blocks(rows)
        scratch = xp.empty((blocks[0].stop, n), grad.dtype)
        for part in blocks:
            block, product = rows[part], scratch[: part.stop - part.start]
            xp.multiply(block, normal[part], out=product)
            if to_scale is not None:
                total = to_scale.reshape(1, n)
                if part.start == 0:
                    xp.matmul(ones[:, part], product, out=total)
                else:
                    xp.add(total, xp.matmul(ones[:, part], product), out=total)
            if to_x is not None:
                result = to_x[part]
                both = xp.matmul(block, weights)[:, None], xp.matmul(product, weights)[:, None]
                xp.multiply(block, flat, out=result)
                xp.subtract(result, both[0], out=result)
                xp.multiply(normal[part], both[1], out=product)
                xp.subtract(result, product, out=result)
                xp.multiply(result, inverse[part], out=result)
        return None if to_x is None else to_x.reshape(grad.shape), to_scale, to_shift

    def _place(self, i: int, parameter: Array) -> Array:
        """Return where the gradient of a parameter is computed."""
        place = self.into(i)
        fresh: Array = self.xp.empty(parameter.shape, parameter.dtype) if place is None else place
        return fresh


class _CompiledLayerNorm(LayerNorm):
    """The same by compiled kernels, forward and backward in one pass each."""

    __slots__ = ("kernels",)

    def __init__(self, eps: float, kernels: Kernels) -> None:
        super().__init__(eps)
        self.kernels = kernels

    def forward(self, x: Array, scale: Array, shift: Array) -> Array:
        xp, n = self.xp, scale.size
        rows = xp.ascontiguousarray(xp.reshape(x, (x.size // n, n)))
        flat_scale, flat_shift = (xp.ascontiguousarray(xp.reshape(each, (n,))) for each in (scale, shift))
        y, normal = xp.empty(rows.shape, x.dtype), xp.empty(rows.shape, x.dtype)
        inverse = xp.empty((len(rows),), x.dtype)
        self.invoke(self.kernels.layer_norm, rows, flat_scale, flat_shift, self.eps, y, normal, inverse)
        self.saved = (normal, inverse, flat_scale, scale)
        result: Array = y.reshape(x.shape)
        return result

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        normal, inverse, flat_scale, scale = self.saved
        xp, n = self.xp, flat_scale.size
        rows, to_x = xp.ascontiguousarray(xp.reshape(grad, normal.shape)), xp.empty(normal.shape, grad.dtype)
        places = [self._place(i, scale) if self.needs[i] else xp.empty((n,), grad.dtype) for i in (1, 2)]
        sums = [each.reshape(n) for each in places]
        self.invoke(self.kernels.layer_norm_grad, rows, normal, inverse, flat_scale, to_x, *sums)
        grads = (to_x.reshape(grad.shape), *places)
        return tuple(each if needed else None for each, needed in zip(grads, self.needs, strict=True))


class _DeviceLayerNorm(LayerNorm):
    """The same by a device's kernels, in float32 or more; x is kept, not what it is normalized to."""

    __slots__ = ("table",)

    def __init__(self, eps: float, table: Any) -> None:
        super().__init__(eps)
        self.table = table

    def forward(self, x: Array, scale: Array, shift: Array) -> Array:
        xp, n = self.xp, scale.size
        rows = xp.ascontiguousarray(xp.reshape(x, (x.size // n, n)))
        flat_scale, flat_shift = (xp.ascontiguousarray(xp.reshape(each, (n,))) for each in (scale, shift))
        y, wide = xp.empty(rows.shape, x.dtype), FLOAT32 if is_low(x.dtype) else x.dtype
        inverse, mean = xp.empty((len(rows),), wide), xp.empty((len(rows),), wide)
        self.invoke(self.table.layer_norm, rows, flat_scale, flat_shift, self.eps, y, None, inverse, mean)
        self.saved = (rows, inverse, mean, flat_scale, scale)
        result: Array = y.reshape(x.shape)
        return result

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        x, inverse, mean, flat_scale, scale = self.saved
        xp, n = self.xp, flat_scale.size
        rows = xp.ascontiguousarray(xp.reshape(grad, x.shape))
        to_x = xp.empty(x.shape, grad.dtype) if self.needs[0] else None
        places = [self._place(i, scale) if self.needs[i] else None for i in (1, 2)]
        sums = [None if each is None else each.reshape(n) for each in places]
        self.invoke(self.table.layer_norm_grad, rows, x, inverse, flat_scale, to_x, *sums, mean)
        return None if to_x is None else to_x.reshape(grad.shape), *places


def batch_norm(
    x: Tensor,
    scale: Tensor,
    shift: Tensor,
    eps: float = 1e-5,
    all_reduce: AllReduce | None = None,
    observe: Observe | None = None,
) -> tuple[Tensor, Array, Array, Count]:
    """Normalize each channel by the batch's statistics (Ioffe and Szegedy, 2015).

    A channel whose variance is too large for the dtype is NaN.

    Args:
        x: (..., channels); the statistics run over all other axes, and with `all_reduce` over all ranks.
        scale, shift: (channels,).
        all_reduce: adds a float64 array up over the ranks and returns the sum; every rank must call it, even with
            no rows of its own. Called twice here and, where x needs a gradient, once in backward.
        observe: called as observe(mean, variance, elements) in every pass, also when a compiled step is replayed.

    Returns:
        The result, and the batch's mean, variance (divisor n) and number of elements n per channel; over ranks, n is
        an array () where x is on a device.

    Raises:
        ShapeError: when scale or shift do not fit x.
        DtypeError: when x, scale and shift differ in dtype.
    """
    _check("batch_norm", x, scale, shift, x.shape[-1:])
    function = BatchNorm(float(eps), all_reduce, observe)
    y = widely(function, real("batch_norm", x), scale, shift)
    return y, *function.statistics


def layer_norm(x: Tensor, scale: Tensor, shift: Tensor, eps: float = 1e-5) -> Tensor:
    """Normalize each row over its last axes (Ba, Kiros and Hinton, 2016).

    A row whose variance is too large for the dtype in which is computed (differences of 1.8e19 in float32) is NaN: to
    scale it first would take a look at the rows in every call.

    Args:
        x: (..., *features).
        scale, shift: (*features); they say over which axes.

    Raises:
        ShapeError: when scale or shift do not fit the last axes of x.
        DtypeError: when x, scale and shift differ in dtype.
    """
    _check("layer_norm", x, scale, shift, x.shape[x.ndim - scale.ndim :])
    table = device_kernels(real("layer_norm", x).data)
    if table is not None:
        return _DeviceLayerNorm(float(eps), table)(x, scale, shift)
    compiled = kernels_for(x.data)
    function = LayerNorm(float(eps)) if compiled is None else _CompiledLayerNorm(float(eps), compiled)
    return widely(function, x, scale, shift)


def _check(name: str, x: Tensor, scale: Tensor, shift: Tensor, wanted: tuple[int, ...]) -> None:
    if x.ndim < 1 or not wanted or prod(wanted) == 0 or scale.shape != wanted or shift.shape != wanted:
        raise ShapeError(f"{name} of shape {x.shape} does not fit scale {scale.shape} and shift {shift.shape}")
    may_meet(name, x, scale, shift)
