"""Branches dealt to ranks: the serial run's losses, gradients and weights, or a sentence."""

import numpy as np
import pytest

from nnmpi import nn
from nnmpi.base.errors import LayoutError, ShapeError
from nnmpi.nn import Module, Sharding
from nnmpi.parallel.tensor import shard
from tests.harness.refusals import refuses, usage_error
from tests.parallel.sharded.compare import check_equal

BRANCHES = Sharding.BRANCHES


class Halves(Module):
    """Networks that share neither input nor output: each gets its part of the features."""

    def __init__(self):
        first = nn.Linear(3, 4)
        self.parts = nn.Branches(
            nn.Sequential(first, nn.Tanh(), nn.Linear(4, 4)), nn.Linear(2, 4), join="add"
        )
        self.before = nn.Linear(5, 5)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        """Return the logits."""
        x = self.before(x)
        return self.head(self.parts((x[:, :3], x[:, 3:])))


def tower(wide, out):
    """Return a tower that has all that differs between training and evaluation."""
    conv = nn.Conv2d(2, wide, 3, padding=1)
    return nn.Sequential(
        conv,
        nn.BatchNorm(wide),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.GlobalAvgPool2d(),
        nn.Linear(wide, out),
    )


def weighted(results):
    """Return the branches' results, each with a weight of its own."""
    return results[0] * 0.5 + results[1] * results[2]


MODELS = {
    "first": lambda: nn.Sequential(
        nn.Branches(tower(4, 3), tower(3, 5), tower(1, 2)), nn.ReLU(), nn.Linear(10, 3)
    ),
    "amid": lambda: nn.Sequential(
        nn.Conv2d(2, 2, 1),
        nn.Branches(*(tower(n, 4) for n in (2, 2, 3)), join=weighted),
        nn.Linear(4, 3),
    ),
    "last": lambda: nn.Sequential(nn.Branches(*(tower(n, 3) for n in (2, 5, 3, 1)), join="add")),
}


@pytest.mark.simulated(max_size=3)
@pytest.mark.parametrize("name", MODELS)
def test_equal_to_serial(group, name):
    """Towers at the beginning, amid and at the end of a model, of unequal sizes, more of them than
    ranks.
    """
    check_equal(group, MODELS[name], (4, 4, 2), rows=3, sharded_at_least=12)


@pytest.mark.simulated(max_size=2)
def test_inputs_apart(group):
    """Each branch has its input; the gradient of what comes before is complete on every rank."""
    model = check_equal(group, Halves, (5,), sharded_at_least=6)
    if group.size == 2:
        sizes = [
            sum(p.size for p in model.get(f"parts.branches.{i}").parameters()) for i in range(2)
        ]
        assert sizes == ([36, 0] if group.rank == 0 else [0, 12])


@pytest.mark.simulated(max_size=2)
def test_beside_layers_that_are_cut(group):
    """A table may cut the layers after the branches, or those in branches that it does not deal
    out.
    """
    for table in (
        {"0": BRANCHES, "2": Sharding.ROW},
        {"0.branches.0.5": Sharding.COLUMN, "2": Sharding.COLUMN},
    ):
        check_equal(group, MODELS["first"], (4, 4, 2), table=table)


def test_refusals():
    """What branches cannot do is said in a sentence."""
    usage_error("two modules or more", lambda: nn.Branches(nn.Linear(2, 2)))
    usage_error(
        "concatenate or add", lambda: nn.Branches(nn.Linear(2, 2), nn.Linear(2, 2), join="mean")
    )
    refuses(
        ShapeError,
        "2 branches got 3 inputs",
        lambda: nn.Branches(nn.Linear(2, 2), nn.Linear(2, 2)).initialize()(
            [np.ones((1, 2), np.float32)] * 3
        ),
    )


@pytest.mark.simulated(max_size=3)
def test_refused_on_ranks(group):
    """Fewer branches than ranks, branches that share a parameter, tables that contradict
    themselves.
    """
    if group.size == 1:
        return
    linear, two = nn.Linear(2, 2), nn.Branches(nn.Linear(2, 2), nn.Linear(2, 2))
    cases = [
        (nn.Branches(linear, *[nn.Sequential(linear)] * 2), {"0": BRANCHES}, "share a parameter"),
        (two, {"0": BRANCHES, "0.branches.1": Sharding.COLUMN}, "'0.branches.1' is in a branch"),
        (two, {"0": Sharding.COLUMN}, "choose Sharding.BRANCHES"),
        (linear, {"0": BRANCHES}, "has no branches"),
    ]
    if group.size == 3:
        cases.append((two, {"0": BRANCHES}, "2 branches, which 3 ranks cannot share"))
    for module, table, match in cases:
        with pytest.raises(LayoutError, match=match):
            shard(nn.Sequential(module), group, table)
