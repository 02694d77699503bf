"""One stage of a program: forward and backward of microbatches, and their saved values in between.

    forward(m)    leaves --> layers --> outputs
    backward(m)   leaves <-- layers <-- outputs

Between the two, the graph of microbatch m stays in memory, or only its leaves if the stage
recomputes (Chen et al., "Training deep nets with sublinear memory cost", 2016).

An uncut model is a program of one stage. A stage sends nothing and does not depend on the schedule.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np

import nnmpi.base.clock as clock
from nnmpi.backend.array import Array, namespace
from nnmpi.backend.backend import Backend
from nnmpi.backend.recording import active
from nnmpi.memory.store import (
    SavedArrays,
    Store,
    operations_of,
    owner_id,
    saved_memory,
    weights_of,
)
from nnmpi.nn.chain import ChainLayer, join_layers, run_layers, unpack
from nnmpi.parallel.pipeline.boundary import BoundaryArrays, pack
from nnmpi.tensor.backward import Deferred
from nnmpi.tensor.function import CommonRoot
from nnmpi.tensor.operand import values_or_refuse
from nnmpi.tensor.tensor import Tensor
from nnmpi.tensor.turns import graph_alone

Head: TypeAlias = Callable[[Tensor, int], Tensor]
Outputs: TypeAlias = tuple[list[Tensor], bool]
RunStage: TypeAlias = Callable[[Sequence[Tensor], bool, int], Outputs]


def run_chain(
    number: int, layers: Sequence[ChainLayer], names: Sequence[str], head: Head | None
) -> RunStage:
    """Return a function that runs some layers of a chain as a stage.

    Args:
        number: of the stage, for messages.
        layers: see `nn.chain`.
        names: of the stashed values at its beginning, sorted.
        head: on the last stage: (result, microbatch) -> the stage's output.
    """
    joined = join_layers(layers)

    def run(tensors: Sequence[Tensor], single: bool, microbatch: int) -> Outputs:
        x, stashed = unpack(tensors, single, names)
        x = run_layers(layers, joined, x, stashed)
        return pack(x, stashed, number) if head is None else ([head(x, microbatch)], True)

    return run


@dataclass
class _InFlight:
    """A microbatch between its forward and its backward: `outputs` is None if it is recomputed."""

    leaves: list[Tensor]
    single: bool
    outputs: list[Tensor] | None


class StageCost(NamedTuple):
    """What a microbatch costs a stage, the largest one.

    Attributes:
        inputs: bytes of its inputs, which it holds from the forward to the backward.
        inner: bytes of what else its operations save.
        outputs: bytes of its outputs, without inputs.
        seconds: of a recomputation.
    """

    inputs: float = 0
    inner: float = 0
    outputs: float = 0
    seconds: float = 0.0


class Stage:
    """Computes a part of a model for one microbatch after another.

    Args:
        run: (inputs, whether x is a single one, microbatch) -> the outputs, and whether x is a
            single one there.
        scope: (microbatch, again) -> the mode for its forward; `again` for a recomputation.
        is_last: whether the outputs are the model's, and go to no other stage.
        recompute: whether only a microbatch's input is kept, and the rest computed again.
        is_cut: whether it is one of several stages.

    Attributes:
        recomputes: as given; it may change between passes.
        measures: whether backward passes measure their microbatches.
        cost: the largest measured one.
    """

    def __init__(
        self,
        run: RunStage,
        scope: Callable[[int, bool], AbstractContextManager[Any]],
        is_last: bool = True,
        recompute: bool = False,
        is_cut: bool = False,
    ) -> None:
        self._alone = graph_alone if is_cut else nullcontext
        self.run, self._scope, self._is_last = run, scope, is_last
        self.recomputes = recompute
        self.measures, self.cost = False, StageCost()
        self._in_flight: dict[int, _InFlight] = {}
        self._halves: dict[int, Deferred] = {}
        self._away: dict[int, SavedArrays] = {}

    @property
    def live(self) -> int:
        """The number of microbatches whose activations are in memory."""
        return len(self._in_flight) + len(self._halves)

    def outputs(self, microbatch: int) -> Sequence[Tensor]:
        """Return the outputs of a microbatch in flight, if they are in memory."""
        flight = self._in_flight.get(microbatch)
        return () if flight is None else flight.outputs or ()

    def forward(self, microbatch: int, values: BoundaryArrays, keep: bool = True) -> BoundaryArrays:
        """Return the stage's output for one microbatch; empty on the last stage.

        Args:
            microbatch: its number.
            values: the stage's input.
            keep: whether a backward will follow.
        """
        with self._alone(), self._scope(microbatch, False):
            leaves = [
                Tensor(array, requires_grad=need)
                for array, need in zip(values.arrays, values.needs, strict=True)
            ]
            outputs, single = self._run(microbatch, leaves, values.single)
        if keep:
            self._in_flight[microbatch] = _InFlight(
                leaves, values.single, None if self.recomputes else outputs
            )
        if self._is_last:
            return BoundaryArrays((), ())
        arrays = tuple(values_or_refuse("the end of a stage", y) for y in outputs)
        return BoundaryArrays(arrays, tuple(y.requires_grad for y in outputs), single)

    def backward(
        self, microbatch: int, grads: Sequence[Array], halves: bool = False
    ) -> list[Array]:
        """Return the gradients of the inputs that need one, and add to the parameters' gradients.

        Args:
            microbatch: its number; its forward ran with `keep`.
            grads: of the outputs that need one; on the last stage, of the head's scalar.
            halves: whether the parameters' gradients are left to `finish` (see `schedule`, zero
                bubble).
        """
        if microbatch in self._away:
            self._away.pop(microbatch).wait()
        flight, begin = self._in_flight.pop(microbatch), clock.now()
        if self.recomputes:
            with self._alone(), self._scope(microbatch, True):
                flight.outputs, _ = self._run(microbatch, flight.leaves, flight.single)
        outputs, flight.outputs = flight.outputs, None
        assert outputs is not None
        if self.measures:
            cost = _cost(flight.leaves, outputs, (clock.now() - begin) * self.recomputes)
            self.cost = StageCost(*map(max, self.cost, cost))
        _mark_as_inputs(flight.leaves)  # a leaf that passes through the stage is an output, too
        deferred = Deferred() if halves else None
        # the loss always has a backward, so that one that needs no gradient raises here
        differentiable = outputs if self._is_last else [y for y in outputs if y.requires_grad]
        with self._alone():
            if len(differentiable) == 1:
                differentiable[0].backward(grads[0], deferred=deferred)
            elif differentiable:
                CommonRoot(grads)(*differentiable).backward(np.zeros(()), deferred=deferred)
        if deferred is not None:
            self._halves[microbatch] = deferred
        grads_back = [_take_grad(leaf) for leaf in flight.leaves if leaf.requires_grad]
        for leaf in flight.leaves:
            # the recording refers to the leaf, and must not keep its values alive
            leaf.data = np.broadcast_to(np.zeros((), leaf.data.dtype), leaf.data.shape)
        recorder = active()
        if recorder is not None:
            recorder.loose.clear()  # the leaves' gradients, which are sent as copies
        return grads_back

    def finish(self, microbatch: int) -> None:
        """Compute the parameters' gradients of a halved backward."""
        half = self._halves.pop(microbatch, None)
        if half is not None:
            half.finish()

    def send_out(self, microbatch: int, store: Store, backend: Backend) -> None:
        """Start to move what a microbatch saved to a store, without its inputs and outputs."""
        flight = self._in_flight[microbatch]
        assert flight.outputs is not None
        nodes, ends = operations_of(flight.outputs), [*flight.leaves, *flight.outputs]
        arrays = SavedArrays(nodes, [*weights_of(nodes), *(x.data for x in ends)], backend)
        arrays.send(store)
        self._away[microbatch] = arrays

    def drop(self, microbatch: int) -> None:
        """Free the memory of what was sent, once it has arrived."""
        self._away[microbatch].release()

    def bring_in(self, microbatch: int) -> None:
        """Start to move it back, for the backward."""
        self._away[microbatch].fetch()

    def clear(self) -> None:
        """Drop all microbatches, after a pass that ended early."""
        self._away.clear()
        self._in_flight.clear()
        self._halves.clear()

    def _run(self, microbatch: int, leaves: list[Tensor], single: bool) -> Outputs:
        _mark_as_inputs(leaves)
        return self.run(leaves, single, microbatch)


def _cost(leaves: Sequence[Tensor], outputs: Sequence[Tensor], seconds: float) -> StageCost:
    """Return the cost of a microbatch, from its graph."""
    nodes = operations_of(outputs)
    saved = saved_memory(nodes, weights_of(nodes))
    inputs, ends = (
        {owner_id(x.data): x.data.nbytes for x in tensors} for tensors in (leaves, outputs)
    )
    inner = sum(saved[owner] for owner in saved.keys() - inputs.keys() - ends.keys())
    new = sum(ends[owner] for owner in ends.keys() - inputs.keys())
    return StageCost(sum(inputs.values()), inner, new, seconds)


def _mark_as_inputs(leaves: Sequence[Tensor]) -> None:
    """Mark these leaves as inputs of a recording: each replay has other values."""
    recorder = active()
    if recorder is not None:
        recorder.made.update(leaves)


def _take_grad(leaf: Tensor) -> Array:
    grad, leaf.grad = leaf._grad, None
    if grad is None:  # no output depends on the leaf
        return namespace(leaf.data).zeros_like(leaf.data)
    return grad
