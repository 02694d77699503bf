"""A model's summary: its numbers beside those of formulas, and what is refused."""

import numpy as np
import pytest

from nnmpi import models, nn, ops
from nnmpi.base.errors import UsageError
from nnmpi.ops.linear import LinearFunction
from nnmpi.ops.recurrent import RecurrentFunction
from tests.harness.refusals import refuses
from tests.tensor.samples import OPERATIONS

IMAGE = np.zeros((2, 9, 8, 4), "f4")
ROWS = np.zeros((3, 5, 6), "f4")


def by_path(model, x):
    return {row.path: row for row in model.initialize(seed=0).summary(x).rows}


@pytest.mark.parametrize(
    ("layer", "x", "result", "products"),
    [
        (nn.Linear(6, 7), ROWS, (3, 5, 7), 3 * 5 * 6 * 7),
        (nn.Conv2d(4, 6, 3, 2, 1, groups=2), IMAGE, (2, 5, 4, 6), 2 * 5 * 4 * 6 * 9 * 2),
        (nn.ConvTranspose2d(4, 3, 2, 2), IMAGE, (2, 18, 16, 3), 2 * 9 * 8 * 4 * 3 * 4),
        (nn.Conv1d(6, 2, 3), ROWS, (3, 3, 2), 3 * 3 * 2 * 3 * 6),
        (nn.Conv3d(6, 2, 2), np.zeros((1, 3, 3, 3, 6), "f4"), (1, 2, 2, 2, 2), 8 * 2 * 8 * 6),
        (nn.GRU(6, 4), ROWS, (3, 5, 4), 3 * 5 * 12 * (6 + 4)),
        (nn.MultiheadAttention(6, 2), ROWS, (3, 5, 6), 3 * (5 * 6 * 24 + 2 * 5 * 5 * 6)),
        (nn.LayerNorm(6), ROWS, (3, 5, 6), 0),
        (
            nn.RotaryAttention(8, 4, 2),
            np.zeros((3, 5, 8), "f4"),
            (3, 5, 8),
            3 * (5 * (8 * 8 + 8 * 8 + 8 * 8) + 2 * 5 * 5 * 8),
        ),
    ],
)
def test_a_layer(layer, x, result, products):
    """Its result's shape, and the multiply-adds that its formula has; attention's in all."""
    total = layer.initialize(seed=0).summary(x).total
    assert (total.result, total.products) == (result, products)
    assert total.parameters == sum(p.size for p in layer.parameters())


def test_the_table_adds_up_and_fits_a_terminal():
    """What a layer computes beside the layers within it is its own."""
    model = models.gpt(65, 16, 32, 2, 4)
    rows = by_path(model, np.zeros((2, 16), "uint32"))
    assert rows["2.attention"].products == 2 * 2 * 16 * 16 * 32
    assert rows["2.attention.proj"].products == 2 * 16 * 32 * 32
    summary = model.summary(np.zeros((2, 16), "uint32"))
    assert summary.total.parameters == sum(p.size for p in model.parameters())
    assert all(len(line) <= 80 for line in str(summary).splitlines())
    assert "| | | qkv Linear" in summary._repr_html_() and "drops.1 Dropout" in str(summary)


def test_a_layer_that_is_called_twice_counts_twice_and_has_its_parameters_once():
    class Twice(nn.Module):
        def __init__(self):
            self.layer = nn.Linear(6, 6)

        def forward(self, x):
            return ops.relu(self.layer(self.layer(x)))

    rows = by_path(Twice(), ROWS)
    assert (rows["layer"].products, rows["layer"].parameters) == (2 * 3 * 5 * 36, 42)
    assert (rows[""].products, rows[""].nbytes) == (0, ROWS.nbytes)  # the ReLU


def test_what_is_refused():
    class Deciding(nn.Module):
        def forward(self, x):
            return x if x.sum().item() > 0 else -x

    refuses(UsageError, "summary needs a sample", nn.ReLU().summary)
    refuses(UsageError, "compute with tensors alone", Deciding().summary, ROWS)


def test_each_operation_that_multiplies_says_how_much():
    """Those of ranks' parts are not called in a summary's pass."""
    for kind in OPERATIONS.values():
        names = "MatMul", "Experts", "Attention", "PackedAttention", "GroupedAttention"
        is_product = issubclass(kind, LinearFunction | RecurrentFunction) or kind.__name__ in names
        is_product = is_product or kind.computes == "product"
        if is_product and not kind.__module__.startswith("nnmpi.parallel"):
            assert kind.traits.products is not None, kind
