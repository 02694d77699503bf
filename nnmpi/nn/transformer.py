"""The transformer's block and its self-attention."""

from functools import partial
from types import MappingProxyType

from nnmpi.base.errors import UsageError, check_int
from nnmpi.nn.activation import GELU, Dropout, mask_key
from nnmpi.nn.container import Sequential
from nnmpi.nn.experts import MixtureOfExperts
from nnmpi.nn.linear import Linear
from nnmpi.nn.mode import current, note_mask
from nnmpi.nn.module import Module
from nnmpi.nn.norm import LayerNorm
from nnmpi.nn.sharding import Sharding, ShardingTable, Units
from nnmpi.ops.attention import KeyValues, attention
from nnmpi.tensor.tensor import Tensor

__all__ = ["CausalSelfAttention", "MultiheadAttention", "TransformerBlock"]


class CausalSelfAttention(Module, read_once="features heads units"):
    """Each position attends to itself and to those before it: (batch, time, features) -> the same.

    Vaswani et al., "Attention is all you need", 2017. One linear layer computes queries, keys and
    values, side by side in its outputs; `proj` mixes the heads' results. Tensor parallelism shards
    the heads: a rank has the queries, keys and values of its heads, and the rows of `proj` that
    read them. So one all-reduce forward and one backward suffice (Shoeybi et al., "Megatron-LM",
    2019). With more ranks than heads some have none.

        2 ranks, 3 heads     qkv  q0 q1 | q2   k0 k1 | k2   v0 v1 | v2     proj sums over the ranks

    Args:
        features: of x; a multiple of `heads`.
        heads: the number of heads, each of features / heads features.
        bias: whether the two linear layers have one.
        dropout: the probability of dropping one of the attention's probabilities in training (see
            `Dropout`).
    """

    causal = True
    sharding = MappingProxyType({"qkv": Sharding.COLUMN, "proj": Sharding.ROW})

    def __init__(
        self,
        features: int,
        heads: int,
        bias: bool = True,
        dropout: float = 0.0,
    ) -> None:
        if check_int("attention's features", features) % check_int("attention's heads", heads):
            raise UsageError(
                f"attention of {features} features cannot have {heads} heads; give a multiple of"
                " the heads as features"
            )
        self.features, self.heads, self.dropout = features, heads, Dropout(dropout).p
        self.units = {"qkv": Units(heads, repeats=3), "proj": Units(heads, sharding=Sharding.ROW)}
        self.qkv = Linear(features, 3 * features, bias)
        self.proj = Linear(features, features, bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the attention's result, of the shape of x. See `ops.attention`."""
        memory, rate = current().memory, self.dropout if current().training else 0.0
        if memory is not None and not self.causal:
            raise UsageError("generating text needs causal attention; this layer has causal=False")
        before = None if memory is None else memory.setdefault(self.path, KeyValues())
        if rate:
            note_mask(self)
        key = partial(mask_key, self.path)
        return self.proj(attention(self.qkv(x), self.heads, self.causal, before, rate, key))


class MultiheadAttention(CausalSelfAttention):
    """Self-attention without a mask, as in an encoder: (batch, time, embed_dim), keeps the shape.

    For keys and values of another sequence use `ops.scaled_dot_product_attention`.

    Args:
        embed_dim: the length of x's last axis; a multiple of `num_heads`.
        num_heads, dropout, bias: see `CausalSelfAttention`.
    """

    causal = False

    def __init__(
        self, embed_dim: int, num_heads: int, dropout: float = 0.0, bias: bool = True
    ) -> None:
        super().__init__(embed_dim, num_heads, bias, dropout)

    def forward(self, x: Tensor) -> Tensor:
        """See `CausalSelfAttention`."""
        h = super().forward(x)
        h.made_by = "MultiheadAttention"
        return h


class TransformerBlock(Module):
    """The block of GPT-2: (batch, time, features) -> the same (Radford et al., 2019).

        x --+-- norm1 -- attention --(+)--+-- norm2 -- mlp --(+)-->
            +-------------------------^   +-------------------^

    Normalization is inside each branch (pre-norm), so the sums pass gradients back unchanged.

    Args:
        features: of x; a multiple of `heads`.
        heads: of the attention, which is causal.
        hidden: the width inside the multilayer perceptron, Linear - GELU (tanh form) - Linear; by
            default 4 * features.
        bias: whether the linear layers have one.
        eps: of the normalizations.
        dropout: the probability of dropping, in training, an element of a branch's result and one
            of the attention's probabilities.
        experts: a mixture of experts that replaces the perceptron; `hidden` is then ignored.

    Example:
        >>> block = nn.TransformerBlock(16, heads=4).initialize(seed=0)
        >>> block(np.zeros((2, 10, 16), "float32")).shape
        (2, 10, 16)
    """

    links = (
        ("attention", "attend", ("norm1", "attention", "drops.0")),
        ("mlp", "feed", ("norm2", "mlp", "drops.1")),
    )
    sharding: ShardingTable = MappingProxyType(
        {
            **{
                f"attention.{name}": sharding
                for name, sharding in CausalSelfAttention.sharding.items()
            },
            "mlp.0": Sharding.COLUMN,
            "mlp.2": Sharding.ROW,
        }
    )

    def __init__(
        self,
        features: int,
        heads: int,
        hidden: int | None = None,
        bias: bool = True,
        eps: float = 1e-5,
        dropout: float = 0.0,
        experts: MixtureOfExperts | None = None,
    ) -> None:
        hidden = 4 * features if hidden is None else check_int("TransformerBlock's hidden", hidden)
        self.norm1 = LayerNorm(features, eps)
        self.attention = CausalSelfAttention(features, heads, bias, dropout)
        self.norm2 = LayerNorm(features, eps)
        self.mlp: Module = experts or Sequential(
            Linear(features, hidden, bias),
            GELU("tanh"),
            Linear(hidden, features, bias),
        )
        if experts is not None:
            self.sharding = {
                name: item for name, item in self.sharding.items() if not name.startswith("mlp.")
            }
        self.drops: list[Module] = [Dropout(dropout), Dropout(dropout)]

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's result, of the shape of x."""
        return self.feed(self.attend(x))

    def attend(self, x: Tensor) -> Tensor:
        """Return the result of the first half, the attention."""
        return x + self.drops[0](self.attention(self.norm1(x)))

    def feed(self, x: Tensor) -> Tensor:
        """Return the result of the second half, the multilayer perceptron."""
        return x + self.drops[1](self.mlp(self.norm2(x)))
