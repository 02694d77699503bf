"""The parts of Llama and its kin: rotary attention with grouped heads, a gated perceptron, a block.

Touvron et al., "LLaMA", 2023, and after it Mistral, Qwen, SmolLM and others: no table of positions,
fewer heads of keys and values than of queries, RMS normalization, no biases.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import pi
from types import MappingProxyType

from nnmpi.backend.rotary import Rotary
from nnmpi.base.errors import UsageError, check_int, number
from nnmpi.nn.linear import Linear
from nnmpi.nn.mode import current
from nnmpi.nn.module import Module
from nnmpi.nn.norm import RMSNorm
from nnmpi.nn.sharding import Sharding, ShardingTable, Units
from nnmpi.ops.activation import swiglu
from nnmpi.ops.attention import KeyValues, grouped_attention
from nnmpi.tensor.tensor import Tensor

__all__ = ["LlamaBlock", "RotaryAttention", "RotaryScaling", "SwiGLU"]


@dataclass(frozen=True)
class RotaryScaling:
    """Slower turns, for longer sequences than a model was first trained on.

    Without `original` all frequencies are divided by the factor (Chen et al., "Positional
    interpolation", 2023). With it those that turn fully within the original context are kept, as in
    Llama 3: a pair that turns more than `high` times in it keeps its frequency, one that turns less
    than `low` times is divided, and between them both are mixed.

    Attributes:
        factor: by which the context has grown, above 0.
        original: the context of the first training, or None.
        low, high: turns in the original context, low < high.
    """

    factor: float
    original: int | None = None
    low: float = 1.0
    high: float = 4.0

    def __post_init__(self) -> None:
        if not number("RotaryScaling's factor", self.factor):
            raise UsageError("RotaryScaling's factor is 0; give a number above 0")
        if self.original is not None:
            check_int("RotaryScaling's original", self.original)
            number("RotaryScaling's low", self.low)
            if not number("RotaryScaling's high", self.high) > self.low:
                raise UsageError(
                    f"RotaryScaling's high is {self.high} and low {self.low}; give a larger high"
                )

    def scaled(self, frequency: float) -> float:
        """Return a scaled frequency, in radians per position."""
        if self.original is None:
            return frequency / self.factor
        turns = self.original * frequency / (2 * pi)
        kept = min(max((turns - self.low) / (self.high - self.low), 0), 1)
        return (1 - kept) * frequency / self.factor + kept * frequency


class RotaryAttention(Module, read_once="features heads kv_heads rotary q_norm k_norm units"):
    """Causal attention with rotary positions and grouped heads: (batch, time, features), the same.

    Queries and keys are turned by their position (Su et al., "RoFormer", 2021), so no table of
    positions is needed. `heads / kv_heads` neighbouring heads of queries share one of keys and
    values (Ainslie et al., "GQA", 2023), which takes as much less memory when text is generated.
    Tensor parallelism shards the heads of keys, each with the queries that read it. With more ranks
    than such heads some have none.

        4 heads, 2 of keys, 2 ranks     q  q0 q1 | q2 q3     k  k0 | k1     v  v0 | v1

    Args:
        features: of x.
        heads: the number of heads of queries.
        kv_heads: of keys and values, a divisor of `heads`; by default as many.
        head_features: of each head, an even number; by default features / heads.
        theta: pair i of n turns by theta^(-i / n) per position.
        scaling: of these turns, or None.
        bias: whether queries, keys and values have one.
        proj_bias: whether the result has one.
        norm_eps: of an RMS normalization of each head's queries and keys before they are turned, as
            in Qwen 3; None for none.

    Example:
        >>> attention = nn.RotaryAttention(16, heads=4, kv_heads=2).initialize(seed=0)
        >>> attention(np.zeros((2, 10, 16), "float32")).shape, attention.k.weight.shape
        ((2, 10, 16), (16, 8))
    """

    sharding: ShardingTable = MappingProxyType(
        {**dict.fromkeys("qkv", Sharding.COLUMN), "proj": Sharding.ROW}
    )

    def __init__(
        self,
        features: int,
        heads: int,
        kv_heads: int | None = None,
        head_features: int | None = None,
        theta: float = 10_000.0,
        scaling: RotaryScaling | None = None,
        bias: bool = False,
        proj_bias: bool = False,
        norm_eps: float | None = None,
    ) -> None:
        self.features = check_int("RotaryAttention's features", features)
        self.heads = check_int("RotaryAttention's heads", heads)
        self.kv_heads = heads if kv_heads is None else check_int("kv_heads", kv_heads)
        if heads % self.kv_heads:
            raise UsageError(
                f"{heads} heads cannot share {kv_heads} of keys and values; give a divisor of the"
                " heads as kv_heads"
            )
        if head_features is None and features % heads:
            raise UsageError(
                f"RotaryAttention of {features} features cannot have {heads} heads; give a multiple"
                " of the heads as features, or head_features"
            )
        width = check_int(
            "head_features", features // heads if head_features is None else head_features
        )
        if width % 2:
            raise UsageError(
                f"heads of {width} features have no pairs that could turn; give an even number"
            )
        if not number("RotaryAttention's theta", theta):
            raise UsageError("RotaryAttention's theta is 0; give a number above 0")
        turns = [float(theta) ** (-i / (width // 2)) for i in range(width // 2)]
        self.rotary = Rotary(
            tuple(turns if scaling is None else [scaling.scaled(item) for item in turns])
        )
        whole = Units(self.kv_heads)
        self.units: Mapping[str, Units] = {
            **dict.fromkeys("qkv", whole),
            "proj": Units(self.kv_heads, sharding=Sharding.ROW),
        }
        self.q = Linear(features, heads * width, bias)
        self.k = Linear(features, self.kv_heads * width, bias)
        self.v = Linear(features, self.kv_heads * width, bias)
        self.q_norm = None if norm_eps is None else RMSNorm(width, norm_eps)
        self.k_norm = None if norm_eps is None else RMSNorm(width, norm_eps)
        self.proj = Linear(heads * width, features, proj_bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the attention's result, of the shape of x. See `ops.grouped_attention`."""
        memory = current().memory
        before = None if memory is None else memory.setdefault(self.path, KeyValues())
        q, k, v = _normalized(self.q_norm, self.q(x)), self.k(x), self.v(x)
        k = _normalized(self.k_norm, k)
        return self.proj(grouped_attention(q, k, v, self.heads, True, self.rotary, before))


def _normalized(norm: RMSNorm | None, x: Tensor) -> Tensor:
    """Return x (batch, time, heads * features) with each head normalized."""
    if norm is None:
        return x
    batch, time, width = x.shape
    features = norm.weight.shape[0]
    return norm(x.reshape((batch, time, width // features, features))).reshape(x.shape)


class SwiGLU(Module):
    """The gated perceptron down(silu(gate(x)) * up(x)): (batch, time, features), keeps the shape.

    Shazeer, "GLU variants improve transformer", 2020.

    Args:
        features: of x.
        hidden: inside.
        bias: whether the three linear layers have one.

    Example:
        >>> mlp = nn.SwiGLU(8, hidden=20).initialize(seed=0)
        >>> mlp(np.zeros((2, 10, 8), "float32")).shape
        (2, 10, 8)
    """

    sharding: ShardingTable = MappingProxyType(
        {"gate": Sharding.COLUMN, "up": Sharding.COLUMN, "down": Sharding.ROW}
    )

    def __init__(self, features: int, hidden: int, bias: bool = False) -> None:
        self.gate = Linear(features, hidden, bias)
        self.up = Linear(features, hidden, bias)
        self.down = Linear(hidden, features, bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the perceptron's result, of the shape of x."""
        return self.down(swiglu(self.gate(x), self.up(x)))


class LlamaBlock(Module):
    """The block of Llama: (batch, time, features) -> the same.

        x --+-- norm1 -- attention --(+)--+-- norm2 -- mlp --(+)-->
            +-------------------------^   +-------------------^

    Args:
        attention, mlp: its parts.
        eps: of the RMS normalizations.

    Example:
        >>> attention, mlp = nn.RotaryAttention(16, heads=4, kv_heads=2), nn.SwiGLU(16, 40)
        >>> block = nn.LlamaBlock(attention, mlp).initialize(seed=0)
        >>> block(np.zeros((2, 10, 16), "float32")).shape
        (2, 10, 16)
    """

    links = (
        ("attention", "attend", ("norm1", "attention")),
        ("mlp", "feed", ("norm2", "mlp")),
    )
    sharding: ShardingTable = MappingProxyType(
        {
            f"{part}.{name}": sharding
            for part, kind in (("attention", RotaryAttention), ("mlp", SwiGLU))
            for name, sharding in kind.sharding.items()
        }
    )

    def __init__(self, attention: RotaryAttention, mlp: SwiGLU, eps: float = 1e-5) -> None:
        self.norm1 = RMSNorm(attention.features, eps)
        self.attention = attention
        self.norm2 = RMSNorm(attention.features, eps)
        self.mlp = mlp

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's result, of the shape of x."""
        return self.feed(self.attend(x))

    def attend(self, x: Tensor) -> Tensor:
        """Return the result of the first half, the attention."""
        return x + self.attention(self.norm1(x))

    def feed(self, x: Tensor) -> Tensor:
        """Return the result of the second half, the perceptron."""
        return x + self.mlp(self.norm2(x))
