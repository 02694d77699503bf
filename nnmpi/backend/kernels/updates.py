"""Optimizers' updates in one pass over the memory, where compiled code computes them."""

from typing import Protocol

from nnmpi.backend.array import Array


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
