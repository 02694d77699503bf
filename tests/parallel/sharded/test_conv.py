"""Convolutional networks, sharded by channels and by image rows, compute what whole ones do."""

import pytest

from nnmpi import nn
from nnmpi.nn import Sharding
from tests.parallel.sharded.compare import check_equal

C, R, H, X = Sharding.COLUMN, Sharding.ROW, Sharding.ROWS, Sharding.REPLICATED
SHAPE = (7, 6, 2)


def small_cnn():
    """Return the convolutional network on few channels, with odd sizes."""
    return nn.Sequential(
        nn.Conv2d(2, 5, 3, padding=1),
        nn.BatchNorm(5),
        nn.ReLU(),
        nn.Conv2d(5, 3, (2, 3), stride=(2, 1), padding=(0, 1)),
        nn.Tanh(),
        nn.MaxPool2d(2, stride=1),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(30, 7),
        nn.BatchNorm(7),
        nn.Dropout(0.2),
        nn.Linear(7, 3),
    )


@pytest.mark.simulated
@pytest.mark.parametrize(
    "table",
    [
        {"0": C, "3": C, "8": R, "11": C},
        {"0": C, "3": R, "8": C, "11": R},
        {"0": R, "3": C, "8": C},
        {"0": C, "1": X, "3": C, "7": X, "8": C, "9": X, "11": R},
        {"0": H, "3": H, "8": R, "11": C},
        {"0": H, "3": C, "8": R},
        {"0": C, "3": H, "8": C, "11": R},
        {"0": H, "3": X, "8": R},
    ],
)
def test_channels_and_rows(group, table):
    """By any table, with batch normalization, dropout and flattened images on the way."""
    check_equal(group, small_cnn, SHAPE, "float64", table, sample=SHAPE)


@pytest.mark.simulated
def test_without_a_sample(group):
    """Channels can be cut without knowing the images' size."""
    check_equal(group, small_cnn, SHAPE, "float64", {"0": C, "3": C, "8": R, "11": C})
