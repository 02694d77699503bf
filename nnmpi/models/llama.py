"""Llama and its kin: transformers with rotary positions that predict the next token."""

from math import sqrt
from typing import Any

from nnmpi.base.errors import ShapeError, check_int
from nnmpi.nn.container import Sequential
from nnmpi.nn.linear import Embedding, Linear, TiedLinear
from nnmpi.nn.llama import LlamaBlock, RotaryAttention, RotaryScaling, SwiGLU
from nnmpi.nn.mode import current
from nnmpi.nn.module import Constant, Module, Normal
from nnmpi.nn.norm import RMSNorm
from nnmpi.nn.sharding import Sharding
from nnmpi.tensor.parameter import Initializer
from nnmpi.tensor.tensor import Tensor

STD = 0.02  # of the initial weights


class TokenEmbedding(Module):
    """Rows of a table of tokens: (batch, time) -> (batch, time, features).

    Args:
        vocabulary: the number of tokens.
        context: the longest sequence.
        features: the length of each row.
        init: draws the table.
    """

    def __init__(self, vocabulary: int, context: int, features: int, init: Initializer) -> None:
        self.tokens = Embedding(vocabulary, features, init)
        self.context = context

    def forward(self, tokens: Any) -> Tensor:
        """Return the rows.

        Raises:
            ShapeError: for sequences longer than the context, or tokens that are not (batch, time).
        """
        # generation counts its tokens itself, since layers see the new ones alone
        if len(tokens.shape) != 2 or (current().memory is None and tokens.shape[1] > self.context):
            raise ShapeError(
                f"llama with a context of {self.context} needs tokens (batch, at most"
                f" {self.context}), not {tokens.shape}"
            )
        return self.tokens(tokens)


def default_hidden(features: int) -> int:
    """Return the width of a gated perceptron with as many weights as GPT-2's: 8/3 of the features.

    It is rounded up to a multiple of 16, for the processor's vectors.
    """
    return -(-8 * features // 48) * 16


def llama(
    vocabulary: int,
    context: int,
    features: int = 576,
    layers: int = 30,
    heads: int = 9,
    kv_heads: int | None = None,
    hidden: int | None = None,
    head_features: int | None = None,
    theta: float = 10_000.0,
    scaling: RotaryScaling | None = None,
    eps: float = 1e-5,
    tied: bool = False,
    bias: bool = False,
    proj_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
) -> Sequential:
    """Return a Llama: tokens (batch, time) -> logits of the next token (Touvron et al., 2023).

        tokens -> table -> [x + attention(norm(x)) -> x + mlp(norm(x))] x layers -> norm -> output

    Attention turns queries and keys by their positions, and several of its heads share keys and
    values (`nn.RotaryAttention`); the mlp is gated (`nn.SwiGLU`); normalizations are by the root
    mean square. Mistral, Qwen 2 and 3 and SmolLM are of this form. Weights are normal with standard
    deviation 0.02; those of the last layer of each branch have 0.02 / sqrt(2 layers). A pipeline
    may cut before and after each block, and inside of it.

    The sharding table has the vocabulary, each attention's heads, and each mlp's inner features.

    Args:
        vocabulary: the number of tokens.
        context: the longest sequence.
        features: a multiple of `heads`, unless `head_features` is given.
        layers: the number of blocks.
        heads: of each attention's queries.
        kv_heads: of its keys and values, a divisor of `heads`; by default as many.
        hidden: inside of each mlp; by default 8/3 of the features, rounded up to a multiple of 16.
        head_features, theta, scaling: see `nn.RotaryAttention`.
        eps: of the normalizations.
        tied: whether the output is the token table, transposed.
        bias: whether queries, keys and values have one, as in Qwen 2.
        proj_bias, mlp_bias: whether attention's result has one, and the mlp's layers.
        qk_norm: whether each head's queries and keys are normalized, as in Qwen 3.

    Raises:
        UsageError: for sizes that do not work.

    Example:
        >>> model = models.llama(65, context=16, features=32, layers=2, heads=4, kv_heads=2)
        >>> model.initialize(seed=0)(np.zeros((2, 16), int)).shape  # logits of the next token
        (2, 16, 65)
    """
    vocabulary, context = (
        check_int("llama's vocabulary", vocabulary),
        check_int("llama's context", context),
    )
    features, layers = check_int("llama's features", features), check_int("llama's layers", layers)
    inside = default_hidden(features) if hidden is None else check_int("llama's hidden", hidden)
    norm_eps = eps if qk_norm else None

    def block() -> LlamaBlock:
        attention = RotaryAttention(
            features, heads, kv_heads, head_features, theta, scaling, bias, proj_bias, norm_eps
        )
        return LlamaBlock(attention, SwiGLU(features, inside, mlp_bias), eps)

    blocks = [block() for _ in range(layers)]
    for name, parameter in (item for block in blocks for item in block.named_parameters()):
        if name.endswith(".bias"):
            parameter.init = Constant(0.0)
        elif not (name.startswith("norm") or "_norm." in name):
            is_last = name in ("attention.proj.weight", "mlp.down.weight")
            parameter.init = Normal(STD / sqrt(2 * layers) if is_last else STD)
    embedding = TokenEmbedding(vocabulary, context, features, Normal(STD))
    output: Module = (
        TiedLinear(embedding.tokens)
        if tied
        else Linear(features, vocabulary, bias=False, init=Normal(STD))
    )
    model = Sequential(embedding, *blocks, RMSNorm(features, eps), output)
    model.sharding = {
        "0.tokens": Sharding.VOCAB,
        **{f"*.{name}": sharding for name, sharding in blocks[0].sharding.items()},
        str(layers + 2): Sharding.VOCAB,
    }
    return model
