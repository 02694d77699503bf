"""Optimizers by name: every option arrives, and none is ignored."""

import numpy as np
import pytest

from nnmpi.errors import UsageError
from nnmpi.optim.adam import Adam, AdamW
from nnmpi.optim.names import NAMES, build
from nnmpi.optim.sgd import SGD
from nnmpi.optim.storage import Arrays


@pytest.fixture
def storage():
    return Arrays([np.zeros(3)], [np.zeros(3)])


def test_names():
    assert NAMES == ("sgd", "adam", "adamw")


def test_sgd_gets_its_options(storage):
    optimizer = build("sgd", storage, lr=0.5, momentum=0.75, nesterov=True, weight_decay=0.25)
    assert type(optimizer) is SGD
    assert (optimizer.lr, optimizer.momentum, optimizer.nesterov) == (0.5, 0.75, True)
    assert optimizer.weight_decay == (0.25,)
    assert optimizer.storage is storage


@pytest.mark.parametrize(("name", "kind"), [("adam", Adam), ("adamw", AdamW)])
def test_adam_gets_its_options(storage, name, kind):
    optimizer = build(name, storage, lr=0.5, betas=(0.5, 0.75), eps=0.25, weight_decay={"default": 0.125})
    assert type(optimizer) is kind
    assert (optimizer.lr, optimizer.betas, optimizer.eps) == (0.5, (0.5, 0.75), 0.25)
    assert optimizer.weight_decay == (0.125,)


def test_what_is_left_out_keeps_the_default(storage):
    assert build("adam", storage).lr == 1e-3
    assert build("adamw", storage).weight_decay == (0.01,)
    assert build("sgd", storage, lr=0.1).slots() == {}


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("adagrad", {}, "optimizer 'adagrad' is unknown; choose one of sgd, adam, adamw"),
        ("sgd", {}, "sgd has no default learning rate; give lr"),
        ("adam", {"momentum": 0.9}, "adam has no option momentum; .* has: lr, betas, eps, weight_decay"),
        ("adamw", {"nesterov": True}, "adamw has no option nesterov"),
        ("sgd", {"lr": 0.1, "betas": (0.9, 0.99)}, "sgd has no option betas"),
        ("sgd", {"lr": 0.1, "eps": 1e-8}, "sgd has no option eps"),
        ("sgd", {"lr": -0.1}, "lr is -0.1"),
    ],
)
def test_refusals(storage, name, options, sentence):
    with pytest.raises(UsageError, match=sentence):
        build(name, storage, **options)
