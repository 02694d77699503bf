"""Mixture of experts: a gate sends each row to a few MLPs, on one rank or on several.

    rows of this rank        a b c d e            the gate has chosen     a 0, b 2, c 1, d 2, e 0
    by expert                a e | c | b d        and how many each expert gets: 2 1 2
    all-to-all               a e c -> rank 0, which has experts 0 and 1;  b d -> rank 1, which has expert 2
    each expert              its rows of all ranks, in one product
    all-to-all               results come back, and are added up in their rows, times the gate's
                             probabilities

Backward, gradients go the same way. Elements that a rank sends in a layer, which has given n of its
rows to experts of other ranks (a row counts for each of its experts), and m rows of other ranks to
its own, for F features:

    forward   n F there + m F back + a number for each expert of another rank   backward   n F + m F

Over all ranks of N that is 2 k T F (N - 1) / N each way where T rows take k experts each, dealt out
evenly.

Shazeer et al., "Outrageously large neural networks", 2017; Fedus et al., "Switch transformers",
2021, for capacity and balance; DeepSeek-AI, "DeepSeek-V3", 2024, section 2.1.2, for a balance
within each sequence: a sum over sequences is the same for any layout, as a product of means over
the batch is not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np

from nnmpi.backend.array import Array
from nnmpi.ops.activation import LinearGeluFunction
from nnmpi.ops.embedding import EmbeddingFunction
from nnmpi.ops.linear import LinearFunction
from nnmpi.shard import split
from nnmpi.tensor.function import Function, Grads
from nnmpi.tensor.tensor import Tensor, concatenate


@dataclass(frozen=True)
class Gate:
    """Which experts rows take.

    Attributes:
        top_k: how many each.
        capacity: how many rows of a sample an expert takes at most, beside an even share; None for
            any number.
        balance: the weight of what keeps experts evenly used.
    """

    top_k: int
    capacity: float | None
    balance: float

    def choose(self, xp: Any, p: Array) -> tuple[Array, Array]:
        """Return the experts of each row, and whether each takes it.

        Args:
            p: (samples, positions, experts), probabilities.

        Returns:
            (samples, positions, top_k) integers, of ties the lower ones, and booleans: who comes
            late is turned away.
        """
        _, positions, experts = p.shape
        chosen = xp.argsort(-p, axis=2, kind="stable")[:, :, : self.top_k]
        if self.capacity is None:
            return chosen, xp.ones(chosen.shape, bool)
        most = ceil(self.capacity * self.top_k * positions / experts)
        choices = chosen.reshape(len(p), positions * self.top_k, 1)
        queue = (choices == xp.arange(experts)).cumsum(axis=1)
        places = xp.take_along_axis(queue, choices, axis=2)
        return chosen, (places <= most).reshape(chosen.shape)


class Experts(Function):
    """The sum over a row's experts of a probability times Linear - GELU (tanh form) - Linear.

    It is one operation, with a graph of its own inside, as which rows an expert gets depends on
    values: a recorded step comes here each time.

    Args:
        gate: chooses.
        ranks: a group of those that have some of the experts each, dealt out by `split`; None where
            they are all here.
        exchange: of their rows: `ops.collectives.AllToAll`.
        weight: what the gradient of a sum over rows is multiplied by, asked in each pass; None for
            a mean over these.
    """

    __slots__ = ("exchange", "gate", "ranks", "weight")

    def __init__(
        self, gate: Gate, ranks: Any, exchange: Any, weight: Callable[[], float | None]
    ) -> None:
        self.gate, self.ranks, self.exchange, self.weight = gate, ranks, exchange, weight

    def forward(self, x: Array, p: Array, *weights: Array) -> Array:
        local, gates = (Tensor(item, requires_grad=True) for item in (x, p))
        experts = [
            [Tensor(array, requires_grad=True) for array in arrays]
            for arrays in zip(*weights, strict=True)
        ]
        chosen, taken = self.gate.choose(self.xp, p)
        y = self._mix(local, gates, experts, chosen, taken)
        self.saved = local, gates, weights, experts, y, self._pushed(p, chosen)
        return y.data

    def backward(self, grad: Array) -> Grads:
        x, p, weights, experts, y, pushed = self.saved
        grads = [self.xp.zeros(weight.shape, weight.dtype) for weight in weights]
        x.grad = p.grad = None  # it may be a graph's second backward pass
        for number, leaves in enumerate(experts):
            for leaf, full in zip(leaves, grads, strict=True):
                leaf.grad, leaf.buffer = None, full[number]
        y.backward(grad, retain_graph=True)
        return (x.grad, p.grad + pushed, *grads)

    def _mix(
        self, x: Tensor, p: Tensor, experts: Sequence[Sequence[Tensor]], chosen: Array, taken: Array
    ) -> Tensor:
        xp, count, top_k = self.xp, p.shape[2], self.gate.top_k
        # who is turned away stands behind the last expert
        flat = xp.where(taken, chosen, count).reshape(-1)
        order = xp.argsort(flat, kind="stable")[: int(taken.sum())]
        rows = _pick(x.reshape(-1, x.shape[-1]), order // top_k)
        counts = [xp.bincount(flat, minlength=count + 1)[:count]]
        if self.ranks is not None:
            parts = [counts[0][item.start : item.stop] for item in split(count, self.ranks.size)]
            counts = self.ranks.all_to_all_v(parts, [(len(experts),)] * len(parts), "how many rows")
            sends, receives = ([int(item.sum()) for item in some] for some in (parts, counts))
            kinds = xp.concatenate(
                [xp.repeat(xp.arange(len(experts)), item.tolist()) for item in counts]
            )
            there = xp.argsort(kinds, kind="stable")
            rows = _pick(self.exchange(self.ranks, sends, receives)(rows), there)
        results, start = [rows[:0]], 0
        for (w1, b1, w2, b2), entry in zip(
            experts, np.sum([item.tolist() for item in counts], axis=0).tolist(), strict=True
        ):
            if entry:
                inner = LinearGeluFunction(True, None)(rows[start : start + entry], w1, b1)
                results.append(LinearFunction(None)(inner, w2, b2))
            start += entry
        out = concatenate(results)
        if self.ranks is not None:
            out = self.exchange(self.ranks, receives, sends)(_pick(out, xp.argsort(there)))
        # of each choice among the sorted ones, or of a row of zeros
        places = xp.full(flat.shape, len(order))
        places[order] = xp.arange(len(order))
        out = _pick(concatenate([out, Tensor(xp.zeros((1, x.shape[-1]), x.dtype))]), places)
        numbers = xp.arange(len(flat)) // top_k * count + chosen.reshape(-1)
        mixed = out * _pick(p.reshape(-1, 1), numbers)
        return mixed.reshape(*x.shape[:2], top_k, x.shape[2]).sum(axis=2)

    def _pushed(self, p: Array, chosen: Array) -> Array:
        """Return the balance's gradient: of experts times a choice's share times its probabilities
        in a sample.

        The share has no slope, as in the papers: an expert that is chosen too often gets lower
        probabilities.
        """
        xp, (samples, positions, experts) = self.xp, p.shape
        weight = self.weight() if self.gate.balance else 0.0
        weight = 1 / max(samples * positions, 1) if weight is None else weight
        chosen = chosen.reshape(samples, positions * self.gate.top_k, 1)
        counts = (chosen == xp.arange(experts)).sum(axis=1, keepdims=True, dtype=p.dtype)
        return counts * xp.asarray(
            self.gate.balance * weight * experts / max(chosen.shape[1], 1), p.dtype
        )


def _pick(rows: Tensor, numbers: Array) -> Tensor:
    return EmbeddingFunction(rows.dtype)(rows, numbers)
