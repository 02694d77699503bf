"""Workers of a layout, and their keyword arguments from flat ones: a test's case is one dict."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from nnmpi import GradientExchange, Group, Layout, Numerics, Worker, arrange
from nnmpi.nn import Module
from nnmpi.optim import SGD, Optimizer


def arranged(
    model: Module,
    group: Group,
    layout: Layout,
    sample=None,
    dtype: str = "float32",
    initial: int = 0,
    make: Callable[..., Optimizer] = SGD,
    lr: float = 0.1,
    **options,
) -> Worker:
    """Return a worker of a model in a layout; `model` and `arrangement` are its attributes.

    Args:
        initial: the seed of the weights.
        make: of the optimizer.
        options: of the worker.
    """
    where = arrange(model, group, layout, sample, dtype)
    where.model.initialize(seed=initial, dtype=dtype, storage=where.storage)
    optimizer = make(where.model.storage, lr=lr)
    return Worker(where.model, optimizer, group, arrangement=where, **options)


def grouped(**options) -> dict[str, Any]:
    """Return keyword arguments for a worker, those of GradientExchange and Numerics put into these.

    grouped(allreduce="ring", clip=1.0, seed=3)
    -> {"exchange": GradientExchange(allreduce="ring"), "numerics": Numerics(clip=1.0), "seed": 3}
    """
    result = dict(options)
    for name, kind in (("exchange", GradientExchange), ("numerics", Numerics)):
        local = {
            field.name: result.pop(field.name) for field in fields(kind) if field.name in result
        }
        if local:
            result[name] = kind(**local)
    return result
