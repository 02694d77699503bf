"""LoRA: a model is fine-tuned by small additions to its linear layers, and stays as it is.

    y = x W + b + (x A) B alpha / rank        A (in, rank), B (rank, out); W and b are not trained

Hu et al., "LoRA: low-rank adaptation of large language models", 2021. The names are PEFT's. A and B
together are an adapter; B begins with zeros, so that the model first computes what it did. All
other weights are the model's base (see `Parameter.make_base`): no gradient, optimizer state,
message between replicas or checkpoint has them.

With tensor parallelism A and B are cut with their layer:

    outputs cut    A whole, B by outputs      each rank's gradient of A is from its outputs alone
    inputs cut     A by inputs, B whole       each rank's gradient of B is from its inputs alone

so the gradients of the whole factor are summed over the ranks, which is `LoRA.whole`.
"""

from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase

import numpy as np

from nnmpi.backend.array import Array
from nnmpi.base.errors import UsageError, check_int, number
from nnmpi.nn.activation import Dropout
from nnmpi.nn.linear import Linear
from nnmpi.nn.module import Constant, Module, fan_in
from nnmpi.nn.sharding import Sharding, find
from nnmpi.ops.linear import linear
from nnmpi.tensor.parameter import Parameter
from nnmpi.tensor.tensor import Tensor

__all__ = ["LoRA", "adapt", "merge"]

ALL_LINEAR = "all-linear"
FUSED = {"qkv": ("q", "k", "v")}  # what a layer of this name computes, each with a name of its own


class LoRA(Linear):
    """A linear layer with an adapter: (..., in_features) -> (..., out_features).

    Args:
        layer: whose weight and bias become this layer's, and are not trained any more.
        rank: of the product A B.
        alpha: the product is multiplied by alpha / rank; by default the rank.
        dropout: the probability of dropping an element of the adapter's input in training.

    Raises:
        UsageError: for another layer, such as one with an adapter, and for values out of range.

    Example:
        >>> layer = nn.LoRA(nn.Linear(6, 4), rank=2).initialize(seed=0)
        >>> {name: item.shape for name, item in layer.named_parameters()}
        {'lora_a': (6, 2), 'lora_b': (2, 4)}
        >>> layer(np.ones((3, 6), "float32")).shape
        (3, 4)
    """

    def __init__(
        self, layer: Linear, rank: int = 8, alpha: float | None = None, dropout: float = 0.0
    ) -> None:
        if type(layer) is not Linear:
            raise UsageError(f"LoRA adapts an nn.Linear, not a {type(layer).__name__}")
        rank = check_int("LoRA's rank", rank)
        self.alpha = float(rank) if alpha is None else number("LoRA's alpha", alpha)
        self.weight, self.bias = layer.weight, layer.bias
        for _, parameter in layer.named_weights():
            parameter.make_base()
        inputs, outputs = self.weight.shape
        self.dropout = Dropout(dropout)
        self.lora_a = Parameter((inputs, rank), fan_in(inputs))
        self.lora_b = Parameter((rank, outputs), Constant(0.0))

    @property
    def rank(self) -> int:
        """The number of A's columns and B's rows."""
        return self.lora_a.shape[1]

    def forward(self, x: Tensor) -> Tensor:
        """Return x W + b and the adapter's addition."""
        x = self.product_input(x)
        return linear(x, self.weight, self.bias) + self.addition(x)

    def addition(self, x: Tensor, product: Callable[..., Tensor] = linear) -> Tensor:
        """Return (x A) B alpha / rank.

        Args:
            x: the layer's input.
            product: the last one, `ops.linear` or a part of it.
        """
        a, b = (
            self.whole(factor) if factor.region is None else factor
            for factor in (self.lora_a, self.lora_b)
        )
        return product(linear(self.dropout(x), a) * (self.alpha / self.rank), b)

    def whole(self, factor: Tensor) -> Tensor:
        """Return a factor that every rank has in full; tensor parallelism sums its gradients."""
        return factor

    def merged(self) -> Array:
        """Return W + A B alpha / rank, in the dtype of W; for the full layer in host memory."""
        w, a, b = (
            np.asarray(item.numpy(), "float64") for item in (self.weight, self.lora_a, self.lora_b)
        )
        return (w + a @ b * (self.alpha / self.rank)).astype(self.weight.dtype)


def adapt(
    model: Module,
    rank: int = 8,
    alpha: float | None = None,
    targets: str = "q,v",
    dropout: float = 0.0,
) -> Module:
    """Give linear layers of a model adapters, and freeze all that it has now; return the model.

        model = nn.adapt(models.gpt(...), rank=16, targets="all-linear").initialize(seed=0)

    Weights that the model has are kept. Call `initialize` afterwards, which draws the adapters, and
    make the optimizer then.

    Args:
        model: of any kind, not in a Worker or a strategy.
        rank, alpha, dropout: see `LoRA`.
        targets: names of linear layers, or patterns of full names, separated by commas, such as
            "q,v" or "*.mlp.*". A layer that computes queries, keys and values together is called
            by q, k or v, too. "all-linear": all but an output over the vocabulary.

    Raises:
        UsageError: for targets that fit no linear layer, with the names of those that there are,
            and for a model with adapters.
    """
    if any(True for _ in adapters(model)):
        raise UsageError("the model has adapters already; merge them before it gets others")
    layers = {name: layer for name, layer in model.named_modules() if type(layer) is Linear}
    if "" in layers:
        raise UsageError("the model is a single layer; put it into a Sequential, or call nn.LoRA")
    chosen = dict[str, Linear]()
    for target in targets.split(","):
        fitting = {
            name: layer for name, layer in layers.items() if _fits(model, name, target.strip())
        }
        if not fitting:
            raise UsageError(
                f"no linear layer is called {target!r}; there are"
                f" {', '.join(map(repr, layers)) or 'none'}"
            )
        chosen |= fitting
    vars(model).pop("storage", None)
    for _, parameter in [*model.named_parameters()]:
        parameter.make_base()
    for name, layer in chosen.items():
        model.replace(name, LoRA(layer, rank, alpha, dropout))
    return model


def _fits(model: Module, name: str, target: str) -> bool:
    """Return whether a target names a linear layer; see `adapt`."""
    if target == ALL_LINEAR:
        found = find(model.sharding, name)
        return found is None or found[1] is not Sharding.VOCAB
    last = name.rpartition(".")[2]
    return target in (last, *FUSED.get(last, ())) or fnmatchcase(name, target)


def adapters(model: Module) -> Iterator[tuple[str, LoRA]]:
    """Yield the layers with adapters, by full names."""
    return ((name, layer) for name, layer in model.named_modules() if isinstance(layer, LoRA))


def merge(model: Module) -> dict[str, Array]:
    """Return the full weights of a model, in which adapters are added to their layers' weights.

    Args:
        model: the full model, with values. It stays as it is.

    Returns:
        Arrays by the names that they have in the model without adapters, for its `load_state`.
    """
    added = dict(adapters(model))
    own = {f"{name}.{factor}" for name in added for factor in ("lora_a", "lora_b")}
    values = {name: np.array(item.numpy()) for name, item in model.named_weights()}
    merged = {f"{name}.weight": layer.merged() for name, layer in added.items()}
    buffers = {name: np.array(Tensor(item.data).numpy()) for name, item in model.named_buffers()}
    return {name: item for name, item in {**values, **merged, **buffers}.items() if name not in own}
