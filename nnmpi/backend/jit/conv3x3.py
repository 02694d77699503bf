"""Compiled 3 x 3 convolutions: Winograd's F(2x2, 3x3), which takes 16 products per four outputs
instead of 36.

Lavin and Gray, "Fast algorithms for convolutional neural networks" (2016), with the transforms

    B^T = 1  0 -1  0     G =  1   0   0     A^T = 1  1  1  0
          0  1  1  0         .5  .5  .5           0  1 -1 -1
          0 -1  1  0         .5 -.5  .5
          0  1  0 -1          0   0   1

of 4 x 4 patches, two pixels apart, of the images with a border of zeros around them:

    patch --B^T . B--> V[16][tiles][c]
                            | 16 products V[k] U[k]                 U[16][c][o] = G kernel G^T
                            v
                       M[16][tiles][o] --A^T . A--> 2 x 2 outputs
                            |                            "plain": (+ bias)
                            v                            "pooled": largest, + bias, ReLU

A tile is a max-pooling window, so pooled outputs come straight from M. Backward is the adjoint,
step by step: dM = A dY A^T, dU = sum V^T dM, dV = dM U^T, dX = sum of overlapping B dV B^T, dW =
G^T dU G.

All arrays are flat, and the sizes are constants of each kernel: the compiler vectorizes a loop that
writes 16 matrices of one array only if it knows the distance between them. A kernel handles a few
tile rows at a time, so that V and M stay in the processor's cache.

The products are calls of sgemm in the OpenBLAS of NumPy's wheels, with no Python in between. Its
functions have 64-bit sizes and a prefix in their names. Other builds of NumPy (a distribution's, or
with Apple's Accelerate) lack them and do not use this kernel.
"""

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from llvmlite import binding
from numba import types
from threadpoolctl import threadpool_info

from nnmpi.backend.jit.build import inlined

ZERO, HALF, ONE = np.float32(0), np.float32(0.5), np.float32(1)
DEAD = np.int32(4)  # instead of a corner 0 to 3: the window's output is not positive

NAME = "scipy_cblas_sgemm64_"

# cblas's codes
ROWS, PLAIN, TRANSPOSED = 101, 111, 112

# (order, transpose a, transpose b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc), matrices given as
# addresses
sgemm: Any = types.ExternalFunction(
    NAME,
    types.void(
        *(types.int32,) * 3,
        *(types.int64,) * 3,
        types.float32,
        *(types.intp, types.int64) * 2,
        types.float32,
        *(types.intp, types.int64),
    ),
)


@cache
def has_products() -> bool:
    """True if compiled code can call sgemm; call this before loading any such code."""
    for library in threadpool_info():
        path = library["filepath"]
        if library["internal_api"] == "openblas" and hasattr(ctypes.CDLL(path), NAME):
            binding.load_library_permanently(path)
            return True
    return False


# For V and M. Measured (Xeon with 2 MB of second-level cache, images (64, 14, 14, 32), 64 outputs,
# pooled, forward and backward): 8.8 ms with 256 KB, 8.4 with 384, 8.3 with 512 and with 768; in
# another run 7.8 with 512 KB, 8.1 with 1 MB, 8.7 with 2 MB, 13.6 with 4 MB.
CACHE_BYTES = 3 << 18


class Sizes(NamedTuple):
    """The sizes that a kernel is compiled for.

    Attributes:
        h, w: the images' height and width, even.
        c, o: channels of the input and the output.
        images: the number of images computed at a time.
        rows: the number of tile rows computed at a time, in these images.
    """

    h: int
    w: int
    c: int
    o: int
    images: int
    rows: int

    @property
    def tiles(self) -> int:
        """The number of tiles computed at a time."""
        return self.rows * (self.w // 2)

    def scratch(self, gradients: bool) -> tuple[int, ...]:
        """Return the number of elements of each scratch array, flat and uninitialized.

        A forward pass needs:

            v, m        the transformed tiles of the images (16, tiles, c) and of the result (16,
                        tiles, o)
            border      images with a border of zeros, (images, h + 2, w + 2, c)

        A backward pass needs the same, with v and m for their gradients as well, and then:

            spread      the gradient of the images with their border
            sums        the sum of the result's gradient over some tiles, (o,)
            du          the gradient of the transformed kernels, (16, c, o)
            ut          the transformed kernels, transposed, (16, o, c)
        """
        border, kernel = self.images * (self.h + 2) * (self.w + 2) * self.c, 16 * self.c * self.o
        counts = 16 * self.tiles * self.c, 16 * self.tiles * self.o, border
        return (*counts, border, self.o, kernel, kernel) if gradients else counts


def sizes(h: int, w: int, c: int, o: int) -> Sizes:
    """Return the sizes for these images and kernels, with as many tile rows as fit the cache.

    Args:
        h, w: the images' height and width, even.
        c, o: channels of the input and the output.
    """
    row_bytes = 16 * 4 * (w // 2) * (c + o)
    rows = max(1, CACHE_BYTES // row_bytes)
    images = max(1, rows // (h // 2))
    return Sizes(h, w, c, o, images, min(rows, h // 2) if images == 1 else images * (h // 2))


# ---------------------------------------------------------------- transforms


@inlined
def _kernels_in(weight, u, s):
    """U = G weight G^T for each of the s = c o pairs of channels."""
    for j in range(3):  # G weight into the place of rows 0 .. 3, column j
        column = weight[j * s :]
        for i in range(s):
            a, b, d = column[i], column[3 * s + i], column[6 * s + i]
            at = j * s + i
            u[at], u[at + 12 * s] = a, d
            u[at + 4 * s], u[at + 8 * s] = HALF * (a + b + d), HALF * (a - b + d)
    for r in range(4):  # then times G^T, in place
        row = u[4 * r * s :]
        for i in range(s):
            a, b, d = row[i], row[s + i], row[2 * s + i]
            row[s + i], row[2 * s + i], row[3 * s + i] = HALF * (a + b + d), HALF * (a - b + d), d


@inlined
def _kernels_out(u, to_weight, s):
    """dW = G^T dU G for each of the s = c o pairs of channels."""
    for r in range(4):  # dU G, in place
        row = u[4 * r * s :]
        for i in range(s):
            a, b, d = row[i], HALF * row[s + i], HALF * row[2 * s + i]
            row[i], row[s + i], row[2 * s + i] = a + b + d, b - d, b + d + row[3 * s + i]
    for j in range(3):
        column, result = u[j * s :], to_weight[j * s :]
        for i in range(s):
            a, b, d = column[i], HALF * column[4 * s + i], HALF * column[8 * s + i]
            result[i], result[3 * s + i], result[6 * s + i] = (
                a + b + d,
                b - d,
                b + d + column[12 * s + i],
            )


@inlined
def _kernels_turned(u, ut, c, o):
    """Write U[k]^T: with a transposed matrix of this size, BLAS takes 1.5 times as long."""
    for k in range(16):
        for j in range(o):
            column, row = u[k * c * o + j :], ut[(k * o + j) * c :]
            for i in range(c):
                row[i] = column[i * o]


@inlined
def _copy(plain, bordered, inwards, first, images, h, w, c):
    """Copy some images (n, h, w, c), from the first on, into the inside of (images, h + 2, w + 2,
    c), or back.
    """
    for b in range(images):
        for r in range(h):
            pixels = plain[((first + b) * h + r) * w * c :]
            inside = bordered[((b * (h + 2) + r + 1) * (w + 2) + 1) * c :]
            for i in range(w * c):
                if inwards:
                    inside[i] = pixels[i]
                else:
                    pixels[i] = inside[i]


# Four elements of a row or column, or a 2 x 2 result, are passed as tuples of numbers.


@inlined
def _four(x, at, step):
    return x[at], x[at + step], x[at + 2 * step], x[at + 3 * step]


@inlined
def _put(x, at, step, p):
    x[at], x[at + step], x[at + 2 * step], x[at + 3 * step] = p[0], p[1], p[2], p[3]


@inlined
def _add(p, q):
    return p[0] + q[0], p[1] + q[1], p[2] + q[2], p[3] + q[3]


@inlined
def _less(p, q):
    return p[0] - q[0], p[1] - q[1], p[2] - q[2], p[3] - q[3]


@inlined
def _seen(p):
    return p[0] - p[2], p[1] + p[2], p[2] - p[1], p[1] - p[3]


@inlined
def _put_results(part, at, s, y):
    z0, z1, x0, x1 = y[0] + y[2], y[1] + y[3], y[0] - y[2], y[1] - y[3]
    _put(part, at, s, (y[0], y[0] + y[1], y[0] - y[1], -y[1]))
    _put(part, at + 4 * s, s, (z0, z0 + z1, z0 - z1, -z1))
    _put(part, at + 8 * s, s, (x0, x0 + x1, x0 - x1, -x1))
    _put(part, at + 12 * s, s, (-y[2], -y[2] - y[3], y[3] - y[2], y[3]))


@inlined
def _results(part, at, s):
    b, d = _four(part, at + 4 * s, s), _four(part, at + 8 * s, s)
    z = _add(_add(_four(part, at, s), b), d)
    x = _less(_less(b, d), _four(part, at + 12 * s, s))
    return z[0] + z[1] + z[2], z[1] - z[2] - z[3], x[0] + x[1] + x[2], x[1] - x[2] - x[3]


@inlined
def largest_of(y, bias):
    """Return ReLU(bias + the largest of four), and the index of the largest, or DEAD."""
    # NaN is not lost: it reaches some window's first output, and no comparison replaces that.
    top, which = y[0], np.int32(0)
    which, top = np.int32(1) if y[1] > top else which, y[1] if y[1] > top else top
    which, top = np.int32(2) if y[2] > top else which, y[2] if y[2] > top else top
    which, top = np.int32(3) if y[3] > top else which, (y[3] if y[3] > top else top) + bias
    return ZERO if top <= ZERO else top, DEAD if top <= ZERO else which


@inlined
def winner_of(g, which):
    """Return the gradients of four outputs: g for the largest one, if any, and 0 for the others."""
    return (
        g if which == 0 else ZERO,
        g if which == 1 else ZERO,
        g if which == 2 else ZERO,
        g if which == 3 else ZERO,
    )


@inlined
def _patches_in(border, v, top, rows, h, w, c, s):
    """V = B^T patch B of the tile rows top .. top + rows, counted over all images; V[k] begins at k
    s.
    """
    step = (w + 2) * c
    for row in range(rows):
        b, r = divmod(top + row, h // 2)
        begin = (b * (h + 2) + 2 * r) * step
        for t in range(w // 2):
            patch, part = border[begin + 2 * t * c :], v[(row * (w // 2) + t) * c :]
            for i in range(c):
                p, q = _four(patch, i, c), _four(patch, step + i, c)
                x, y = _four(patch, 2 * step + i, c), _four(patch, 3 * step + i, c)
                _put(part, i, s, _seen(_less(p, x)))
                _put(part, 4 * s + i, s, _seen(_add(q, x)))
                _put(part, 8 * s + i, s, _seen(_less(x, q)))
                _put(part, 12 * s + i, s, _seen(_less(q, y)))


@inlined
def _raise(patch, at, c, p):
    patch[at] += p[0]
    patch[at + c] += p[1] - p[2] + p[3]
    patch[at + 2 * c] += p[1] + p[2] - p[0]
    patch[at + 3 * c] -= p[3]


@inlined
def _patches_out(v, spread, top, rows, h, w, c, s):
    """Add B dV B^T to the tiles' patches of the bordered images."""
    step = (w + 2) * c
    for row in range(rows):
        b, r = divmod(top + row, h // 2)
        begin = (b * (h + 2) + 2 * r) * step
        for t in range(w // 2):
            patch, part = spread[begin + 2 * t * c :], v[(row * (w // 2) + t) * c :]
            for i in range(c):
                p, q = _four(part, i, s), _four(part, 4 * s + i, s)
                x, y = _four(part, 8 * s + i, s), _four(part, 12 * s + i, s)
                _raise(patch, i, c, p)
                _raise(patch, step + i, c, _add(_less(q, x), y))
                _raise(patch, 2 * step + i, c, _less(_add(q, x), p))
                _raise(patch, 3 * step + i, c, (-y[0], -y[1], -y[2], -y[3]))


@inlined
def _largest_out(m, bias, y, corner, first, tiles, o, s):
    """y = ReLU(bias + the largest of A^T M A), corner = the index of the largest, or DEAD; from the
    output's tile `first` on.
    """
    for t in range(tiles):
        part, out, argmax = m[t * o :], y[(first + t) * o :], corner[(first + t) * o :]
        for i in range(o):
            out[i], argmax[i] = largest_of(_results(part, i, s), bias[i])


@inlined
def _largest_in(grad, corner, m, sums, first, tiles, o, s):
    """dM = A dY A^T, dY being grad at each window's winner; sums gains the sum of dY."""
    for t in range(tiles):
        part, above, argmax = m[t * o :], grad[(first + t) * o :], corner[(first + t) * o :]
        for i in range(o):
            _put_results(part, i, s, winner_of(above[i], np.int32(argmax[i])))
        for i in range(o):
            sums[i] += above[i] if argmax[i] < 4 else ZERO


@inlined
def _each_out(m, bias, y, first, top, rows, h, w, o, s):
    """y = A^T M A + bias of the tile rows top .. top + rows of the images from `first` on."""
    for row in range(rows):
        b, r = divmod(top + row, h // 2)
        begin = ((first + b) * h + 2 * r) * w * o
        for t in range(w // 2):
            part, out = m[(row * (w // 2) + t) * o :], y[begin + 2 * t * o :]
            for i in range(o):
                shift, p, at = bias[i], _results(part, i, s), w * o + i
                p = _add(p, (shift, shift, shift, shift))
                out[i], out[i + o], out[at], out[at + o] = p


@inlined
def _each_in(grad, m, sums, first, top, rows, h, w, o, s):
    """dM = A grad A^T; sums gains the sum of grad."""
    for row in range(rows):
        b, r = divmod(top + row, h // 2)
        begin = ((first + b) * h + 2 * r) * w * o
        for t in range(w // 2):
            part, above = m[(row * (w // 2) + t) * o :], grad[begin + 2 * t * o :]
            for i in range(o):
                at = w * o + i
                _put_results(part, i, s, (above[i], above[i + o], above[at], above[at + o]))
            for i in range(o):  # M[1, 1], where all four are added up
                sums[i] += part[5 * s + i]


# ---------------------------------------------------------------- kernels


@inlined
def _products(
    a, a_step, a_code, lda, b, b_step, ldb, d, d_step, ldd, rows, columns, inner, beta
):  # fmt: skip
    """d[k] = a[k] b[k] + beta d[k] for 16 matrices each, `step` elements apart."""
    a_at, b_at, d_at = a.ctypes.data, b.ctypes.data, d.ctypes.data
    for k in range(16):
        at, bt, dt = a_at + 4 * k * a_step, b_at + 4 * k * b_step, d_at + 4 * k * d_step
        sgemm(ROWS, a_code, PLAIN, rows, columns, inner, ONE, at, lda, bt, ldb, beta, dt, ldd)


Kernels: TypeAlias = tuple[Callable[..., None], Callable[..., None]]  # forward and backward


def winograd(z: Sizes, pooled: bool) -> Kernels:
    """Return the kernels of a convolution and its gradients; see `kernels.winograd`.

    Args:
        z: the sizes.
        pooled: whether ReLU and max-pooling over 2 x 2 pixels follow.
    """
    return _forward_kernel(z, pooled), _backward_kernel(z, pooled)


def _forward_kernel(z: Sizes, pooled: bool) -> Callable[..., None]:
    """Return the kernel of the result; see `winograd`."""
    (h, w, c, o, images, rows), tiles = z, z.tiles

    def forward(x, weight, bias, y, corner, u, scratch):
        v, m, border = scratch
        _kernels_in(weight, u, c * o)
        border[:] = ZERO
        count = x.size // (h * w * c)
        for first in range(0, count, images):
            here = min(images, count - first)
            _copy(x, border, True, first, here, h, w, c)
            for top in range(0, here * (h // 2), rows):
                some = min(rows, here * (h // 2) - top)
                seen = some * (w // 2)
                _patches_in(border, v, top, some, h, w, c, tiles * c)
                _products(v, tiles * c, PLAIN, c, u, c * o, o, m, tiles * o, o, seen, o, c, ZERO)
                if pooled:
                    _largest_out(
                        m, bias, y, corner, (first * (h // 2) + top) * (w // 2), seen, o, tiles * o
                    )
                else:
                    _each_out(m, bias, y, first, top, some, h, w, o, tiles * o)

    return forward


def _backward_kernel(z: Sizes, pooled: bool) -> Callable[..., None]:
    """Return the kernel of the gradients; see `winograd`."""
    (h, w, c, o, images, rows), tiles = z, z.tiles

    def backward(grad, x, corner, u, to, scratch):
        to_x, to_weight, to_bias = to
        v, m, border, spread, sums, du, ut = scratch
        for_x, for_weight = to_x.size > 0, to_weight.size > 0
        border[:] = ZERO
        to_bias[:] = ZERO
        du[:] = ZERO
        if for_x:
            _kernels_turned(u, ut, c, o)
        count = grad.size // ((h // 2) * (w // 2) * o) if pooled else grad.size // (h * w * o)
        for first in range(0, count, images):
            here = min(images, count - first)
            if for_weight:
                _copy(x, border, True, first, here, h, w, c)
            spread[:] = ZERO
            for top in range(0, here * (h // 2), rows):
                some = min(rows, here * (h // 2) - top)
                seen = some * (w // 2)
                sums[:] = ZERO  # of these tiles alone: one sum over all tiles would round worse
                if pooled:
                    at = (first * (h // 2) + top) * (w // 2)
                    _largest_in(grad, corner, m, sums, at, seen, o, tiles * o)
                else:
                    _each_in(grad, m, sums, first, top, some, h, w, o, tiles * o)
                for i in range(o):
                    to_bias[i] += sums[i]
                if for_weight:
                    _patches_in(border, v, top, some, h, w, c, tiles * c)
                    _products(
                        v, tiles * c, TRANSPOSED, c, m, tiles * o, o, du, c * o, o, c, o, seen, ONE
                    )
                if for_x:
                    _products(
                        m, tiles * o, PLAIN, o, ut, c * o, c, v, tiles * c, c, seen, c, o, ZERO
                    )
                    _patches_out(v, spread, top, some, h, w, c, tiles * c)
            if for_x:
                _copy(to_x, spread, False, first, here, h, w, c)
        if for_weight:
            _kernels_out(du, to_weight, c * o)

    return backward
