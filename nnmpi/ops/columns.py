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

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

from nnmpi.backend.array import Array
from nnmpi.backend.windows import Pair, corners, out_size, windows

COLUMNS_BYTES = 3 << 18  # of one block of columns and its result: half of a usual second-level cache
SHORT_RUN = 24  # elements


class Frame(NamedTuple):
    """How windows go over images, and the pooling that orders them."""

    kernel: Pair
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    dilation: Pair = (1, 1)
    pool: Pair = (1, 1)

    def out(self, h: int, w: int) -> Pair:
        """Return the numbers of rows and columns of windows over images of h x w."""
        return (
            out_size(h, self.kernel[0], self.stride[0], self.padding[0], self.dilation[0]),
            out_size(w, self.kernel[1], self.stride[1], self.padding[1], self.dilation[1]),
        )

    def pooled(self, h: int, w: int) -> Pair:
        """Return the numbers of rows and columns that the pooling leaves of them."""
        rows, columns = self.out(h, w)
        return rows // self.pool[0], columns // self.pool[1]

    @property
    def reversible(self) -> bool:
        """Whether the input's gradient is a convolution too: for stride 1, and a border that the kernel needs."""
        return self.stride == (1, 1) and min(self.backwards().padding) >= 0

    def backwards(self) -> Frame:
        """Return how the flipped kernel's windows go over the result's gradient of a `reversible` frame."""
        top = self.dilation[0] * (self.kernel[0] - 1) - self.padding[0]
        left = self.dilation[1] * (self.kernel[1] - 1) - self.padding[1]
        return Frame(self.kernel, (1, 1), (top, left), self.dilation)


class Part(NamedTuple):
    """Some rows, of all images of a block, of what the pooling leaves.

    Attributes:
        rows: which rows.
        images: how many there are in the block.
        target: where the columns go, in the order in which they are copied.
        matrix: the same memory, (pool_h pool_w images rows columns, kh kw c).
    """

    rows: slice
    images: int
    target: Array
    matrix: Array


class Columns:
    """The columns of one block of images after another, in memory that every block uses again.

    Args:
        xp: the library that copies.
        shape: of all images, (n, h, w, c).
        dtype: of their elements.
        frame: the windows.
        outputs: elements of the result of each row of columns.
        count: the most images in a block.
        whole: all images, if they are known by now: without a border, windows then lie in them and not in a copy.

    Attributes:
        out: rows and columns that the pooling leaves.
        count: images in a block; the last one may have fewer.
        inner: (count, h, w, c), where a block's images go, unless `whole` is used. The border around it is zero.
    """

    __slots__ = (
        "_each",
        "_frame",
        "_memory",
        "_parts",
        "_shape",
        "_short",
        "_start",
        "_view",
        "_whole",
        "_xp",
        "count",
        "inner",
        "out",
    )

    def __init__(
        self,
        xp: Any,
        shape: tuple[int, ...],
        dtype: Any,
        frame: Frame,
        outputs: int,
        count: int | None = None,
        whole: Array | None = None,
    ) -> None:
        self._xp, self._shape, self._frame = xp, shape, frame
        n, h, w, c = shape
        top, left = frame.padding
        self.out = frame.pooled(h, w)
        row = self.out[1] * prod(frame.pool)  # pixels
        terms = prod(frame.kernel) * c
        most = COLUMNS_BYTES // (max(1, row * (terms + outputs)) * dtype.itemsize)  # rows of pooled pixels
        self.count = max(1, min(n, most // max(1, self.out[0]), n if count is None else count))
        self._each = max(1, min(self.out[0], most))
        self._memory: Array = xp.empty((self.count * self._each * row * terms,), dtype)
        self._whole = whole is not None and top == left == 0
        spread: Array = (
            whole if whole is not None and self._whole else xp.zeros((self.count, h + 2 * top, w + 2 * left, c), dtype)
        )
        self.inner = spread[:, top : top + h, left : left + w]
        self._view = corners(windows(spread, frame.kernel, frame.stride, frame.dilation), frame.pool)
        self._short = frame.kernel[1] * c < SHORT_RUN
        if self._short:
            self._view = self._view.transpose(5, 6, 7, 0, 1, 2, 3, 4)
        self._start = 0
        self._parts: dict[int, list[Part]] = {}

    def blocks(self) -> Iterator[slice]:
        """Yield the images of one block after another."""
        n = self._shape[0]
        for start in range(0, n, self.count):
            yield slice(start, min(start + self.count, n))

    def load(self, x: Array, images: slice) -> None:
        """Put the images of a block, out of all (n, h, w, c), in their place."""
        if self._whole:
            self._start = images.start
        else:
            self._xp.copyto(self.inner[: images.stop - images.start], x[images])

    def parts(self, count: int) -> list[Part]:
        """Return the parts of a block of so many images; of small images the only part is the whole."""
        if count not in self._parts:
            self._parts[count] = list(self._cut(count))
        return self._parts[count]

    def fill(self, part: Part) -> Array:
        """Return the columns of a part of the images in their place, in the memory of the columns before."""
        self._xp.copyto(part.target, self._seen(part.images, part.rows))
        return part.matrix

    def _seen(self, count: int, rows: slice) -> Array:
        """Return some rows of the block's windows, in the order in which they are copied."""
        images = slice(self._start, self._start + count)
        if self._short:
            return self._view[:, :, :, :, :, images, rows]
        return self._view[:, :, images, rows]

    def _cut(self, count: int) -> Iterator[Part]:
        frame, (height, width), c = self._frame, self.out, self._shape[3]
        terms = prod(frame.kernel) * c
        for start in range(0, height, self._each):
            rows = slice(start, min(start + self._each, height))
            pixels = count * (rows.stop - start) * width * prod(frame.pool)
            memory = self._memory[: pixels * terms]
            matrix = memory.reshape(terms, pixels).T if self._short else memory.reshape(pixels, terms)
            yield Part(rows, count, memory.reshape(self._seen(count, rows).shape), matrix)


def repeated(xp: Any, values: Array, pixels: int) -> Array:
    """Return values (c,) once per pixel, (pixels * c,): adding these at once is faster than values to each pixel."""
    result: Array = xp.empty((pixels, values.size), values.dtype)
    xp.copyto(result, values)
    return result.reshape(result.size)
