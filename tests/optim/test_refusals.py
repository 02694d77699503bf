"""What optimizers, clipping and schedules refuse: a call, and the words of its sentence."""

import math

import numpy as np
import pytest

from nnmpi import nn
from nnmpi.base.errors import DtypeError, ShapeError, UsageError
from nnmpi.optim import (
    Arrays,
    ConstantRate,
    Cosine,
    StepDecay,
    Warmup,
    build,
    clip_by_global_norm,
)


def made(name="adam", lr=0.1, **options):
    """Return what makes an optimizer of three numbers."""
    return lambda: build(name, Arrays([np.zeros(3)], [np.zeros(3)]), lr=lr, **options)


def held(data, grads=None, groups=None):
    """Return what makes an optimizer of these arrays."""
    return lambda: build("sgd", data if grads is None else Arrays(data, grads, groups), lr=0.1)


def read_only():
    """Return numbers that cannot be written."""
    array = np.ones(3)
    array.flags.writeable = False
    return array


ROWS = [
    *(
        (made(name, lr), UsageError, "lr is ")
        for name in ("sgd", "adam", "adamw")
        for lr in (-1.0, math.nan, "x")
    ),
    (made(weight_decay=-0.1), UsageError, "weight_decay is -0.1"),
    (made(weight_decay={"default": -0.1}), UsageError, "weight_decay of 'default'"),
    (made(weight_decay={"norms": 0.1}), UsageError, "group 'norms', which does not exist"),
    (
        made(lr={"default": 0.1, "norms": 0.1}),
        UsageError,
        "lr names the group 'norms', which does not exist",
    ),
    (made(lr={}), UsageError, "lr has no rate for the group 'default'; give each group one"),
    (made(lr={"default": -1}), UsageError, "lr of 'default' is -1"),
    (made("sgd", nesterov=True), UsageError, "nesterov needs momentum"),
    (made(betas=(1.0, 0.9)), UsageError, r"betas\[0\] is 1.0"),
    (made("adamw", eps=-1e-8), UsageError, "eps is -1e-08"),
    (made("rprop"), UsageError, "'rprop' is unknown"),
    (made("adam", momentum=0.9), UsageError, "adam has no option momentum"),
    (held([np.ones(3)]), UsageError, "model.storage"),
    (held(nn.ReLU()), UsageError, "model.storage|no storage"),
    (held([np.ones(3)], []), UsageError, "1 buffers, 0 gradients"),
    (held([np.ones(3)], [np.ones((3, 1))]), ShapeError, "buffer 0"),
    (held([np.ones(3)], [np.ones(3, "float32")]), DtypeError, "its gradient float32"),
    (held([np.ones(3, ">f4")], [np.ones(3, ">f4")]), DtypeError, "buffer 0 is >f4"),
    (held([read_only()], [np.ones(3)]), UsageError, "read-only"),
    (held([np.ones((3, 2)).T], [np.ones((2, 3))]), UsageError, "not contiguous"),
    (lambda: clip_by_global_norm([np.ones(3)], 0.0), UsageError, "max_norm is 0.0"),
    (lambda: ConstantRate(-0.1), UsageError, "lr is -0.1"),
    (lambda: ConstantRate(0.1)(-1), UsageError, "step is -1"),
    (lambda: StepDecay(0.1, 1, 1.5), UsageError, "factor is 1.5"),
    (lambda: Cosine(0.1, 5, -0.1), UsageError, "final is -0.1"),
    (lambda: Warmup(-1, ConstantRate(0.1)), UsageError, "steps is -1"),
]


@pytest.mark.parametrize("call, error, words", ROWS)
def test_refused(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_a_bad_rate_set_later_changes_nothing():
    optimizer = made("sgd")()
    optimizer.lr = -0.1
    with pytest.raises(UsageError, match="lr is -0.1"):
        optimizer.step()
    assert optimizer.steps == 0


def test_options_arrive_by_name():
    sgd = made("sgd", momentum=0.75, nesterov=True, weight_decay=0.25)()
    adam = made("adamw", betas=(0.5, 0.75), eps=0.25)()
    assert (sgd.lr, sgd.momentum, sgd.nesterov, sgd.weight_decay) == (0.1, 0.75, True, (0.25,))
    assert (adam.betas, adam.eps, adam.weight_decay) == ((0.5, 0.75), 0.25, (0.01,))
