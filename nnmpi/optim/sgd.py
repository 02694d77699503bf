"""Stochastic gradient descent with momentum, Nesterov's momentum and L2 weight decay."""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from nnmpi.backend.array import Array
from nnmpi.errors import UsageError
from nnmpi.optim.blocks import BufferBlock, compiled_update
from nnmpi.optim.optimizer import Optimizer, below_one, decayed_gradient, factor
from nnmpi.optim.storage import Storage


class SGD(Optimizer):
    """Gradient descent, with the same numbers as torch.optim.SGD (dampening 0).

        g = gradient + weight_decay * w
        b = momentum * b + g                    b: the slot "momentum", zeros at first
        w = w - lr * d                          d: g without momentum, b with it, g + momentum * b with Nesterov's

    The learning rate multiplies the finished direction and not what goes into b, as in Sutskever et al., "On the
    importance of initialization and momentum in deep learning" (2013), section 2, rewritten so that w is always the
    point at which the gradient was taken.

    Args:
        storage: the buffers, see `Storage`.
        lr: the learning rate, at least 0.
        momentum: in [0, 1); 0 needs no state.
        nesterov: look ahead along the momentum; needs momentum > 0.
        weight_decay: one number, or a number by group name; groups left out are not decayed.

    Raises:
        UsageError: for values out of range, Nesterov's momentum without momentum, or an unknown group.
    """

    def __init__(
        self,
        storage: Storage,
        lr: float,
        momentum: float = 0.0,
        *,
        nesterov: bool = False,
        weight_decay: float | Mapping[str, float] = 0.0,
    ) -> None:
        self.momentum: Final = below_one("momentum", momentum)
        if nesterov and self.momentum == 0:
            raise UsageError("nesterov needs momentum, which is 0; give a momentum such as 0.9 or leave nesterov out")
        self.nesterov: Final = bool(nesterov)
        super().__init__(storage, lr, weight_decay, slots=("momentum",) if self.momentum else ())

    def _update(self, lr: float, blocks: Iterable[BufferBlock]) -> None:
        rate, dtype = None, None
        for block in blocks:
            grad, data = block.grad, block.data
            compiled = compiled_update(block, "sgd_momentum" if block.slots else "sgd")
            if compiled is not None:
                self._compiled(compiled, block, lr)
                continue
            direction = grad if block.decay == 0 else decayed_gradient(block)
            if block.slots:
                direction = self._direction(block, direction)
            if data.dtype is not dtype:
                rate, dtype = factor(block, lr), data.dtype
            # In place where possible: one array less in the cache.
            change = direction if block.is_spent and direction is grad else block.scratch[1]
            block.xp.multiply(direction, rate, out=change)
            block.xp.subtract(data, change, out=data)

    def _compiled(self, compiled: Any, block: BufferBlock, lr: float) -> None:
        if block.slots:
            (momentum,), kept = block.slots, self.momentum
            compiled(block.data, block.grad, momentum, lr, kept, block.decay, self.nesterov)
        else:
            compiled(block.data, block.grad, lr, block.decay)

    def _direction(self, block: BufferBlock, gradient: Array) -> Array:
        """Return what the learning rate multiplies, after adding the gradient to the momentum."""
        xp, (momentum,) = block.xp, block.slots
        xp.multiply(momentum, self.momentum, out=momentum)
        xp.add(momentum, gradient, out=momentum)
        if not self.nesterov:
            return momentum
        ahead = block.scratch[1]
        xp.multiply(momentum, self.momentum, out=ahead)
        xp.add(ahead, gradient, out=ahead)
        return ahead
