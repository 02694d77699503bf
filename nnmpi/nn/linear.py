"""The linear layer, the embedding, and the output that is tied to one."""

from typing import Any

from nnmpi.aliases import also
from nnmpi.errors import whole
from nnmpi.nn.init import Normal, fan_in
from nnmpi.nn.module import Module
from nnmpi.ops.embedding import embedding
from nnmpi.ops.linear import linear, linear_transposed
from nnmpi.tensor.parameter import Initializer, Parameter
from nnmpi.tensor.tensor import Tensor


class Linear(Module):
    """x W + b: (..., inputs) -> (..., outputs). The weight is stored (inputs, outputs).

    Args:
        inputs, outputs: the numbers of features.
        bias: whether b is added.
        init: draws the weight; by default uniform within 1 / sqrt(inputs), and so is the bias.
        bias_init: draws the bias.
    """

    @also(in_features="inputs", out_features="outputs")
    def __init__(
        self,
        inputs: int,
        outputs: int,
        bias: bool = True,
        init: Initializer | None = None,
        bias_init: Initializer | None = None,
    ) -> None:
        inputs, outputs = whole("Linear's inputs", inputs), whole("Linear's outputs", outputs)
        self.weight = Parameter((inputs, outputs), init or fan_in(inputs))
        self.bias = Parameter((outputs,), bias_init or fan_in(inputs)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Return x W + b. See `ops.linear`."""
        return linear(self.enter(x), self.weight, self.bias)

    def enter(self, x: Tensor) -> Tensor:
        """Return the input as the product wants it: where ranks share the layer, an exchange comes first."""
        return x


class Embedding(Module):
    """Rows of a trained table: integers (...) -> (..., features).

    Args:
        entries: the number of rows.
        features: their length.
        init: draws the table; by default normal with standard deviation 1.
    """

    @also(num_embeddings="entries", embedding_dim="features")
    def __init__(self, entries: int, features: int, init: Initializer | None = None) -> None:
        entries, features = whole("Embedding's entries", entries), whole("Embedding's features", features)
        self.weight = Parameter((entries, features), init or Normal(1.0))

    @property
    def entries(self) -> int:
        """How many rows there are to pick, on all ranks that share the table."""
        return self.weight.shape[0]

    def forward(self, indices: Any) -> Tensor:
        """Return the rows that the indices pick. See `ops.embedding`."""
        return embedding(self.weight, indices)


class TiedLinear(Module):
    """x W^T with an embedding's table W: (..., features) -> (..., entries), logits without weights of their own.

    Press and Wolf, "Using the output embedding to improve language models", 2017.

    Args:
        embedding: whose table it is; its gradient is the sum of both uses.
    """

    def __init__(self, embedding: Embedding) -> None:
        self.weight = embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        """Return x W^T. See `ops.linear.linear_transposed`."""
        return linear_transposed(self.enter(x), self.weight)

    def enter(self, x: Tensor) -> Tensor:
        """Return the input as the product wants it. See `Linear.enter`."""
        return x
