"""`shard` finds its way through any tree of modules, keeps its names, and says what it cannot
do.
"""

import numpy as np
import pytest

from nnmpi import models, nn
from nnmpi.base.errors import CommError, LayoutError, ShapeError
from nnmpi.nn import Module, Sharding
from nnmpi.nn.sharding import find
from nnmpi.parallel.replication import check_replicas
from nnmpi.parallel.tensor import shard
from tests.harness.refusals import refuses, usage_error
from tests.parallel.sharded.compare import check_equal

C, R, H, V, X = Sharding.COLUMN, Sharding.ROW, Sharding.ROWS, Sharding.VOCAB, Sharding.REPLICATED


class Attention(Module):
    """A module of the user's own: one head over the sequence, and a tied projection."""

    def __init__(self, features):
        self.query, self.key = nn.Linear(features, 5), nn.Linear(features, 5)
        self.gate = nn.Sequential(nn.Linear(features, 6), nn.ReLU(), nn.Linear(6, features))
        self.mlp = [nn.Linear(features, 7), nn.GELU(), nn.Linear(7, features, bias=False)]

    def forward(self, x):
        """Return x, attended to: (batch, time, features)."""
        scores = nn.Softmax()(self.query(x) @ self.key(x).transpose(0, 2, 1))
        x = (scores @ x) * self.gate(x)
        for layer in self.mlp:
            x = layer(x)
        return x


def test_tables():
    """A name word for word counts first, then the first pattern that fits."""
    table = {"blocks.*": C, "*.out": R, "blocks.1.out": X}
    assert find(table, "blocks.1.out") == ("blocks.1.out", X)
    assert find(table, "blocks.2.out") == ("blocks.*", C)
    assert find(table, "head.out") == ("*.out", R)
    assert find(table, "head") is None


@pytest.mark.simulated
def test_a_module_of_the_users_own(group):
    """In it each layer does what the table says; sequences in it are followed."""
    table = {"0": C, "1.gate.0": C, "1.gate.2": R, "1.mlp.0": C, "1.mlp.2": R, "4": R}

    def build():
        return nn.Sequential(
            nn.Linear(4, 6), Attention(6), nn.Dropout(0.2), nn.Flatten(), nn.Linear(18, 3)
        )

    check_equal(group, build, (3, 4), table=table, rows=4, sharded_at_least=8)


@pytest.mark.simulated
@pytest.mark.parametrize(
    "table",
    [
        {"0": C, "2.*": C},
        {"2.body.0": C, "2.body.2": R, "2.shortcut": C},
        {"0": C, "2.body.0": C, "2.body.2": R, "2.shortcut": R, "3.body": C},
        {"2.body.2": C, "2.shortcut": C, "3.body": C, "4": R},
        {"3.body": C},
    ],
)
def test_residual_blocks(group, table):
    """Also where a block begins with features that are cut, and ends with such."""

    def build():
        body = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5))
        return nn.Sequential(
            nn.Linear(4, 6),
            nn.Tanh(),
            nn.Residual(body, nn.Linear(6, 5)),
            nn.Residual(nn.Linear(5, 5)),
            nn.Linear(5, 3),
        )

    check_equal(group, build, (4,), table=table)


@pytest.mark.simulated
def test_shared_layers_stay_shared(group):
    """A layer that stands in two places has one set of weights, whose gradients add up."""

    def build():
        twice = nn.Linear(5, 5)
        return nn.Sequential(nn.Linear(4, 5), twice, nn.Tanh(), twice, nn.Linear(5, 3))

    ours = check_equal(group, build, (4,), table={"1": R, "0": C, "3": R})
    assert all(group.gather(ours.get("1") is ours.get("3") or group.size > 1))
    assert all(group.gather(len(ours.parameters()) == 6))


@pytest.mark.simulated
def test_tied_weights_stay_tied(group):
    """Two layers with one weight have one part of it."""

    def build():
        return nn.Sequential(
            nn.Linear(4, 5), tied(nn.Linear(5, 5), nn.Linear(5, 5)), nn.Linear(5, 3)
        )

    ours = check_equal(group, build, (4,), table={"1.0": C, "1.1": C, "2": R})
    assert all(group.gather(len(ours.parameters()) == 7))


FROM_2 = pytest.mark.simulated(min_size=2)


@FROM_2
def test_weights_that_went_apart_are_found(group):
    """One bit of what is whole on all ranks; parts differ anyway."""
    model = models.resnet((8, 8, 1), 3, width=3)
    shard(model, group)
    model.initialize(seed=0)
    check_replicas(model, group)
    if group.rank == group.size - 1:
        dict(model.named_buffers())["3.body.4.running_mean"].data[0] += 1e-6
    refuses(
        CommError,
        f"3.body.4.running_mean.*: rank {group.size - 1} of {group.size} has not what rank 0 has",
        check_replicas,
        model,
        group,
    )


def tied(one, other):
    """Return two layers with one weight."""
    other.weight = one.weight
    return nn.Sequential(one, other)


REFUSED = [
    (lambda: models.mlp((4,), 3), {"9": C}, "'9' names no module"),
    (
        lambda: nn.Sequential(nn.Linear(2, 2)),
        {},
        "no table of .*; give it one, such as model.sharding",
    ),
    (lambda: nn.Linear(2, 2), {"*": C}, "single layer"),
    (
        lambda: nn.Sequential(nn.Linear(2, 2)),
        {"0": H},
        (
            "'0' has type Linear, which Sharding.ROWS does not cut; choose Sharding.COLUMN, VOCAB,"
            " ROW or REPLICATED"
        ),
    ),
    (lambda: nn.Sequential(nn.Conv2d(2, 2, 1)), {"0": H}, "shape of a sample"),
    (
        lambda: nn.Sequential(nn.Conv2d(2, 2, 1)),
        {"0": V},
        "Conv2d, which Sharding.VOCAB .*; choose Sharding.COLUMN, ROW, ROWS or REPLICATED",
    ),
    (lambda: nn.Sequential(nn.Conv2d(4, 4, 1, groups=2)), {"0": R}, "2 groups"),
    (lambda: nn.Sequential(nn.Embedding(4, 4)), {"0": R}, "Embedding, which Sharding.ROW "),
    (lambda: nn.Sequential(nn.MaxPool2d(2)), {"0": H}, "shape of a sample"),
    (lambda: tied(nn.Linear(4, 4), nn.Linear(4, 4)), {"0": C}, "'1.weight' is whole in one"),
    (
        lambda: nn.Sequential(nn.Conv2d(2, 1, 1), nn.Flatten()),
        {"0": C},
        "cannot infer the images' size",
    ),
    (lambda: tied(nn.Linear(4, 4), nn.Linear(4, 4)), {"0": C, "1": R}, "cut it in different ways"),
]


@FROM_2
@pytest.mark.parametrize("build, table, words", REFUSED)
def test_refusals(group, build, table, words):
    """A sentence that names the layer and what would work."""
    refuses(LayoutError, words, lambda: shard(build(), group, table))


@FROM_2
def test_other_refusals(group):
    """Initialized models, images of another size, and too few groups."""
    usage_error("shard it first", lambda: shard(models.mlp((4,), 3).initialize(seed=0), group))
    for layer, sample, words in (
        (
            nn.Conv2d(1, 1, (3, 5)),
            (6, 4, 1),
            "'0' has windows of 5 columns, which do not fit images of 4 columns",
        ),
        (
            nn.Conv2d(1, 1, (7, 1)),
            (6, 4, 1),
            "'0' has windows of 7 rows, which do not fit images of 6 rows",
        ),
    ):
        with pytest.raises(LayoutError, match=words):
            shard(nn.Sequential(layer), group, {"0": H}, sample=sample)
    refuses(
        LayoutError,
        "'1' has windows of 5 columns, which do not fit images of 4 columns",
        lambda: shard(
            nn.Sequential(nn.Conv2d(1, 1, 1), nn.MaxPool2d((2, 5))),
            group,
            {"0": H, "1": H},
            sample=(6, 4, 1),
        ),
    )
    refuses(
        LayoutError, "use a Sharding", lambda: shard(models.mlp((4,), 3), group, {"1": "column"})
    )
    refuses(
        LayoutError,
        "too few",
        lambda: shard(
            nn.Sequential(nn.Conv2d(2, 2, 1, groups=2)),
            group if group.size > 2 else _Many(),
            {"0": C},
        ),
    )
    model = nn.Sequential(nn.Conv2d(1, 1, 3))
    shard(model, group, {"0": H}, sample=(9, 4, 1))
    model.initialize(seed=0)
    if group.size < 9:
        refuses(
            ShapeError, "sharded for 9 in dimension 1", model, np.zeros((1, 90, 4, 1), np.float32)
        )
    group.barrier()


class _Many:
    """Three ranks, for what needs no message."""

    rank, size = 0, 3
