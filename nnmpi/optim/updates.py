"""SGD, and optimizers by name, for command lines and configuration files."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, TypeAlias

from nnmpi.backend.array import Array
from nnmpi.backend.storage import Storage
from nnmpi.base.errors import UsageError, number
from nnmpi.base.glossary import Glossary
from nnmpi.optim.adaptive import Adadelta, Adagrad, Adam, AdamW, Lion, RMSprop, decayed
from nnmpi.optim.muon import Muon
from nnmpi.optim.optimizer import (
    Arrays,
    ByGroup,
    Optimizer,
)

__all__ = ["NAMES", "SGD", "build"]


def sgd(w: Array, grad: Array, lr: float, decay: float) -> None:
    """Descend along the gradient, see `SGD`."""
    w -= decayed(grad, w, decay) * lr


def sgd_momentum(
    w: Array, grad: Array, b: Array, lr: float, momentum: float, decay: float, nesterov: bool
) -> None:
    """Descend along the momentum b, see `SGD`."""
    grad = decayed(grad, w, decay)
    b *= momentum
    b += grad
    w -= (b * momentum + grad if nesterov else b) * lr


class SGD(Optimizer, read_once="momentum nesterov"):
    """Gradient descent, with the same numbers as torch.optim.SGD (dampening 0).

        g = gradient + weight_decay * w
        b = momentum * b + g              slot "momentum", initially zeros
        d = g                             without momentum
            b                             with momentum
            g + momentum * b              with Nesterov momentum
        w = w - lr * d

    The learning rate multiplies the direction d, not the terms of b, as in Sutskever et al., "On
    the importance of initialization and momentum in deep learning" (2013), section 2. Nesterov
    momentum is rewritten so that w is always the point at which the gradient was computed.

    Args:
        storage: the buffers, see `Storage`.
        lr: the learning rate, at least 0; or a number by group name.
        momentum: in [0, 1); 0 needs no state.
        nesterov: use Nesterov momentum; needs momentum > 0.
        weight_decay: one number, or a number by group name; groups left out are not decayed.

    Raises:
        UsageError: for values out of range, `nesterov` without momentum, or an unknown group.

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

    @property
    def formula(self) -> Any:  # type: ignore[override]
        """With or without momentum."""
        return sgd_momentum if self.momentum else sgd

    def numbers(self, lr: float, decay: float) -> tuple[float, ...]:
        """See `Optimizer.numbers`."""
        return (lr, self.momentum, decay, self.nesterov) if self.momentum else (lr, decay)


@dataclass(frozen=True)
class NamedOptimizer:
    """What the name of an optimizer stands for; all that lists optimizers reads these.

    Attributes:
        kind: the class.
        words: what it is, in a few words, for the help of options.
    """

    kind: type[Optimizer]
    words: str

    @property
    def options(self) -> Mapping[str, inspect.Parameter]:
        """The options of the class by name, with their defaults."""
        parameters = inspect.signature(self.kind).parameters
        return {name: item for name, item in parameters.items() if name != "storage"}

    @property
    def help(self) -> str:
        """What it is, and the defaults of options that commands have, too."""
        defaults = [
            f"{option.replace('_', ' ')} {self.options[option].default:g}"
            for option in ("momentum", "weight_decay")
            if option in self.options
        ]
        return f"{self.words} (by default {', '.join(defaults)})" if defaults else self.words


# To add an optimizer, write its class and its row: options, their help, checkpoints, ZeRO, the
# planner and the tests follow.
OPTIMIZERS: Mapping[str, NamedOptimizer] = {
    "sgd": NamedOptimizer(SGD, "gradient descent"),
    "adam": NamedOptimizer(Adam, "steps by the size of past gradients"),
    "adamw": NamedOptimizer(AdamW, "adam with decoupled weight decay"),
    "rmsprop": NamedOptimizer(RMSprop, "gradients divided by their mean square's root"),
    "adagrad": NamedOptimizer(Adagrad, "gradients divided by their sum of squares' root"),
    "adadelta": NamedOptimizer(Adadelta, "steps of the size of past steps"),
    "lion": NamedOptimizer(
        Lion, "steps by the sign of an average, of equal size, with decoupled weight decay"
    ),
    "muon": NamedOptimizer(
        Muon, "orthogonalized updates of matrices, the rest as adamw, decoupled weight decay"
    ),
}
"""The optimizers by name."""

NAMES = tuple(OPTIMIZERS)
OptimizerName: TypeAlias = Annotated[
    str, NAMES, Glossary({name: row.help for name, row in OPTIMIZERS.items()})
]


def taking(option: str) -> tuple[str, ...]:
    """Return the optimizers that have an option, by name."""
    return tuple(name for name, row in OPTIMIZERS.items() if option in row.options)


def is_elementwise(name: Any) -> bool:
    """Return whether an optimizer updates each element by itself; a user's class by name: true."""
    if not isinstance(name, str):
        return bool(getattr(name, "elementwise", True))
    return name not in OPTIMIZERS or OPTIMIZERS[name].kind.elementwise


def count_state(name: str, **options: Any) -> int:
    """Return the arrays of each parameter's size in an optimizer's state; see `build`."""
    return len(build(name, Arrays([], []), lr=1.0, **options).slots())


def build(name: str, storage: Storage, **options: Any) -> Optimizer:
    """Return the optimizer of a name in `NAMES`; an option of None means its default.

    Raises:
        UsageError: for an unknown name, an option that this optimizer lacks, a missing learning
            rate (sgd has no default), or a value out of range.
    """
    if name not in OPTIMIZERS:
        raise UsageError(f"optimizer {name!r} is unknown; choose one of {', '.join(NAMES)}")
    given = {option: value for option, value in options.items() if value is not None}
    row = OPTIMIZERS[name]
    for option in given:
        if option not in row.options:
            raise UsageError(
                f"{name} has no option {option}; leave it out, or choose one of"
                f" {', '.join(row.options)}"
            )
    if "lr" not in given and row.options["lr"].default is inspect.Parameter.empty:
        raise UsageError(f"{name} has no default learning rate; give lr, for instance 0.1")
    return row.kind(storage, **given)
