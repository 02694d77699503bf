"""Max-pooling, bias and ReLU on planes: one flat array per place in the pooling's windows.

    y0 = places (0, 0) of all windows, y1 = (0, 1), ...          h = relu(max(y0, y1, ...) + b)

Bias and ReLU come after the pooling, on fewer elements: max(y + b) = max(y) + b exactly, since
rounding keeps order. What backward needs is one number per window, usually a byte, the winner: the
place from which h came, the first of equal ones, or a number that no place has where the ReLU cut
the result off.
"""

from typing import Any

import numpy as np

from nnmpi.backend.array import Array


class Planes:
    """Max-pooling by planes: finds maxima, routes gradients back, and reuses its memory.

    Args:
        xp: the library that computes.
        places: how many there are in a window.
        size: the most windows times channels at a time.

    Attributes:
        dtype: of the winners' numbers: one byte for up to 255 places.
    """

    __slots__ = ("_masks", "_numbers", "_wide", "_xp", "dtype")

    def __init__(self, xp: Any, places: int, size: int) -> None:
        self._xp = xp
        self.dtype = np.min_scalar_type(places)  # which can also count what is no place
        self._masks: Array = xp.empty((places * size,), bool)
        self._numbers: Array = xp.arange(places, dtype=self.dtype).reshape(places, 1)
        self._wide: Array = xp.empty((0 if self.dtype == np.uint8 else size,), self.dtype)

    def largest(self, planes: Array, h: Array, winner: Array | None) -> None:
        """Write the largest of each element's places to h, and its number to `winner`.

        Args:
            planes: (places, size).
            h: out, (size,).
            winner: out, (size,) of `dtype`, or None.
        """
        xp = self._xp
        if winner is not None:
            xp.copyto(winner, 0)
        if len(planes) == 1:
            xp.copyto(h, planes[0])
        for k in range(1, len(planes)):
            before = h if k > 1 else planes[0]
            if winner is not None:
                mask = self._masks[: len(h)]
                xp.greater(planes[k], before, out=mask)
                number = self._counted(mask)
                xp.multiply(number, k, out=number)
                xp.maximum(winner, number, out=winner)  # k is larger than the places before it
            xp.maximum(before, planes[k], out=h)

    def _counted(self, mask: Array) -> Array:
        """Return a mask as numbers 0 and 1 in the winners' dtype."""
        if self.dtype == np.uint8:
            return mask.view(np.uint8)
        number = self._wide[: len(mask)]
        self._xp.copyto(number, mask)
        return number

    def bias_relu(self, bias: Array | None, h: Array, winner: Array | None) -> None:
        """Make h to relu(h + bias), and the winner to no place where that is 0.

        Args:
            bias: (size,) or longer, or None.
            h: (size,), in place.
            winner: (size,) of `dtype`, in place, or None.
        """
        xp = self._xp
        if bias is not None:
            xp.add(h, bias[: len(h)], out=h)
        xp.maximum(h, 0, out=h)
        if winner is not None:
            mask = self._masks[: len(h)]
            xp.greater(h, 0, out=mask)
            number = self._counted(mask)
            xp.subtract(number, 1, out=number)  # 1 becomes 0, and 0 the largest number
            xp.bitwise_or(winner, number, out=winner)

    def gradient(self, grad: Array, winner: Array, out: Array) -> None:
        """Write the planes' gradient: that of h at the winner, and 0 elsewhere.

        Args:
            grad: of h, (size,).
            winner: (size,) of `dtype`.
            out: (places, size).
        """
        xp = self._xp
        masks = self._masks[: out.size].reshape(out.shape)
        xp.equal(winner, self._numbers, out=masks)
        xp.copyto(out, masks)  # a product of bool and float would be converted in pieces
        xp.multiply(out, grad, out=out)


def repeated(xp: Any, values: Array, pixels: int) -> Array:
    """Return values (c,) repeated per pixel, (pixels * c,): adding these at once is faster."""
    result: Array = xp.empty((pixels, values.size), values.dtype)
    xp.copyto(result, values)
    return result.reshape(result.size)
