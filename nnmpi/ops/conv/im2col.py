"""Convolution by im2col: the pixels that each window sees become a row of a matrix, and the convolution a product.

    images (n, h, w, c)                          kernels (kh, kw, c, o)
       |  a few images at a time                     |  seen as a matrix
       v                                             v
    columns (pixels, kh kw c)          @         (kh kw c, o)          ->   (pixels, o) = images (n, out_h, out_w, o)

    dW = columns^T dy, summed over the blocks of images               (made again: that costs less than keeping them)
    dx = columns of dy @ flipped kernels                              for stride 1: a convolution, too
         dy W[r, s]^T added to the pixels that kernel element r, s saw      otherwise

`Im2col` computes any convolution, one group after another. `Im2colReluPool` does bias, ReLU and max-pooling on the way,
and the convolution's whole result is never stored: a block's is pooled at once, and backward needs but where the
largest elements were.

    forward     columns @ W = | y0 | y1 | y2 | y3 |       one plane per place in the pooling's window (see `columns`)
                h = relu(max(y0 .. y3) + b)               winner = the first place that is the largest, if h > 0
    backward    dyk = dh where the winner is k            dW = columns^T dy, block by block; db = sum of dy
                dx = conv(dy with a border, W flipped)
"""

from collections.abc import Iterator
from math import prod
from typing import Any

from nnmpi.backend.array import Array
from nnmpi.backend.windows import corners
from nnmpi.ops.conv.algorithm import Algorithm, Gradients
from nnmpi.ops.conv.columns import Columns, repeated
from nnmpi.ops.conv.gradients import InputGradient, ProductSum, multiply, pixel_sum, scatter_windows
from nnmpi.ops.planes import Planes


class Im2col(Algorithm):
    """Any convolution without ReLU and pooling, group by group."""

    __slots__ = ()

    def forward(self, xp: Any, x: Array, weight: Array, bias: Array | None, y: Array, keep: bool) -> None:
        for inputs, outputs in self._groups(x.shape[3], weight.shape[3]):
            images, result = x[..., inputs], y[..., outputs]  # (n, h, w, c / groups), (n, out_h, out_w, o / groups)
            part = weight[..., outputs]
            kernel = xp.reshape(part, (prod(part.shape[:3]), part.shape[3]))  # (kh kw c / groups, o / groups)
            columns = Columns(xp, images.shape, x.dtype, self.spec, part.shape[3], source=images)
            for block in columns.blocks():
                columns.load(images, block)
                for strip in columns.strips(block.stop - block.start):
                    multiply(xp, columns.fill(strip), kernel, _pixels(result[block][:, strip.rows]))
        if bias is not None:
            flat = y.reshape(len(y), prod(y.shape[1:]))  # (n, out_h out_w o)
            xp.add(flat, repeated(xp, bias, y.shape[1] * y.shape[2]), out=flat)

    def backward(self, xp: Any, grad: Array, x: Array, weight: Array, kept: None, out: Gradients) -> None:
        grad = xp.reshape(grad, (grad.size,)).reshape(grad.shape)  # without gaps
        if out.x is not None:
            self._input_gradient(xp, grad, weight, out.x)
        if out.weight is not None:
            self._weight_gradient(xp, grad, x, out.weight)
        if out.bias is not None:
            pixel_sum(xp, grad, out.bias)

    def _groups(self, c: int, o: int) -> Iterator[tuple[slice, slice]]:
        """Yield each group's slice of the input channels and of the output channels."""
        groups = self.spec.groups
        c, o = c // groups, o // groups
        for g in range(groups):
            yield slice(g * c, (g + 1) * c), slice(g * o, (g + 1) * o)

    def _weight_gradient(self, xp: Any, grad: Array, x: Array, out: Array) -> None:
        """Write the sum over pixels of column times output gradient: columns^T grad, block by block."""
        for inputs, outputs in self._groups(x.shape[3], out.shape[3]):
            images, part = x[..., inputs], out[..., outputs]
            matrix = (prod(part.shape[:3]), part.shape[3])  # (kh kw c / groups, o / groups)
            # a group's outputs lie apart in `out`, where no product can be written
            total = ProductSum(xp, part.reshape(matrix) if self.spec.groups == 1 else xp.empty(matrix, part.dtype))
            columns = Columns(xp, images.shape, x.dtype, self.spec, part.shape[3], source=images)
            for block in columns.blocks():
                columns.load(images, block)
                for strip in columns.strips(block.stop - block.start):
                    total.add(columns.fill(strip).T, _pixels(grad[block][:, strip.rows, :, outputs]))
            summed = total.finish()
            if self.spec.groups > 1:
                xp.copyto(part, summed.reshape(part.shape))

    def _input_gradient(self, xp: Any, grad: Array, weight: Array, out: Array) -> None:
        for inputs, outputs in self._groups(out.shape[3], weight.shape[3]):
            images, part, result = grad[..., outputs], weight[..., outputs], out[..., inputs]
            if self.spec.reversible:
                reverse = InputGradient(xp, images.shape, part, self.spec, result, source=images)
                for block in reverse.columns.blocks():
                    reverse.columns.load(images, block)
                    reverse.write(block)
            else:
                scatter_windows(xp, images, part, self.spec, result)


class Im2colReluPool(Algorithm):
    """A convolution of stride 1 in one group with ReLU, and with max-pooling if there is some."""

    __slots__ = ()

    def forward(self, xp: Any, x: Array, weight: Array, bias: Array | None, y: Array, keep: bool) -> Array | None:
        o, places = weight.shape[3], prod(self.spec.pool)
        columns = Columns(xp, x.shape, x.dtype, self.spec, o, source=x)
        row = columns.out[1] * o  # elements of y
        image = columns.out[0] * row
        flat = y.reshape(y.size)
        planes = Planes(xp, places, columns.count * image)
        winner: Array | None = xp.empty((y.size,), planes.dtype) if keep else None
        kernel = xp.reshape(weight, (prod(weight.shape[:3]), o))  # (kh kw c, o)
        # without a pooling the product goes straight to y
        memory = xp.empty((places * columns.count * image,), x.dtype) if places > 1 else None
        biases = None if bias is None else repeated(xp, bias, columns.count * prod(columns.out))
        for block in columns.blocks():
            columns.load(x, block)
            for strip in columns.strips(block.stop - block.start):
                matrix = columns.fill(strip)  # (places pooled pixels, kh kw c)
                start, size = block.start * image + strip.rows.start * row, len(matrix) * o // places
                h = flat[start : start + size]
                z = (h if memory is None else memory[: places * size]).reshape(places, size)
                multiply(xp, matrix, kernel, z.reshape(len(matrix), o))
                won = None if winner is None else winner[start : start + size]
                if places > 1:
                    planes.largest(z, h, won)
                elif won is not None:
                    xp.copyto(won, 0)
                planes.bias_relu(biases, h, won)
        return winner

    def backward(self, xp: Any, grad: Array, x: Array, weight: Array, kept: Array, out: Gradients) -> None:
        spec, (n, height, width, o), dtype = self.spec, grad.shape, x.dtype
        places, row = prod(spec.pool), width * o
        flat = xp.reshape(grad, (grad.size,))
        reverse = None
        if out.x is not None:
            reverse = InputGradient(xp, (n, *spec.conv_size(*x.shape[1:3]), o), weight, spec, out.x)
        # both work on the same images at a time: dy is computed once
        columns = Columns(xp, x.shape, dtype, spec, o, None if reverse is None else reverse.columns.count, x)
        reverse_places = None if reverse is None else corners(reverse.columns.inner, spec.pool)
        memory = xp.empty((places * columns.count * height * row,), dtype)
        planes = Planes(xp, places, columns.count * height * row)
        to_weight = None if out.weight is None else ProductSum(xp, out.weight.reshape(prod(weight.shape[:3]), o))
        to_bias = None if out.bias is None else ProductSum(xp, out.bias)
        ones = xp.ones(places * columns.count * height * width, dtype)
        for block in columns.blocks():
            count = block.stop - block.start
            if to_weight is not None:
                columns.load(x, block)
            for strip in columns.strips(count):
                start = (block.start * height + strip.rows.start) * row
                size = len(strip.matrix) * o // places
                dy = memory[: places * size].reshape(places, size)
                planes.gradient(flat[start : start + size], kept[start : start + size], dy)
                pixels = dy.reshape(len(strip.matrix), o)  # in the order of the columns
                if to_weight is not None:
                    to_weight.add(columns.fill(strip).T, pixels)
                if to_bias is not None:
                    to_bias.add(ones[: len(pixels)], pixels)
                if reverse_places is not None:
                    target = reverse_places[:, :, :count, strip.rows]
                    xp.copyto(target, dy.reshape(target.shape))
            if reverse is not None:
                reverse.write(block)
        for each in (to_weight, to_bias):
            if each is not None:
                each.finish()


def _pixels(images: Array) -> Array:
    """Return images (n, h, w, c) as a view (pixels, c)."""
    return images.reshape(prod(images.shape[:3]), images.shape[3])  # not -1: there may be no elements
