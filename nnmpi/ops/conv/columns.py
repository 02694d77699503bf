"""Columns: what each window of a convolution sees, copied into the rows of a matrix for a GEMM (im2col).

    images (n, h, w, c)  --border-->  a few images, with zeros around  --one strided copy-->  columns (pixels, kh kw c)

They are made for a few images at a time, or for some rows of a large one, so that they stay in the processor's cache
between the copy and the GEMM; making them again in backward costs less than keeping them. Rows are ordered by their
place in the windows of a pooling that follows, so that the GEMM's result has one contiguous plane per place, and
pooling is arithmetic on whole planes:

    | place 0: all pixels of all images of the block |  place 1  |  place 2  |  place 3  |      of a 2x2 pooling

In channels-last images the pixels that a row of the kernel sees are one run of memory. Where the runs are short (few
channels), the matrix is stored transposed, so that the copy runs along the images' rows instead.
"""

from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

import numpy as np

from nnmpi.backend.array import Array
from nnmpi.backend.windows import corners, windows
from nnmpi.ops.conv.algorithm import ConvSpec

COLUMNS_BYTES = 3 << 18  # of one block of columns and its result: half of a usual second-level cache
SHORT_RUN = 24  # elements


class Strip(NamedTuple):
    """Some rows of the result, of all images of a block, and memory for their columns.

    Attributes:
        rows: which rows of what the pooling leaves.
        images: how many images there are in the block.
        target: where the columns go, in the order in which they are copied.
        matrix: the same memory, (pool_h pool_w images rows columns, kh kw c).
    """

    rows: slice
    images: int
    target: Array
    matrix: Array


class Columns:
    """The columns of one block of images after another, in memory that every block uses again.

        for block in columns.blocks():                      a slice of the images
            columns.load(x, block)
            for strip in columns.strips(images in it):      some rows of them: all, unless images are large
                matrix = columns.fill(strip)

    Args:
        xp: the library that copies.
        shape: of all images, (n, h, w, c).
        dtype: of their elements.
        spec: the convolution.
        outputs: elements of the result of each row of columns.
        count: the most images in a block.
        source: all images, if they are known by now: without a border, windows then lie in them and not in a copy.

    Attributes:
        out: rows and columns that the pooling leaves.
        count: images in a block; the last one may have fewer.
        inner: (count, h, w, c), where a block's images go, unless they lie in `source`. The border around it is zero.
    """

    __slots__ = (
        "_in_place",
        "_memory",
        "_shape",
        "_short",
        "_spec",
        "_start",
        "_strip_rows",
        "_strips",
        "_view",
        "_xp",
        "count",
        "inner",
        "out",
    )

    def __init__(
        self,
        xp: Any,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        spec: ConvSpec,
        outputs: int,
        count: int | None = None,
        source: Array | None = None,
    ) -> None:
        self._xp, self._shape, self._spec = xp, shape, spec
        n, h, w, c = shape
        top, left = spec.padding
        self.out = spec.pooled_size(h, w)
        row = self.out[1] * prod(spec.pool)  # pixels of the convolution for a row of the result
        terms = prod(spec.kernel) * c
        most = COLUMNS_BYTES // (max(1, row * (terms + outputs)) * dtype.itemsize)  # rows of the result
        self.count = max(1, min(n, most // max(1, self.out[0]), n if count is None else count))
        self._strip_rows = max(1, min(self.out[0], most))
        self._memory: Array = xp.empty((self.count * self._strip_rows * row * terms,), dtype)
        self._in_place = source is not None and top == left == 0
        bordered: Array = (
            source
            if source is not None and self._in_place
            else xp.zeros((self.count, h + 2 * top, w + 2 * left, c), dtype)
        )
        self.inner = bordered[:, top : top + h, left : left + w]
        view = windows(bordered, spec.kernel, spec.stride, spec.dilation)  # (n, out_h, out_w, kh, kw, c)
        view = corners(view, spec.pool)  # (pool_h, pool_w, n, rows, columns, kh, kw, c)
        self._short = spec.kernel[1] * c < SHORT_RUN
        if self._short:
            view = view.transpose(5, 6, 7, 0, 1, 2, 3, 4)  # (kh, kw, c, pool_h, pool_w, n, rows, columns)
        self._view = view
        self._start = 0  # the block's first image in the view
        self._strips: dict[int, list[Strip]] = {}

    def blocks(self) -> Iterator[slice]:
        """Yield the images of one block after another."""
        n = self._shape[0]
        for start in range(0, n, self.count):
            yield slice(start, min(start + self.count, n))

    def load(self, x: Array, block: slice) -> None:
        """Put the images of a block, out of all (n, h, w, c), in their place."""
        if self._in_place:
            self._start = block.start
        else:
            self._xp.copyto(self.inner[: block.stop - block.start], x[block])

    def strips(self, count: int) -> list[Strip]:
        """Return the strips of a block of so many images; of small images one strip has all rows."""
        if count not in self._strips:
            self._strips[count] = list(self._cut(count))
        return self._strips[count]

    def fill(self, strip: Strip) -> Array:
        """Return the columns of a strip of the images in their place; they overwrite the columns before."""
        self._xp.copyto(strip.target, self._seen(strip.images, strip.rows))
        return strip.matrix

    def _seen(self, count: int, rows: slice) -> Array:
        """Return some rows of the block's windows, in the order in which they are copied."""
        images = slice(self._start, self._start + count)
        if self._short:
            return self._view[:, :, :, :, :, images, rows]
        return self._view[:, :, images, rows]

    def _cut(self, count: int) -> Iterator[Strip]:
        spec, (height, width), c = self._spec, self.out, self._shape[3]
        terms = prod(spec.kernel) * c
        for start in range(0, height, self._strip_rows):
            rows = slice(start, min(start + self._strip_rows, height))
            pixels = count * (rows.stop - start) * width * prod(spec.pool)
            memory = self._memory[: pixels * terms]
            matrix = memory.reshape(terms, pixels).T if self._short else memory.reshape(pixels, terms)
            yield Strip(rows, count, memory.reshape(self._seen(count, rows).shape), matrix)


def repeated(xp: Any, values: Array, pixels: int) -> Array:
    """Return values (c,) once per pixel, (pixels * c,): adding these at once is faster than values to each pixel.

    Args:
        xp: the library that copies.
        values: (c,).
        pixels: how many times they are wanted.
    """
    result: Array = xp.empty((pixels, values.size), values.dtype)
    xp.copyto(result, values)
    return result.reshape(result.size)
