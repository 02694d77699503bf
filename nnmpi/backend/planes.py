"""Max-pooling, bias and ReLU on planes: one flat array per position in the pooling's windows.

    y0 = positions (0, 0) of all windows, y1 = (0, 1), ...          h = relu(max(y0, y1, ...) + b)

Bias and ReLU follow the pooling, on fewer elements: max(y + b) = max(y) + b exactly, since rounding
preserves order. Backward needs one number per window, usually a byte: the winner. It is the
position of h in the window, the first one of ties; or a number of no position if the ReLU set the
result to 0.
"""

from typing import Any

import numpy as np

from nnmpi.backend.array import Array, zero


class Planes:
    """Max-pooling by planes: finds maxima, routes gradients back, and reuses its memory.

    Args:
        xp: NumPy, CuPy, or a recorder's stand-in.
        positions: the number of positions in a window.
        size: the maximal number of windows times channels in a call.

    Attributes:
        dtype: of the winners: one byte for up to 255 positions.
    """

    __slots__ = ("_masks", "_numbers", "dtype")

    def __init__(self, xp: Any, positions: int, size: int) -> None:
        self.dtype = np.min_scalar_type(positions)  # has room for the number of no position
        self._masks: Array = xp.empty((positions * size,), bool)
        self._numbers: Array = xp.arange(positions, dtype=self.dtype).reshape(positions, 1)

    def largest(self, planes: Array, h: Array, winner: Array | None) -> None:
        """Write the maximum over the positions to h, and its position to `winner`.

        Args:
            planes: (positions, size).
            h: out, (size,).
            winner: (size,) of `dtype`, or None; holds the position that wins a window of -infinity.
        """
        if len(planes) == 1:
            np.copyto(h, planes[0])
        for k in range(1, len(planes)):
            before = h if k > 1 else planes[0]
            if winner is not None:
                mask = self._masks[: len(h)]
                np.greater(planes[k], before, out=mask)
                number = self._as_numbers(mask)
                np.multiply(number, k, out=number)
                np.maximum(winner, number, out=winner)  # k exceeds all earlier positions
            np.maximum(before, planes[k], out=h)

    def _as_numbers(self, mask: Array) -> Array:
        # a view if possible: windows of more than 255 positions are rare
        return mask.view(np.uint8) if self.dtype == np.uint8 else np.add(mask, 0, dtype=self.dtype)

    def bias_relu(self, bias: Array | None, h: Array, winner: Array | None) -> None:
        """Compute h = relu(h + bias) in place; set the winner to no position if that is 0.

        Args:
            bias: (size,) or longer, or None.
            h: (size,), in place.
            winner: (size,) of `dtype`, in place, or None.
        """
        if bias is not None:
            np.add(h, bias[: len(h)], out=h)
        np.maximum(h, zero(h), out=h)
        if winner is not None:
            mask = self._masks[: len(h)]
            np.greater(h, 0, out=mask)
            number = self._as_numbers(mask)
            np.subtract(number, 1, out=number)  # 1 becomes 0; 0 becomes the dtype's largest number
            np.bitwise_or(winner, number, out=winner)

    def gradient(self, grad: Array, winner: Array, out: Array) -> None:
        """Write the planes' gradient: that of h at the winner, 0 elsewhere.

        Args:
            grad: of h, (size,).
            winner: (size,) of `dtype`.
            out: (positions, size).
        """
        masks = self._masks[: out.size].reshape(out.shape)
        np.equal(winner, self._numbers, out=masks)
        _select(masks, grad, out)


def flattened(array: Array) -> Array:
    """Return a contiguous array as a view with one axis."""
    return array.reshape(array.size)


def _select(mask: Array, values: Array, out: Array) -> None:
    """Write the values where the mask holds, 0 elsewhere; all contiguous.

    It is a product of integers, since 0 * infinity would be NaN. A masked copy is ten times slower.
    """
    kind = f"u{out.itemsize}"
    bits = out.view(kind)
    np.copyto(bits, mask)  # first: NumPy converts a product of bool and integer in small pieces
    np.multiply(bits, values.view(kind), out=bits)
