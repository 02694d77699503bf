"""How many tiles of Winograd's convolution are worked on at a time, and the memory for that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from nnmpi.backend.array import Array

# For V and M. Measured (Xeon with 2 MB of second-level cache, images (64, 14, 14, 32), 64 outputs, pooled, forward and
# backward): 8.8 ms with 256 KB, 8.4 with 384, 8.3 with 512 and with 768; in another run 7.8 with 512 KB, 8.1 with 1 MB,
# 8.7 with 2 MB, 13.6 with 4 MB.
CACHE_BYTES = 3 << 18


@dataclass(frozen=True)
class Sizes:
    """What a kernel is made for.

    Attributes:
        h, w: the images' height and width, even.
        c, o: channels of the input and the output.
        images: images that are worked on at a time.
        rows: rows of tiles that are worked on at a time, of these images.
    """

    h: int
    w: int
    c: int
    o: int
    images: int
    rows: int

    @property
    def tiles(self) -> int:
        """Tiles that are worked on at a time."""
        return self.rows * (self.w // 2)

    def scratch(self, xp: Any, dtype: np.dtype[Any]) -> Scratch:
        """Return memory for a forward pass, of any values."""
        v, m, border = 16 * self.tiles * self.c, 16 * self.tiles * self.o, (self.h + 2) * (self.w + 2) * self.c
        return Scratch(*(xp.empty((size,), dtype) for size in (v, m, self.images * border)))

    def gradient_scratch(self, xp: Any, dtype: np.dtype[Any]) -> GradientScratch:
        """Return memory for a backward pass, of any values."""
        sums = xp.empty((self.o,), dtype)
        du, ut = (xp.empty((16 * self.c * self.o,), dtype) for _ in range(2))
        v, m, border = self.scratch(xp, dtype)
        return GradientScratch(sums, du, ut, v, m, border, xp.empty(border.shape, dtype))


class Scratch(NamedTuple):
    """Memory that a forward pass works in; all flat.

    Attributes:
        v, m: the tiles' 16 places, of the images (16, tiles, c) and of the result (16, tiles, o).
        border: images with a border of zeros, (images, h + 2, w + 2, c).
    """

    v: Array
    m: Array
    border: Array


class GradientScratch(NamedTuple):
    """Memory that a backward pass works in; all flat.

    Attributes:
        sums: of the result's gradient over some tiles, (o,).
        du: the gradient of the kernels' places, (16, c, o).
        ut: these places transposed, (16, o, c).
        v, m: the gradients of those of `Scratch`; v is first the images' places.
        border: as in `Scratch`.
        spread: the gradient of the images with their border.
    """

    sums: Array
    du: Array
    ut: Array
    v: Array
    m: Array
    border: Array
    spread: Array


class FlatGradients(NamedTuple):
    """Where a backward pass writes the gradients; all flat. Those of x and weight are empty if nobody wants them."""

    x: Array
    weight: Array
    bias: Array


def sizes(h: int, w: int, c: int, o: int) -> Sizes:
    """Return the sizes for these images and kernels: as many tile rows at a time as the cache holds.

    Args:
        h, w: the images' height and width, even.
        c, o: channels of the input and the output.
    """
    row_bytes = 16 * 4 * (w // 2) * (c + o)
    rows = max(1, CACHE_BYTES // row_bytes)
    images = max(1, rows // (h // 2))
    return Sizes(h, w, c, o, images, min(rows, h // 2) if images == 1 else images * (h // 2))
