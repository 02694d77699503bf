"""Multi-head attention of a sequence with itself."""

from __future__ import annotations

from functools import partial
from types import MappingProxyType

from nnmpi.errors import UsageError
from nnmpi.nn.dropout import mask_place
from nnmpi.nn.linear import Linear
from nnmpi.nn.mode import current
from nnmpi.nn.module import Module
from nnmpi.nn.sharding import Sharding, Units
from nnmpi.ops.attention import KeyValues, attention
from nnmpi.tensor.parameter import Initializer
from nnmpi.tensor.tensor import Tensor


class CausalSelfAttention(Module):
    """Each position attends to itself and to those before it: (batch, time, features) -> the same.

    Vaswani et al., "Attention is all you need", 2017. One linear layer makes queries, keys and values, side by side
    in its outputs; `proj` mixes the heads' results. Ranks share out the heads: each has queries, keys and values of its
    own ones, and the rows of `proj` that read them; so one all-reduce forward and one backward are all (Shoeybi et al.,
    "Megatron-LM", 2019). With more ranks than heads some have none.

        2 ranks, 3 heads     qkv  q0 q1 | q2   k0 k1 | k2   v0 v1 | v2     attention  y0 y1 | y2     proj  add up

    Args:
        features: of x; a multiple of `heads`.
        heads: each works on features / heads of them.
        bias: whether the two linear layers have one.
        init: draws both weights; by default as `Linear` does.
        proj_init: draws the second one, if it is another way.
        bias_init: draws the biases; by default as `Linear` does.
        dropout: the probability with which one of the attention's probabilities is dropped in training (see `Dropout`).
    """

    sharding = MappingProxyType({"qkv": Sharding.COLUMN, "proj": Sharding.ROW})

    def __init__(
        self,
        features: int,
        heads: int,
        bias: bool = True,
        init: Initializer | None = None,
        proj_init: Initializer | None = None,
        bias_init: Initializer | None = None,
        dropout: float = 0.0,
    ) -> None:
        if heads < 1 or features < 1 or features % heads:
            raise UsageError(
                f"attention of {features} features with {heads} heads does not work; both must be at least 1, "
                "and the features a multiple of the heads"
            )
        if not 0 <= dropout < 1:
            raise UsageError(f"attention's dropout is a probability in [0, 1), not {dropout}")
        self.features, self.heads, self.dropout = features, heads, dropout
        self.units = {"qkv": Units(heads, repeats=3), "proj": Units(heads, sharding=Sharding.ROW)}
        self.qkv = Linear(features, 3 * features, bias, init, bias_init)
        self.proj = Linear(features, features, bias, proj_init or init, bias_init)

    def forward(self, x: Tensor) -> Tensor:
        """Return the attention's result, of the shape of x. See `ops.attention`."""
        memory, rate = current().memory, self.dropout if current().training else 0.0
        before = None if memory is None else memory.setdefault(self.path, KeyValues())
        place = partial(mask_place, self.path)
        y: Tensor = self.proj(attention(self.qkv(x), self.heads, True, before, rate, place))
        return y
