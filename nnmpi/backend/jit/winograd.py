"""Winograd's convolution F(2x2, 3x3): 16 products per four outputs of a 3 x 3 kernel instead of 36.

Lavin and Gray, "Fast algorithms for convolutional neural networks" (2016), with the transforms

    B^T = 1  0 -1  0     G =  1   0   0     A^T = 1  1  1  0
          0  1  1  0         .5  .5  .5           0  1 -1 -1
          0 -1  1  0         .5 -.5  .5
          0  1  0 -1          0   0   1

of 4 x 4 patches, two pixels apart, of the images with a border of zeros around them:

    patch --B^T . B--> V[16][tiles][c]
                            | 16 products V[k] U[k]                 U[16][c][o] = G kernel G^T
                            v
                       M[16][tiles][o] --A^T . A--> 2 x 2 outputs   ->  (+ bias, ReLU)          "plain"
                                                                    or  largest, + bias, ReLU   "pooled"

A tile is a max-pooling window, so pooled outputs come straight from M. Backward is the adjoint, step by step:
dM = A dY A^T, dU = sum V^T dM, dV = dM U^T, dX = sum of overlapping B dV B^T, dW = G^T dU G.

All arrays are flat; the sizes are constants of each kernel, because only so do loops that write 16 places of one array
become vector instructions. Some tile rows are worked on at a time, so that V and M stay in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from nnmpi.backend.array import Array
from nnmpi.backend.jit.blas import PLAIN, ROWS, TRANSPOSED, sgemm
from nnmpi.backend.jit.build import inlined
from nnmpi.backend.jit.tiling import FlatGradients, GradientScratch, Scratch, Sizes

ZERO, HALF, ONE = np.float32(0), np.float32(0.5), np.float32(1)
DEAD = np.int32(4)  # in place of a corner: the window's output is not positive

# ---------------------------------------------------------------- transforms


@inlined
def _kernels_in(weight: Any, u: Any, s: Any) -> None:
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
def _kernels_out(u: Any, to_weight: Any, s: Any) -> None:
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
            result[i], result[3 * s + i], result[6 * s + i] = a + b + d, b - d, b + d + column[12 * s + i]


@inlined
def _kernels_turned(u: Any, ut: Any, c: Any, o: Any) -> None:
    """Write U[k]^T: the BLAS takes half as long again for a product with a transposed matrix of this size."""
    for k in range(16):
        for j in range(o):
            column, row = u[k * c * o + j :], ut[(k * o + j) * c :]
            for i in range(c):
                row[i] = column[i * o]


@inlined
def images_in(x: Any, border: Any, first: Any, images: Any, h: Any, w: Any, c: Any) -> None:
    """Copy images into the inside of the bordered ones.

    Args:
        x: all images (n, h, w, c), flat.
        border: out, (images, h + 2, w + 2, c), flat.
        first: the first image that is copied.
        images: how many are copied.
        h, w, c: the sizes of an image.
    """
    for b in range(images):
        for r in range(h):
            source = ((first + b) * h + r) * w * c
            target = ((b * (h + 2) + r + 1) * (w + 2) + 1) * c
            inside, pixels = border[target:], x[source:]
            for i in range(w * c):
                inside[i] = pixels[i]


@inlined
def _images_out(spread: Any, to_x: Any, first: Any, images: Any, h: Any, w: Any, c: Any) -> None:
    """Copy the inside of bordered images."""
    for b in range(images):
        for r in range(h):
            target = ((first + b) * h + r) * w * c
            source = ((b * (h + 2) + r + 1) * (w + 2) + 1) * c
            pixels, inside = to_x[target:], spread[source:]
            for i in range(w * c):
                pixels[i] = inside[i]


@inlined
def _patches_in(border: Any, v: Any, top: Any, rows: Any, h: Any, w: Any, c: Any, s: Any) -> None:
    """V = B^T patch B of the tile rows top .. top + rows, counted over all images; V[k] begins at k s."""
    step = (w + 2) * c
    for row in range(rows):
        b, r = (top + row) // (h // 2), (top + row) % (h // 2)
        begin = (b * (h + 2) + 2 * r) * step
        for t in range(w // 2):
            patch, part = border[begin + 2 * t * c :], v[(row * (w // 2) + t) * c :]
            for i in range(c):
                at = i
                a0, a1, a2, a3 = patch[at], patch[at + c], patch[at + 2 * c], patch[at + 3 * c]
                at = step + i
                b0, b1, b2, b3 = patch[at], patch[at + c], patch[at + 2 * c], patch[at + 3 * c]
                at = 2 * step + i
                d0, d1, d2, d3 = patch[at], patch[at + c], patch[at + 2 * c], patch[at + 3 * c]
                at = 3 * step + i
                e0, e1, e2, e3 = patch[at], patch[at + c], patch[at + 2 * c], patch[at + 3 * c]
                z0, z1, z2, z3 = a0 - d0, a1 - d1, a2 - d2, a3 - d3
                at = i
                part[at], part[at + s], part[at + 2 * s], part[at + 3 * s] = z0 - z2, z1 + z2, z2 - z1, z1 - z3
                z0, z1, z2, z3 = b0 + d0, b1 + d1, b2 + d2, b3 + d3
                at = 4 * s + i
                part[at], part[at + s], part[at + 2 * s], part[at + 3 * s] = z0 - z2, z1 + z2, z2 - z1, z1 - z3
                z0, z1, z2, z3 = d0 - b0, d1 - b1, d2 - b2, d3 - b3
                at = 8 * s + i
                part[at], part[at + s], part[at + 2 * s], part[at + 3 * s] = z0 - z2, z1 + z2, z2 - z1, z1 - z3
                z0, z1, z2, z3 = b0 - e0, b1 - e1, b2 - e2, b3 - e3
                at = 12 * s + i
                part[at], part[at + s], part[at + 2 * s], part[at + 3 * s] = z0 - z2, z1 + z2, z2 - z1, z1 - z3


@inlined
def _patches_out(v: Any, spread: Any, top: Any, rows: Any, h: Any, w: Any, c: Any, s: Any) -> None:
    """Add B dV B^T to the tiles' patches of the bordered images."""
    step = (w + 2) * c
    for row in range(rows):
        b, r = (top + row) // (h // 2), (top + row) % (h // 2)
        begin = (b * (h + 2) + 2 * r) * step
        for t in range(w // 2):
            patch, part = spread[begin + 2 * t * c :], v[(row * (w // 2) + t) * c :]
            for i in range(c):
                at = i
                a0, a1, a2, a3 = part[at], part[at + s], part[at + 2 * s], part[at + 3 * s]
                at = 4 * s + i
                b0, b1, b2, b3 = part[at], part[at + s], part[at + 2 * s], part[at + 3 * s]
                at = 8 * s + i
                d0, d1, d2, d3 = part[at], part[at + s], part[at + 2 * s], part[at + 3 * s]
                at = 12 * s + i
                e0, e1, e2, e3 = part[at], part[at + s], part[at + 2 * s], part[at + 3 * s]
                at = i
                patch[at] += a0
                patch[at + c] += a1 - a2 + a3
                patch[at + 2 * c] += a1 + a2 - a0
                patch[at + 3 * c] -= a3
                z0, z1, z2, z3 = b0 - d0 + e0, b1 - d1 + e1, b2 - d2 + e2, b3 - d3 + e3
                at = i + step
                patch[at] += z0
                patch[at + c] += z1 - z2 + z3
                patch[at + 2 * c] += z1 + z2 - z0
                patch[at + 3 * c] -= z3
                z0, z1, z2, z3 = b0 + d0 - a0, b1 + d1 - a1, b2 + d2 - a2, b3 + d3 - a3
                at = i + 2 * step
                patch[at] += z0
                patch[at + c] += z1 - z2 + z3
                patch[at + 2 * c] += z1 + z2 - z0
                patch[at + 3 * c] -= z3
                at = i + 3 * step
                patch[at] -= e0
                patch[at + c] -= e1 - e2 + e3
                patch[at + 2 * c] -= e1 + e2 - e0
                patch[at + 3 * c] += e3


@inlined
def _largest_out(m: Any, bias: Any, y: Any, corner: Any, first: Any, tiles: Any, o: Any, s: Any) -> None:
    """y = ReLU(bias + the largest of A^T M A), corner = which that was, or DEAD, from the output's tile `first` on."""
    for t in range(tiles):
        part, out, place = m[t * o :], y[(first + t) * o :], corner[(first + t) * o :]
        for i in range(o):
            at = i
            a0, a1, a2, a3 = part[at], part[at + s], part[at + 2 * s], part[at + 3 * s]
            at = 4 * s + i
            b0, b1, b2, b3 = part[at], part[at + s], part[at + 2 * s], part[at + 3 * s]
            at = 8 * s + i
            d0, d1, d2, d3 = part[at], part[at + s], part[at + 2 * s], part[at + 3 * s]
            at = 12 * s + i
            e0, e1, e2, e3 = part[at], part[at + s], part[at + 2 * s], part[at + 3 * s]
            z0, z1, z2, z3 = a0 + b0 + d0, a1 + b1 + d1, a2 + b2 + d2, a3 + b3 + d3
            top, which = z0 + z1 + z2, np.int32(0)
            value = z1 - z2 - z3
            which = np.int32(1) if value > top else which
            top = value if value > top else top
            z0, z1, z2, z3 = b0 - d0 - e0, b1 - d1 - e1, b2 - d2 - e2, b3 - d3 - e3
            value = z0 + z1 + z2
            which = np.int32(2) if value > top else which
            top = value if value > top else top
            value = z1 - z2 - z3
            which = np.int32(3) if value > top else which
            top = (value if value > top else top) + bias[i]
            # A NaN stays: one pixel's spreads to some window's first output, which no comparison replaces.
            out[i] = ZERO if top <= ZERO else top
            place[i] = DEAD if top <= ZERO else which


@inlined
def _largest_in(grad: Any, corner: Any, m: Any, sums: Any, first: Any, tiles: Any, o: Any, s: Any) -> None:
    """dM = A dY A^T, dY being grad at each window's winner; sums gains the sum of dY."""
    for t in range(tiles):
        part, above, place = m[t * o :], grad[(first + t) * o :], corner[(first + t) * o :]
        for i in range(o):
            g, which = above[i], np.int32(place[i])
            y0 = g if which == 0 else ZERO
            y1 = g if which == 1 else ZERO
            y2 = g if which == 2 else ZERO
            y3 = g if which == 3 else ZERO
            z0, z1 = y0 + y2, y1 + y3
            x0, x1 = y0 - y2, y1 - y3
            at = i
            part[at], part[at + s], part[at + 2 * s], part[at + 3 * s] = y0, y0 + y1, y0 - y1, -y1
            at = 4 * s + i
            part[at], part[at + s], part[at + 2 * s], part[at + 3 * s] = z0, z0 + z1, z0 - z1, -z1
            at = 8 * s + i
            part[at], part[at + s], part[at + 2 * s], part[at + 3 * s] = x0, x0 + x1, x0 - x1, -x1
            at = 12 * s + i
            part[at], part[at + s], part[at + 2 * s], part[at + 3 * s] = -y2, -y2 - y3, y3 - y2, y3
        for i in range(o):
            sums[i] += above[i] if place[i] < 4 else ZERO


@inlined
def _each_out(
    m: Any, bias: Any, y: Any, first: Any, top: Any, rows: Any, h: Any, w: Any, o: Any, s: Any, least: Any
) -> None:
    """y = A^T M A + bias, and not below `least`, of the tile rows top .. top + rows of the images from `first` on."""
    for row in range(rows):
        b, r = (top + row) // (h // 2), (top + row) % (h // 2)
        begin = ((first + b) * h + 2 * r) * w * o
        for t in range(w // 2):
            part, out = m[(row * (w // 2) + t) * o :], y[begin + 2 * t * o :]
            for i in range(o):
                at = i
                a0, a1, a2, a3 = part[at], part[at + s], part[at + 2 * s], part[at + 3 * s]
                at = 4 * s + i
                b0, b1, b2, b3 = part[at], part[at + s], part[at + 2 * s], part[at + 3 * s]
                at = 8 * s + i
                d0, d1, d2, d3 = part[at], part[at + s], part[at + 2 * s], part[at + 3 * s]
                at = 12 * s + i
                e0, e1, e2, e3 = part[at], part[at + s], part[at + 2 * s], part[at + 3 * s]
                z0, z1, z2, z3 = a0 + b0 + d0, a1 + b1 + d1, a2 + b2 + d2, a3 + b3 + d3
                x0, x1, x2, x3 = b0 - d0 - e0, b1 - d1 - e1, b2 - d2 - e2, b3 - d3 - e3
                shift = bias[i]
                y0, y1 = z0 + z1 + z2 + shift, z1 - z2 - z3 + shift
                y2, y3 = x0 + x1 + x2 + shift, x1 - x2 - x3 + shift
                out[i], out[i + o] = least if y0 < least else y0, least if y1 < least else y1
                at = w * o + i
                out[at], out[at + o] = least if y2 < least else y2, least if y3 < least else y3


@inlined
def _each_in(
    grad: Any, y: Any, m: Any, sums: Any, first: Any, top: Any, rows: Any, h: Any, w: Any, o: Any, s: Any, least: Any
) -> None:
    """dM = A dY A^T, dY being grad where y is above `least`; sums gains the sum of dY."""
    for row in range(rows):
        b, r = (top + row) // (h // 2), (top + row) % (h // 2)
        begin = ((first + b) * h + 2 * r) * w * o
        for t in range(w // 2):
            part, above, out = m[(row * (w // 2) + t) * o :], grad[begin + 2 * t * o :], y[begin + 2 * t * o :]
            for i in range(o):
                y0, y1 = above[i] if out[i] > least else ZERO, above[i + o] if out[i + o] > least else ZERO
                at = w * o + i
                y2, y3 = above[at] if out[at] > least else ZERO, above[at + o] if out[at + o] > least else ZERO
                z0, z1 = y0 + y2, y1 + y3
                x0, x1 = y0 - y2, y1 - y3
                at = i
                part[at], part[at + s], part[at + 2 * s], part[at + 3 * s] = y0, y0 + y1, y0 - y1, -y1
                at = 4 * s + i
                part[at], part[at + s], part[at + 2 * s], part[at + 3 * s] = z0, z0 + z1, z0 - z1, -z1
                at = 8 * s + i
                part[at], part[at + s], part[at + 2 * s], part[at + 3 * s] = x0, x0 + x1, x0 - x1, -x1
                at = 12 * s + i
                part[at], part[at + s], part[at + 2 * s], part[at + 3 * s] = -y2, -y2 - y3, y3 - y2, y3
            for i in range(o):  # M[1, 1], where all four are added up
                sums[i] += part[5 * s + i]


# ---------------------------------------------------------------- kernels


@inlined
def _products(
    a: Any, a_step: Any, a_code: Any, lda: Any, b: Any, b_step: Any, b_code: Any, ldb: Any,
    d: Any, d_step: Any, ldd: Any, rows: Any, columns: Any, inner: Any, beta: Any
) -> None:  # fmt: skip
    """d[k] = a[k] b[k] + beta d[k] for the 16 matrices of each, `step` elements apart."""
    a_at, b_at, d_at = a.ctypes.data, b.ctypes.data, d.ctypes.data
    for k in range(16):
        at, bt, dt = a_at + 4 * k * a_step, b_at + 4 * k * b_step, d_at + 4 * k * d_step
        sgemm(ROWS, a_code, b_code, rows, columns, inner, ONE, at, lda, bt, ldb, beta, dt, ldd)


def forward(z: Sizes, pooled: bool, least: float) -> Callable[..., None]:
    """Return the kernel of the convolution; its arguments are in `table.CompiledFunctions.winograd`.

    Args:
        z: the sizes that it is made for.
        pooled: whether ReLU and max-pooling over 2 x 2 pixels follow.
        least: without pooling, below which no result is: 0 for a ReLU, minus infinity for none.
    """
    h, w, c, o, images, rows, tiles = z.h, z.w, z.c, z.o, z.images, z.rows, z.tiles
    floor = np.float32(least)

    def winograd(x: Array, weight: Array, bias: Array, y: Array, corner: Array, u: Array, scratch: Scratch) -> None:
        v, m, border = scratch
        _kernels_in(weight, u, c * o)
        border[:] = ZERO
        count = x.size // (h * w * c)
        for first in range(0, count, images):
            here = min(images, count - first)
            images_in(x, border, first, here, h, w, c)
            for top in range(0, here * (h // 2), rows):
                some = min(rows, here * (h // 2) - top)
                seen = some * (w // 2)
                _patches_in(border, v, top, some, h, w, c, tiles * c)
                _products(v, tiles * c, PLAIN, c, u, c * o, PLAIN, o, m, tiles * o, o, seen, o, c, ZERO)
                if pooled:
                    _largest_out(m, bias, y, corner, (first * (h // 2) + top) * (w // 2), seen, o, tiles * o)
                else:
                    _each_out(m, bias, y, first, top, some, h, w, o, tiles * o, floor)

    return winograd


def backward(z: Sizes, pooled: bool, least: float) -> Callable[..., None]:
    """Return the kernel of the gradients; the arguments are those of `forward`.

    Args:
        z, pooled, least: as for `forward`.
    """
    h, w, c, o, images, rows, tiles = z.h, z.w, z.c, z.o, z.images, z.rows, z.tiles
    floor = np.float32(least)

    def winograd_grad(
        grad: Array, x: Array, y: Array, corner: Array, u: Array, to: FlatGradients, scratch: GradientScratch
    ) -> None:
        to_x, to_weight, to_bias = to
        sums, du, ut, v, m, border, spread = scratch
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
                images_in(x, border, first, here, h, w, c)
            spread[:] = ZERO
            for top in range(0, here * (h // 2), rows):
                some = min(rows, here * (h // 2) - top)
                seen = some * (w // 2)
                sums[:] = ZERO  # of these tiles alone: one sum over all tiles would round worse
                if pooled:
                    place = (first * (h // 2) + top) * (w // 2)
                    _largest_in(grad, corner, m, sums, place, seen, o, tiles * o)
                else:
                    _each_in(grad, y, m, sums, first, top, some, h, w, o, tiles * o, floor)
                for i in range(o):
                    to_bias[i] += sums[i]
                if for_weight:
                    _patches_in(border, v, top, some, h, w, c, tiles * c)
                    _products(v, tiles * c, TRANSPOSED, c, m, tiles * o, PLAIN, o, du, c * o, o, c, o, seen, ONE)
                if for_x:
                    _products(m, tiles * o, PLAIN, o, ut, c * o, PLAIN, c, v, tiles * c, c, seen, c, o, ZERO)
                    _patches_out(v, spread, top, some, h, w, c, tiles * c)
            if for_x:
                _images_out(spread, to_x, first, here, h, w, c)
        if for_weight:
            _kernels_out(du, to_weight, c * o)

    return winograd_grad
