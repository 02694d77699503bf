"""A device's kernels in CUDA C++, as methods for operations (see `backend.kernels`).

They override `PlainKernels`, whose docstrings explain arguments and results.
"""

from collections.abc import Callable, Collection, Sequence
from functools import cache, partialmethod
from itertools import chain
from math import prod, sqrt
from types import ModuleType
from typing import Any

import numpy as np

from nnmpi.backend.array import Array, Dtype, Matrices, Residuals, Shape, collapsed, namespace
from nnmpi.backend.cuda.cudnn import cudnn_of
from nnmpi.backend.cuda.launch import (
    NAMES,
    ROWS_EACH,
    SUM_BLOCKS,
    THREADS,
    KernelLauncher,
)
from nnmpi.backend.cuda.rows import RowKernel
from nnmpi.backend.gemm import gemm
from nnmpi.backend.plain import inverse_root
from nnmpi.backend.precision import is_low, low_dtype
from nnmpi.backend.printed import PrintedKernels, itself
from nnmpi.backend.random import least_kept, place_of
from nnmpi.backend.trace import VECTOR, kinds_of, name_of

COPY_AXES = 6  # as in copy.cu

# The kernels in each source, and the roles of their first arguments, a letter each:
#
#     T    an array in the activations' dtype, floating point
#     P    an array in T's dtype, or in float32 if T has 16 bits
#     A    an array in float32, or in float64 if T is
#     D    an array in float64
#     S    an array in any floating-point dtype, in kernels without P
#     X, Y the same as S and T, of any strides
#     i    integers of any kind
#     b    numbers of winners, unsigned
#     u    uint32
#     .    a number
#
# Further arguments are numbers.
_FAMILIES = {
    "copy": {"copy": "XY"},
    "softmax": {
        "softmax": "ST",
        "softmax_grad": "TTT",
        "softmax_loss": "Yi.AA",
        "softmax_loss_grad": "Yi.AAY",
    },
    "norm": {
        "moments": "TPPPA",
        "moments_total": "TPPPA",
        "group_moments": "TPP",
        "group_sums": "PPPPP",
    },
    "embedding": {"embedding": "Si.T", "embedding_grad": "Ti.iS"},
    "dropout": {"dropout": "TTuu"},
    "recurrent": {
        "lstm_step": "TTTTTT",
        "lstm_step_grad": "TTTTTTT",
        "gru_step": "TTTTTTT",
        "gru_step_grad": "TTTTTTT",
    },
    "depthwise": {
        "depthwise": "TPT",
        "depthwise_grad": "TPT",
        "depthwise_sums": "TTA",
    },
    "pooling": {
        "max_pool": "TTb",
        "max_pool_grad": "TbT",
        "avg_pool": "TT",
        "avg_pool_grad": "TT",
        "whole_pool": "TT",
    },
    "sums": {
        "squares": "TD",
        "sum_total": "DD",
    },
}
# The layers that need a family. Nearly every model needs the first two.
_ALWAYS = "softmax", "copy"
_USERS = {
    "norm": "BatchNorm GroupNorm",
    "embedding": "Embedding",
    "dropout": "Dropout",
    "recurrent": "GRULayer LSTMDirection",
    "pooling": "MaxPool2d AvgPool2d AdaptiveAvgPool2d GlobalAvgPool2d Upsample",
}
KERNELS = {
    name: (family, roles)
    for family, kernels in _FAMILIES.items()
    for name, roles in kernels.items()
}


def works_on(dtype: Dtype) -> bool:
    """True if there are kernels for activations of this dtype."""
    return name_of(dtype) in NAMES


class DeviceKernels(KernelLauncher, PrintedKernels):
    """Kernels on CuPy's arrays, queued on the current stream, each compiled at its first use.

    They read and write contiguous arrays. `xp` is the library, or a recorder's stand-in for it.
    """

    of_device = convolves = True
    table = KERNELS
    printed = RowKernel

    def __init__(self, xp: ModuleType) -> None:
        KernelLauncher.__init__(self, xp)
        PrintedKernels.__init__(self)

    # ---- row formulas

    def kinds_of(self, operands: tuple[Any, ...], sums: Sequence[Array]) -> tuple[Any, ...]:
        """See `PrintedKernels`."""
        kinds = kinds_of(operands, NAMES, True)
        if not kinds:
            return ()
        types = [
            (name_of(x.dtype), x.ndim == 3 and kind == VECTOR) if hasattr(x, "ndim") else None
            for x, kind in zip(operands, kinds, strict=True)
        ]
        return kinds, (*types,), name_of((sums or operands)[0].dtype)

    def launch(
        self,
        loop: Any,
        operands: tuple[Any, ...],
        sums: Sequence[Array],
        guard: Array | None = None,
    ) -> Any:
        """See `PrintedKernels`; if the guard is a number that is not finite, nothing is written."""
        return loop(self, operands, sums, guard)

    # ---- optimizers: nothing changes if the guard, a float64 on the device, is not finite

    def update(self, loop: Any, arrays: Sequence[Array]) -> Callable[..., None]:
        return lambda numbers, guard: self.launch(loop, (*arrays, *numbers), (), guard)

    def track(
        self,
        running: tuple[Array, Array],
        values: tuple[Array, Array],
        fraction: float,
        factor: float,
    ) -> None:
        self.rows(_track, *running, *values, float(fraction), float(factor), reuse=2)

    def copy(self, target: Array, x: Array) -> None:
        """Write x to `target`, rounded to its dtype.

        CuPy's copies of views, and to and from bfloat16, take two to four times as long on an H100.
        """
        twice = x.dtype.itemsize > 4 and is_low(target.dtype)  # the kernel would round twice
        axes = collapsed(x.shape, Matrices.of(x).strides, Matrices.of(target).strides)
        is_known = works_on(x.dtype) and works_on(target.dtype)
        if x.shape != target.shape or twice or not is_known or len(axes) > COPY_AXES:
            super().copy(target, x)
            return
        axes = [(1, 0, 0)] * (COPY_AXES - len(axes)) + axes
        numbers = chain.from_iterable(zip(*axes, strict=True))
        self.flat("copy", x.size, target.dtype.itemsize, x, target, x.size, *numbers)

    def _pair(self, function: Any, a: Array, b: Any, out: Array | None = None) -> Array:
        """Return a + b or a * b; by a kernel for contiguous arrays of one shape and dtype.

        CuPy converts every element of bfloat16 by itself.
        """
        if not (
            type(b) is type(a)
            and a.dtype == b.dtype
            and a.shape == b.shape
            and a.flags.c_contiguous
            and b.flags.c_contiguous
        ):
            return super()._pair(function, a, b, out)
        if out is None or out is a:
            return self.rows(_paired, a, b, function, reuse=out is a)[0]
        self.copy(out, self._pair(function, a, b))
        return out

    def add_low(self, a: Array, b: Array) -> Array:
        return self.rows(_paired, a, b, np.add)[0]

    # ---- sums of all elements, in float64

    def squares(self, grad: Array, to: Array, dtype: Any) -> None:
        """Add the squares of all elements, contiguous, in float64.

        Not by cuBLAS's dot, which no graph of CUDA's can capture through CuPy, and whose float32
        overflows.
        """
        grad = self.contiguous(grad)
        least = 16 * THREADS * ROWS_EACH
        blocks = min(SUM_BLOCKS, 1 + grad.size * grad.dtype.itemsize // least)
        parts = namespace(grad).empty((blocks,), "float64")
        self.run("squares", (blocks,), (THREADS,), grad, parts, grad.size)
        self.run("sum_total", (1,), (1024,), parts, to, blocks, like=grad)

    def contiguous(self, x: Array) -> Array:
        """Return x itself if it is C-contiguous, else a copy."""
        if x.flags.c_contiguous:
            return x
        result = np.empty_like(x, order="C")
        self.copy(result, x)
        return result

    def concatenate(self, arrays: Sequence[Array], axis: int) -> Array:
        if any(x.dtype != arrays[0].dtype for x in arrays):
            return super().concatenate(arrays, axis)
        shape, start = list(arrays[0].shape), 0
        shape[axis] = sum(x.shape[axis] for x in arrays)
        result = np.empty(tuple(shape), arrays[0].dtype, like=arrays[0])
        for x in arrays:
            part = result[(slice(None),) * axis + (slice(start, start + x.shape[axis]),)]
            self.copy(part, x)
            start += x.shape[axis]
        return result

    # ---- dense layers: rows are all axes but the last

    def bias_grad(self, grad: Array, to_bias: Array) -> None:
        """Sum the rows; with few columns this is several times as fast as CuPy's sum."""
        self.rows(itself, grad, sums=(to_bias,))

    def add_bias(self, y: Array, bias: Array) -> None:
        self.rows(_paired, y, bias, np.add, reuse=True)

    # ---- recurrent layers: the steps halve the sums

    lstm_step = partialmethod(KernelLauncher.over_cells, "lstm_step")
    lstm_step_grad = partialmethod(KernelLauncher.over_cells, "lstm_step_grad")
    gru_step = partialmethod(KernelLauncher.over_cells, "gru_step")
    gru_step_grad = partialmethod(KernelLauncher.over_cells, "gru_step_grad")

    # ---- attention

    def attend(
        self,
        inputs: tuple[Array, ...],
        y: Array,
        causal: bool,
        keep: bool,
        drop: Any = None,
    ) -> Residuals:
        """Attention of all heads at once, by cuDNN for half precision without dropout.

        Otherwise two products, and a softmax kernel in place in between:

            S = Q K^T, (batch, heads, queries, keys)    P = softmax(S), saved in the heads' dtype
            dP = dY V^T    dS = softmax's gradient of dP    dQ = dS K    dK = dS^T Q    dV = P^T dY

        The scores of half-precision heads are float32: they may exceed the range of float16, and
        the exponential would magnify the rounding of bfloat16. Bands of queries, without the keys
        that none of a causal band sees, were 2 % faster on an H100 in a block of 2048 features.
        """
        xp = namespace(y)
        q, k, v = inputs
        library = cudnn_of(self.xp) if is_low(q.dtype) and drop is None else None
        # A single query follows others: the keys grow at each call, and a plan takes longer to
        # build than such a product.
        if library is not None and (q.shape[2] > 1 or keep):
            statistics = xp.empty((*q.shape[:3], 1), "float32") if keep else None
            if library.attend(inputs, y, statistics, causal):
                return (q, k, v, y, statistics)
        return self._attend(xp, inputs, y, causal, drop)

    def _attend(self, xp: Any, inputs: Any, y: Array, causal: bool, drop: Any) -> Residuals:
        q, k, v = inputs
        scores = xp.empty((*q.shape[:3], k.shape[2]), _accumulated(q))
        gemm(_folded(q, k), k.swapaxes(2, 3), out=_folded(scores, k))
        p = scores if scores.dtype == q.dtype else xp.empty(scores.shape, q.dtype)
        self._softmax("softmax", 1 / sqrt(q.shape[3]), causal, scores, p)
        if q.shape[1] == v.shape[1]:
            gemm(self._left(p, drop), v, out=y)
        else:
            self.copy(y, gemm(_folded(self._left(p, drop), v), v).reshape(y.shape))
        return (q, k, v, p)

    def attend_grad(
        self,
        grad: Array,
        residuals: Residuals,
        targets: tuple[Array, ...],
        causal: bool,
        drop: Any = None,
    ) -> None:
        """Write all three gradients; the dropout mask is drawn again, not saved."""
        xp = namespace(grad)
        if len(residuals) == 5:  # cuDNN's
            *inputs, y, statistics = residuals
            library = cudnn_of(self.xp)
            given = xp.ascontiguousarray(grad) if grad.strides[3] != grad.itemsize else grad
            if library and library.attend_grad(
                given, tuple(inputs), y, statistics, targets, causal
            ):
                return
            residuals = self._attend(xp, inputs, xp.empty(y.shape, y.dtype), causal, None)
        (q, k, v, p), (to_q, to_k, to_v) = residuals, targets
        # the queries of a group are those of one head: so the products add up its gradients
        left, d = self._left(p, drop), xp.empty(p.shape, p.dtype)
        grad = _folded(grad, v)
        gemm(grad, v.swapaxes(2, 3), out=_folded(d, v))
        gemm(_folded(left, v).swapaxes(2, 3), grad, out=to_v)
        d = self._left(d, drop)
        self._softmax("softmax_grad", 1 / sqrt(q.shape[3]), causal, d, p, d)
        d = _folded(d, k)
        if q.shape[1] == k.shape[1]:
            gemm(d, k, out=to_q)
        else:
            self.copy(to_q, gemm(d, k).reshape(q.shape))
        gemm(d.swapaxes(2, 3), _folded(q, k), out=to_k)

    def _left(self, p: Array, drop: Any) -> Array:
        """Apply dropout to probabilities (batch, heads, queries, keys), or to their gradient."""
        return (
            p
            if drop is None
            else self.dropout(p, drop.rate, place_of(drop.key, drop.first_row), None)[0]
        )

    # ---- rows

    def _softmax(self, name: str, scale: float, causal: bool, *arrays: Array) -> None:
        """Write softmax(scale * x) along the last axis, or its gradient.

        The arrays are x and the result; or the result's gradient, the result, and x's gradient.
        Causal scores are (..., queries, keys), and query i sees the keys up to i + keys - queries.
        The scores of hidden keys are not read; their results are 0.
        """
        shape = arrays[0].shape
        rows, queries = prod(shape[:-1]), shape[-2] if causal else 1
        numbers = (float(scale), rows, shape[-1], queries, int(causal))
        self.over_rows(name, rows, shape[-1], *arrays, *numbers)

    def softmax_loss(self, logits: Array, labels: Array, *settings: Any) -> tuple[Array, Residuals]:
        """Compute losses, in float32 or more, in one pass over the logits.

        A label out of range gives NaN, also for the gradient; nothing out of bounds is read.
        """
        xp = namespace(logits)
        ignore_index, smoothing = settings
        (logits, lead), labels = _in_rows(xp, logits), self.contiguous(labels)
        wide, count = _accumulated(logits), len(logits)
        losses, powers = xp.empty((count,), wide), xp.empty((2, count), wide)
        ignored = (0, 0) if ignore_index is None else (1, int(ignore_index))
        self.over_rows(
            "softmax_loss",
            *logits.shape,
            *(logits, labels, _integer_bytes(labels), losses, powers),
            *(*logits.shape, lead, *ignored, float(smoothing)),
        )
        return losses, (logits, labels, powers)

    def softmax_loss_grad(self, grad: Array, saved: Residuals, *settings: Any) -> Array:
        """Return the gradient of the logits, whose rows lie as theirs do.

        It is computed again from the logits, because a gradient in float32 takes twice the memory
        of bfloat16's logits, and scaling and rounding it later two more passes.
        """
        xp = namespace(grad)
        ignore_index, smoothing = settings
        logits, labels, powers = saved
        (rows, n), (_, lead) = logits.shape, _in_rows(xp, logits)
        to_logits = xp.empty((rows, lead), logits.dtype)[:, :n]
        grad = xp.ascontiguousarray(grad)
        ignored = (0, 0) if ignore_index is None else (1, int(ignore_index))
        self.over_rows(
            "softmax_loss_grad",
            *(rows, n),
            *(logits, labels, _integer_bytes(labels), powers, grad, to_logits),
            *(rows, n, lead, int(grad.size > 1), *ignored, float(smoothing)),
        )
        return to_logits

    # ---- channels of x (samples, rows, n), contiguous: a batch is one sample. Means, variances and
    # sums are (samples, n), parameters (n,), all in float32 or x's dtype if that is wider.

    def moments(self, x: Array, count: int = 1) -> tuple[Array, Array, Array]:
        """Return offsets, variances and means of columns, or of groups of `count` columns.

        An offset is the mean minus the first element of the column. Without rows all are 0. The
        means are those of columns in either case.
        """
        xp = namespace(x)
        samples, rows, n = x.shape
        make = xp.empty if rows else xp.zeros
        offset, variance, mean = (make((samples, n), _accumulated(x)) for _ in range(3))
        if not x.size:
            return offset, variance, mean
        partial, parts = self.sample_sums("moments", (x,), (offset, variance, mean))
        if partial is not None:
            grid, numbers = (1 + (n - 1) // 32, 1, min(samples, 65535)), (parts, rows, n, samples)
            self.run("moments_total", grid, (32, 32), x, offset, variance, mean, partial, *numbers)
        if count > 1:
            blocks = (min(1 + (samples * n // count - 1) // 8, 2**31 - 1),)
            self.run("group_moments", blocks, (32, 8), x, offset, variance, rows, n, samples, count)
        return offset, variance, mean

    def normalize(self, moments: Residuals, scale: Array, shift: Array) -> Array:
        """See `PlainKernels.normalize`; with a fifth of the moments the offsets are means."""
        return self.rows(_normalize, *_deviations(moments), scale, shift)[0]

    def norm_sums(self, grad: Array, moments: Residuals, targets: tuple[Array, Array]) -> None:
        self.rows(_norm_terms, grad, *_deviations(moments), sums=targets)

    def group_sums(
        self, xp: Any, sums: tuple[Array, Array], scale: Array, count: int, like: Array
    ) -> tuple[Array, Array]:
        """Return the means over groups of `count` columns of sums (samples, n) times scale."""
        samples, n = sums[0].shape
        center, slope = (xp.empty((samples, n), scale.dtype) for _ in range(2))
        blocks = (min(1 + (samples * n // count - 1) // 8, 2**31 - 1),)
        numbers = (n, samples, count)
        if center.size:
            arrays = *sums, scale, center, slope
            self.run("group_sums", blocks, (32, 8), *arrays, *numbers, like=like)
        return center, slope

    def norm_grad(
        self,
        grad: Array,
        moments: Residuals,
        scale: Array,
        sums: tuple[Array, Array],
        count: float,
        scaled: bool = False,
    ) -> Array:
        """See `PlainKernels.norm_grad`; if `scaled`, the sums are those of scaled gradients."""
        given, share = _deviations(moments), 1 / max(float(count), 1)
        vectors = scale, *(_each(x) for x in sums)
        return self.rows(_norm_grad, grad, *given, *vectors, share, scaled)[0]

    def channel_rows(self, x: Array, channels: int) -> Array:
        return self.samples(x, 1, channels)

    def batch_moments(self, x: Array, channels: int) -> tuple[Array, Array, Array, Array]:
        rows = self.channel_rows(x, channels)
        return rows, *(item[0] for item in self.moments(rows))

    def samples(self, x: Array, count: int, channels: int) -> Array:
        """Return x as (count, rows, channels), contiguous."""
        rows = x.size // max(count * channels, 1)
        return self.contiguous(x).reshape(count, rows, channels)

    def group_norm(
        self, x: Array, eps: float, count: int, scale: Array, shift: Array
    ) -> tuple[Array, Residuals]:
        images = self.samples(x, len(x), scale.size)
        moments, scale = (
            (images, *self.moments(images, count)[:2], eps),
            self.contiguous(scale),
        )
        return self.normalize(moments, scale, shift), (moments, scale, count)

    def group_norm_grad(
        self, grad: Array, saved: Residuals, needs: tuple[bool, ...], *targets: Array
    ) -> Array | None:
        xp = namespace(grad)
        moments, scale, count = saved
        images = moments[0]
        grad = self.contiguous(grad).reshape(images.shape)
        below, products = sums = tuple(
            xp.empty((len(images), scale.size), scale.dtype) for _ in range(2)
        )
        self.norm_sums(grad, moments, sums)
        for item, target in zip((products, below), targets, strict=True):
            self.bias_grad(item, target)
        if not needs[0]:
            return None
        means = self.group_sums(xp, sums, scale, count, images)
        return self.norm_grad(grad, moments, scale, means, images.shape[1], True)

    # ---- tables and labels

    def check(self, function: Callable[..., None], integers: Array, *args: Any) -> None:
        if isinstance(integers, np.ndarray):
            super().check(function, integers, *args)

    def embedding(self, table: Array, indices: Array, dtype: Dtype) -> Array:
        """Copy and convert rows; indices are not checked, one out of range gives NaN."""
        rows = np.empty((*indices.shape, table.shape[1]), dtype, like=table)
        table, indices = self.contiguous(table), self.contiguous(indices)
        args = (table, indices, _integer_bytes(indices), rows, indices.size, *table.shape)
        self.flat("embedding", rows.size, dtype.itemsize, *args)
        return rows

    def embedding_grad(
        self,
        grad: Array,
        indices: Array,
        shape: Shape,
        dtype: Dtype,
        into: Array | None,
        add: bool,
    ) -> Array:
        """Add rows in order, in place; indices out of range are skipped."""
        xp = namespace(grad)
        spread = xp.empty(shape, dtype) if into is None else into
        grad = self.contiguous(grad)
        indices = self.contiguous(indices)
        count = indices.size
        if not add:
            spread.fill(0)
        if grad.size and shape[0]:
            order = xp.argsort(indices.reshape(count)).astype("int64", copy=False)
            args = (grad, indices, _integer_bytes(indices), order, spread, count, *shape, int(add))
            self.run(
                "embedding_grad", (count, min(1 + (shape[1] - 1) // 32, 65535)), (32, 8), *args
            )
        return spread

    def dropout(
        self,
        x: Array,
        rate: float,
        key: Any,
        columns: Array | None,
    ) -> tuple[Array, Any]:
        """Draw and apply the mask in one pass; backward draws it again, which saves its memory.

        The key is that of row 0: two numbers, or (2,) uint32 on the device.

        y = x / (1 - rate) for elements with `random_bits` at or above the threshold, else 0 * x.
        """
        result, saved = np.empty_like(x, order="C"), (rate, key, columns)
        # the right-hand side reads the old x: ascontiguousarray makes a 0-d array 1-D
        x, rows = self.contiguous(x), x.shape[0] if x.ndim else 1
        numbers = (
            *((None, *key) if isinstance(key, tuple) else (key, 0, 0)),
            least_kept(rate),
            1 / (1 - rate),
            rows,
            x.size // max(rows, 1),
        )
        self.flat("dropout", x.size, x.dtype.itemsize, x, result, columns, *numbers)
        return result, saved

    def dropout_grad(self, grad: Array, saved: Any) -> Array:
        return self.dropout(grad, *saved)[0]

    # ---- images

    def depthwise_conv(self, x: Array, weight: Array, y: Array, spec: Any) -> None:
        """Write the convolution of images (n, h, w, c) with a weight (kh, kw, 1, c) to y.

        cuDNN takes up to 2 s to prepare one of a new shape, and 0.5 ms for the weight's gradient in
        float32 (7 x 7, 64 images of 16 x 16, 96 channels, H100).
        """
        self._depthwise("depthwise", x, weight, y, _depthwise_sizes(x, y, spec))

    def depthwise_input_grad(self, grad: Array, weight: Array, to_x: Array, spec: Any) -> None:
        """Write the gradient of x, given that of y."""
        self._depthwise("depthwise_grad", grad, weight, to_x, _depthwise_sizes(to_x, grad, spec))

    def _depthwise(
        self, name: str, given: Array, weight: Array, result: Array, sizes: tuple[int, ...]
    ) -> None:
        # a thread computes some channels, of 4 bytes or more each, of four pixels
        lanes = 16 // max(result.itemsize, 4)
        each = 4 * (1 if result.shape[3] % lanes else lanes)
        self.flat(name, -(-result.size // each), 16, given, weight, result, *sizes)

    def depthwise_weight_grad(self, x: Array, grad: Array, to_weight: Array, spec: Any) -> None:
        """Write the gradient of the weight, summed in float32 or more, in an order of its own."""
        (kh, kw), (n, out_h, _, c) = spec.kernel, grad.shape
        across, taps = 1 + (c - 1) // 32, kh * (1 + (kw - 1) // 8)  # of a block: 32, and 8 in a row
        parts = max(1, min(2 * SUM_BLOCKS // (across * taps), -(-n * out_h // 8)))
        partial = namespace(x).empty((parts, kh * kw * c), _accumulated(x))
        sizes = _depthwise_sizes(x, grad, spec)
        self.run("depthwise_sums", (across, parts, taps), (32, 8), x, grad, partial, *sizes)
        self.rows(itself, partial, sums=(to_weight.reshape(to_weight.size),))

    def max_pool(self, x: Array, over: Any, keep: bool) -> tuple[Array, Array | None]:
        """Return maxima and positions.

        A NaN is the maximum of its window; the border never is.
        """
        xp = namespace(x)
        x = self.contiguous(x)
        y = xp.empty((len(x), *over.out(*x.shape[1:3]), x.shape[3]), x.dtype)
        winner = xp.empty(y.shape, np.min_scalar_type(prod(over.kernel))) if keep else None
        width = 1 if winner is None else winner.dtype.itemsize
        numbers = (width, *x.shape, *y.shape[1:3], *sum(over, ()))
        self.flat("max_pool", y.size, x.dtype.itemsize, x, y, winner, *numbers)
        return y, winner

    def max_pool_grad(self, grad: Array, winner: Array, shape: Shape, over: Any) -> Array:
        """Gather each pixel's gradient from the windows of which it is the maximum."""
        to_x = np.empty(shape, grad.dtype, like=grad)
        numbers = (
            winner.dtype.itemsize,
            *shape,
            *grad.shape[1:3],
            *sum(over, ()),
        )
        args = (self.contiguous(grad), winner, to_x, *numbers)
        self.flat("max_pool_grad", to_x.size, to_x.dtype.itemsize, *args)
        return to_x

    def avg_pool(self, x: Array, over: Any, share: float) -> Array:
        x = self.contiguous(x)
        (n, h, w, c), out = x.shape, over.out(*x.shape[1:3])
        y = np.empty((n, *out, c), x.dtype, like=x)
        if over.kernel == (h, w) and over.padding == (0, 0):
            self.whole_samples("whole_pool", x.reshape(n, h * w, c), y, float(share))
        else:
            numbers = (float(share), *x.shape, *out, *sum(over, ()))
            self.flat("avg_pool", y.size, x.dtype.itemsize, x, y, *numbers)
        return y

    def avg_pool_grad(self, grad: Array, shape: Shape, over: Any, share: float) -> Array:
        to_x = np.empty(shape, grad.dtype, like=grad)
        numbers = (float(share), *shape, *grad.shape[1:3], *sum(over, ()))
        args = (self.contiguous(grad), to_x, *numbers)
        self.flat("avg_pool_grad", to_x.size, to_x.dtype.itemsize, *args)
        return to_x


def _depthwise_sizes(x: Array, y: Array, spec: Any) -> tuple[int, ...]:
    """Return a depthwise convolution's sizes, in the order of its kernels' arguments."""
    return (*x.shape, *y.shape[1:3], *sum(spec[:4], ()))


def _in_rows(xp: Any, x: Array) -> tuple[Array, int]:
    """Return a row-major matrix, and the elements from one row to the next: x itself if
    `empty_rows` may have made it, else a contiguous copy.
    """
    lead, least = x.strides[0] // x.itemsize, x.shape[1]
    if x.strides[1] == x.itemsize and least <= lead < least + 16 // x.itemsize:
        return x, lead
    return xp.ascontiguousarray(x), least


def _accumulated(x: Array) -> Dtype:
    """Return the dtype in which kernels accumulate elements of an array's dtype."""
    return np.dtype(np.float32) if is_low(x.dtype) else x.dtype


def _integer_bytes(array: Array) -> int:
    """Return an integer dtype's code for kernels: its bytes, negative for unsigned ones.

    64-bit unsigned integers are read as signed: too large ones become negative, so out of range.
    """
    return (
        array.dtype.itemsize
        if array.dtype.kind == "i" or array.dtype.itemsize == 8
        else -array.dtype.itemsize
    )


@cache
def device_kernels(xp: ModuleType) -> DeviceKernels | None:
    """Return the kernels of a device's library, or None if it cannot compile any."""
    return DeviceKernels(xp) if hasattr(xp, "RawModule") else None


def compile_for(xp: ModuleType, layers: Collection[str], wide: Dtype, mode: str) -> None:
    """Begin to compile the kernels of a model's first step, all at the same time.

    The first step compiled them one by one, in 0.5 to 1.3 s each; later runs find them on disk.

    Args:
        xp: a device's library, or one without kernels.
        layers: the names of the layers' classes.
        wide: the dtype of the parameters.
        mode: the precision of products.
    """
    kernels = device_kernels(xp)
    if kernels is None:
        return
    families = {family for family, users in _USERS.items() if {*layers} & {*users.split()}}
    families |= {*_ALWAYS}
    low = low_dtype(mode)
    narrow = wide.name if low is None else low.name
    inside = families & {"recurrent"}  # computes in float32 inside of half precision
    kernels.compile_ahead(families - inside, narrow, wide.name)
    kernels.compile_ahead(["sums", *inside], wide.name, wide.name)
    # copies within a dtype and between them; the seed of a backward pass is float64
    for target, source in {(narrow, narrow), (wide.name, narrow), (wide.name, "float64")}:
        kernels.compile_ahead(["copy"], target, source)


# ---- row formulas of a device's own


def _deviations(moments: Residuals) -> tuple[Any, ...]:
    """Return x, eps, variances, and what to subtract: the first row, unless means are given."""
    x, offset, variance, eps, *given = moments
    firsts = [] if given else [x[:, :1]]
    return x, float(eps), is_low(x.dtype), *map(_each, (variance, offset)), *firsts


def _each(x: Array) -> Array:
    """Return numbers of columns, (n,) or of each sample (samples, n), as operands of samples."""
    return x if x.ndim == 1 else x[:, None]


def _away(x: Array, low: bool, offset: Array, *first: Array) -> Array:
    if not first:
        return x - offset
    # in 16 bits x has so few digits that one number holds them all, and fits the registers
    return x - (first[0] + offset) if low else x - first[0] - offset


def _normalize(
    x: Array, eps: float, low: bool, variance: Array, offset: Array, *more: Array
) -> tuple[Array]:
    *first, scale, shift = more
    away = _away(x, low, offset, *first)
    return (away * (inverse_root(variance, eps) * scale) + shift,)


def _norm_terms(
    grad: Array, x: Array, eps: float, low: bool, variance: Array, offset: Array, *first: Array
) -> tuple[Array, ...]:
    return grad, grad * (_away(x, low, offset, *first) * inverse_root(variance, eps))


def _norm_grad(
    grad: Array, x: Array, eps: float, low: bool, variance: Array, offset: Array, *more: Any
) -> tuple[Array]:
    """inverse (scale g - share (center + x^ slope)), of sums that are `scaled` or yet to be."""
    *first, scale, center, slope, share, scaled = more
    inverse = inverse_root(variance, eps)
    factor = inverse * scale
    part = share * (inverse if scaled else factor)
    center, slope = part * center, part * inverse * slope
    if low and first:  # three numbers of a column fit the registers
        return (grad * factor - x * slope + ((first[0] + offset) * slope - center),)
    return (grad * factor - center - _away(x, low, offset, *first) * slope,)


def _paired(a: Array, b: Array, function: Any) -> tuple[Array]:
    return (function(a, b),)


def _track(
    mean: Array, variance: Array, to_mean: Array, to_variance: Array, fraction: float, factor: float
) -> tuple[Array, ...]:
    return mean + fraction * (to_mean - mean), variance + fraction * (
        to_variance * factor - variance
    )


def _folded(x: Array, keys: Array) -> Array:
    """Return heads of queries as those of keys: (batch, key heads, group * time, any).

    The heads of a group become more rows; that is a view if x is contiguous.
    """
    batch, heads, time, width = x.shape
    if heads == keys.shape[1]:
        return x
    shared = keys.shape[1]
    return namespace(x).reshape(x, (batch, shared, heads // shared * time, width))
