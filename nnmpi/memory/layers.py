"""The layers of a chain one by one: each run with a graph of its own, and measured.

    Sequential(conv, relu, pool, Residual(..), Sequential(c, d))

        0: conv, relu, pool     computed as one      1: Residual      2: c      3: d

A layer of a memory plan is a closed run of the chain's layers (see `nn.chain`): a single tensor, in
memory of its own, passes from one to the next. A pipeline may also cut inside of one. `measure`
measures both kinds for all of nnmpi.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import nnmpi.base.clock as clock
from nnmpi.backend.array import Array, namespace
from nnmpi.backend.backend import Backend
from nnmpi.backend.memory import Meter, T
from nnmpi.base.errors import UsageError
from nnmpi.memory.plan import LayerCost, moved_bytes
from nnmpi.memory.store import (
    BYTE_S,
    SavedArrays,
    Store,
    arrays_of,
    operations_of,
    owner_id,
    saved_memory,
)
from nnmpi.nn.chain import (
    ChainLayer,
    ModelPart,
    RunLayer,
    Stashed,
    closed_parts,
    open_chain,
    unpack,
)
from nnmpi.nn.mode import Mode, current, restore
from nnmpi.nn.module import Module
from nnmpi.tensor.backward import walk_back
from nnmpi.tensor.function import CommonRoot, Function, Grads, Tape, enable_grad, kind_of, no_grad
from nnmpi.tensor.parameter import Parameter
from nnmpi.tensor.placement import Shard
from nnmpi.tensor.sharded import mark
from nnmpi.tensor.tensor import Tensor

Layer = Callable[[Tensor], Any]
REPEATS, TRACED = 3, 2  # passes that are timed, and whose memory is counted


class Value(NamedTuple):
    """An array between two layers, or a shard of a larger one; `cuts` from the inside out."""

    array: Array
    cuts: tuple[Shard, ...] = ()

    def tensor(self) -> Tensor:
        """Return it as a tensor without a graph."""
        return self.marked(Tensor(self.array))

    def marked(self, x: Tensor) -> Tensor:
        """Return a tensor of these values with the cuts of its shard."""
        for cut in self.cuts:
            x = mark(x, cut)
        return x


def local_tensor(x: Tensor) -> tuple[Tensor, tuple[Shard, ...]]:
    """Return a tensor as this rank's plain tensor, in the same graph, and its cuts.

    Raises:
        UsageError: for a layer's result that is no tensor.
    """
    if not isinstance(x, Tensor):
        raise UsageError(
            f"a layer returned {kind_of(x)}, which is not measured; give split, the number of"
            " layers in each stage, and cut where a tensor or a tuple of tensors passes"
        )
    cuts: list[Shard] = []
    while x.shard is not None:
        cuts.append(x.shard)
        x = x.part()  # type: ignore[attr-defined]
    return x, tuple(reversed(cuts))


class _GraphInput(Function):
    """The beginning of a layer's graph: saves no value, and takes the gradient."""

    __slots__ = ("taken",)

    def forward(self, x: Array) -> Array:
        self.taken: Array | None = None
        return x

    def backward(self, grad: Array) -> Grads:
        self.taken = grad
        return (None,)


class LayerGraph:
    """One layer's graph for one backward pass, without input and result; made by `run_saving`."""

    def __init__(self, first: _GraphInput | None, end: Tensor) -> None:
        self._input, self._node, self._tape = first, end.node, end.tape

    @property
    def operations(self) -> Sequence[Function]:
        """The operations on its tape."""
        return self._tape.find().nodes if self._tape is not None else ()

    def backward(self, grad: Array) -> Array | None:
        """Return the gradient of the input; frees the saved arrays."""
        end = Tensor.blank()
        end.node, end.tape = self._node, self._tape
        self._node, self._tape = None, Tape()
        walk_back(end, grad, retain=False)
        first, self._input = self._input, None
        return None if first is None else first.taken


def run_saving(layer: Layer, value: Value, needed: bool) -> tuple[Value, LayerGraph]:
    """Return a layer's result for a value, and its graph.

    Args:
        needed: whether the value needs a gradient.
    """
    x, graph_input = _begin(value, needed)
    y, cuts = local_tensor(layer(x))
    return Value(y.data, cuts), LayerGraph(graph_input, y)


def _begin(value: Value, needed: bool) -> tuple[Tensor, _GraphInput | None]:
    """Return a value as the beginning of a graph, and its operation if it needs a gradient."""
    x = Tensor(value.array, requires_grad=needed)
    if not needed:
        return value.marked(x), None
    graph_input = _GraphInput()
    x = graph_input(x)
    graph_input.edges = (None,)  # no edge to the leaf, which would keep the value alive
    return value.marked(x), graph_input


def run_without_graph(layer: Layer, value: Value) -> Value:
    """Return a layer's result for a value, without a graph."""
    with no_grad():
        x, cuts = local_tensor(layer(value.tensor()))
    return Value(x.data, cuts)


@contextmanager
def recomputing(mode: Mode | None = None) -> Iterator[None]:
    """Run in the original mode for a recomputation, which leaves running statistics alone."""
    before = current()
    restore((mode or before)._replace(recomputing=True, dropped=None))
    try:
        with enable_grad():
            yield
    finally:
        restore(before)


def find_layers(model: Module, value: Value) -> list[range]:
    """Return the chain's layers in each layer of a plan.

    Args:
        model: with the chain.
        value: its input.

    Raises:
        UsageError: when the model's result is no single tensor.
    """
    x = value.tensor()
    starts, before = [0], x
    chain = open_chain(model)
    with recomputing(), no_grad():
        stop = 0
        for part in closed_parts(chain):
            x = ModelPart(model, part)(x)
            stop += len(part)
            if isinstance(x, Tensor) and not namespace(x.data).may_share_memory(
                before.data, x.data
            ):
                starts.append(stop)
                before = x
    if not isinstance(x, Tensor):
        raise UsageError(
            f"recomputation needs a model that returns one tensor, not a {type(x).__name__}"
        )
    starts = [0, *starts[1:-1]]
    return list(map(range, starts, [*starts[1:], len(chain)]))


@contextmanager
def without_hooks(parameters: Sequence[Parameter]) -> Iterator[None]:
    """Remove the parameters' hooks and guards in the block: strategies get no gradients."""
    watchers = [(parameter.hook, parameter.guard) for parameter in parameters]
    for item in parameters:
        item.guard = item.hook = None
    try:
        yield
    finally:
        for item, (hook, guard) in zip(parameters, watchers, strict=True):
            item.hook, item.guard = hook, guard


@contextmanager
def _gradients_restored(parameters: Sequence[Parameter]) -> Iterator[None]:
    """Restore the parameters' gradients after the block."""
    grads = [parameter._grad for parameter in parameters]
    saved = [None if grad is None else grad.copy() for grad in grads]
    for item in parameters:
        item.grad = None
    try:
        yield
    finally:
        for item, grad, values in zip(parameters, grads, saved, strict=True):
            item.grad = grad
            if grad is not None and values is not None:
                grad[...] = values


class Measured(NamedTuple):
    """A layer to measure: its name, its computation as in a chain, its parameters, and those of a
    base that adapters change.
    """

    name: str
    run: RunLayer
    parameters: Sequence[Parameter]
    base: Sequence[Parameter] = ()


def of_chain(
    model: Module, layers: Sequence[ChainLayer], dtype: str, backend: Backend
) -> Iterator[Measured]:
    """Yield a chain's layers to measure, each initialized only until the next.

    So a model can be measured that does not fit into memory.
    """
    for layer in layers:
        part = ModelPart(model, [layer])
        base = [item for _, item in part.named_base()]
        drawn = [item for item in base if not item.has_values]
        part.initialize(dtype=dtype, backend=backend)
        parameters = part.parameters()
        yield Measured(layer.name, layer.run, parameters, base)
        for parameter in (*parameters, *drawn):
            parameter.drop()
            parameter.grad = parameter.buffer = None


def measure(
    layers: Iterable[Measured],
    x: Tensor,
    backend: Backend,
    store: Store | None = None,
    adds: bool = False,
) -> list[LayerCost]:
    """Return each layer's costs for this input. Collective if layers communicate.

    Only one layer's saved arrays are in memory at a time, and the values around it.

    Args:
        layers: in their order.
        x: the first one's input.
        backend: of the layers.
        store: a destination of saved arrays, which is tried out; None for none.
        adds: whether passes add to gradients of earlier ones, which takes more memory.
    """
    result: list[LayerCost] = []
    around, _ = _Around.of(x, {})
    with recomputing():
        for layer in layers:
            with without_hooks(layer.parameters), _gradients_restored(layer.parameters):
                cost, after = _measure_layer(layer, around, backend, adds)
                # the caller keeps the chain's input anyway
                cost = replace(cost, saves_input=cost.saves_input and bool(result))
                if store is not None:
                    nbytes = moved_bytes([*result, replace(cost, moves=True)], len(result))
                    cost = replace(
                        cost, moves=_can_move(layer, around, nbytes, not result, backend, store)
                    )
            result.append(cost)
            around = after
    if any(clock.reproducible(cost.keep_s) for cost in result):
        return result
    units = [BYTE_S * (1 + cost.elements + cost.value + cost.saved) for cost in result]
    return [
        replace(cost, forward_s=unit, keep_s=unit, backward_s=2 * unit, timed=False)
        for cost, unit in zip(result, units, strict=True)
    ]


class _Around(NamedTuple):
    """The values between two layers: arrays, whether each needs a gradient, and the names of the
    stashed ones, which come last.
    """

    values: tuple[Value, ...]
    needs: tuple[bool, ...]
    names: tuple[str, ...]
    single: bool

    @classmethod
    def of(cls, x: Any, stashed: Stashed) -> tuple[_Around, list[Tensor]]:
        """Return these values without their graphs, and as plain tensors with their graphs."""
        single = not isinstance(x, tuple | list)
        pairs = [local_tensor(item) for item in [*([x] if single else x), *stashed.values()]]
        values = tuple(Value(local.data, cuts) for local, cuts in pairs)
        plain = [local for local, _ in pairs]
        needs = tuple(local.requires_grad for local in plain)
        return cls(values, needs, tuple(stashed), single), plain

    def run(self, layer: Measured) -> tuple[list[_GraphInput | None], Any, Stashed]:
        """Return the beginnings of the graph, the layer's result, and the stashed values."""
        inputs, begins = zip(*map(_begin, self.values, self.needs), strict=True)
        x, stashed = unpack(inputs, self.single, self.names)
        return [*begins], layer.run(x, stashed), stashed

    @property
    def nbytes(self) -> int:
        """The bytes of all values."""
        return sum(value.array.nbytes for value in self.values)

    @property
    def owners(self) -> set[int]:
        """The ids of their memories."""
        return {owner_id(value.array) for value in self.values}


def _measure_layer(
    layer: Measured, before: _Around, backend: Backend, adds: bool
) -> tuple[LayerCost, _Around]:
    """Return a layer's costs, the least of some repetitions, and the values after it."""
    outside, rounds = arrays_of([*layer.parameters, *layer.base]), []
    run = partial(before.run, layer)
    for number in range(REPEATS + TRACED):
        for parameter in () if adds else layer.parameters:
            parameter.grad = None
        # Traced are the last passes, as the first makes what lasts, and gradients to add to. The
        # least counts: another thread may load a batch meanwhile.
        with nullcontext() if number < REPEATS else backend.meter() as meter:
            with no_grad():
                forward = _spend(backend, meter, run)[1]
            (begins, *ends), keep = _spend(backend, meter, run)
            around, outputs = _Around.of(*ends)
            if meter is None:
                after, saved = around, saved_memory(operations_of(outputs), outside)
            back = _backward_of(outputs)
            del ends, outputs, around  # what the graph alone holds is freed meanwhile
            backward = _spend(backend, meter, back)[1]
        gradient = sum(item.taken.nbytes for item in begins if item and item.taken is not None)
        rounds.append((forward, keep, backward))
        del begins, back
    owners = before.owners, after.owners
    kinds = list(zip(*rounds, strict=True))
    forward_s, keep_s, backward_s = (min(item.seconds for item in kind[:REPEATS]) for kind in kinds)
    forward_work, keep_work, _ = (min(item.work for item in kind[REPEATS:]) for kind in kinds)
    backward_most = min(item.most for item in kinds[2][REPEATS:])
    return LayerCost(
        layer.name,
        after.nbytes,
        gradient,
        sum(nbytes for owner, nbytes in saved.items() if owner not in owners[0] | owners[1]),
        not owners[0].isdisjoint(saved),
        not owners[1].isdisjoint(saved),
        forward_s,
        keep_s,
        backward_s,
        elements=sum(parameter.size for parameter in layer.parameters),
        forward_work=forward_work,
        keep_work=keep_work,
        backward_work=max(0, backward_most - gradient),
    ), after


class _Spent(NamedTuple):
    """What a call took: seconds, and with a meter the most bytes and those left."""

    seconds: float
    most: int
    left: int

    @property
    def work(self) -> int:
        """The bytes of temporary arrays, at the peak."""
        return self.most - self.left


def _spend(backend: Backend, meter: Meter | None, call: Callable[[], T]) -> tuple[T, _Spent]:
    """Return a call's result, and what it took."""
    backend.synchronize()
    begin = clock.now()
    result, most, left = (call(), 0, 0) if meter is None else meter.measure(call)
    backend.synchronize()
    return result, _Spent(clock.now() - begin, most, left)


def _backward_of(outputs: Sequence[Tensor]) -> Callable[[], object]:
    """Return the backward pass from a layer's results, if some need a gradient."""
    ends = [end for end in outputs if end.requires_grad]
    if not ends:
        return int
    grads = [namespace(end.data).ones_like(end.data, order="C") for end in ends]
    root = CommonRoot(grads)(*ends)
    return partial(root.backward, namespace(root.data).ones_like(root.data))


def _can_move(
    layer: Measured, before: _Around, nbytes: int, first: bool, backend: Backend, store: Store
) -> bool:
    """Offload a layer's saved arrays and fetch them; return whether that freed their memory."""
    (value,), (needs,) = before.values, before.needs
    outside = arrays_of([*layer.parameters, *layer.base])
    if first:
        outside.append(value.array)  # the caller keeps it
    else:
        value = value._replace(array=value.array.copy())
    graph = run_saving(lambda x: layer.run(x, {}), value, needs)[1]
    del value
    arrays = SavedArrays(graph.operations, outside, backend)
    memory = arrays.watch()
    arrays.send(store)
    arrays.release()
    gone = all(item() is None for item in memory)
    arrays.fetch()
    arrays.wait()
    return gone and arrays.nbytes == nbytes
