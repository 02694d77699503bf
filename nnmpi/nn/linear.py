"""The linear layer, the embedding, and an output layer with the embedding's weights."""

from typing import Any

from nnmpi.backend.array import Shape
from nnmpi.base.errors import check_int
from nnmpi.nn.module import Module, Normal, fan_in
from nnmpi.ops.embedding import embedding
from nnmpi.ops.linear import linear, linear_transposed
from nnmpi.tensor.parameter import Initializer, LookupTable, Parameter
from nnmpi.tensor.tensor import Tensor

__all__ = ["Embedding", "Linear", "TiedLinear"]


class Linear(Module):
    """Linear layer x W + b: (..., in_features) -> (..., out_features).

    Args:
        in_features, out_features: the numbers of features.
        bias: whether b is added.
        init: draws the weight; by default uniform within 1 / sqrt(in_features). The bias is drawn
            by the default in any case.

    Example:
        >>> layer = nn.Linear(3, 2).initialize(seed=0)
        >>> layer(np.ones((5, 3), "float32")).shape, layer.weight.shape
        ((5, 2), (3, 2))
    """

    axes = "(in, out)"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        init: Initializer | None = None,
    ) -> None:
        in_features = check_int("Linear's in_features", in_features)
        out_features = check_int("Linear's out_features", out_features)
        self.weight = Parameter((in_features, out_features), init or fan_in(in_features))
        self.bias = Parameter((out_features,), fan_in(in_features)) if bias else None

    def shape_after(self, shape: Shape) -> Shape:
        """See `Module.shape_after`."""
        return (*shape[:-1], self.weight.shape[1])

    def forward(self, x: Tensor) -> Tensor:
        """Return x W + b. See `ops.linear`."""
        return linear(self.product_input(x), self.weight, self.bias)


class Embedding(Module):
    """Rows of a trained table: integers (...) -> (..., embedding_dim).

    Args:
        num_embeddings: the number of rows.
        embedding_dim: their length.
        init: draws the table; by default normal with standard deviation 1.

    Example:
        >>> table = nn.Embedding(100, 8).initialize(seed=0)
        >>> table(np.array([[1, 5, 1]])).shape
        (1, 3, 8)
    """

    axes = "(rows, features)"

    def __init__(
        self, num_embeddings: int, embedding_dim: int, init: Initializer | None = None
    ) -> None:
        num_embeddings = check_int("Embedding's num_embeddings", num_embeddings)
        embedding_dim = check_int("Embedding's embedding_dim", embedding_dim)
        self.weight = LookupTable((num_embeddings, embedding_dim), init or Normal(1.0))

    @property
    def num_embeddings(self) -> int:
        """The number of rows of the full table, over all ranks that shard it."""
        region = self.weight.region
        return (self.weight.shape if region is None else region.shape)[0]

    def forward(self, indices: Any) -> Tensor:
        """Return the rows that the indices pick. See `ops.embedding`."""
        return embedding(self.weight, indices)


class TiedLinear(Module):
    """x W^T with an embedding's table W: (..., embedding_dim) -> (..., num_embeddings).

    Press and Wolf, "Using the output embedding to improve language models", 2017.

    Args:
        embedding: the owner of W, whose gradient is the sum of both uses.
    """

    axes = Embedding.axes

    def __init__(self, embedding: Embedding) -> None:
        self.weight = embedding.weight

    def shape_after(self, shape: Shape) -> Shape:
        """See `Module.shape_after`."""
        return (*shape[:-1], self.weight.shape[0])

    def forward(self, x: Tensor) -> Tensor:
        """Return x W^T. See `ops.linear.linear_transposed`."""
        return linear_transposed(self.product_input(x), self.weight)
