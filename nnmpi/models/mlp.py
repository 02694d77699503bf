"""The multi-layer perceptron."""

from collections.abc import Sequence
from math import prod

from nnmpi.base.errors import check_int, check_ints
from nnmpi.nn.activation import Dropout, Flatten, activation
from nnmpi.nn.container import Sequential
from nnmpi.nn.linear import Linear
from nnmpi.nn.module import Module
from nnmpi.nn.sharding import Sharding, ShardingTable


def mlp(
    sample_shape: Sequence[int],
    classes: int,
    hidden: Sequence[int] = (128, 64),
    activation_name: str = "relu",
    dropout: float = 0.0,
) -> Sequential:
    """Return linear layers with an activation between them; samples are flattened first.

        (batch, *sample_shape) -> flatten -> [linear -> activation (-> dropout)] per hidden size
                               -> linear -> logits

    The sharding table has the linear layers by outputs and by inputs in turn.

    Args:
        hidden: the sizes of the hidden layers; without any the model is linear.

    Raises:
        UsageError: for sizes below 1, an unknown activation, or a dropout rate outside [0, 1).

    Example:
        >>> model = models.mlp((28, 28, 1), 10, hidden=[64]).initialize(seed=0)
        >>> model(np.zeros((2, 28, 28, 1), "float32")).shape
        (2, 10)
    """
    features, classes = (
        prod(check_ints("sample_shape", sample_shape)),
        check_int("mlp's classes", classes),
    )
    model = Sequential(
        Flatten(), *dense_layers(features, hidden, classes, activation_name, dropout)
    )
    model.sharding = in_turn(model, Sharding.COLUMN)
    return model


def dense_layers(
    features: int, hidden: Sequence[int], classes: int, activation_name: str, dropout: float
) -> list[Module]:
    """Return linear layers down to the logits, with activation and dropout after hidden ones."""
    layers: list[Module] = []
    for size in check_ints("hidden", hidden):
        layers += [Linear(features, size), activation(activation_name)]
        if dropout:
            layers.append(Dropout(dropout))
        features = size
    return [*layers, Linear(features, classes)]


def in_turn(model: Sequential, first: Sharding) -> ShardingTable:
    """Return a sharding table that alternates column- and row-parallel layers, from `first` on.

    A pair of layers then needs one all-reduce forward and one backward, and no exchange between
    the two.
    """
    other = Sharding.ROW if first is Sharding.COLUMN else Sharding.COLUMN
    linear = [name for name, layer in model.children() if isinstance(layer, Linear)]
    return {name: other if number % 2 else first for number, name in enumerate(linear)}
