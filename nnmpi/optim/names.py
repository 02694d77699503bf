"""Making an optimizer by its name, for command lines and configuration files."""

import inspect
from collections.abc import Mapping
from types import MappingProxyType

from nnmpi.errors import UsageError
from nnmpi.optim.adam import Adam, AdamW
from nnmpi.optim.optimizer import Optimizer
from nnmpi.optim.sgd import SGD
from nnmpi.optim.storage import Storage

_CLASSES: Mapping[str, type[Optimizer]] = MappingProxyType({"sgd": SGD, "adam": Adam, "adamw": AdamW})

NAMES = tuple(_CLASSES)


def build(
    name: str,
    storage: Storage,
    *,
    lr: float | None = None,
    momentum: float | None = None,
    nesterov: bool | None = None,
    betas: tuple[float, float] | None = None,
    eps: float | None = None,
    weight_decay: float | Mapping[str, float] | None = None,
) -> Optimizer:
    """Return the optimizer of that name; what is None keeps the optimizer's own default.

    Args:
        name: one of `NAMES`.
        storage: the buffers that it updates.
        lr, weight_decay: of any optimizer.
        momentum, nesterov: of SGD.
        betas, eps: of Adam and AdamW.

    Raises:
        UsageError: for an unknown name, an option that this optimizer has not (it would be ignored otherwise), a
            missing learning rate (sgd has no default), or a value out of range.
    """
    if name not in _CLASSES:
        raise UsageError(f"optimizer {name!r} is unknown; choose one of {', '.join(NAMES)}")
    options = {
        "lr": lr,
        "momentum": momentum,
        "nesterov": nesterov,
        "betas": betas,
        "eps": eps,
        "weight_decay": weight_decay,
    }
    given = {option: value for option, value in options.items() if value is not None}
    accepted = inspect.signature(_CLASSES[name]).parameters
    for option in given:
        if option not in accepted:
            known = ", ".join(key for key in accepted if key != "storage")
            raise UsageError(f"{name} has no option {option}; leave it out, {name} has: {known}")
    if "lr" not in given and accepted["lr"].default is inspect.Parameter.empty:
        raise UsageError(f"{name} has no default learning rate; give lr, for instance 0.1")
    return _CLASSES[name](storage, **given)  # type: ignore[arg-type]  # checked against the signature above
