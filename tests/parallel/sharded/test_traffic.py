"""What sharded layers send: as many messages as their pictures say, and no more."""

from collections import Counter

import pytest

from nnmpi import Tensor, nn
from nnmpi.base import timeline
from nnmpi.nn import Sharding, training
from nnmpi.ops import cross_entropy
from nnmpi.ops.collectives import CATEGORY
from nnmpi.parallel.tensor import shard
from tests.parallel.sharded.compare import images

C, R, H, V = Sharding.COLUMN, Sharding.ROW, Sharding.ROWS, Sharding.VOCAB
SUM, GATHER, SCATTER, HALO = "all-reduce", "all-gather", "reduce-scatter", "halo"


def count(model, shape):
    """Return how many exchanges of each kind a forward and a backward pass make on this rank."""
    x, y = images(3, shape, "float32")
    passes = []
    with training(seed=0):
        with timeline.tracing(timeline.Timeline()) as forward:
            loss = cross_entropy(model(Tensor(x)), y)
        with timeline.tracing(timeline.Timeline()) as backward:
            loss.backward()
    for events in (forward.events, backward.events):
        passes.append(Counter(event.name for event in events if event.category == CATEGORY))
    return passes[0], passes[1]


def pairs():
    """Return two pairs of linear layers."""
    return nn.Sequential(
        nn.Linear(6, 8),
        nn.ReLU(),
        nn.Linear(8, 8),
        nn.GELU(),
        nn.Linear(8, 9),
        nn.Tanh(),
        nn.Linear(9, 3),
    )


def pictures():
    """Return a convolutional network."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.BatchNorm(4),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 4, 1),
        nn.Flatten(),
        nn.Linear(36, 3),
    )


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    "build, shape, table, forward, backward",
    [
        # two pairs: one sum each forward; backward none for the first, whose input needs no
        # gradient
        (pairs, (6,), {"0": C, "2": R, "4": C, "6": R}, {SUM: 2}, {SUM: 1}),
        # all by outputs: each but the first gathers its input, and the logits are gathered
        (pairs, (6,), {"*": C}, {GATHER: 4}, {SCATTER: 3}),
        (pairs, (6,), {"*": R}, {SUM: 4}, {GATHER: 3}),
        # flattened channels go as they lie into a layer that is cut by inputs; normalization needs
        # nothing
        (pictures, (6, 6, 2), {"0": C, "3": C, "5": R}, {GATHER: 1, SUM: 1}, {SCATTER: 1}),
        (pictures, (6, 6, 2), {"0": C, "3": R, "5": C}, {SUM: 1, GATHER: 1}, {SUM: 1}),
        # rows: three windows, two sums for the statistics; backward a kernel and a bias each,
        # normalization's three
        (pictures, (6, 6, 2), {"0": H, "3": H, "5": R}, {HALO: 3, SUM: 3}, {HALO: 2, SUM: 7}),
    ],
)
def test_exchanges(group, build, shape, table, forward, backward):
    """One all-reduce forward and one backward for each pair, and so on."""
    model = build()
    shard(model, group, table, sample=shape)
    result = count(model.initialize(seed=0), shape)
    everyone = group.gather([dict(item) for item in result])
    assert all(item == [forward, backward] for item in everyone), everyone
