"""Models of a user's own, each with something in it that is hard to spread; all take (sample_shape,
classes).

No bias stands before a batch norm: its gradient is 0, and Adam would divide rounding errors by
their own size.
"""

import os
import signal
from math import prod

import numpy as np

from nnmpi import Tensor
from nnmpi.nn import (
    GRU,
    AdaptiveAvgPool2d,
    BatchNorm,
    Branches,
    Conv1d,
    Conv2d,
    ConvTranspose2d,
    Dropout,
    Dropout2d,
    Embedding,
    Flatten,
    GlobalAvgPool2d,
    GroupNorm,
    Linear,
    Module,
    MultiheadAttention,
    Pop,
    ReLU,
    Residual,
    RMSNorm,
    Sequential,
    Sharding,
    Stash,
    Tanh,
    Upsample,
)

COLUMN, ROW = Sharding.COLUMN, Sharding.ROW


def skipping(sample_shape, classes):
    """Return a model whose skip connections overlap, and one of which begins at the input.

    in -- 0 -- 12 -- 12 -- 12 -- 9 ------- 9 -- 9 -- out
       |         |      |        |             |
       | "far"   |      '-"near"-^ (9 by 12)   |     "far" goes over all of it
       '---------+-----------------------------^
    """
    features = prod(sample_shape)
    model = Sequential(
        Flatten(),
        Stash("far"),
        Linear(features, 12),
        Tanh(),
        Stash("near"),
        Linear(12, 12),
        Tanh(),
        Linear(12, 9),
        Pop("near", Linear(12, 9)),
        Tanh(),
        Linear(9, 9),
        Pop("far", Linear(features, 9)),
        Tanh(),
        Linear(9, classes),
    )
    model.sharding = {
        "2": COLUMN,
        "5": ROW,
        "7": COLUMN,
        "8.shortcut": COLUMN,
        "10": ROW,
        "13": COLUMN,
    }
    return model


def nested(sample_shape, classes):
    """Return a residual block in a residual block, and a shortcut with parameters."""
    channels = sample_shape[-1]
    inner = Residual(Sequential(Conv2d(4, 4, 3, padding=1, bias=False), BatchNorm(4)))
    last = Conv2d(4, 6, 3, padding=1, bias=False)
    body = Sequential(Conv2d(channels, 4, 3, padding=1), ReLU(), inner, last, BatchNorm(6))
    shortcut = Sequential(Conv2d(channels, 6, 1, bias=False), BatchNorm(6))
    model = Sequential(Residual(body, shortcut), GlobalAvgPool2d(), Linear(6, classes))
    model.sharding = {"0.body.0": COLUMN, "0.body.3": ROW, "2": COLUMN}
    return model


def decoding(sample_shape, classes):
    """Return layers that few models have: convolutions of each channel and backwards, groups,
    channels that go.
    """
    model = Sequential(
        Conv2d(sample_shape[-1], 4, 3, padding=1),
        GroupNorm(2, 4),
        Conv2d(4, 4, 3, stride=2, padding=1, groups=4),
        ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1),
        Dropout2d(0.3),
        AdaptiveAvgPool2d((3, 2)),
        Upsample(2),
        GlobalAvgPool2d(),
        RMSNorm(6),
        Linear(6, classes),
    )
    model.sharding = {"0": COLUMN, "9": COLUMN}
    return model


def reading(sample_shape, classes):
    """Return a model of texts with a GRU, whole attention and a convolution over time."""
    return Sequential(
        Embedding(classes, 6),
        Conv1d(6, 6, 3, padding=1),
        GRU(6, 9, 2),
        MultiheadAttention(9, 3),
        Linear(9, classes),
    )


def branched(sample_shape, classes):
    """Return a model of two unequal towers, with running statistics, between layers that no branch
    has.
    """
    channels = sample_shape[-1]

    def tower(width, features):
        conv = Conv2d(channels, width, 3, padding=1, bias=False)
        return Sequential(
            conv, BatchNorm(width), ReLU(), GlobalAvgPool2d(), Linear(width, features)
        )

    first = Conv2d(channels, channels, 1)
    return Sequential(
        first, Branches(tower(4, 5), tower(6, 3)), Tanh(), Linear(8, 8), Tanh(), Linear(8, classes)
    )


def tied(sample_shape, classes):
    """Return a model with one layer at three places, and one parameter in two layers."""
    shared, other, twin = Linear(12, 12), Linear(12, 12), Linear(12, 12)
    twin.bias = other.bias
    model = Sequential(
        Flatten(),
        Linear(prod(sample_shape), 12),
        Tanh(),
        shared,
        Tanh(),
        other,
        Tanh(),
        shared,
        Tanh(),
        twin,
        Tanh(),
        shared,
        Tanh(),
        Linear(12, classes),
    )
    model.sharding = {"3": COLUMN, "7": COLUMN, "11": COLUMN, "13": ROW}
    return model


class Fork(Module):
    """x -> (x W, x, the place of its largest element as integers)."""

    def __init__(self, features):
        self.linear = Linear(features, features)

    def forward(self, x):
        """Return three tensors, the last of which has no gradient."""
        return self.linear(x), x, Tensor(x.data.argmax(axis=1))


class Cross(Module):
    """(a, b, places) -> (b + tanh(a), a, places)."""

    def __init__(self):
        self.tanh = Tanh()

    def forward(self, both):
        """Return three tensors."""
        a, b, places = both
        return b + self.tanh(a), a, places


class Join(Module):
    """(a, b, places) -> a b + a row of a table for the places."""

    def __init__(self, features):
        self.table = Embedding(features, features)

    def forward(self, all_):
        """Return one tensor again."""
        a, b, places = all_
        return a * b + self.table(places)


def tupled(sample_shape, classes):
    """Return a model between whose layers tuples pass, with integers among them."""
    layers = [
        Flatten(),
        Linear(prod(sample_shape), 8),
        Tanh(),
        Fork(8),
        Cross(),
        Cross(),
        Join(8),
        Linear(8, classes),
    ]
    model = Sequential(*layers)
    model.sharding = {"1": COLUMN, "3.linear": Sharding.REPLICATED}
    return model


def words(sample_shape, classes):
    """Return a model of integers: each pixel's brightness, 0..16, is a word."""
    entries, features = 17, 3
    model = Sequential(
        Embedding(entries, features),
        Flatten(),
        Linear(prod(sample_shape) * features, 10),
        Tanh(),
        Linear(10, 7),
        Tanh(),
        Linear(7, 9),
        Tanh(),
        Linear(9, classes),
    )
    model.sharding = {"0": Sharding.VOCAB, "2": COLUMN, "4": ROW, "6": COLUMN, "8": ROW}
    return model


def noisy(sample_shape, classes):
    """Return a model with dropout and batch statistics all over."""
    layers = [Flatten()]
    features = prod(sample_shape)
    for size in (12, 11, 10):
        layers += [Linear(features, size, bias=False), BatchNorm(size), Tanh(), Dropout(0.3)]
        features = size
    model = Sequential(*layers, Linear(features, classes))
    model.sharding = {"1": COLUMN, "5": ROW, "9": COLUMN, "13": ROW}
    return model


class Selecting(Module):
    """Keeps as many features as the data say: what no pipeline can agree on beforehand."""

    def forward(self, x):
        """Return the first columns of x."""
        return x[:, : 1 + int(np.abs(x.data).sum() * 1000) % 7]


class Dying(Module):
    """Passes x on once; the second time its process is killed."""

    calls = 0

    def forward(self, x):
        """Return x."""
        self.calls += 1
        if self.calls == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return x


class Mean(Module):
    """The mean over the features, as one feature."""

    def forward(self, x):
        """Return (batch, 1)."""
        return x.mean(axis=1).reshape(x.shape[0], 1)


def flat(sample_shape, classes):
    """Return a model whose first layer has no parameters."""
    return Sequential(Flatten(), Linear(prod(sample_shape), classes))


def faulty(kind):
    """Return what builds a model of four layers, the second of which is of this kind."""

    def build(sample_shape, classes):
        first = Sequential(Flatten(), Linear(prod(sample_shape), 8))
        return Sequential(Whole(first), kind(), Mean(), Linear(1, classes))

    return build


class Whole(Module):
    """A module that is not cut."""

    def __init__(self, inner):
        self.inner = inner

    def forward(self, x):
        """Return the inner module's result."""
        return self.inner(x)


def halves(sample_shape, classes):
    """Return a model whose outputs, the logits of classes, may stand on several ranks."""
    model = Sequential(Flatten(), Linear(prod(sample_shape), 23), ReLU(), Linear(23, classes))
    model.sharding = {"1": Sharding.REPLICATED, "3": Sharding.VOCAB}
    return model


def numeric(sample_shape, classes):
    """Return a model of two quantities, whatever the classes."""
    model = Sequential(
        Flatten(), Linear(prod(sample_shape), 11), Tanh(), Linear(11, 7), Tanh(), Linear(7, 2)
    )
    model.sharding = {"1": COLUMN, "3": ROW}
    return model


def perceiving(sample_shape, classes):
    """Return a model of tokens with a tower for each position, and its output's table cut."""
    model = Sequential(Embedding(classes, 6), Linear(6, 5), Tanh(), Linear(5, classes))
    model.sharding = {"1": COLUMN, "3": Sharding.VOCAB}
    return model


class Free(Module):
    """A model that is no chain, as users write them."""

    def __init__(self, features, classes):
        self.flat, self.first, self.last = Flatten(), Linear(features, 7), Linear(7, classes)

    def forward(self, x):
        """Return the logits."""
        return self.last(self.first(self.flat(x)))


def free(sample_shape, classes):
    """Return a model that is one link."""
    return Free(prod(sample_shape), classes)


def integers(x):
    """Return the digits' brightness as integers."""
    return np.rint(x).astype(np.int64)
