"""The transformer's block."""

from __future__ import annotations

from types import MappingProxyType

from nnmpi.errors import UsageError
from nnmpi.nn.activation import GELU
from nnmpi.nn.attention import CausalSelfAttention
from nnmpi.nn.container import Sequential
from nnmpi.nn.dropout import Dropout
from nnmpi.nn.linear import Linear
from nnmpi.nn.module import Module
from nnmpi.nn.norm import LayerNorm
from nnmpi.nn.sharding import Sharding
from nnmpi.tensor.parameter import Initializer
from nnmpi.tensor.tensor import Tensor


class TransformerBranch(Module):
    """x + drop(body(norm(x))): one of the two halves of a `TransformerBlock`, made of its layers.

    Args:
        norm, body, drop: the layers.
    """

    def __init__(self, norm: LayerNorm, body: Module, drop: Dropout) -> None:
        self.norm, self.body, self.drop = norm, body, drop

    def forward(self, x: Tensor) -> Tensor:
        """Return the half's result, of the shape of x."""
        return _add_branch(x, self.norm, self.body, self.drop)


def _add_branch(x: Tensor, norm: Module, body: Module, drop: Module) -> Tensor:
    y: Tensor = x + drop(body(norm(x)))
    return y


class TransformerBlock(Module):
    """The block of GPT-2: (batch, time, features) -> the same (Radford et al., 2019).

        x --+-- norm1 -- attention --(+)--+-- norm2 -- mlp --(+)-->
            +-------------------------^   +-------------------^

    Normalization comes first in each branch, so that the sums pass gradients on unchanged.

    Args:
        features: of x; a multiple of `heads`.
        heads: of the attention, which is causal.
        hidden: the width inside the multilayer perceptron, Linear - GELU (tanh form) - Linear; by default 4 * features.
        bias: whether the linear layers have one.
        init: draws their weights; by default as `Linear` does.
        eps: of the normalizations.
        dropout: the probability with which an element of what a branch adds is dropped in training, and one of the
            attention's probabilities.
        proj_init: draws the weights of the branches' last layers, if it is another way than `init`.
        bias_init: draws the biases; by default as `Linear` does.
    """

    sharding = MappingProxyType(
        {
            **{f"attention.{name}": sharding for name, sharding in CausalSelfAttention.sharding.items()},
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
        init: Initializer | None = None,
        eps: float = 1e-5,
        dropout: float = 0.0,
        proj_init: Initializer | None = None,
        bias_init: Initializer | None = None,
    ) -> None:
        hidden = 4 * features if hidden is None else hidden
        if hidden < 1:
            raise UsageError(f"a transformer block needs at least 1 hidden feature, not {hidden}")
        self.norm1 = LayerNorm(features, eps)
        self.attention = CausalSelfAttention(features, heads, bias, init, proj_init, bias_init, dropout)
        self.norm2 = LayerNorm(features, eps)
        self.mlp = Sequential(
            Linear(features, hidden, bias, init, bias_init),
            GELU("tanh"),
            Linear(hidden, features, bias, proj_init or init, bias_init),
        )
        self.drops = [Dropout(dropout), Dropout(dropout)]

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's result, of the shape of x."""
        x = _add_branch(x, self.norm1, self.attention, self.drops[0])
        return _add_branch(x, self.norm2, self.mlp, self.drops[1])

    @property
    def branches(self) -> tuple[TransformerBranch, TransformerBranch]:
        """Its halves, one after the other, made of its layers as they are now."""
        return (
            TransformerBranch(self.norm1, self.attention, self.drops[0]),
            TransformerBranch(self.norm2, self.mlp, self.drops[1]),
        )
