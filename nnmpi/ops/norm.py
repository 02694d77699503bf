"""Normalization: over the batch (per channel), over an image's groups, over a row's features.

Batch statistics may span several ranks: `all_reduce` then sums float64 arrays over them. The
forward pass calls it twice: for counts and sums, then for squared deviations from the resulting
mean, which avoids cancellation. The backward pass calls it once, for the two sums of the
derivative. A rank's squared deviations are converted to the global mean by the formula of Chan,
Golub and LeVeque ("Updating formulae and a pairwise algorithm for computing sample variances",
1979).
"""

from collections.abc import Callable
from functools import partial
from math import inf, prod
from typing import Any, TypeAlias

import numpy as np

from nnmpi.backend.array import Array, namespace
from nnmpi.backend.kernels import kernels_of
from nnmpi.backend.recording import record_call, record_launch
from nnmpi.base.errors import ShapeError, check_int, number
from nnmpi.ops.linear import place_for
from nnmpi.tensor.dtypes import may_meet
from nnmpi.tensor.function import Function, Grads
from nnmpi.tensor.operand import refuse_parts, require_floating
from nnmpi.tensor.placement import Placement, elementwise_placement, placement_if_uncut
from nnmpi.tensor.tensor import Tensor
from nnmpi.tensor.turns import in_turn

AllReduce: TypeAlias = Callable[[Array], Array]
Count: TypeAlias = "float | Array"  # a 0-d array over ranks on a device: the host need not wait
Observe: TypeAlias = Callable[[Array, Array, Count], None]


def overflows(values: Array) -> bool:
    """Return whether narrow numbers are not all finite: float64's might be."""
    return values.dtype != np.float64 and not np.isfinite(values).all()


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

    After `forward`, `statistics` is (mean, variance with divisor n, n) of the global batch; the
    caller deletes it. In half precision x, the result and their gradients alone have 16 bits.
    Backward, for the normalized x^ and the gradient g:

        dx = scale / sqrt(variance + eps) * (g - mean(g) - x^ mean(g x^))      means over the batch
    """

    __slots__ = ("all_reduce", "eps", "observe", "statistics")

    computes = "parameters"

    def __init__(self, eps: float, all_reduce: AllReduce | None, observe: Observe | None) -> None:
        self.eps, self.all_reduce, self.observe = eps, all_reduce, observe

    @_quiet
    def forward(self, x: Array, scale: Array, shift: Array) -> Array:
        xp, kernels, again = self.xp, kernels_of(x), None
        kept, offset, variance, mean = kernels.batch_moments(xp, x, scale.size)
        count: Count = x.size // scale.size
        n = None
        if self.all_reduce is not None:
            # an array: in a replay other ranks may have other numbers of rows
            n = xp.empty((), np.float64)
            results = mean, variance, offset
            count = record_call(_count_ranks, self.all_reduce, count, results, n)
        if self.observe is not None:
            record = record_launch if n is None else record_call
            record(_report, self.observe, mean, variance, count if n is None else n)
        self.statistics = (mean, variance, count)
        moments = kept, offset, variance, self.eps
        scale, shift = map(xp.ascontiguousarray, (scale, shift))
        y = kernels.normalize(xp, moments, scale, shift).reshape(x.shape)
        if isinstance(x, np.ndarray):
            again = Again(partial(BatchNormFunction, self.eps, self.all_reduce, self.observe))
            record_call(again.forward, y, variance, self.needs, x, scale, shift)
            if again.function is not None:
                self.statistics = again.function.statistics  # type: ignore[attr-defined]
        self.saved = (moments, scale, n, kernels, again)
        return y

    @_quiet
    def backward(self, grad: Array) -> Grads:
        (moments, scale, n, kernels, again), xp = self.saved, self.xp
        given = kernels.contiguous(xp, grad).reshape(moments[0].shape)
        sums = tuple(place_for(self, i, scale.shape, scale.dtype) for i in (2, 1))
        kernels.norm_sums(xp, given, moments, sums)
        to_x, (to_shift, to_scale) = None, sums
        if self.needs[0]:
            count = inf if moments[4:] else grad.size // scale.size  # constant means
            if n is not None:
                both, count = xp.concatenate(sums), 1
                record_call(_all_reduce, self.all_reduce, both)
                xp.divide(both, at_least_one(n), out=both)
                sums = both[: scale.size], both[scale.size :]
            to_x = kernels.norm_grad(xp, given, moments, scale, sums, max(count, 1))
            to_x = to_x.reshape(grad.shape)
        if again is not None:
            record_call(again.backward, grad, to_x, to_scale, to_shift)
        return to_x, to_scale, to_shift


def _report(observe: Observe, mean: Array, variance: Array, count: Count) -> None:
    # an overflow is observed in the second computation
    if not (isinstance(variance, np.ndarray) and overflows(variance)):
        observe(mean, variance, float(count) if isinstance(count, np.ndarray) else count)


def _count_ranks(
    all_reduce: AllReduce, local: int, results: tuple[Array, Array, Array], n: Array
) -> Count:
    count = _over_ranks(all_reduce, local, *results)
    n[...] = count
    return count


class FixedNormFunction(BatchNormFunction):
    """Normalization by given means and variances, by a device's kernels, for `fixed_norm`."""

    __slots__ = ()

    def forward(self, x: Array, *inputs: Array) -> Array:
        kernels, (scale, shift, mean, variance) = kernels_of(x), inputs
        rows = kernels.samples(self.xp, x, 1, scale.size)
        scale, shift = map(self.xp.ascontiguousarray, (scale, shift))
        moments = rows, mean, variance, self.eps, True
        self.saved = (moments, scale, None, kernels, None)
        return kernels.normalize(self.xp, moments, scale, shift).reshape(x.shape)

    def backward(self, grad: Array) -> Grads:
        return *super().backward(grad), None, None


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


class LayerNormFunction(Function):
    """(x - mean) / sqrt(variance + eps) * scale + shift, over the last axes of each row.

    Backward, for the normalized x^ and h = scale times the gradient:

        dx = (h - mean(h) - x^ mean(h x^)) / sqrt(variance + eps)              means over the row

    Without a shift mean and shift are left out, for `rms_norm`.

    Args:
        eps: added to the variance.
    """

    __slots__ = ("eps",)

    computes = "kernels"

    def __init__(self, eps: float) -> None:
        self.eps = eps

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
        kernels = kernels_of(x)
        y, residuals = kernels.layer_norm(xp, rows, scale_row, shift_row, self.eps)
        again = None
        if isinstance(x, np.ndarray):
            again = Again(partial(LayerNormFunction, self.eps))
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
        kernels.layer_norm_grad(xp, rows, residuals, xp.reshape(scale, (n,)), to_x, *sums)
        if again is not None:
            record_call(again.backward, grad, *(to_x, to_scale, to_shift)[: len(self.needs)])
        to_x = None if to_x is None else to_x.reshape(grad.shape)
        return (to_x, to_scale, to_shift)[: len(self.needs)]


class GroupNormFunction(Function):
    """(x - mean) / sqrt(variance + eps) * scale + shift, over each image's groups of channels.

    Backward, for the normalized x^ and h = scale times the gradient:

        dx = (h - mean(h) - x^ mean(h x^)) / sqrt(variance + eps)         means over the group

    Args:
        count: channels of a group.
        eps: added to the variance.
    """

    __slots__ = ("count", "eps")

    computes = "parameters"
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
        if not x.size:
            return self.xp.empty(x.shape, x.dtype)
        kernels, settings = kernels_of(x), (self.count, self.eps)
        y, saved = kernels.group_norm(self.xp, x, scale, shift, *settings)
        again = None
        if isinstance(x, np.ndarray):
            again = Again(partial(GroupNormFunction, *settings))
            record_call(again.forward, y, saved[1], self.needs, x, scale, shift)
        self.saved = (saved, scale, kernels, again)
        return y

    @_quiet
    def backward(self, grad: Array) -> Grads:
        xp = self.xp
        if not grad.size:
            return grad, *(xp.zeros(grad.shape[-1:], grad.dtype) for _ in range(2))
        saved, scale, kernels, again = self.saved
        sums = [place_for(self, i, scale.shape, scale.dtype) for i in (1, 2)]
        settings = self.count, self.needs[0]
        to_x = kernels.group_norm_grad(xp, grad, saved, *settings, *sums)
        if again is not None:
            record_call(again.backward, grad, to_x, *sums)
        return to_x, *sums


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
    return GroupNormFunction(scale.size // groups, number("eps", eps))(x, scale, shift)


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
    function = BatchNormFunction(number("eps", eps), all_reduce, observe)
    turns = getattr(all_reduce, "turns", None) if x.requires_grad else None
    y = in_turn(turns, function, x, scale, shift)
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
    if x.shard is not None or not kernels_of(x.data).of_device:
        return None
    may_meet("batch_norm", x, scale, shift)
    return FixedNormFunction(eps, None, None)(x, scale, shift, mean, variance)


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
    return LayerNormFunction(number("eps", eps))(x, scale, shift)


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
    return LayerNormFunction(number("eps", eps))(x, scale)


def _check(name: str, x: Tensor, scale: Tensor, shift: Tensor, axes: int | None = 1) -> None:
    """Refuse what does not fit; `axes` are normalized, or those of the scale (None)."""
    may_meet(name, require_floating(name, x), scale, shift)
    shape = x.shape[x.ndim - (scale.ndim if axes is None else axes) :]
    if prod(shape) == 0 or not shape or not scale.shape == shift.shape == shape:
        raise ShapeError(
            f"{name} of shape {x.shape} does not fit scale {scale.shape} and shift {shift.shape}"
        )
