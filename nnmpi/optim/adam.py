"""Adam and AdamW: gradients divided by a running root mean square of themselves."""

import math
from collections.abc import Iterable, Mapping
from typing import Final

from nnmpi.backend.array import Array
from nnmpi.errors import UsageError, shortened
from nnmpi.optim.blocks import BufferBlock, compiled_update
from nnmpi.optim.optimizer import Optimizer, below_one, decayed_gradient, non_negative
from nnmpi.optim.storage import Storage


class Adam(Optimizer):
    """Adam (Kingma and Ba, "Adam: a method for stochastic optimization", 2015), as torch.optim.Adam computes it.

        g = gradient + weight_decay * w
        m = beta1 * m + (1 - beta1) * g                             the slots "m" and "v", zeros at first
        v = beta2 * v + (1 - beta2) * g * g
        w = w - lr * m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps)             t: the update's number, from 1

    Args:
        storage: the buffers, see `Storage`.
        lr: the learning rate, at least 0.
        betas: what m and v keep of their past in one update, each in [0, 1).
        eps: at least 0, added to the root so that tiny gradients do not give huge updates; with 0, an element whose
            gradients were all 0 becomes NaN.
        weight_decay: L2 regularization, added to the gradient: one number, or a number by group name; groups left
            out are not decayed.

    Raises:
        UsageError: for values out of range or an unknown group.
    """

    def __init__(
        self,
        storage: Storage,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float | Mapping[str, float] = 0.0,
    ) -> None:
        try:
            beta1, beta2 = betas
        except (TypeError, ValueError):
            raise UsageError(f"betas are {shortened(repr(betas))}; give two numbers such as (0.9, 0.999)") from None
        self.betas: Final = (below_one("betas[0]", beta1), below_one("betas[1]", beta2))
        self.eps: Final = non_negative("eps", eps)
        super().__init__(storage, lr, weight_decay, slots=("m", "v"))

    def _update(self, lr: float, blocks: Iterable[BufferBlock]) -> None:
        beta1, beta2 = self.betas
        # m / c1 / (sqrt(v / c2) + eps)  =  m * (r / c1) / (sqrt(v) + eps * r)  with r = sqrt(c2): one pass less
        root = math.sqrt(1 - beta2**self.steps)
        rate = lr * root / (1 - beta1**self.steps)
        eps = self.eps * root
        for block in blocks:
            compiled = compiled_update(block, "adam")
            if compiled is not None:
                (m, v), (decay, kept) = block.slots, self._decays(block, lr)
                compiled(block.data, block.grad, m, v, rate, eps, beta1, beta2, decay, kept)
                continue
            self._average(block, self._gradient(block, lr))
            xp, (m, v), change = block.xp, block.slots, block.scratch[1]
            xp.sqrt(v, out=change)
            xp.add(change, eps, out=change)
            xp.divide(m, change, out=change)
            xp.multiply(change, rate, out=change)
            xp.subtract(block.data, change, out=block.data)

    def _average(self, block: BufferBlock, gradient: Array) -> None:
        """Move m towards the gradient and v towards its square."""
        beta1, beta2 = self.betas
        xp, (m, v), change = block.xp, block.slots, block.scratch[1]
        xp.subtract(gradient, m, out=change)  # m + (1 - beta1) (g - m): rounds less than the sum of two products
        xp.multiply(change, 1 - beta1, out=change)
        xp.add(m, change, out=m)
        xp.multiply(gradient, gradient, out=change)
        xp.multiply(change, 1 - beta2, out=change)
        xp.multiply(v, beta2, out=v)
        xp.add(v, change, out=v)

    def _gradient(self, block: BufferBlock, lr: float) -> Array:
        """Return the gradient that enters the averages."""
        return decayed_gradient(block)

    def _decays(self, block: BufferBlock, lr: float) -> tuple[float, float]:
        """Return the decay that enters the gradient, and what the data are multiplied by."""
        return block.decay, 1.0


class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019), with the same numbers as torch.optim.AdamW.

        w = w * (1 - lr * weight_decay)         then Adam's update, without decay in its gradient

    Every weight decays at the same rate, however large its gradients are.

    Args:
        storage, lr, betas, eps: see `Adam`; errors are its own, too.
        weight_decay: the part of a weight that an update takes away, times lr; one number, or one for each group.
    """

    def __init__(
        self,
        storage: Storage,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float | Mapping[str, float] = 1e-2,
    ) -> None:
        super().__init__(storage, lr, betas, eps, weight_decay)

    def _gradient(self, block: BufferBlock, lr: float) -> Array:
        if block.decay:
            block.xp.multiply(block.data, 1 - lr * block.decay, out=block.data)
        return block.grad

    def _decays(self, block: BufferBlock, lr: float) -> tuple[float, float]:
        return 0.0, 1 - lr * block.decay
