"""A stage of a program, and a microbatch's flight through it: its forward, then its backward.

    forward     leaves --> layers --> outputs
    backward    leaves <-- layers <-- outputs

Between the two, the graph of the microbatch stays in memory, or only its leaves if the stage
recomputes (Chen et al., "Training deep nets with sublinear memory cost", 2016).

An uncut model is a program of one stage. A stage sends nothing and does not depend on the schedule.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np

import nnmpi.base.clock as clock
from nnmpi.backend.array import Array, namespace
from nnmpi.backend.backend import Backend
from nnmpi.backend.memory import Meter
from nnmpi.backend.recording import active
from nnmpi.memory.fitting import StageCost
from nnmpi.memory.store import (
    SavedArrays,
    Store,
    arrays_of,
    operations_of,
    owner_id,
    saved_memory,
    weights_of,
)
from nnmpi.nn.chain import ChainLayer, run_layers, unpack
from nnmpi.parallel.pipeline.boundary import BoundaryArrays, pack
from nnmpi.tensor.backward import Deferred
from nnmpi.tensor.function import CommonRoot
from nnmpi.tensor.operand import values_or_refuse
from nnmpi.tensor.parameter import Parameter
from nnmpi.tensor.tensor import Tensor
from nnmpi.tensor.turns import graph_alone

Outputs: TypeAlias = tuple[list[Tensor], bool]


class Visit(NamedTuple):
    """How a microbatch is computed.

    Attributes:
        mode: (recomputing) -> the mode for a forward; `recomputing` for a recomputation.
        end: the model's result -> the last stage's output.
        length: of full sequences, if this rank has only some of their positions.
        size: the elements of the global batch.
        adds: whether it has several microbatches, whose gradients are added up.
    """

    mode: Callable[[bool], AbstractContextManager[Any]]
    end: Callable[[Tensor], Tensor]
    length: int = 0
    size: int = 0
    adds: bool = False


RunStage: TypeAlias = Callable[[Sequence[Tensor], bool, Visit], Outputs]


def run_chain(
    number: int, layers: Sequence[ChainLayer], names: Sequence[str], is_last: bool
) -> RunStage:
    """Return a function that runs some layers of a chain as a stage.

    Args:
        number: of the stage, for messages.
        layers: see `nn.chain`.
        names: of the stashed values at its beginning, sorted.
        is_last: whether the layers' result is the model's.
    """

    def run(tensors: Sequence[Tensor], single: bool, visit: Visit) -> Outputs:
        x, stashed = unpack(tensors, single, names)
        x = run_layers(layers, x, stashed)
        return ([visit.end(x)], True) if is_last else pack(x, stashed, number)

    return run


def run_whole(model: Callable[..., Any]) -> RunStage:
    """Return a function that runs a model that is not cut as a stage."""
    return lambda tensors, single, visit: ([visit.end(model(*tensors))], True)


@dataclass
class Stage:
    """A part of a model that this rank computes.

    Attributes:
        run: (inputs, whether x is a single one, visit) -> the outputs, and whether x is a single
            one there.
        is_last: whether the outputs are the model's, and go to no other stage.
        recomputes: whether only a microbatch's input is kept, and the rest computed again; it may
            change between passes.
        is_cut: whether it is one of several stages.
        base: the weights that adapters change, which operations save and no pass allocates.
    """

    run: RunStage
    is_last: bool = True
    recomputes: bool = False
    is_cut: bool = False
    base: Sequence[Parameter] = ()


class Flight:
    """A microbatch in a stage, from its forward to its backward.

    Args:
        stage, visit: where, and how.
        meter: measures the `cost`, if there is one.

    Attributes:
        outputs: the stage's, if they are in memory.
        cost: of the microbatch, once its backward has ended.
    """

    def __init__(self, stage: Stage, visit: Visit, meter: Meter | None = None) -> None:
        self._stage, self._visit, self._meter = stage, visit, meter
        self._alone = graph_alone if stage.is_cut else nullcontext
        self._leaves: list[Tensor] = []
        self._single = True
        self.outputs: Sequence[Tensor] = ()
        self._half: Deferred | None = None
        self._away: SavedArrays | None = None
        self.cost = StageCost()

    def forward(self, values: BoundaryArrays) -> BoundaryArrays:
        """Return the stage's output; empty on the last stage.

        Args:
            values: the stage's input.
        """
        self._leaves = [
            Tensor(array, requires_grad=need)
            for array, need in zip(values.arrays, values.needs, strict=True)
        ]
        self._single = values.single
        outputs, single = self._run(self._leaves, False)
        if not self._stage.recomputes:
            self.outputs = outputs
        if self._stage.is_last:
            return BoundaryArrays((), ())
        arrays = tuple(values_or_refuse("the end of a stage", y) for y in outputs)
        return BoundaryArrays(arrays, tuple(y.requires_grad for y in outputs), single)

    def _run(self, leaves: list[Tensor], recomputing: bool) -> Outputs:
        _mark_as_inputs(leaves)
        begin, run = clock.now(), partial(self._stage.run, leaves, self._single, self._visit)
        with self._alone(), self._visit.mode(recomputing):
            if self._meter is None:
                return run()
            result, most, left = self._meter.measure(run)
        cost = _cost(leaves, result[0], (clock.now() - begin) * recomputing, self._stage.base)
        known = cost.inner + cost.outputs
        # of a plan, whose layers have graphs of their own
        self._unknown = max(0, left - known)
        self.cost = cost._replace(work=max(0, most - known))
        return result

    def backward(self, grads: Sequence[Array], halves: bool = False) -> list[Array]:
        """Return the gradients of the inputs that need one, and add to the parameters' gradients.

        Args:
            grads: of the outputs that need one; on the last stage, of the end's scalar.
            halves: whether the parameters' gradients are left to `finish` (see `schedule`, zero
                bubble).
        """
        away, self._away = self._away, None
        if away is not None:
            away.wait()
        stage, outputs = self._stage, self.outputs
        leaves, self._leaves, self.outputs = self._leaves, [], ()
        if stage.recomputes:
            outputs, _ = self._run(leaves, True)
        _mark_as_inputs(leaves)  # a leaf that passes through the stage is an output, too
        deferred = Deferred() if halves else None
        # the loss always has a backward, so that one that needs no gradient raises here
        differentiable = outputs if stage.is_last else [y for y in outputs if y.requires_grad]
        back: Callable[[], object] = int
        if len(differentiable) == 1:
            back = partial(differentiable[0].backward, grads[0], deferred=deferred)
        elif differentiable:
            root = CommonRoot(grads)(*differentiable)
            back = partial(root.backward, np.zeros(()), deferred=deferred)
        with self._alone():
            if self._meter is None:
                back()
            else:
                _, most, left = self._meter.measure(back)
                work = most + self._unknown + sum(grad.nbytes for grad in grads)
                self.cost = self.cost._replace(work=max(self.cost.work, work))
        self._half = deferred
        grads_back = [_take_grad(leaf) for leaf in leaves if leaf.requires_grad]
        if halves and self._meter is not None:
            sent = sum(grad.nbytes for grad in grads_back)
            self.cost = self.cost._replace(deferred=left - sent)
        for leaf in leaves:
            # the recording refers to the leaf, and must not keep its values alive
            leaf._data = np.broadcast_to(np.zeros((), leaf._data.dtype), leaf._data.shape)
        recorder = active()
        if recorder is not None:
            recorder.loose.clear()  # the leaves' gradients, which are sent as copies
        return grads_back

    def finish(self) -> None:
        """Compute the parameters' gradients of a halved backward."""
        half, self._half = self._half, None
        if half is not None and self._meter is not None:
            _, most, _ = self._meter.measure(half.finish)
            self.cost = self.cost._replace(finishing=most)
        elif half is not None:
            half.finish()

    def send_out(self, store: Store, backend: Backend) -> None:
        """Start to move what the microbatch saved to a store, without its inputs and outputs."""
        nodes, ends = operations_of(self.outputs), [*self._leaves, *self.outputs]
        weights = [*weights_of(nodes), *arrays_of(self._stage.base)]
        self._away = SavedArrays(nodes, [*weights, *(x._data for x in ends)], backend)
        self._away.send(store)

    def drop(self) -> None:
        """Free the memory of what was sent, once it has arrived."""
        assert self._away is not None
        self._away.release()

    def bring_in(self) -> None:
        """Start to move it back, for the backward."""
        assert self._away is not None
        self._away.fetch()


def _cost(
    leaves: Sequence[Tensor],
    outputs: Sequence[Tensor],
    seconds: float,
    base: Sequence[Parameter],
) -> StageCost:
    """Return the cost of a microbatch, from its graph."""
    nodes = operations_of(outputs)
    saved = saved_memory(nodes, [*weights_of(nodes), *arrays_of(base)])
    inputs, ends = (
        {owner_id(x._data): x._data.nbytes for x in tensors} for tensors in (leaves, outputs)
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
        return namespace(leaf._data).zeros_like(leaf._data)
    return grad
