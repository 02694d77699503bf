"""Normalization: over the batch (per channel), over an image's groups, over a row's features.

Batch statistics may span several ranks: `all_reduce` then sums float64 arrays over them. The
forward pass calls it twice: for counts and sums, then for squared deviations from the resulting
mean, which avoids cancellation. The backward pass calls it once, for the two sums of the
derivative. A rank's squared deviations are converted to the global mean by the formula of Chan,
Golub and LeVeque ("Updating formulae and a pairwise algorithm for computing sample variances",
1979).
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf, prod
from typing import Any, TypeAlias

import numpy as np

from nnmpi.backend.array import Array, Residuals, is_array, namespace
from nnmpi.backend.kernels import kernels_of
from nnmpi.backend.recording import call
from nnmpi.base.errors import ShapeError, check_int, number
from nnmpi.ops.linear import place_for
from nnmpi.tensor.dtypes import may_meet
from nnmpi.tensor.function import Elementwise, Function, Grads
from nnmpi.tensor.operand import refuse_parts, require_floating
from nnmpi.tensor.placement import Placement, elementwise_placement, placement_if_uncut
from nnmpi.tensor.tensor import Tensor
from nnmpi.tensor.traits import WRITTEN, Channels, NotExported, Sample, Traits
from nnmpi.tensor.turns import in_turn

__all__ = ["batch_norm", "group_norm", "layer_norm", "rms_norm"]

AllReduce: TypeAlias = Callable[[Array], Array]
Count: TypeAlias = "float | Array"  # a 0-d array over ranks on a device: the host need not wait
Observe: TypeAlias = Callable[[Array, Array, Count], None]


_quiet = np.errstate(all="ignore")  # an overflow shows in the statistics


class Norm(Function):
    """(x - mean) / sqrt(variance + eps) * scale + shift: statistics, then a function of them.

    The squares of numbers of 1.8e19 and more overflow in float32. So a pass whose statistics are
    not finite is computed again in float64. On a device the host would have to wait for the
    statistics: such a pass stays NaN there.

    Attributes:
        in_float64: the operation on float64, if the pass was computed again.
        settings: eps, which is added to the variance, and the subclass's own.
    """

    __slots__ = ("in_float64", "settings")
    varies = (*Function.varies, "in_float64")

    in_float64: Any

    def __init__(self, eps: float, *others: Any) -> None:
        self.settings, self.in_float64 = (number("eps", eps), *others), None

    def pair(self, kernels: Any) -> tuple[Any, Any]:
        """Return kernels' normalization, and its derivative.

        The first returns the result and what the second reads, of which the statistic number 1
        shows an overflow; it is None if none can. The second returns the gradient of x if it is
        needed, and writes those of scale and shift.
        """
        raise NotImplementedError

    @_quiet
    def forward(self, x: Array, *parameters: Array) -> Array:
        kernels = kernels_of(x)
        y, saved = self.pair(kernels)[0](x, *self.settings, *parameters)
        y, self.saved = y.reshape(x.shape), (kernels, parameters[0], saved)
        if isinstance(saved[1], np.ndarray):
            call(self._repeat, (saved[1], x, *parameters), (y,))
        return y

    @_quiet
    def backward(self, grad: Array) -> Grads:
        (kernels, scale, saved), indices = self.saved, range(1, len(self.needs))[:2]
        targets = [place_for(self, i, scale.shape, scale.dtype) for i in indices]
        to_x = self.pair(kernels)[1](grad, saved, self.needs, *targets)
        grads = (None if to_x is None else to_x.reshape(grad.shape), *targets)
        if isinstance(saved[1], np.ndarray):
            call(self._repeat_backward, (grad,), grads)
        return *grads, *[None] * (len(self.needs) - len(grads))

    def _repeat(self, statistic: Array, *arrays: Array) -> None:
        *inputs, y = arrays
        self.in_float64 = None
        if overflows(statistic):
            in_float64 = self.in_float64 = type(self)(*self.settings)
            in_float64.xp, in_float64.needs, in_float64.edges = np, self.needs, None
            y[...] = in_float64.forward(*(item.astype(np.float64) for item in inputs))

    def _repeat_backward(self, grad: Array, *targets: Array | None) -> None:
        grads = () if self.in_float64 is None else self.in_float64.backward(grad.astype(np.float64))
        for target, item in zip(targets, grads, strict=False):
            if target is not None:
                target[...] = item


def overflows(values: Array) -> bool:
    """Return whether narrow numbers are not all finite: float64's might be."""
    return values.dtype != np.float64 and not np.isfinite(values).all()


class BatchNormFunction(Norm):
    """Normalization with the statistics of the batch.

    After `forward`, `statistics` is (mean, variance with divisor n, n) of the global batch; the
    caller deletes it. In half precision x, the result and their gradients alone have 16 bits.
    Backward, for the normalized x^ and the gradient g:

        dx = scale / sqrt(variance + eps) * (g - mean(g) - x^ mean(g x^))      means over the batch

    Args:
        settings: eps, `all_reduce` and `observe` of `batch_norm`.
    """

    __slots__ = ("statistics",)

    traits = Traits(
        onnx=NotExported(),
        channels=Channels.NORMALIZED,
        samples=(
            Sample(
                "batch_norm",
                lambda x, scale, shift: batch_norm(x, scale, shift, 0.1)[0],
                ((4, 3), (3,), (3,)),
                parameters=2,
            ),
        ),
    )

    computes = "parameters"

    @property
    def alike(self) -> str:
        """See `Function.alike`."""
        return "batch normalization by the statistics of the batch"

    def pair(self, kernels: Any) -> tuple[Any, Any]:
        """See `Norm.pair`."""
        return self._normalize, self._derive

    def _normalize(self, x: Array, *values: Any) -> tuple[Array, Residuals]:
        xp = namespace(x)
        kernels, (eps, all_reduce, observe, scale, shift) = kernels_of(x), values
        kept, offset, variance, mean = kernels.batch_moments(x, scale.size)
        count: Count = x.size // scale.size
        seen, divisor = count, max(count, 1)
        if all_reduce is not None:
            # an array: in a replay other ranks may have other numbers of rows
            seen = divisor = xp.empty((), np.float64)
            count = call(_over_ranks, (all_reduce, count, mean, variance, offset, divisor))
        if observe is not None:
            given = observe, mean, variance, seen
            call(_report, given, () if all_reduce is None else None)
        self.statistics = mean, variance, count
        moments = kept, offset, variance, eps
        return kernels.normalize(moments, scale, shift), (moments, variance, divisor)

    def _derive(self, grad: Array, *values: Any) -> Array | None:
        (kernels, scale, _), ((moments, _, divisor), needs, to_scale, to_shift) = self.saved, values
        given, sums = kernels.contiguous(grad).reshape(moments[0].shape), (to_shift, to_scale)
        kernels.norm_sums(given, moments, sums)
        if not needs[0]:
            return None
        if is_array(divisor):
            both = np.concatenate(sums)
            call(_average, (self.settings[1], both, divisor))
            sums, divisor = (both[: scale.size], both[scale.size :]), 1
        return kernels.norm_grad(given, moments, scale, sums, divisor)


def _report(observe: Observe, mean: Array, variance: Array, count: Count) -> None:
    # an overflow is observed in the second computation
    if not (isinstance(variance, np.ndarray) and overflows(variance)):
        observe(mean, variance, float(count) if isinstance(count, np.ndarray) else count)


def _over_ranks(
    all_reduce: AllReduce, local: int, mean: Array, variance: Array, offset: Array, seen: Array
) -> Count:
    """Turn a rank's statistics of `local` elements into those of all ranks; return their number."""
    xp = namespace(mean)
    ours = mean.astype(xp.float64)
    total = all_reduce(xp.concatenate([xp.full(1, local, xp.float64), local * ours]))
    seen[...] = total[0]
    divisor = xp.maximum(total[0], 1)
    wide_mean = total[1:] / divisor
    variance[...] = all_reduce(local * (variance + (ours - wide_mean) ** 2)) / divisor
    mean[...] = wide_mean
    offset += wide_mean - ours
    return total[0]


def _average(all_reduce: AllReduce, sums: Array, seen: Array) -> None:
    sums[...] = all_reduce(sums.astype(np.float64)) / namespace(sums).maximum(seen, 1)


def _batch_normalization(function: Norm, y: Any, x: Any, *others: Any) -> Any:
    """Return the node of ONNX's operator, whose channels come first."""
    add = x.add if y.ndim == 2 else x.images
    return add("BatchNormalization", *others, epsilon=function.settings[0])


class FixedNormFunction(BatchNormFunction, Elementwise):
    """Normalization with given means and variances, which are constant; for `fixed_norm`.

    Of sharded channels, each rank uses its slice of the other inputs.
    """

    __slots__ = ()

    traits = Traits(
        onnx=_batch_normalization,
        channels=Channels.NORMALIZED,
        tested_in="tests/ops/rows.py",
    )

    def placed(self, *inputs: Any) -> Placement:
        """Return the input's placement."""
        refuse_parts(self, *inputs[1:], why="needs a whole scale and shift")
        return Elementwise.placed(self, *inputs)

    def _normalize(self, x: Array, *values: Any) -> tuple[Array, Residuals]:
        kernels, (eps, scale, shift, mean, variance) = kernels_of(x), values
        moments = kernels.channel_rows(x, scale.size), mean, variance, eps, True
        return kernels.normalize(moments, scale, shift), (moments, None, inf)


class LayerNormFunction(Norm):
    """Normalization over the last axes of each row.

    Backward, for the normalized x^ and h = scale times the gradient:

        dx = (h - mean(h) - x^ mean(h x^)) / sqrt(variance + eps)              means over the row

    Without a shift mean and shift are left out, for `rms_norm`.
    """

    __slots__ = ()

    traits = Traits(
        onnx=WRITTEN,
        samples=(
            Sample(
                "layer_norm",
                lambda x, scale, shift: layer_norm(x, scale, shift, 0.1),
                ((3, 2, 4), (2, 4), (2, 4)),
                parameters=2,
            ),
            Sample(
                "rms_norm", lambda x, scale: rms_norm(x, scale, 0.1), ((3, 4), (4,)), parameters=1
            ),
        ),
    )

    computes = "kernels"

    def placed(self, *inputs: Any) -> Placement:
        """Return the input's placement; sharded rows are refused."""
        x, *parameters = inputs
        refuse_parts(self, *parameters, why="needs a whole scale and shift")
        return placement_if_uncut(
            self, x, range(-parameters[0].ndim, 0), "averages over whole rows"
        )

    def pair(self, kernels: Any) -> tuple[Any, Any]:
        """See `Norm.pair`."""
        return kernels.layer_norm, kernels.layer_norm_grad


class GroupNormFunction(Norm):
    """Normalization over each image's groups of channels.

    Backward, for the normalized x^ and h = scale times the gradient:

        dx = (h - mean(h) - x^ mean(h x^)) / sqrt(variance + eps)         means over the group

    Args:
        settings: eps, and the number of a group's channels.
    """

    __slots__ = ()

    traits = Traits(
        onnx=WRITTEN,
        channels=Channels.NORMALIZED,
        samples=(
            Sample(
                "group_norm",
                lambda x, scale, shift: group_norm(x, scale, shift, 2, 0.1),
                ((2, 3, 2, 4), (4,), (4,)),
                parameters=2,
            ),
        ),
    )

    computes = "parameters"
    broadcasts = True  # of sharded channels, each rank uses its slice of scale and shift

    def placed(self, *inputs: Any) -> Placement:
        """Return the input's placement; refuse a part of an image or of a group."""
        x, *parameters = inputs
        refuse_parts(self, *parameters, why="needs a whole scale and shift")
        placement_if_uncut(self, x, range(1, x.ndim - 1), "averages over whole images")
        placement, ranks = elementwise_placement(self, inputs, scatters=True), x.shard.group.size
        widths = {placement.width(ranks, rank) for rank in range(ranks)}
        if x.shard.axis and (placement.repeats != 1 or any(n % self.settings[1] for n in widths)):
            raise x.shard.error(self, "averages over whole groups of channels")
        return placement

    def pair(self, kernels: Any) -> tuple[Any, Any]:
        """See `Norm.pair`."""
        return kernels.group_norm, kernels.group_norm_grad


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
        raise ShapeError(
            f"group_norm needs (batch, ..., channels), {groups} of them or a multiple, not"
            f" {x.shape}"
        )
    return GroupNormFunction(eps, scale.size // groups)(x, scale, shift)


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
            With an attribute `turns` (see `tensor.turns`) not every rank's loss must use the
            result.
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
    function = BatchNormFunction(eps, all_reduce, observe)
    turns = getattr(all_reduce, "turns", None) if x.requires_grad else None
    y = in_turn(turns, function, x, scale, shift)
    statistics = (function.in_float64 or function).statistics
    del function.statistics  # the tape should hold only what backward needs
    return y, *statistics


def fixed_norm(
    x: Tensor, scale: Tensor, shift: Tensor, mean: Array, variance: Array, eps: float
) -> Tensor:
    """Normalize each channel by a given mean and variance.

    Args:
        x: (..., channels).
        scale, shift, mean, variance: (channels,).
        eps: added to the variance.

    Same errors as `batch_norm`.
    """
    _check("batch_norm", x, scale, shift)
    return FixedNormFunction(eps)(x, scale, shift, Tensor(mean), Tensor(variance))


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
    return LayerNormFunction(eps)(x, scale, shift)


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
    return LayerNormFunction(eps)(x, scale)


def _check(name: str, x: Tensor, scale: Tensor, shift: Tensor, axes: int | None = 1) -> None:
    """Refuse what does not fit; `axes` are normalized, or those of the scale (None)."""
    may_meet(name, require_floating(name, x), scale, shift)
    shape = x.shape[x.ndim - (scale.ndim if axes is None else axes) :]
    if prod(shape) == 0 or not shape or not scale.shape == shift.shape == shape:
        raise ShapeError(
            f"{name} of shape {x.shape} does not fit scale {scale.shape} and shift {shift.shape}"
        )
