"""Mixture of experts: a gate sends each row to a few MLPs, on one rank or on several.

    rows of this rank        a b c d e              the gate's choices: a 0, b 2, c 1, d 2, e 0
    by expert                a e | c | b d          rows per expert: 2 1 2
    all-to-all               a e c -> rank 0        owner of experts 0 and 1
                             b d   -> rank 1        owner of expert 2
    each expert              computes its rows of all ranks in one product
    all-to-all               returns the results; each row sums its own, times the gate's
                             probabilities

In backward the gradients take the same two exchanges. For F features, let a rank send n of its rows
to experts of other ranks (a row counts once per expert), and receive m rows for its own experts. It
sends these numbers of elements per layer:

    forward    n F of rows, m F of results, and a count for each expert of another rank
    backward   n F + m F

Over all N ranks that is 2 k T F (N - 1) / N per pass, for T rows with k experts each, evenly
distributed.

Shazeer et al., "Outrageously large neural networks", 2017. Capacity and balance: Fedus et al.,
"Switch transformers", 2021. Balance within each sequence: DeepSeek-AI, "DeepSeek-V3", 2024, section
2.1.2. A sum over sequences is the same in any layout, unlike a product of means over the batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np

from nnmpi.backend.array import Array, Dtype
from nnmpi.backend.precision import rounds_products
from nnmpi.base.shard import split
from nnmpi.ops.activation import gelu
from nnmpi.ops.embedding import TableRows
from nnmpi.ops.linear import WideLinear
from nnmpi.tensor.function import Function, Grads
from nnmpi.tensor.placement import Placement, Shard
from nnmpi.tensor.tensor import Tensor, concatenate
from nnmpi.tensor.traits import WRITTEN, Traits

POSITIONS = 1  # the axis


@dataclass(frozen=True)
class Gate:
    """The settings of the gate.

    Attributes:
        top_k: the number of experts per row.
        capacity: the maximal number of rows of a sample per expert, in multiples of an even share;
            None for no limit.
        balance: the weight of the balancing loss.
    """

    top_k: int
    capacity: float | None
    balance: float

    def choose(
        self, xp: Any, p: Array, positions: Shard | None = None
    ) -> tuple[Array, Array, Array]:
        """Return the experts of each row, whether each has capacity for it, and those of all rows.

        Collective over the ranks that share the positions, if any.

        Args:
            p: (samples, positions, experts), probabilities.
            positions: of the probabilities, if ranks share the positions of samples; a capacity is
                that of full samples.

        Returns:
            (samples, positions, top_k) integers, the lower ones of ties; booleans, False for rows
            beyond the capacity; and the first again, of all positions.
        """
        chosen = xp.argsort(-p, axis=2, kind="stable")[:, :, : self.top_k]
        everywhere = chosen
        if positions is not None:
            everywhere = positions.group.gather(Tensor(chosen), positions.placement)._data
        if self.capacity is None:
            return chosen, xp.ones(chosen.shape, bool), everywhere
        (samples, length, _), experts = everywhere.shape, p.shape[2]
        most = ceil(self.capacity * self.top_k * length / experts)
        choices = everywhere.reshape(samples, length * self.top_k, 1)
        queue = (choices == xp.arange(experts)).cumsum(axis=1)
        ranks = xp.take_along_axis(queue, choices, axis=2)  # of each choice in its expert's queue
        taken = (ranks <= most).reshape(everywhere.shape)
        if positions is not None:
            group = positions.group
            region = positions.placement.region(taken.shape, 1, group.size, group.rank)
            taken = region.take(taken)
        return chosen, taken, everywhere


class Experts(Function):
    """The sum over a row's experts of a probability times Linear - GELU (tanh form) - Linear.

    It is one operation with an inner graph, whose shapes depend on values.

    Args:
        gate: the gate's settings.
        ranks: the group that shards the experts, by `split`; None if this rank has all.
        exchange: the all-to-all of rows, `ops.collectives.AllToAll`.
        weight: returns the factor of the gradient of a sum over rows, called in each pass; None
            stands for a mean over these rows.
    """

    __slots__ = ("exchange", "gate", "positions", "ranks", "weight")

    traits = Traits(
        onnx=WRITTEN,
        tested_in="tests/nn/test_experts.py",
        # without regard to what exceeds an expert's capacity
        products=lambda f, y, x, p, w1, b1, w2, b2: (
            x.shape[0] * x.shape[1] * f.gate.top_k * (w1.size + w2.size) // len(w1)
        ),
    )

    computes = "float32"
    is_call = True

    def __init__(
        self, gate: Gate, ranks: Any, exchange: Any, weight: Callable[[], float | None]
    ) -> None:
        self.gate, self.ranks, self.exchange, self.weight = gate, ranks, exchange, weight
        self.positions: Shard | None = None

    def raised(self, inputs: tuple[Any, ...]) -> tuple[tuple[Any, ...], Dtype | None]:
        """See `Function.raised`; note the precision, which replays of the call may not find."""
        self.rounds = rounds_products(inputs[0]._data)
        return super().raised(inputs)

    def placed(self, *inputs: Any) -> Placement:
        """Compute a shard of the positions; only capacity and balance depend on the others."""
        shards = [item.shard for item in inputs[:2]]
        shard = next(filter(None, shards))
        if shard.axis != POSITIONS or not all(item and item.is_like(shard) for item in shards):
            raise shard.error(self, "needs all features of a row and their probabilities")
        self.positions = shard
        return shard.placement

    def forward(self, x: Array, p: Array, *weights: Array) -> Array:
        # leaves of the inner graph, whose gradients backward returns
        rows, gates = (Tensor(item, requires_grad=True) for item in (x, p))
        experts = [
            [Tensor(array, requires_grad=True) for array in arrays]
            for arrays in zip(*weights, strict=True)
        ]
        chosen, taken, everywhere = self.gate.choose(self.xp, p, self.positions)
        y = self._mix(rows, gates, experts, chosen, taken)
        self.saved = rows, gates, weights, experts, y, self._balance_grad(p, everywhere)
        return y._data

    def backward(self, grad: Array) -> Grads:
        x, p, weights, experts, y, balance_grad = self.saved
        grads: list[Array] = []
        for i, weight in enumerate(weights):
            full = self.into(2 + i)
            grads.append(self.xp.empty(weight.shape, weight.dtype) if full is None else full)
            grads[i][...] = 0
        x.grad = p.grad = None  # this may be a second backward pass, after retain_graph
        for number, leaves in enumerate(experts):
            for leaf, full in zip(leaves, grads, strict=True):
                leaf.grad, leaf.buffer = None, full[number]
        y.backward(grad, retain_graph=True)
        return (x.grad, p.grad + balance_grad, *grads)

    def _mix(
        self, x: Tensor, p: Tensor, experts: Sequence[Sequence[Tensor]], chosen: Array, taken: Array
    ) -> Tensor:
        xp, count, top_k = self.xp, p.shape[2], self.gate.top_k
        # The rows of each choice, sorted by expert; choices beyond the capacity sort last and are
        # left out.
        flat = xp.where(taken, chosen, count).reshape(-1)
        order = xp.argsort(flat, kind="stable")[: int(taken.sum())]
        rows = _pick(x.reshape(-1, x.shape[-1]), order // top_k)
        counts = [xp.bincount(flat, minlength=count + 1)[:count]]
        if self.ranks is not None:
            # Exchange the counts, then the rows. They arrive by sender: sort them by expert.
            parts = [counts[0][item.start : item.stop] for item in split(count, self.ranks.size)]
            shapes = [(len(experts),)] * len(parts)
            counts = self.ranks.all_to_all_v(parts, shapes, "how many rows", check=False)
            sends, receives = ([int(item.sum()) for item in some] for some in (parts, counts))
            kinds = xp.concatenate(
                [xp.repeat(xp.arange(len(experts)), item.tolist()) for item in counts]
            )
            by_expert = xp.argsort(kinds, kind="stable")
            rows = _pick(self.exchange(self.ranks, sends, receives)(rows), by_expert)
        # each expert computes all of its rows at once
        results, start = [rows[:0]], 0
        for (w1, b1, w2, b2), entry in zip(
            experts, np.sum([item.tolist() for item in counts], axis=0).tolist(), strict=True
        ):
            if entry:
                first, second = WideLinear(self.rounds), WideLinear(self.rounds)
                inner = gelu(first(rows[start : start + entry], w1, b1), "tanh")
                results.append(second(inner, w2, b2))
            start += entry
        out = concatenate(results)
        if self.ranks is not None:
            out = self.exchange(self.ranks, receives, sends)(_pick(out, xp.argsort(by_expert)))
        # the row of each choice's result; the appended row of zeros for choices beyond the capacity
        sources = xp.full(flat.shape, len(order))
        sources[order] = xp.arange(len(order))
        out = _pick(concatenate([out, Tensor(xp.zeros((1, x.shape[-1]), x.dtype))]), sources)
        numbers = xp.arange(len(flat)) // top_k * count + chosen.reshape(-1)
        mixed = out * _pick(p.reshape(-1, 1), numbers)
        return mixed.reshape(*x.shape[:2], top_k, x.shape[2]).sum(axis=2)

    def _balance_grad(self, p: Array, chosen: Array) -> Array:
        """Return the balancing loss's gradient with respect to the probabilities.

        The loss of a sample is experts * sum of f P, for an expert's share f of the choices and its
        mean probability P. As in the papers, f counts as constant: an expert chosen too often gets
        lower probabilities.
        """
        xp, (samples, positions, _), experts = self.xp, chosen.shape, p.shape[2]
        weight = self.weight() if self.gate.balance else 0.0
        weight = 1 / max(samples * positions, 1) if weight is None else weight
        chosen = chosen.reshape(samples, positions * self.gate.top_k, 1)
        counts = (chosen == xp.arange(experts)).sum(axis=1, keepdims=True, dtype=p.dtype)
        return counts * xp.asarray(
            self.gate.balance * weight * experts / max(chosen.shape[1], 1), p.dtype
        )


def _pick(rows: Tensor, numbers: Array) -> Tensor:
    return TableRows()(rows, numbers)
