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

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase
from typing import Literal

import numpy as np

from nnmpi.backend.array import Array, Dtype
from nnmpi.backend.precision import bfloat16
from nnmpi.base.errors import UsageError, check_int, number
from nnmpi.nn.activation import Dropout
from nnmpi.nn.linear import Embedding, Linear, TiedLinear
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
        _check_adaptable(layer, layer.path or "the layer")
        rank = check_int("LoRA's rank", rank)
        self.alpha = float(rank) if alpha is None else number("LoRA's alpha", alpha)
        self.weight, self.bias = layer.weight, layer.bias
        for _, parameter in layer.named_weights():
            if not parameter.is_base:
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
        return (w + a @ b * (self.alpha / self.rank)).astype(self.lora_a.dtype)


def _check_adaptable(layer: Linear, name: str) -> None:
    """Refuse a layer of which an adapter would drop something.

    Raises:
        UsageError: for another class than `Linear`, and for a forward or a hook of its own.
    """
    if type(layer) is not Linear:
        raise UsageError(
            f"an adapter is for an nn.Linear, and {name} is a {type(layer).__name__}, whose forward"
            " it would not call; name the layers that get adapters without it"
        )
    if layer._forward_hooks or "forward" in vars(layer):
        raise UsageError(
            f"{name} has a forward or a hook of your own, which the layer with an adapter would not"
            " call; give it to that one, after nn.adapt or nn.LoRA"
        )


def adapt(
    model: Module,
    rank: int = 8,
    alpha: float | None = None,
    targets: str = "q,v",
    dropout: float = 0.0,
    base_dtype: Literal["bf16"] | None = None,
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
        base_dtype: "bf16" keeps the weights of linear layers and embeddings in bfloat16, in half of
            the memory. Each is widened while its layer computes, in the model's dtype; what it has
            lost by rounding stays lost. Other weights, such as norms, are kept as they are.

    Raises:
        UsageError: for targets that fit no linear layer, with the names of those that there are;
            for a model with adapters, one that is arranged or trained, and a layer that an adapter
            would change; for a base_dtype without layers that can have it, or without ml_dtypes.
    """
    if any(True for _ in adapters(model)):
        raise UsageError("the model has adapters already; merge them before it gets others")
    for _, parameter in model.named_parameters():
        if parameter.region is not None or parameter.guard is not None:
            raise UsageError(
                "the model is in a layout, a Worker or a strategy already; call nn.adapt before"
            )
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, Linear)}
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
                f" {', '.join(map(repr, _kinds(layers))) or 'none'}"
            )
        chosen |= fitting
    for name, layer in chosen.items():
        _check_adaptable(layer, name)
    low = weights_kept_as(base_dtype, model)
    vars(model).pop("storage", None)
    for _, parameter in [*model.named_parameters()]:
        parameter.make_base(low.get(parameter))
    # a layer in two places keeps one adapter, as it has one weight
    adapted = {layer: LoRA(layer, rank, alpha, dropout) for layer in chosen.values()}
    for name, layer in chosen.items():
        model.replace(name, adapted[layer])
    return model


def weights_kept_as(base_dtype: str | None, model: Module) -> dict[Parameter, Dtype]:
    """Return the parameters that a base keeps in half precision, and the dtype; see `adapt`.

    Raises:
        UsageError: for another word, a model without such parameters, and without ml_dtypes.
    """
    if base_dtype is None:
        return {}
    if base_dtype != "bf16":
        raise UsageError(f"base_dtype is {base_dtype!r}; choose 'bf16', or None for the model's")
    kinds = Linear, Embedding, TiedLinear
    found = [vars(layer)["weight"] for _, layer in model.named_modules() if type(layer) in kinds]
    if not found:
        raise UsageError(
            "base_dtype is for linear layers and embeddings, and the model has none; leave it out"
        )
    return dict.fromkeys(found, bfloat16())


def _kinds(names: Iterable[str]) -> Iterable[str]:
    """Return names of layers, those of all blocks as one pattern: "*.attention.q"."""
    return dict.fromkeys(re.sub(r"^\d+\.", "*.", name) for name in names)


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


class BaseDigest:
    """A hash of the weights that adapters are added to, by their full names.

    It is of values in float32, so the same in every layout and dtype.
    """

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)

    def add(self, name: str, values: Array) -> None:
        """Add a weight."""
        self._hash.update(name.encode())
        self._hash.update(np.ascontiguousarray(values, np.float32).data)

    @classmethod
    def of(cls, model: Module) -> str:
        """Return that of a full model with values; "" for one without adapters."""
        result, base = cls(), dict(model.named_base())
        for name, item in base.items():
            result.add(name, item.numpy())
        return str(result) if base else ""

    def __str__(self) -> str:
        return self._hash.hexdigest()


def merge(model: Module) -> dict[str, Array]:
    """Return the full weights of a model, in which adapters are added to their layers' weights.

    Args:
        model: the full model, with values. It stays as it is.

    Returns:
        Arrays by the names that they have in the model without adapters, for its `load_state`.

    Raises:
        UsageError: for a rank's part of a model.
    """
    weights, full = dict(model.named_weights()), dict(model.full_weights())
    if weights.keys() != full.keys() or any(item.region is not None for item in weights.values()):
        raise UsageError(
            "this rank has only part of the model, so nn.merge would give part of the weights;"
            " merge the full model, as nnmpi export does with a run"
        )
    added = dict(adapters(model))
    own = {f"{name}.{factor}" for name in added for factor in ("lora_a", "lora_b")}
    dtype = model.storage.dtype
    values = {name: np.array(item.numpy(), dtype) for name, item in weights.items()}
    of_weights = {f"{name}.weight": layer for name, layer in added.items()}
    merged = {name: layer.merged() for name, layer in of_weights.items() if name in values}
    buffers = {name: np.array(Tensor(item.data).numpy()) for name, item in model.named_buffers()}
    return {name: item for name, item in {**values, **merged, **buffers}.items() if name not in own}
