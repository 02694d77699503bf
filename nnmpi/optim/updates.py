"""SGD; and making an optimizer by its name, for command lines and configuration files."""

import inspect
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from nnmpi.errors import UsageError
from nnmpi.optim.adaptive import Adadelta, Adagrad, Adam, AdamW, RMSprop
from nnmpi.optim.muon import Muon
from nnmpi.optim.optimizer import (
    BufferBlock,
    ByGroup,
    Optimizer,
    Storage,
    compiled_update,
    decayed_gradient,
    number,
)


class SGD(Optimizer):
    """Gradient descent, with the same numbers as torch.optim.SGD (dampening 0).

        g = gradient + weight_decay * w
        b = momentum * b + g                    b: the slot "momentum", zeros at first
        w = w - lr * d                          d: g without momentum, b with it, g + momentum * b
                                                with Nesterov's

    The learning rate multiplies the finished direction and not what goes into b, as in Sutskever et
    al., "On the importance of initialization and momentum in deep learning" (2013), section 2,
    rewritten so that w is always the point at which the gradient was taken.

    Args:
        storage: the buffers, see `Storage`.
        lr: the learning rate, at least 0; or one for each group, by its name.
        momentum: in [0, 1); 0 needs no state.
        nesterov: look ahead along the momentum; needs momentum > 0.
        weight_decay: one number, or a number by group name; groups left out are not decayed.

    Raises:
        UsageError: for values out of range, Nesterov's momentum without momentum, or an unknown
            group.

    Example:
        >>> model = models.mlp([4], 3, [8]).initialize(seed=0)
        >>> optim.SGD(model.storage, lr=0.1, momentum=0.9)
        SGD(lr=0.1, 67 parameters, after 0 steps)
    """

    def __init__(
        self,
        storage: Storage,
        lr: ByGroup,
        momentum: float = 0.0,
        *,
        nesterov: bool = False,
        weight_decay: ByGroup = 0.0,
    ) -> None:
        self.momentum: Final = number("momentum", momentum, 1)
        if nesterov and self.momentum == 0:
            raise UsageError(
                "nesterov needs momentum, which is 0; give a momentum such as 0.9 or leave"
                " nesterov out"
            )
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
            direction = decayed_gradient(block, block.decay)
            for saved in block.slots:
                xp.multiply(saved, self.momentum, out=saved)
                xp.add(saved, direction, out=saved)
                if self.nesterov:
                    ahead = block.scratch[1]
                    xp.multiply(saved, self.momentum, out=ahead)
                    xp.add(ahead, direction, out=ahead)
                    direction = ahead
                else:
                    direction = saved
            # In place where possible: one array less in the cache.
            change = direction if block.is_spent and direction is grad else block.scratch[1]
            # NumPy takes 0.3 us to multiply a short array by another, and 0.8 us by a number of
            # Python's
            xp.multiply(direction, np.array(lr, data.dtype) if xp is np else lr, out=change)
            xp.subtract(data, change, out=data)


_CLASSES: Mapping[str, type[Optimizer]] = MappingProxyType(
    {
        "sgd": SGD,
        "adam": Adam,
        "adamw": AdamW,
        "rmsprop": RMSprop,
        "adagrad": Adagrad,
        "adadelta": Adadelta,
        "muon": Muon,
    }
)

NAMES = tuple(_CLASSES)


def build(name: str, storage: Storage, **options: Any) -> Optimizer:
    """Return the optimizer of a name in `NAMES`; None keeps an option's default.

    Raises:
        UsageError: for an unknown name, an option that this optimizer has not (it would be ignored
            otherwise), a missing learning rate (sgd has no default), or a value out of range.
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
