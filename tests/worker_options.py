"""Workers of a layout, and their keyword arguments from flat ones: a test's case is one dict."""

from dataclasses import fields

from nnmpi import DataParallel, GradientExchange, Numerics, ShardedDataParallel, Worker, arrange
from nnmpi.optim import SGD


def sgd(model, lr=0.1, **options):
    """Return an optimizer of a model."""
    return SGD(model.storage, lr=lr, **options)


def work(model, group, lr=0.1, **options):
    """Return a worker of a model, with an optimizer of its own."""
    return Worker(model, sgd(model, lr), group, **options)


def replicas(model, group, stage=0, **options):
    """Return what averages a model's gradients, and shards the model from stage 1 on."""
    if stage:
        return ShardedDataParallel(model, group, stage, **options)
    return DataParallel(model, group)


def arranged(
    model, group, layout, sample=None, dtype="float32", initial=0, make=SGD, lr=0.1, **options
):
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


def grouped(**options):
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
