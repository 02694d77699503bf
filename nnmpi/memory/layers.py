"""The layers of a chain one by one: each run alone, with a graph of its own, and measured.

    Sequential(conv, relu, pool, Residual(..), Sequential(c, d))

        0: conv, relu, pool     computed as one      1: Residual      2: c      3: d

A memory plan's layer is a closed run of the chain's (see `nn.chain`): between two of them passes
one tensor, in memory of its own. Stages of pipelines may begin inside of one. `measure` takes both;
nobody else measures layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import nnmpi.clock as clock
from nnmpi.backend.array import Array, namespace
from nnmpi.backend.backend import Backend
from nnmpi.errors import UsageError
from nnmpi.memory.plan import LayerCost, moved_bytes
from nnmpi.memory.store import BYTE_S, KeptArrays, Store, owner_id, saved_memory
from nnmpi.nn.chain import ChainLayer, ModelPart, Run, Stashed, closed_runs, open_chain
from nnmpi.nn.mode import Mode, current, restore
from nnmpi.nn.module import Module
from nnmpi.tensor.backward import Deferred, walk_back
from nnmpi.tensor.cut import mark
from nnmpi.tensor.function import CommonRoot, Function, Tape, enable_grad, no_grad
from nnmpi.tensor.parameter import Parameter
from nnmpi.tensor.placement import TensorCut
from nnmpi.tensor.tensor import Tensor

Layer = Callable[[Tensor], Any]
REPEATS = 3


class Value(NamedTuple):
    """An array between two layers, or a slice of a larger one, from the inside out."""

    array: Array
    cuts: tuple[TensorCut, ...] = ()

    def tensor(self) -> Tensor:
        """Return it as a tensor without a graph."""
        return self.marked(Tensor(self.array))

    def marked(self, x: Tensor) -> Tensor:
        """Return a tensor of these values as the part that it is."""
        for cut in self.cuts:
            x = mark(x, cut)
        return x


def plain(x: Tensor) -> tuple[Tensor, tuple[TensorCut, ...]]:
    """Return a tensor as this rank has it, in the same graph, and what says which part it is."""
    cuts: list[TensorCut] = []
    while x.cut is not None:
        cuts.append(x.cut)
        x = x.part()  # type: ignore[attr-defined]
    return x, tuple(reversed(cuts))


class _GraphInput(Function):
    """Where a layer's graph begins: keeps no value, and takes the gradient."""

    __slots__ = ("taken",)

    def forward(self, x: Array) -> Array:
        self.taken: Array | None = None
        return x

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        self.taken = grad
        return (None,)


class LayerGraph:
    """One layer's graph for one backward pass, without input and result; `keep` makes it."""

    def __init__(self, first: _GraphInput | None, end: Tensor) -> None:
        self._input, self._node, self._tape = first, end.node, end.tape

    @property
    def operations(self) -> Sequence[Function]:
        """What is on its tape."""
        return self._tape.find().nodes if self._tape is not None else ()

    def backward(self, grad: Array) -> Array | None:
        """Return the gradient of the input; what was kept goes."""
        end = Tensor.blank()
        end.node, end.tape = self._node, self._tape
        self._node, self._tape = None, Tape()
        walk_back(end, grad, retain=False)
        first, self._input = self._input, None
        return None if first is None else first.taken


def keep(layer: Layer, value: Value, needed: bool) -> tuple[Value, LayerGraph]:
    """Return what a layer makes of a value, and its graph.

    Args:
        needed: whether what comes to it needs a gradient.
    """
    first, x = None, Tensor(value.array, requires_grad=needed)
    if needed:
        first = _GraphInput()
        x = first(x)
        first.edges = (None,)  # nothing is passed on to the leaf, which would keep the value
    y, cuts = plain(layer(value.marked(x)))
    return Value(y.data, cuts), LayerGraph(first, y)


def forward(layer: Layer, value: Value) -> Value:
    """Return what a layer makes of a value, without a graph."""
    with no_grad():
        x, cuts = plain(layer(value.tensor()))
    return Value(x.data, cuts)


@contextmanager
def again(mode: Mode | None = None) -> Iterator[None]:
    """Recompute in the original mode, leaving running statistics alone."""
    before = current()
    restore((before if mode is None else mode)._replace(again=True))
    try:
        with enable_grad():
            yield
    finally:
        restore(before)


def gathered(layer: Module, weights: Any | None) -> Layer:
    """Return a layer's computation, which first gathers weights that a strategy holds."""

    def run(x: Tensor) -> Any:
        assert weights is not None
        weights.gather_for(layer)
        return layer(x)

    return layer if weights is None else run


def find_layers(model: Module, value: Value, weights: Any | None = None) -> list[range]:
    """Return which layers of a model's chain go into each of a plan's, given what comes to it.

    Args:
        model, value: as said.
        weights: who lets the model's weights come, if they are not there.

    Raises:
        UsageError: when the model's result is no single tensor.
    """
    x: Any = value.tensor()
    starts, before = [0], x
    chain = open_chain(model)
    with again(), no_grad():
        for run in closed_runs(chain):
            part = ModelPart(model, chain[run.start : run.stop])
            x = gathered(part, weights)(x)
            if isinstance(x, Tensor) and not namespace(x.data).may_share_memory(
                before.data, x.data
            ):
                starts.append(run.stop)
                before = x
    if not isinstance(x, Tensor):
        raise UsageError(
            f"recomputation needs a model that returns one tensor, not a {type(x).__name__}"
        )
    starts = [0, *starts[1:-1]]
    return list(map(range, starts, [*starts[1:], len(chain)]))


@contextmanager
def unwatched(parameters: Sequence[Parameter]) -> Iterator[None]:
    """Let no strategy hear of gradients in the block."""
    watchers = [(parameter.hook, parameter.guard) for parameter in parameters]
    for item in parameters:
        item.hook = item.guard = None
    try:
        yield
    finally:
        for item, (hook, guard) in zip(parameters, watchers, strict=True):
            item.hook, item.guard = hook, guard


@contextmanager
def _gradients_apart(parameters: Sequence[Parameter]) -> Iterator[None]:
    """Leave the gradients after the block as they were before."""
    grads = [parameter.grad for parameter in parameters]
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
    """A layer to measure: its name, what computes it as in a chain, and its parameters."""

    name: str
    run: Run
    parameters: Sequence[Parameter]


def of_chain(
    model: Module, layers: Sequence[ChainLayer], dtype: str, backend: Backend
) -> Iterator[Measured]:
    """Yield a chain's layers to measure, with values meanwhile; leave it uninitialized.

    So a model can be measured that does not fit into memory.
    """
    for layer in layers:
        part = ModelPart(model, [layer])
        part.initialize(dtype=dtype, backend=backend)
        parameters = part.parameters()
        yield Measured(layer.name, layer.run, parameters)
        for parameter in parameters:
            del parameter.data
            parameter.grad = parameter.buffer = None


def measure(
    layers: Iterable[Measured], x: Tensor, backend: Backend, store: Store | None = None
) -> list[LayerCost]:
    """Return what each layer takes for this input. Collective where layers are.

    No more than one layer is kept at a time, and the values around it.

    Args:
        layers: in their order.
        x: what comes to the first one.
        backend: where they compute.
        store: where what is kept may go, which is tried; None for nowhere.
    """
    result: list[LayerCost] = []
    around = _Around.of(x, {})
    with again():
        for layer in layers:
            with unwatched(layer.parameters), _gradients_apart(layer.parameters):
                cost, after = _measure_layer(layer, around, backend)
                # the caller has the chain's input
                cost = replace(cost, keeps_input=cost.keeps_input and bool(result))
                if store is not None:
                    nbytes = moved_bytes([*result, replace(cost, moves=True)], len(result))
                    cost = replace(
                        cost, moves=_moves(layer, around, nbytes, not result, backend, store)
                    )
            result.append(cost)
            around = after
    if any(clock.reproducible(cost.keep_s) for cost in result):
        return result
    units = [BYTE_S * (1 + cost.elements + cost.value + cost.kept) for cost in result]
    return [
        replace(cost, forward_s=unit, keep_s=unit, backward_s=2 * unit, input_s=unit, timed=False)
        for cost, unit in zip(result, units, strict=True)
    ]


class _Around(NamedTuple):
    """What passes between two layers: arrays, which of them need gradients, and the names of kept
    ones, the last.
    """

    values: tuple[Value, ...]
    needs: tuple[bool, ...]
    names: tuple[str, ...]
    single: bool

    @classmethod
    def of(cls, x: Any, kept: Stashed) -> _Around:
        single = not isinstance(x, tuple | list)
        plains = [
            (plain(item), item.requires_grad) for item in [*([x] if single else x), *kept.values()]
        ]
        values = tuple(Value(local.data, cuts) for (local, cuts), _ in plains)
        return cls(values, tuple(needs for _, needs in plains), tuple(kept), single)

    def run(self, layer: Measured) -> tuple[list[Tensor], Any, Stashed]:
        """Return leaves with these values, and what a layer makes of them."""
        leaves = [
            Tensor(value.array, requires_grad=needs)
            for value, needs in zip(self.values, self.needs, strict=True)
        ]
        given = [value.marked(leaf) for value, leaf in zip(self.values, leaves, strict=True)]
        count = len(given) - len(self.names)
        saved = dict(zip(self.names, given[count:], strict=True))
        return leaves, layer.run(given[0] if self.single else tuple(given[:count]), saved), saved

    @property
    def nbytes(self) -> int:
        """The bytes of all of it."""
        return sum(value.array.nbytes for value in self.values)

    @property
    def owners(self) -> set[int]:
        """What tells their memories from others."""
        return {owner_id(value.array) for value in self.values}


def _measure_layer(layer: Measured, before: _Around, backend: Backend) -> tuple[LayerCost, _Around]:
    """Return what a layer takes, the fastest of some times, and what it makes of what comes to
    it.
    """

    def time(call: Callable[[], Any]) -> tuple[float, Any]:
        backend.synchronize()
        begin = clock.now()
        result = call()
        backend.synchronize()
        return clock.now() - begin, result

    outside, rounds = [parameter.data for parameter in layer.parameters], []
    for _ in range(1 + REPEATS):
        with no_grad():
            forward_s, _ = time(lambda: before.run(layer))
        keep_s, (leaves, x, retained) = time(lambda: before.run(layer))
        ends = [
            plain(item)[0]
            for item in [*(x if isinstance(x, tuple | list) else [x]), *retained.values()]
        ]
        after = _Around.of(x, retained)
        tapes = {id(tape): tape for end in ends if end.tape and (tape := end.tape.find())}
        saved = saved_memory((node for tape in tapes.values() for node in tape.nodes), outside)
        needing = [end for end in ends if end.requires_grad]
        input_s = weights_s = 0.0
        if needing:
            root = CommonRoot(
                [namespace(item.data).ones_like(item.data, order="C") for item in needing]
            )(*needing)
            seed, rest = namespace(root.data).ones_like(root.data), Deferred()
            input_s, _ = time(lambda: root.backward(seed, deferred=rest))  # noqa: B023
            weights_s, _ = time(rest.finish)
        gradient = sum(leave.data.nbytes for leave in leaves if leave.grad is not None)
        rounds.append((forward_s, keep_s, input_s + weights_s, input_s))
        del leaves, x, retained, ends, tapes, needing
    owners = before.owners, after.owners
    forward_s, keep_s, backward_s, input_s = map(min, zip(*rounds[1:], strict=True))
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
        input_s=input_s,
        elements=sum(parameter.size for parameter in layer.parameters),
    ), after


def _moves(
    layer: Measured, before: _Around, nbytes: int, first: bool, backend: Backend, store: Store
) -> bool:
    """Send what a layer keeps away, and bring it back; return whether nobody else holds some of
    it.
    """
    (value,), (needs,) = before.values, before.needs
    outside = [parameter.data for parameter in layer.parameters]
    if first:
        outside.append(value.array)  # the caller has it
    else:
        value = value._replace(array=value.array.copy())
    graph = keep(lambda x: layer.run(x, {}), value, needs)[1]
    del value
    saved = KeptArrays(graph.operations, outside, backend)
    memory = saved.watch()
    saved.send(store)
    saved.leave()
    gone = all(item() is None for item in memory)
    saved.fetch()
    saved.arrive()
    return gone and saved.nbytes == nbytes
