"""Softmax along an axis, and the cross-entropy with it.

The cross-entropy's gradient is softmax(logits) - target, so the powers of e and their sums are all that is kept. Few
classes are laid out class by class, as NumPy is slow on short rows:

    logits      (rows, classes)          powers, up to FEW_CLASSES    (classes, rows)
                                         powers, for more classes     (rows, classes)
"""

from typing import Any, TypeAlias

import numpy as np

from nnmpi.backend.array import Array, Residuals, ones, steps
from nnmpi.backend.kernels.sums import row_blocks

FEW_CLASSES = 32


class SoftmaxKernels:
    """Softmax by the array library's functions, shifted by each row's largest element so that nothing overflows."""

    __slots__ = ()

    def softmax(self, xp: Any, x: Array, axis: int) -> Array:
        """Return e^x / sum(e^x) along an axis, of the shape and dtype of x.

        Args:
            xp: the array's module, or a recorder's stand-in for it.
            x: any shape, with at least one element along the axis.
            axis: along which the results add up to 1.
        """
        y: Array = xp.subtract(x, xp.max(x, axis=axis, keepdims=True))
        xp.exp(y, out=y)
        xp.divide(y, xp.sum(y, axis=axis, keepdims=True), out=y)
        return y

    def softmax_grad(self, xp: Any, grad: Array, y: Array, axis: int) -> Array:
        """Return the gradient of x, like grad.

        Args:
            xp: the arrays' module, or a recorder's stand-in for it.
            grad: the gradient of the result.
            y: the result of `softmax`, like grad.
            axis: that of `softmax`.
        """
        weighted: Array = xp.multiply(grad, y)
        total = xp.sum(weighted, axis=axis, keepdims=True)
        xp.subtract(weighted, xp.multiply(y, total), out=weighted)
        return weighted

    def softmax_loss(
        self, xp: Any, logits: Array, labels: Array, ignore_index: int | None, smoothing: float
    ) -> tuple[Array, Residuals]:
        """Return the cross-entropy of each row, (rows,), and what the gradient needs.

        The losses have the logits' dtype, or float32 for float16 and bfloat16.

        Args:
            xp: the arrays' module, or a recorder's stand-in for it.
            logits: (rows, classes); any strides.
            labels: (rows,), integers of any kind, in 0..classes-1 or `ignore_index`. A device's kernels give NaN for
                any other label; here it must not be.
            ignore_index: rows with this label have loss 0 and no gradient; None for no such label.
            smoothing: the share of each target that is spread evenly over all classes, in [0, 1).
        """
        kept = None
        if ignore_index is not None:
            kept = xp.not_equal(labels, ignore_index)
            labels = xp.where(kept, labels, 0)
        axis = int(logits.shape[1] > FEW_CLASSES)
        powers, sums, target, mean, places = (_by_rows if axis else _by_classes)(xp, logits, labels, smoothing > 0)
        if mean is not None:
            target = xp.add(xp.multiply(target, 1 - smoothing), xp.multiply(mean, smoothing))
        losses = xp.subtract(xp.log(sums), target)
        if kept is not None:
            losses = xp.where(kept, losses, 0)  # not a product: what is ignored may be NaN
        return losses, (powers, sums, places, kept, axis)

    def softmax_loss_grad(self, xp: Any, share: Array, residuals: Residuals, smoothing: float, dtype: Any) -> Array:
        """Return the gradient of the logits, (rows, classes).

        Args:
            xp: as for `softmax_loss`.
            share: (rows,), the gradients of the losses, or (1,), one for all.
            residuals: what `softmax_loss` returned.
            smoothing: as it was given to `softmax_loss`.
            dtype: of the logits, and of the result.
        """
        powers, sums, places, kept, axis = residuals
        result: Array = xp.multiply(powers, _beside(xp.divide(share, sums), axis))
        hit = share
        if smoothing:
            hit = xp.multiply(share, 1 - smoothing)
            spread = xp.multiply(share, smoothing / powers.shape[axis])
            xp.subtract(result, _beside(spread, axis), out=result)
        xp.put(result, places, xp.subtract(_take(xp, result, places), hit))
        if kept is not None:
            xp.copyto(result, 0, where=_beside(xp.logical_not(kept), axis))
        return result if axis else result.T


Powers: TypeAlias = tuple[Array, Array, Array, Array | None, Array]


def _by_classes(xp: Any, logits: Array, labels: Array, averages: bool) -> Powers:
    """Return powers of e of the logits less the largest of their row, and what comes of them on the way.

    Args:
        xp: the array's module, or a recorder's stand-in for it.
        logits: (rows, classes).
        labels: (rows,).
        averages: whether the means are wanted.

    Returns:
        (classes, rows) the powers; (rows,) each: their sums, the labels' logits less the largest, the means of these
        over the classes or None, and the labels' places among the powers.
    """
    count, classes = logits.shape
    labels = xp.multiply(labels, count, dtype="int64", casting="unsafe")
    places = xp.add(steps(xp, count, 1), labels, dtype="int64", casting="unsafe")
    powers = xp.empty((classes, count), logits.dtype)
    xp.copyto(powers, logits.T)
    xp.subtract(powers, _max_along(xp, powers, 0), out=powers)
    target = _take(xp, powers, places)
    mean = xp.mean(powers, axis=0) if averages else None
    xp.exp(powers, out=powers)
    return powers, xp.dot(ones(xp, classes, powers.dtype), powers), target, mean, places


def _by_rows(xp: Any, logits: Array, labels: Array, averages: bool) -> Powers:
    """Return the same for powers (rows, classes), a block of rows after the other, while it lies in the cache."""
    count, classes = logits.shape
    logits = xp.ascontiguousarray(logits)
    places = xp.add(steps(xp, count, classes), labels, dtype="int64", casting="unsafe")
    powers, target = xp.empty(logits.shape, logits.dtype), _take(xp, logits, places)
    sums, each = xp.empty((count,), logits.dtype), ones(xp, classes, logits.dtype)
    mean = xp.empty((count,), logits.dtype) if averages else None
    for part in row_blocks(logits):
        block, top = powers[part], _max_along(xp, logits[part], 1)
        xp.subtract(logits[part], top[:, None], out=block)
        xp.subtract(target[part], top, out=target[part])
        if mean is not None:
            xp.mean(block, axis=1, out=mean[part])
        xp.exp(block, out=block)
        xp.dot(block, each, out=sums[part])
    return powers, sums, target, mean, places


def _beside(values: Array, axis: int) -> Array:
    """Return one value per row in the shape that stands beside powers whose classes lie along the axis."""
    return values[:, None] if axis else values


def _take(xp: Any, array: Array, places: Array) -> Array:
    """Return the elements at `places`, which are known to lie within the array.

    NumPy is told to clip places, although none lies outside: to be able to raise an error instead, it would fill a
    buffer first and copy that to `out`, which a recorded step gives it.

    Args:
        xp: the array's module, or a recorder's stand-in for it.
        array: C-contiguous, any shape.
        places: integers, any shape, which is the result's.
    """
    if xp is np:
        return array.take(places, None, None, "clip")  # without NumPy's detour by way of Python
    result: Array = xp.take(array, places, mode="clip") if xp.__name__ == "numpy" else xp.take(array, places)
    return result


def _max_along(xp: Any, array: Array, axis: int) -> Array:
    """Return the largest elements along an axis, NaN where there is one.

    NumPy finds the place of the largest of neighbours five times as fast as the number itself.

    Args:
        xp: the array's module, or a recorder's stand-in for it.
        array: (rows, columns), C-contiguous.
        axis: 0 or 1.
    """
    result: Array
    if xp.__name__ != "numpy":
        result = xp.max(array, axis=axis)
    elif axis == 0:
        result = xp.maximum.reduce(array, axis=0)
    else:
        result = _take(xp, array, xp.add(steps(xp, *array.shape), xp.argmax(array, axis=1)))
    return result
