"""A model as a chain of layers that run one by one, each forward alone or with its graph.

    Sequential(conv, relu, pool, Stash, a, b, Pop, Sequential(c, d))

        0: conv, relu, pool     computed as one      1: Stash .. Pop      2: c      3: d

A layer is what a `Sequential` computes as one, so that the bits are those of the model as a whole. Nested sequences are
opened, and transformers' blocks are two layers, of which one has the attention; any other module is one. Between two
layers passes one tensor, in memory of its own.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple, Protocol

from nnmpi.backend.array import Array, namespace
from nnmpi.backend.backend import Backend
from nnmpi.errors import UsageError
from nnmpi.memory.activation_offload import KeptArrays
from nnmpi.nn.container import Pop, Sequential, Stash
from nnmpi.nn.fuse import fuse
from nnmpi.nn.mode import current, restore
from nnmpi.nn.module import Module
from nnmpi.nn.transformer import TransformerBlock
from nnmpi.tensor.backward import walk_back
from nnmpi.tensor.cut import mark
from nnmpi.tensor.function import Function, Tape, enable_grad, no_grad
from nnmpi.tensor.parameter import Parameter
from nnmpi.tensor.placement import TensorCut
from nnmpi.tensor.tensor import Tensor

Layer = Callable[[Tensor], Any]


class Value(NamedTuple):
    """What passes between two layers: an array, and which part of a larger one it is, from the inside out."""

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
    """The graph of one layer, without its input and its result, for one backward.

    Args:
        layer: what is computed.
        value: what comes to it.
        needed: whether that needs a gradient.

    Attributes:
        result: the value; take it away with `take`.
    """

    def __init__(self, layer: Layer, value: Value, needed: bool) -> None:
        self._input: _GraphInput | None = None
        x = Tensor(value.array, requires_grad=needed)
        if needed:
            self._input = _GraphInput()
            x = self._input(x)
            self._input.edges = (None,)  # nothing is passed on to the leaf, which would keep the value
        y, cuts = plain(layer(value.marked(x)))
        self._node, self._tape = y.node, y.tape
        self._result: Value | None = Value(y.data, cuts)

    def take(self) -> Value:
        """Return the result, which is then here no more."""
        result, self._result = self._result, None
        assert result is not None
        return result

    @property
    def operations(self) -> Sequence[Function]:
        """What is on its tape."""
        return self._tape.find().nodes if self._tape is not None else ()

    def take_out(self, outside: Iterable[Array], backend: Backend) -> KeptArrays:
        """Return what was kept, which is then here no more, until it has come back.

        Args:
            outside: arrays that are there anyway.
            backend: whose arrays they are.
        """
        return KeptArrays(self.operations, outside, backend)

    def backward(self, grad: Array) -> Array | None:
        """Return the gradient of the input; what was kept goes."""
        end = Tensor.blank()
        end.node, end.tape = self._node, self._tape
        self._node, self._tape = None, Tape()
        walk_back(end, grad, retain=False)
        first, self._input = self._input, None
        return None if first is None else first.taken


def forward(layer: Layer, value: Value) -> Value:
    """Return what a layer makes of a value, without a graph."""
    with no_grad():
        x, cuts = plain(layer(value.tensor()))
    return Value(x.data, cuts)


def parameters_of(layers: Sequence[Layer]) -> list[Parameter]:
    """Return the parameters of some layers, each once."""
    found = {id(p): p for layer in layers if isinstance(layer, Module) for p in layer.parameters()}
    return list(found.values())


@contextmanager
def again() -> Iterator[None]:
    """Compute once more what was computed before: running statistics are left alone."""
    mode = current()
    restore(mode._replace(again=True))
    try:
        with enable_grad():
            yield
    finally:
        restore(mode)


class ShardedWeights(Protocol):
    """A strategy in which a module's weights are there for a while (see `parallel.zero`)."""

    def gather_for(self, module: Module) -> None:
        """Let a module's weights be in their places, until others come there."""

    def begin_backward(self, module: Module) -> None:
        """The same, before its backward; gradients of what lies behind it are final."""


class GatheredLayer(Module):
    """A layer whose weights come before it is computed.

    Args:
        layer: what is computed.
        weights: who lets them come.
    """

    def __init__(self, layer: Module, weights: ShardedWeights) -> None:
        self.layer, self._weights = layer, weights

    def forward(self, x: Tensor) -> Any:
        """Return what the layer makes of it."""
        self._weights.gather_for(self.layer)
        return self.layer(x)

    def begin_backward(self) -> None:
        """Let the weights be there for the backward."""
        self._weights.begin_backward(self.layer)


def find_layers(model: Module, value: Value, weights: ShardedWeights | None = None) -> list[int]:
    """Return how many pieces of a model go into each of its layers, given what comes to it.

    Args:
        model, value: as said.
        weights: who lets the model's weights come, if they are not there.

    Raises:
        UsageError: when the model's result is no single tensor.
    """
    counts, count = list[int](), 0
    x: Any = value.tensor()
    start = x
    with again(), no_grad():
        for piece in _pieces(model):
            x, count = (piece if weights is None else GatheredLayer(piece, weights))(x), count + 1
            if isinstance(x, Tensor) and not namespace(x.data).may_share_memory(start.data, x.data):
                counts.append(count)
                start, count = x, 0
    if not isinstance(x, Tensor):
        raise UsageError(f"recomputation needs a model that returns one tensor, not a {type(x).__name__}")
    return [*counts[:-1], sum(counts[-1:]) + count]


def layers_of(model: Module, counts: Sequence[int]) -> tuple[Module, ...]:
    """Return a model's layers of so many pieces each."""
    pieces = _pieces(model)
    found = [tuple(islice(pieces, count)) for count in counts]
    return tuple(each[0] if len(each) == 1 else Sequential(*each) for each in found)


def _pieces(model: Module) -> Iterator[Module]:
    """Yield what a model computes one after another."""
    if type(model) is not Sequential:
        yield model
        return
    layers, start = model.layers, 0
    while start < len(layers):
        stop, open_names = start, 0
        while stop == start or open_names or (stop < len(layers) and len(fuse(layers[start : stop + 1])) == 1):
            open_names += isinstance(layers[stop], Stash) - isinstance(layers[stop], Pop)
            stop += 1
        if stop == start + 1 and type(layers[start]) is Sequential:
            yield from _pieces(layers[start])
        elif stop == start + 1 and type(layers[start]) is TransformerBlock:
            yield from layers[start].branches
        else:
            yield model.slice(start, stop)
        start = stop


@contextmanager
def unwatched(parameters: Sequence[Parameter]) -> Iterator[None]:
    """Let no strategy hear of gradients in the block."""
    watchers = [(each.hook, each.guard) for each in parameters]
    for each in parameters:
        each.hook = each.guard = None
    try:
        yield
    finally:
        for each, (hook, guard) in zip(parameters, watchers, strict=True):
            each.hook, each.guard = hook, guard
