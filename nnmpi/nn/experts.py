"""A mixture of experts: a gate sends each position to a few of many multilayer perceptrons."""

from functools import partial
from math import inf
from typing import Any

from nnmpi.base.errors import ShapeError, UsageError, check_int
from nnmpi.nn.linear import Linear
from nnmpi.nn.mode import current
from nnmpi.nn.module import Module, fan_in
from nnmpi.ops.activation import softmax
from nnmpi.ops.experts import Experts, Gate
from nnmpi.tensor.parameter import LookupTable, Parameter
from nnmpi.tensor.tensor import Tensor
from nnmpi.tensor.turns import in_turn, turns_of

__all__ = ["MixtureOfExperts"]


class MixtureOfExperts(Module):
    """A mixture of experts: a gate sends each position to `top_k` MLPs; keeps the shape.

    The result is the sum of the chosen experts' results, weighted by the gate's probabilities (a
    linear layer and softmax; Fedus et al., "Switch transformers", 2021). See `ops.experts`, also
    for expert parallelism.

    >>> import numpy as np
    >>> from nnmpi import nn
    >>> layer = nn.MixtureOfExperts(8, experts=3, top_k=2).initialize(seed=0)
    >>> layer(np.ones((2, 5, 8), "float32")).shape
    (2, 5, 8)

    Args:
        features: of x.
        experts: the number of experts.
        top_k: the number of experts per position.
        hidden: the width inside an expert; by default 4 * features.
        capacity: limits an expert to the first ceil(capacity * top_k * positions / experts)
            positions of a sample; for further positions its result is 0. None for no limit. The
            limit is per sample, so that no layout changes it; padding counts as positions. It
            excludes text generation, since it depends on tokens not yet generated.
        balance: the weight of the balancing loss in training (DeepSeek-V3); 0 for none. The loss
            is the mean over positions of: experts * sum over experts of f P, for the share f of
            choices and the mean probability P of an expert in the position's sample. It enters the
            gradients, not the reported loss.

    Raises:
        UsageError: for sizes that do not work.
    """

    # set under data parallelism: the mode's `weight` must then give the global batch's denominator
    all_reduce: Any = None
    # the group that shards the experts, and its exchange, see `parallel.experts`
    ranks: Any = None
    exchange: Any = None

    def __init__(
        self,
        features: int,
        experts: int,
        top_k: int = 2,
        hidden: int | None = None,
        capacity: float | None = None,
        balance: float = 0.01,
    ) -> None:
        features = check_int("MixtureOfExperts' features", features)
        experts = check_int("MixtureOfExperts' experts", experts)
        hidden = 4 * features if hidden is None else check_int("MixtureOfExperts' hidden", hidden)
        top_k = check_int("MixtureOfExperts' top_k", top_k)
        if (
            top_k > experts
            or not (capacity is None or 0 < capacity < inf)
            or not 0 <= balance < inf
        ):
            raise UsageError(
                f"a mixture of {experts} experts, top_k {top_k}, capacity {capacity} and balance"
                f" {balance} is impossible; give a top_k of at most the experts, a finite capacity"
                " above 0 or None, and a finite balance of at least 0"
            )
        self.chooses = Gate(top_k, capacity, balance)
        self.gate = Linear(features, experts, bias=False)
        self.w1 = Parameter((experts, features, hidden), fan_in(features))
        self.b1 = LookupTable((experts, hidden), fan_in(features))
        self.w2 = Parameter((experts, hidden, features), fan_in(hidden))
        self.b2 = LookupTable((experts, features), fan_in(hidden))

    def forward(self, x: Tensor) -> Tensor:
        """Return the experts' results, of the shape of x.

        Raises:
            ShapeError: for x without positions.
            UsageError: under data parallelism without a `weight` in `nn.training`; in text
                generation with a capacity.
        """
        if x.ndim != 3:
            raise ShapeError(
                f"a mixture of experts needs (batch, positions, features), not {x.shape}"
            )
        if current().memory is not None and self.chooses.capacity is not None:
            raise UsageError(
                "a text is generated token by token, but a capacity counts a whole sequence's"
                " tokens; to generate, train without a capacity"
            )
        function = Experts(
            self.chooses, self.ranks, self.exchange, partial(_weight, self.all_reduce is not None)
        )
        inputs = x, softmax(self.gate(x)), self.w1, self.b1, self.w2, self.b2
        turns = None if self.ranks is None else turns_of(self.ranks)
        return in_turn(turns, function, *inputs)


def _weight(shared: bool) -> float | None:
    """Return the factor of the balancing loss's gradient; None for a mean over this pass.

    0 in evaluation.
    """
    mode = current()
    if not mode.training:
        return 0.0
    if mode.weight is None and shared:
        raise UsageError(
            "the balancing loss is a mean over the global batch, but this rank has only part of"
            " it; give the factor of its sums: with nn.training(weight=1 / batch.global_targets),"
            " or give balance=0"
        )
    return mode.weight
