"""The specification of a convolution, and the interface of the algorithms that compute it.

    forward     z = conv(x, weight) + bias,     y = z    or    max_pool(relu(z))
    backward    dz from dy,     dx from dz and weight,    dweight from x and dz
                dbias = sum of dz over all pixels

The Function (see `conv2d`) allocates results and saves arrays for backward; an algorithm fills
arrays. So algorithms differ in their arithmetic alone.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

from nnmpi.backend.array import Array
from nnmpi.backend.planes import flattened
from nnmpi.backend.recording import call
from nnmpi.backend.windows import RowsAndColumns, out_size

NO_POOL: RowsAndColumns = (1, 1)


class ConvSpec(NamedTuple):
    """A convolution: its windows and groups, and the operations fused with it.

    Attributes:
        kernel, stride, padding, dilation: rows and columns of pixels.
        groups: the number of groups of channels that do not mix.
        pool: the window of the max-pooling that follows, after a ReLU, whose stride is its size;
            (1, 1) for neither.
    """

    kernel: RowsAndColumns
    stride: RowsAndColumns = (1, 1)
    padding: RowsAndColumns = (0, 0)
    dilation: RowsAndColumns = (1, 1)
    groups: int = 1
    pool: RowsAndColumns = NO_POOL

    def unpooled_size(self, h: int, w: int) -> RowsAndColumns:
        """Return the convolution's rows and columns for images of h x w, before any pooling."""
        axes = zip((h, w), *self[:4], strict=True)
        rows, columns = (
            out_size(n, kernel, stride, border, apart) for n, kernel, stride, border, apart in axes
        )
        return rows, columns

    def pooled_size(self, h: int, w: int) -> RowsAndColumns:
        """Return the result's rows and columns for images of h x w, after any pooling."""
        rows, columns = self.unpooled_size(h, w)
        return rows // self.pool[0], columns // self.pool[1]


class Gradients(NamedTuple):
    """The arrays that a backward pass fills, C-contiguous; None for a gradient that is not needed.

    Attributes:
        x: (n, h, w, c), of x's dtype.
        weight: (kh, kw, c / groups, o).
        bias: (o,).
    """

    x: Array | None
    weight: Array | None
    bias: Array | None


class ConvAlgorithm(ABC):
    """A method to compute a convolution.

    While a step is recorded its arrays note what is done to them (see `backend.program.record`).
    Compiled kernels are called through `call` of that module, so that they are recorded,
    too.

    Args:
        spec: the convolution.
    """

    def __init__(self, spec: ConvSpec) -> None:
        self.spec = spec

    @abstractmethod
    def forward(self, x: Array, weight: Array, bias: Array | None, y: Array, keep: bool) -> Any:
        """Write the result to y; return the values that `backward` needs besides x and weight.

        Args:
            x: images (n, h, w, c).
            weight: (kh, kw, c / groups, o), C-contiguous.
            bias: (o,), C-contiguous, or None.
            y: out, (n, out_h, out_w, o) after the pooling, C-contiguous.
            keep: whether a backward pass will follow.
        """

    @abstractmethod
    def backward(self, grad: Array, x: Array, weight: Array, kept: Any, out: Gradients) -> None:
        """Write the gradients.

        Args:
            grad: of the result, (n, out_h, out_w, o); not always contiguous, never written to.
            x, weight: the arguments of `forward`.
            kept: the result of `forward`.
            out: the arrays for the gradients.
        """


def record_flat(kernel: Any, reads: Sequence[Any], writes: Sequence[Any]) -> None:
    """Call a compiled kernel with arrays as views with one axis, see `recording.call`."""
    flat = ([x if isinstance(x, tuple) else flattened(x) for x in part] for part in (reads, writes))
    call(kernel, next(flat), next(flat))
