"""The kernels that operations compute with, as one typed interface; here computed by the array library's functions.

There is a class per family. `Kernels` is all of them, and what every other implementation derives from.
"""

from typing import Protocol

from nnmpi.backend.array import Array
from nnmpi.backend.kernels.attention import AttentionKernels
from nnmpi.backend.kernels.norm import NormKernels
from nnmpi.backend.kernels.pooling import PoolingKernels
from nnmpi.backend.kernels.recurrent import RecurrentKernels
from nnmpi.backend.kernels.softmax import SoftmaxKernels
from nnmpi.backend.kernels.tables import TableKernels


class UpdateKernels(Protocol):
    """Updates of arrays (n,) of one dtype, without gaps, in place; `nnmpi.optim` explains the letters.

    `Kernels.updates` is None where there are none: optimizers then compute by the array library's functions, block by
    block.
    """

    def sgd(self, data: Array, grad: Array, lr: float, decay: float, /) -> None:
        """data -= lr * (grad + decay * data)."""

    def sgd_momentum(
        self, data: Array, grad: Array, momentum: Array, lr: float, keep: float, decay: float, nesterov: bool, /
    ) -> None:
        """momentum = keep * momentum + g, g = grad + decay * data; data -= lr * momentum, or what Nesterov's takes.

        Args:
            data: the parameters, which are written; any length.
            grad: their gradients, like data.
            momentum: like data; written.
            lr: the learning rate.
            keep: the share of the momentum that stays.
            decay: the weight decay's factor, added to the gradient.
            nesterov: whether data moves by g + keep * momentum instead.
        """

    def adam(
        self,
        data: Array,
        grad: Array,
        m: Array,
        v: Array,
        rate: float,
        eps: float,
        beta1: float,
        beta2: float,
        decay: float,
        factor: float,
        /,
    ) -> None:
        """m and v move towards g and its square; data = factor * data - rate * m / (sqrt(v) + eps).

        g = grad + decay * data. Adam gives factor 1; AdamW gives decay 0 and factor 1 - lr * decay. rate and eps hold
        the corrections of the first updates.

        Args:
            data: the parameters, which are written; any length.
            grad: their gradients, like data.
            m, v: running means of g and of its square, like data; written.
            rate: the learning rate, with the corrections of the first updates.
            eps: added to the root, with the same corrections.
            beta1, beta2: the shares of m and of v that stay.
            decay: the weight decay's factor, added to the gradient.
            factor: what data is multiplied by: 1, or AdamW's 1 - lr * decay.
        """


class Kernels(TableKernels, NormKernels, SoftmaxKernels, AttentionKernels, PoolingKernels, RecurrentKernels):
    """All kernels, for arrays of any library.

    Attributes:
        is_device: whether the kernels run on a device, where looking at a value means waiting for all that was asked
            for before; such kernels also read float16 and bfloat16 as they are, and add up in float32. Others are
            given float32 in their place, see `tensor.convert.in_float32`.
    """

    __slots__ = ()

    is_device = False

    @property
    def updates(self) -> UpdateKernels | None:
        """Optimizers' updates in one pass; None where there are none, and optimizers compute step by step."""
        return None
