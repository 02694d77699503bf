"""Experts: multilayer perceptrons of which each row takes the few that a gate gives it, on one rank or on several.

    rows of this rank        a b c d e            the gate has chosen     a 0, b 2, c 1, d 2, e 0
    by expert                a e | c | b d        and how many each expert gets: 2 1 2
    all-to-all               a e c -> rank 0, which has experts 0 and 1;  b d -> rank 1, which has expert 2
    each expert              its rows of all ranks, in one product
    all-to-all               results come back, and are added up in their rows, times the gate's probabilities

Backward, gradients go the same way. Elements that a rank sends in a layer, which has given n of its rows to experts of
other ranks (a row counts for each of its experts), and m rows of other ranks to its own, for F features:

    forward   n F there + m F back + a number for each expert of another rank           backward   n F + m F

Over all ranks of N that is 2 k T F (N - 1) / N each way where T rows take k experts each, dealt out evenly.

Shazeer et al., "Outrageously large neural networks", 2017; Fedus et al., "Switch transformers", 2021, for capacity and
balance; DeepSeek-AI, "DeepSeek-V3", 2024, section 2.1.2, for a balance within each sequence: a sum over sequences is
the same for any layout, as a product of means over the batch is not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np

from nnmpi.backend.array import Array, namespace
from nnmpi.ops.activation import gelu_in_place
from nnmpi.tensor.function import Function, Grads


@dataclass(frozen=True)
class Owners:
    """Which rank has which experts.

    Attributes:
        ranges: of experts, by rank.
        rank: this one.
        exchange: (a part for each rank, the shapes of what comes from each, a name) -> what comes: see `comm.group`.
    """

    ranges: Sequence[range]
    rank: int
    exchange: Callable[[Sequence[Array], Sequence[tuple[int, ...]], str], list[Array]]


@dataclass(frozen=True)
class Gate:
    """Which experts rows take.

    Attributes:
        top_k: how many each.
        capacity: how many rows of a sample an expert takes at most, beside an even share; None for any number.
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
            (samples, positions, top_k) integers, of equals the lower ones, and booleans: who comes late is turned away.
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


class Journey:
    """The way of rows, which lie expert by expert, to where their experts are, and back.

    Args:
        counts: (experts,) how many rows each gets from here.
        owners: of the experts; None where they are all here.

    Attributes:
        runs: of the rows that are here then, those of each expert.
    """

    def __init__(self, counts: Array, owners: Owners | None) -> None:
        self._owners, told = owners, [counts]
        if owners is not None:
            shape = (len(owners.ranges[owners.rank]),)
            parts = [counts[each.start : each.stop] for each in owners.ranges]
            told = owners.exchange(parts, [shape] * len(parts), "how many rows")
            self._sends = [int(each.sum()) for each in parts]
            self._receives = [int(each.sum()) for each in told]
            experts = np.concatenate([np.repeat(np.arange(len(each)), each.tolist()) for each in told])
            self._order = namespace(counts).asarray(np.argsort(experts, kind="stable"))
        stops = np.sum([each.tolist() for each in told], axis=0).cumsum().tolist()
        self.runs = [slice(start, stop) for start, stop in zip([0, *stops], stops, strict=False)]

    def go(self, rows: Array) -> Array:
        """Return the rows of the experts that are here, given this rank's rows. Collective."""
        return rows if self._owners is None else self._exchange(rows, self._sends, self._receives)[self._order]

    def come(self, rows: Array) -> Array:
        """Return what belongs to this rank's rows, given what belongs to those of the experts here. Collective."""
        if self._owners is None:
            return rows
        theirs = namespace(rows).empty_like(rows)
        theirs[self._order] = rows
        return self._exchange(theirs, self._receives, self._sends)

    def _exchange(self, rows: Array, sends: Sequence[int], receives: Sequence[int]) -> Array:
        assert self._owners is not None
        parts = namespace(rows).split(rows, np.cumsum(sends[:-1]).tolist())
        shapes = [(count, *rows.shape[1:]) for count in receives]
        return namespace(rows).concatenate(self._owners.exchange(parts, shapes, "all-to-all"))


class Experts(Function):
    """The sum over a row's experts of a probability times Linear - GELU (tanh form) - Linear.

    It is one operation, as which rows an expert gets depends on values: a recorded step comes here each time.

    Args:
        gate: chooses.
        owners: of the experts; None where they are all here.
        weight: what the gradient of a sum over rows is multiplied by, asked in each pass; None for a mean over these.
    """

    __slots__ = ("gate", "owners", "probabilities", "weight")

    def __init__(self, gate: Gate, owners: Owners | None, weight: Callable[[], float | None]) -> None:
        self.gate, self.owners, self.weight = gate, owners, weight

    def forward(self, x: Array, p: Array, w1: Array, b1: Array, w2: Array, b2: Array) -> Array:
        xp, top_k, (*_, experts) = self.xp, self.gate.top_k, p.shape
        self.probabilities = p.shape
        rows = x.reshape(-1, x.shape[-1])
        chosen, taken = self.gate.choose(xp, p)
        flat = xp.where(taken, chosen, experts).reshape(-1)  # who is turned away stands behind the last expert
        order = xp.argsort(flat, kind="stable")[: int(taken.sum())]
        places = xp.full(flat.shape, len(order))  # of each choice among the sorted ones, or of a row of zeros
        places[order] = xp.arange(len(order))
        tokens = order // top_k
        journey = Journey(xp.bincount(flat, minlength=experts + 1)[:experts], self.owners)
        here = journey.go(rows[tokens])
        hidden, out = xp.empty((len(here), w1.shape[2]), x.dtype), xp.empty_like(here)
        slopes = xp.empty_like(hidden)
        for i, run in enumerate(journey.runs):
            inner = xp.ascontiguousarray(here[run] @ w1[i])
            if inner.size:
                slopes[run] = gelu_in_place(xp, inner, b1[i], True, True)
            hidden[run] = inner
            out[run] = inner @ w2[i] + b2[i]
        places = places.reshape(-1, top_k)
        results = _with_zeros(xp, journey.come(out))[places]  # (rows, top_k, features)
        factors = xp.take_along_axis(p, chosen, axis=2).reshape(places.shape)
        pushed = self._pushed(xp, p, chosen) if self.gate.balance else None
        self.saved = (
            (journey, tokens, order, places, chosen),
            (here, hidden, slopes, w1, w2),
            (results, factors, pushed),
        )
        return (results * factors[..., None]).sum(axis=1).reshape(x.shape)

    def backward(self, grad: Array) -> Grads:
        (journey, tokens, order, places, chosen), (here, hidden, slopes, w1, w2), own = self.saved
        results, factors, pushed = own
        xp, rows = self.xp, grad.reshape(-1, grad.shape[-1])
        to_out = journey.go(rows[tokens] * factors.reshape(-1)[order][:, None])
        to_here = xp.empty_like(here)
        to_w1, to_w2 = xp.zeros(w1.shape, w1.dtype), xp.zeros(w2.shape, w2.dtype)
        to_b1, to_b2 = (xp.zeros((len(each), each.shape[2]), each.dtype) for each in (w1, w2))
        for i, run in enumerate(journey.runs):
            inner = (to_out[run] @ w2[i].T) * slopes[run]
            to_w2[i], to_b2[i] = hidden[run].T @ to_out[run], to_out[run].sum(axis=0)
            to_w1[i], to_b1[i] = here[run].T @ inner, inner.sum(axis=0)
            to_here[run] = inner @ w1[i].T
        to_x = _with_zeros(xp, journey.come(to_here))[places].sum(axis=1).reshape(grad.shape)
        to_p = xp.zeros(self.probabilities, grad.dtype)
        xp.put_along_axis(to_p, chosen, (results * rows[:, None]).sum(axis=2).reshape(chosen.shape), axis=2)
        if pushed is not None:
            to_p += pushed
        return to_x, to_p, to_w1, to_b1, to_w2, to_b2

    def _pushed(self, xp: Any, p: Array, chosen: Array) -> Array:
        """Return the balance's gradient: of experts times a choice's share times its probabilities in a sample.

        The share has no slope, as in the papers: an expert that is chosen too often gets lower probabilities.
        """
        samples, positions, experts = p.shape
        weight = self.weight()
        weight = 1 / max(samples * positions, 1) if weight is None else weight
        shares = (chosen.reshape(samples, positions * self.gate.top_k, 1) == xp.arange(experts)).mean(
            axis=1, dtype=p.dtype
        )
        return (self.gate.balance * weight * experts) * xp.broadcast_to(shares[:, None], p.shape)


def _with_zeros(xp: Any, rows: Array) -> Array:
    """Return rows with one of zeros behind them."""
    return xp.concatenate([rows, xp.zeros((1, rows.shape[1]), rows.dtype)])
