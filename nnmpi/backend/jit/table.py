"""Every compiled kernel by name, with its arguments; each is compiled, or read from disk, when it is first asked for.

Arrays are float32 and C-contiguous unless another dtype is said. Kernels return nothing: they write into the arrays
marked `out` or `in place`, which must not overlap the others.
"""

from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numba import types

from nnmpi.backend.jit import blas, direct, loops, winograd
from nnmpi.backend.jit.build import boolean, build, float64, int64, read, strided, write
from nnmpi.backend.jit.tiling import FlatGradients, GradientScratch, Scratch, Sizes

Kernel: TypeAlias = Callable[..., None]


class Pair(NamedTuple):
    """A kernel and that of its gradients."""

    forward: Kernel
    backward: Kernel


class CompiledFunctions:
    """The compiled functions of this process."""

    def __init__(self) -> None:
        self._winograd: dict[tuple[Sizes, bool, bool], Pair] = {}
        self._direct: dict[tuple[int, int, int, int], Pair] = {}

    # ---- dense layers

    @cached_property
    def bias_relu(self) -> Kernel:
        """(y: (rows, n) in place, bias: (n,)): y = max(y + bias, 0)."""
        return build(loops.bias_relu, write(2), read(1))

    @cached_property
    def relu_grad_bias(self) -> Kernel:
        """(grad: (rows, n), y: (rows, n), out: (rows, n), to_bias: out (n,)).

        out is grad where the ReLU's output y is positive, and else 0; to_bias its sum over the rows. out may be grad.
        """
        return build(loops.relu_grad_bias, read(2), read(2), write(2), write(1))

    @cached_property
    def softmax_loss(self) -> Kernel:
        """(logits: (rows, classes), labels: int64 (rows,), losses: out (rows,), gradient: out (rows, classes)).

        losses[r] = -log softmax(logits[r])[labels[r]], and each loss's own gradient: softmax less one at the label.
        Labels must be in range. gradient may be logits.
        """
        return build(loops.softmax_loss, read(2), read(1, types.int64), write(1), write(2))

    @cached_property
    def slope_grad_bias(self) -> Kernel:
        """(grad: (rows, n), slope: (rows, n), out: (rows, n), to_bias: out (n,)): grad * slope, and its sum."""
        return build(loops.slope_grad_bias, read(2), read(2), write(2), write(1))

    # ---- transformers

    @cached_property
    def attention_powers(self) -> Kernel:
        """(p: (batch, heads, keys, queries) in place, top, total: out (batch, heads, queries), before, has_before,
        corner).

        p = e^(p - top), top the largest of p over the keys and of `before`, if there is one; total the sums over the
        keys. top, total and before, which is like them, have any strides. Query i does not see the keys after
        corner + i: there p becomes 0.
        """
        return build(loops.powers, write(4), strided(3), strided(3), strided(3), boolean, int64)

    @cached_property
    def attention_score_gradients(self) -> Kernel:
        """(d in place, p: (batch, heads, keys, queries), inner: (batch, heads, queries)): d = (d - inner) * p.

        inner has any strides.
        """
        return build(loops.score_gradients, write(4), read(4), strided(3))

    @cached_property
    def layer_norm(self) -> Kernel:
        """(x: (rows, n), scale: (n,), shift: (n,), eps, y: out (rows, n), normal: out (rows, n), inverse: out (rows,)).

        normal = (x - mean) * inverse, inverse = 1 / sqrt(variance + eps), y = normal * scale + shift.
        A row whose variance is infinite is NaN.
        """
        return build(loops.layer_norm, read(2), read(1), read(1), float64, write(2), write(2), write(1))

    @cached_property
    def layer_norm_grad(self) -> Kernel:
        """(grad: (rows, n), normal: (rows, n), inverse: (rows,), scale: (n,), to_x, to_scale, to_shift: out).

        to_x: (rows, n); to_scale and to_shift: (n,), sums over the rows.
        """
        return build(loops.layer_norm_grad, read(2), read(2), read(1), read(1), write(2), write(1), write(1))

    @cached_property
    def gelu_tanh(self) -> Kernel:
        """(x: (n,), y: out (n,)): y = GELU(x), its tanh form. y may be x."""
        return build(loops.gelu_tanh, read(1), write(1))

    @cached_property
    def bias_gelu_tanh_slope(self) -> Kernel:
        """(x: (rows, n) in place, bias: (n,), slope: out (rows, n)): x = GELU(x + bias), and its slope."""
        return build(loops.bias_gelu_tanh_slope, write(2), read(1), write(2))

    @cached_property
    def gelu_tanh_grad(self) -> Kernel:
        """(x: (n,), grad: (n,), out: (n,)): grad times GELU's derivative at x. out may be grad."""
        return build(loops.gelu_tanh_grad, read(1), read(1), write(1))

    # ---- long short-term memory; all arrays (n, features), gates (n, 4 features)

    @cached_property
    def lstm_step(self) -> Kernel:
        """(gates in place, product: like gates, c, new_c: out, new_h: out): a step, see `backend.kernels.recurrent`."""
        return build(loops.lstm_step, write(2), read(2), read(2), write(2), write(2))

    @cached_property
    def lstm_step_grad(self) -> Kernel:
        """(gates, slopes: out, like gates, h, grad, cell, last_c, to_c in place): its gradients."""
        return build(loops.lstm_step_grad, read(2), write(2), *(read(2),) * 4, write(2))

    # ---- images, (n, h, w, c)

    @cached_property
    def max_pool2(self) -> Kernel:
        """(x: (n, h, w, c), y: out (n, h // 2, w // 2, c), corner: out uint8, like y): the largest of 2 x 2 pixels."""
        return build(loops.max_pool2, read(4), write(4), write(4, types.uint8))

    @cached_property
    def max_pool2_grad(self) -> Kernel:
        """(grad: (n, h // 2, w // 2, c), corner: uint8, like grad, out: (n, h, w, c)): each to its window's winner."""
        return build(loops.max_pool2_grad, read(4), read(4, types.uint8), write(4))

    @property
    def has_products(self) -> bool:
        """Whether compiled code can call the BLAS here, which `winograd` needs."""
        return blas.available()

    def winograd(self, z: Sizes, pooled: bool, relu: bool) -> Pair:
        """Return the convolution with a 3 x 3 kernel, and its gradients, for images and channels of these sizes.

        forward: (x, weight, bias, y: out, corner: out, u: out, scratch: Scratch). `corner` is like y if pooled, and
        empty otherwise; u, of 16 c o elements, is for backward.
        backward: (grad, x, y, corner, u, to: FlatGradients, out, scratch: GradientScratch).
        All arrays are flat, `corner` of uint8; z makes the scratch memory.

        Args:
            pooled: followed by ReLU and max-pooling over 2 x 2 pixels.
            relu: followed by ReLU alone.
        """
        key = (z, pooled, relu)
        if key not in self._winograd:
            self._winograd[key] = _winograd(z, pooled, -np.inf if not relu else 0.0)
        return self._winograd[key]

    def direct(self, h: int, w: int, c: int, o: int) -> Pair:
        """Return the pooled convolution, and the gradients of its weight and bias, for images (h, w, c), c small.

        forward: (x, weight, bias, y: out, corner: out, sums: scratch of 4 o, border: scratch of (h + 2) (w + 2) c).
        backward: (grad, x, corner, to_weight: out, to_bias: out, part: scratch of 9 c o + o, border).
        All arrays are flat, `corner` of uint8.
        """
        key = (h, w, c, o)
        if key not in self._direct:
            self._direct[key] = _direct(h, w, c, o)
        return self._direct[key]

    # ---- optimizers; all arrays (n,)

    @cached_property
    def sgd(self) -> Kernel:
        """(data in place, grad, lr, decay): data -= lr * (grad + decay * data)."""
        return build(loops.sgd, write(1), read(1), float64, float64)

    @cached_property
    def sgd_momentum(self) -> Kernel:
        """(data in place, grad, momentum in place, lr, keep, decay, nesterov: bool), see optim.SGD."""
        return build(loops.sgd_momentum, write(1), read(1), write(1), float64, float64, float64, boolean)

    @cached_property
    def adam(self) -> Kernel:
        """(data in place, grad, m in place, v in place, rate, eps, beta1, beta2, decay, factor), see optim.Adam.

        data = factor * data - rate * m / (sqrt(v) + eps) after m and v took in grad + decay * data; rate and eps hold
        the corrections of the first updates.
        """
        return build(loops.adam, write(1), read(1), write(1), write(1), *(float64,) * 6)


def _winograd(z: Sizes, pooled: bool, least: float) -> Pair:
    corner = types.uint8
    return Pair(
        build(
            winograd.forward(z, pooled, least),
            *(*(read(1),) * 3, write(1), write(1, corner), write(1), _flat(Scratch)),
        ),
        build(
            winograd.backward(z, pooled, least),
            *(*(read(1),) * 3, read(1, corner), read(1), _flat(FlatGradients), _flat(GradientScratch)),
        ),
    )


def _flat(kind: type[Scratch | GradientScratch | FlatGradients]) -> Any:
    """Return the type of a named tuple of flat arrays that a kernel writes to."""
    return types.NamedUniTuple(write(1), len(kind._fields), kind)  # type: ignore[no-untyped-call]


def _direct(h: int, w: int, c: int, o: int) -> Pair:
    corner, scratch = types.uint8, (write(1), write(1))
    return Pair(
        build(direct.forward(h, w, c, o), *(read(1),) * 3, write(1), write(1, corner), *scratch),
        build(direct.backward(h, w, c, o), read(1), read(1), read(1, corner), *scratch, *scratch),
    )
