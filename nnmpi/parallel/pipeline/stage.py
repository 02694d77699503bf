"""What one pipeline stage computes: forward and backward of microbatches, and what is kept between the two.

    forward(m)    leaves --> links --> ends          the graph of microbatch m waits here, or only its leaves, if the
    backward(m)   leaves <-- links <-- ends          stage recomputes (Chen et al., "Training deep nets with sublinear
                                                     memory cost", 2016)

A stage sends nothing and does not know the schedule: boundary and executor do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from nnmpi.backend.array import Array, namespace
from nnmpi.nn.chain import ChainLink, join_links, run_links
from nnmpi.parallel.pipeline.boundary import BoundaryArrays, pack, unpack
from nnmpi.tensor.function import Function
from nnmpi.tensor.operand import whole_values
from nnmpi.tensor.tape import Deferred
from nnmpi.tensor.tensor import Tensor

Head: TypeAlias = Callable[[Tensor, int], Tensor]
Scope: TypeAlias = Callable[[int, bool], AbstractContextManager[None]]


@dataclass
class _InFlight:
    """A microbatch between its forward and its backward: `ends` is None where they are to be computed again."""

    leaves: list[Tensor]
    single: bool
    ends: list[Tensor] | None


class CommonRoot(Function):
    """One root for a backward pass from several tensors, whose gradients are given. Its own value means nothing."""

    __slots__ = ("grads",)

    def __init__(self, grads: Sequence[Array | None]) -> None:
        self.grads = tuple(grads)

    def forward(self, *inputs: Array) -> Array:
        zero: Array = namespace(inputs[0]).zeros((), dtype=inputs[0].dtype)
        return zero

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        return self.grads


class Stage:
    """Computes some links of a chain for one microbatch after another.

    Args:
        number: of the stage, for messages.
        links: see `nn.chain`.
        names: of the kept values at its beginning, sorted.
        scope: (microbatch, again) -> the mode to run in; `again` where a forward is repeated.
        head: on the last stage: (result, microbatch) -> the scalar whose gradient is wanted.
        recompute: microbatch -> whether only its input is kept, and the rest computed again.
        shared: (tensor, enters) -> the tensor marked as a part of what other ranks share with this one, at the stage's
            beginning, and unmarked, at its end (see `parallel.sequence`); None where nothing is.
    """

    def __init__(
        self,
        number: int,
        links: Sequence[ChainLink],
        names: Sequence[str],
        scope: Scope,
        head: Head | None = None,
        recompute: Callable[[int], bool] = lambda microbatch: False,
        shared: Callable[[Tensor, bool], Tensor] | None = None,
    ) -> None:
        self.number, self.links, self.head = number, tuple(links), head
        self._joined = join_links(links)
        self._names, self._scope, self._recompute, self._shared = tuple(names), scope, recompute, shared
        self._in_flight: dict[int, _InFlight] = {}
        self._halves: dict[int, Deferred] = {}

    @property
    def live(self) -> int:
        """The number of microbatches whose activations are kept now."""
        return len(self._in_flight) + len(self._halves)

    def holds(self, microbatch: int) -> list[Array]:
        """Return the arrays at the stage's ends that a microbatch keeps between its forward and its backward."""
        flight = self._in_flight.get(microbatch)
        return [] if flight is None else [each.data for each in (*flight.leaves, *(flight.ends or ()))]

    def forward(self, microbatch: int, values: BoundaryArrays, keep: bool = True) -> BoundaryArrays:
        """Return the stage's result for one microbatch.

        Args:
            microbatch: its number.
            values: the stage's input.
            keep: whether a backward will follow.
        """
        leaves = [Tensor(array, requires_grad=need) for array, need in zip(values.arrays, values.needs, strict=True)]
        ends, single = self._run(microbatch, leaves, values.single, again=False)
        if keep:
            repeat = self._recompute(microbatch)
            self._in_flight[microbatch] = _InFlight(leaves, values.single, None if repeat else ends)
        return BoundaryArrays(
            tuple(whole_values("the end of a stage", end) for end in ends),
            tuple(end.requires_grad for end in ends),
            single,
        )

    def backward(self, microbatch: int, grads: Sequence[Array], halves: bool = False) -> list[Array]:
        """Return the gradients of the inputs that need one, and add to the parameters' gradients.

        Args:
            microbatch: its number; its forward was done with `keep`.
            grads: of the results that need one; on the last stage that of the head's scalar.
            halves: whether the parameters' gradients are left to `finish` (see `schedule`, zero bubble).
        """
        flight = self._in_flight.pop(microbatch)
        ends = flight.ends
        if ends is None:
            ends, _ = self._run(microbatch, flight.leaves, flight.single, again=True)
        deferred = Deferred() if halves else None
        needing = [end for end in ends if end.requires_grad]
        if len(needing) == 1:
            needing[0].backward(grads[0], deferred=deferred)
        elif needing:
            CommonRoot(grads)(*needing).backward(np.zeros(()), deferred=deferred)
        if deferred is not None:
            self._halves[microbatch] = deferred
        return [_take_grad(leaf) for leaf in flight.leaves if leaf.requires_grad]

    def finish(self, microbatch: int) -> None:
        """Compute the parameters' gradients of a backward in halves."""
        self._halves.pop(microbatch).finish()

    def clear(self) -> None:
        """Forget all microbatches, after a pass that broke off."""
        self._in_flight.clear()
        self._halves.clear()

    def _run(self, microbatch: int, leaves: list[Tensor], single: bool, again: bool) -> tuple[list[Tensor], bool]:
        with self._scope(microbatch, again):
            shared = self._shared
            if shared is not None:
                leaves = [shared(leaf, True) for leaf in leaves]
            x, kept = unpack(leaves, single, self._names)
            x = run_links(self.links, self._joined, x, kept)
            if self.head is not None:
                return [self.head(x if shared is None else shared(x, False), microbatch)], True
            ends, single = pack(x, kept, self.number)
            return ends if shared is None else [shared(end, False) for end in ends], single


def _take_grad(leaf: Tensor) -> Array:
    """Return a leaf's gradient, which operations that wait for their second half then keep no more."""
    grad, leaf.grad = leaf.grad, None
    if grad is None:  # nothing depends on it after all
        zeros: Array = namespace(leaf.data).zeros_like(leaf.data)
        return zeros
    return grad
