"""GPT-2, a transformer that predicts the next token (Radford et al., 2019)."""

from math import sqrt
from typing import Any

from nnmpi.backend.array import Array, Shape, namespace
from nnmpi.backend.recording import call
from nnmpi.base.errors import ShapeError, UsageError, check_int
from nnmpi.nn.activation import Dropout
from nnmpi.nn.container import Sequential
from nnmpi.nn.experts import MixtureOfExperts
from nnmpi.nn.linear import Embedding, TiedLinear
from nnmpi.nn.mode import current
from nnmpi.nn.module import Constant, Module, Normal
from nnmpi.nn.norm import LayerNorm
from nnmpi.nn.sharding import Sharding
from nnmpi.nn.transformer import TransformerBlock
from nnmpi.tensor.parameter import Initializer
from nnmpi.tensor.tensor import Tensor

STD = 0.02  # of the initial weights


class GPTEmbedding(Module):
    """Token plus position embedding: tokens (batch, time) -> (batch, time, features).

    Args:
        vocabulary: the number of tokens.
        context: the number of positions.
        features: the length of each row.
        init: draws both tables.
    """

    def __init__(self, vocabulary: int, context: int, features: int, init: Initializer) -> None:
        self.tokens = Embedding(vocabulary, features, init)
        self.positions = Embedding(context, features, init)

    def forward(self, tokens: Any) -> Tensor:
        """Return the sums.

        Raises:
            ShapeError: for sequences longer than the context, or tokens that are not (batch, time).
        """
        memory = current().memory
        if memory is None:
            self._check(tokens.shape, 0)
            rows = self.positions.weight[: tokens.shape[1]]
        else:
            xp = namespace(self.positions.weight._data)
            places = call(self._continue, (memory, tokens.shape, xp), when="before")
            rows = self.positions(places)
        return self.tokens(tokens) + rows

    def _continue(self, memory: dict[str, Any], shape: Shape, xp: Any) -> Array:
        """Return the positions of tokens that follow those of earlier passes."""
        start = memory.get(self.path, 0)
        self._check(shape, start)
        memory[self.path] = start + shape[1]
        return xp.arange(start, start + shape[1])

    def _check(self, shape: Shape, start: int) -> None:
        context = self.positions.num_embeddings
        if len(shape) != 2 or start + shape[1] > context:
            behind = f" after {start} others" if start else ""
            raise ShapeError(
                f"gpt with a context of {context} needs tokens (batch, at most {context}), not"
                f" {shape}{behind}"
            )


def gpt(
    vocabulary: int,
    context: int,
    features: int = 768,
    layers: int = 12,
    heads: int = 12,
    dropout: float = 0.0,
    experts: int = 0,
    top_k: int = 2,
    capacity: float | None = None,
) -> Sequential:
    """Return GPT-2: tokens (batch, time) -> logits of the next token; by default 124M parameters.

        tokens -> token + position -> [x + attention(norm(x)) -> x + mlp(norm(x))] x layers
               -> norm -> tied output

    The mlp is Linear - GELU (tanh form) - Linear, four times as wide inside. The output layer is
    the token embedding's table, transposed. Weights are normal with standard deviation 0.02. Those
    of the last layer of each branch have 0.02 / sqrt(2 layers), since the residual sum has 2 layers
    terms. Biases are 0. Dropout applies to the embedding, to each branch's result and to the
    attention's probabilities, as in GPT-2. A pipeline may cut before and after each block. The
    first and the last stage then both have the token table and sum its gradients.

    The sharding table has the vocabulary, each attention's heads, and each mlp's inner features.

    Args:
        vocabulary: the number of tokens.
        context: the longest sequence.
        features: a multiple of `heads`.
        layers: the number of blocks.
        heads: of each attention.
        dropout: the probability of dropping an element in training.
        experts: if above 0, each mlp is a mixture of this many experts.
        top_k, capacity: see `nn.MixtureOfExperts`.

    Raises:
        UsageError: for sizes that do not work.

    Example:
        >>> model = models.gpt(65, context=16, features=32, layers=2, heads=4).initialize(seed=0)
        >>> model(np.zeros((2, 16), int)).shape  # logits of the next token
        (2, 16, 65)
    """
    vocabulary, context = (
        check_int("gpt's vocabulary", vocabulary),
        check_int("gpt's context", context),
    )
    features = check_int("gpt's features", features)
    layers = check_int("gpt's layers", layers)
    heads = check_int("gpt's heads", heads)
    if features % heads:
        raise UsageError(
            f"gpt cannot have {features} features and {heads} heads; give a multiple of the heads"
        )
    embedding = GPTEmbedding(vocabulary, context, features, Normal(STD))
    mixtures = [
        MixtureOfExperts(features, experts, top_k, None, capacity) if experts else None
        for _ in range(layers)
    ]
    blocks = [
        TransformerBlock(features, heads, dropout=dropout, experts=mixture) for mixture in mixtures
    ]
    for name, parameter in (item for block in blocks for item in block.named_parameters()):
        if name.endswith((".bias", ".b1", ".b2")) and not name.startswith("norm"):
            parameter.init = Constant(0.0)
        elif not name.startswith("norm"):
            is_last = name in ("attention.proj.weight", "mlp.2.weight", "mlp.w2")
            parameter.init = Normal(STD / sqrt(2 * layers) if is_last else STD)
    model = Sequential(
        embedding, Dropout(dropout), *blocks, LayerNorm(features), TiedLinear(embedding.tokens)
    )
    model.sharding = {
        "0.tokens": Sharding.VOCAB,
        **{f"*.{name}": sharding for name, sharding in blocks[0].sharding.items()},
        str(layers + 3): Sharding.VOCAB,
    }
    return model
