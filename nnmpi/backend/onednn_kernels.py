"""Activations by oneDNN, in one pass over x; by NumPy's functions they take up to twenty.

An element's value depends on no other element, so shards have the whole array's bits. Backward
reads x itself, which is there anyway, instead of a derivative that is kept for it.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from nnmpi.backend import onednn
from nnmpi.backend.activations import SILU, Activation, Saves, gated_silu, gated_silu_grad
from nnmpi.backend.array import Array
from nnmpi.backend.plain import PlainKernels
from nnmpi.backend.recording import call

# Elements from which on the two passes are faster than NumPy's, whose calls take less time: a call
# of the library takes 10 us. Of 16,384, 131,072 and a million elements NumPy took as many times as
# long (Emerald Rapids): GELU 3.2, 4.8, 5.5; with tanh 1.4, 2.1, 2.7; SiLU 1.0, 1.9, 2.2; sigmoid
# 1.3, 2.1, 2.8; ELU 1.7, 3.7, 3.6. ReLU and tanh gain nothing.
FEWEST = 1 << 14


class OnednnKernels(PlainKernels):
    """The kernels of NumPy's float32 arrays where oneDNN is installed."""

    def activation(
        self, form: Activation, x: Array, keep: bool, *settings: float
    ) -> tuple[Array, Any]:
        """See `PlainKernels.activation`; the library's gradient reads a tuple of one array."""
        if not form.onednn or x.size < FEWEST:
            return super().activation(form, x, keep, *settings)
        x = np.ascontiguousarray(x, like=x)
        y = _activate(form, x, settings)
        return y, (y if form.saves is Saves.RESULT else x,)

    def activation_grad(self, form: Activation, grad: Array, saved: Any, *settings: float) -> Array:
        """See `PlainKernels.activation_grad`."""
        if not isinstance(saved, tuple):
            return super().activation_grad(form, grad, saved, *settings)
        return _gradient(form, saved[0], np.ascontiguousarray(grad, like=grad), settings)

    def rows(self, formula: Any, *operands: Any, **options: Any) -> tuple[Array, ...]:
        """See `PlainKernels.rows`; a gated SiLU is the library's function and products."""
        if formula not in (gated_silu, gated_silu_grad) or operands[0].size < FEWEST:
            return super().rows(formula, *operands, **options)
        *grad, gate, x = (np.ascontiguousarray(item, like=item) for item in operands)
        y = _activate(SILU, gate, ())
        if not grad:
            return (np.multiply(y, x, out=y),)
        to_gate = _gradient(SILU, gate, x * grad[0], ())
        return to_gate, np.multiply(y, grad[0], out=y)


def _activate(form: Activation, x: Array, settings: Sequence[float]) -> Array:
    y = np.empty(x.shape, x.dtype, like=x)
    call(onednn.activate, (x,), (y, form.onednn, *settings))
    return y


def _gradient(form: Activation, saved: Array, grad: Array, settings: Sequence[float]) -> Array:
    to_x = np.empty(grad.shape, grad.dtype, like=grad)
    call(onednn.activation_gradient, (saved, grad), (to_x, form.onednn, *settings))
    return to_x
