"""The updates: SGD, Adam and AdamW; and making one by its name, for command lines and configuration files."""

import inspect
import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Final

import numpy as np

from nnmpi.backend.array import Array
from nnmpi.errors import UsageError, shortened
from nnmpi.optim.adaptive import Adadelta, Adagrad, RMSprop
from nnmpi.optim.optimizer import BufferBlock, Optimizer, Storage, compiled_update, decayed_gradient, number


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
        self.momentum: Final = number("momentum", momentum, 1)
        if nesterov and self.momentum == 0:
            raise UsageError("nesterov needs momentum, which is 0; give a momentum such as 0.9 or leave nesterov out")
        self.nesterov: Final = bool(nesterov)
        super().__init__(storage, lr, weight_decay, slots=("momentum",) if self.momentum else ())

    def _update(self, lr: float, blocks: Iterable[BufferBlock]) -> None:
        settings = (self.momentum, self.nesterov) if self.momentum else ()
        for block in blocks:
            xp, data, grad = block.xp, block.data, block.grad
            compiled = compiled_update(block, "sgd_momentum" if block.slots else "sgd")
            if compiled is not None:
                compiled(data, grad, *block.slots, lr, *settings[:1], block.decay, *settings[1:])
                continue
            direction = grad if block.decay == 0 else decayed_gradient(block, block.decay)
            for kept in block.slots:
                xp.multiply(kept, self.momentum, out=kept)
                xp.add(kept, direction, out=kept)
                if self.nesterov:
                    ahead = block.scratch[1]
                    xp.multiply(kept, self.momentum, out=ahead)
                    xp.add(ahead, direction, out=ahead)
                    direction = ahead
                else:
                    direction = kept
            # In place where possible: one array less in the cache.
            change = direction if block.is_spent and direction is grad else block.scratch[1]
            # NumPy takes 0.3 us to multiply a short array by another, and 0.8 us by a number of Python's
            xp.multiply(direction, np.array(lr, data.dtype) if xp is np else lr, out=change)
            xp.subtract(data, change, out=data)


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

    decouples: ClassVar[bool] = False  # whether weights decay by themselves, and not by way of the gradient

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
        self.betas: Final = (number("betas[0]", beta1, 1), number("betas[1]", beta2, 1))
        self.eps: Final = number("eps", eps)
        super().__init__(storage, lr, weight_decay, slots=("m", "v"))

    def _update(self, lr: float, blocks: Iterable[BufferBlock]) -> None:
        beta1, beta2 = self.betas
        # m / c1 / (sqrt(v / c2) + eps)  =  m * (r / c1) / (sqrt(v) + eps * r)  with r = sqrt(c2): one pass less
        root = math.sqrt(1 - beta2**self.steps)
        rate = lr * root / (1 - beta1**self.steps)
        eps = self.eps * root
        for block in blocks:
            xp, data, (m, v) = block.xp, block.data, block.slots
            decay, kept = (0.0, 1 - lr * block.decay) if self.decouples else (block.decay, 1.0)
            compiled = compiled_update(block, "adam")
            if compiled is not None:
                compiled(data, block.grad, m, v, rate, eps, beta1, beta2, decay, kept)
                continue
            if kept != 1:
                xp.multiply(data, kept, out=data)
            gradient: Array = decayed_gradient(block, decay) if decay else block.grad
            change = block.scratch[1]
            xp.subtract(gradient, m, out=change)  # m + (1 - beta1) (g - m): rounds less than the sum of two products
            xp.multiply(change, 1 - beta1, out=change)
            xp.add(m, change, out=m)
            xp.multiply(gradient, gradient, out=change)
            xp.multiply(change, 1 - beta2, out=change)
            xp.multiply(v, beta2, out=v)
            xp.add(v, change, out=v)
            xp.sqrt(v, out=change)
            xp.add(change, eps, out=change)
            xp.divide(m, change, out=change)
            xp.multiply(change, rate, out=change)
            xp.subtract(data, change, out=data)


class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019), with the same numbers as torch.optim.AdamW.

        w = w * (1 - lr * weight_decay)         then Adam's update, without decay in its gradient

    Every weight decays at the same rate, however large its gradients are.

    Args:
        storage, lr, betas, eps: see `Adam`; errors are its own, too.
        weight_decay: the part of a weight that an update takes away, times lr; one number, or one for each group.
    """

    decouples = True

    def __init__(
        self,
        storage: Storage,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float | Mapping[str, float] = 1e-2,
    ) -> None:
        super().__init__(storage, lr, betas, eps, weight_decay)


_CLASSES: Mapping[str, type[Optimizer]] = MappingProxyType(
    {"sgd": SGD, "adam": Adam, "adamw": AdamW, "rmsprop": RMSprop, "adagrad": Adagrad, "adadelta": Adadelta}
)

NAMES = tuple(_CLASSES)


def build(name: str, storage: Storage, **options: Any) -> Optimizer:
    """Return the optimizer of that name, one of `NAMES`; an option that is None keeps the optimizer's own default.

    Raises:
        UsageError: for an unknown name, an option that this optimizer has not (it would be ignored otherwise), a
            missing learning rate (sgd has no default), or a value out of range.
    """
    if name not in _CLASSES:
        raise UsageError(f"optimizer {name!r} is unknown; choose one of {', '.join(NAMES)}")
    given = {option: value for option, value in options.items() if value is not None}
    accepted = inspect.signature(_CLASSES[name]).parameters
    for option in given:
        if option not in accepted:
            known = ", ".join(key for key in accepted if key != "storage")
            raise UsageError(f"{name} has no option {option}; leave it out, {name} has: {known}")
    if "lr" not in given and accepted["lr"].default is inspect.Parameter.empty:
        raise UsageError(f"{name} has no default learning rate; give lr, for instance 0.1")
    return _CLASSES[name](storage, **given)
