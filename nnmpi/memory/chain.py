"""A model as a chain of links that run one by one, each forward alone or with its graph; and what each one takes.

    Sequential(conv, relu, pool, Stash, a, b, Pop, Sequential(c, d))

        0: conv, relu, pool     computed as one      1: Stash .. Pop      2: c      3: d

A link is what a `Sequential` computes as one, so that the bits are those of the model as a whole. Nested sequences are
opened; any other module is one link. Between two links passes one tensor, in memory of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from statistics import median
from typing import Any, NamedTuple

from nnmpi import clock
from nnmpi.backend.allocations import AllocationCount, counting
from nnmpi.backend.array import Array, namespace
from nnmpi.backend.record import Backend
from nnmpi.errors import UsageError
from nnmpi.memory.offload import KeptArrays
from nnmpi.memory.plan import ChainLinkCost, moved_bytes
from nnmpi.memory.store import BYTE_S, Store
from nnmpi.nn.container import Sequential
from nnmpi.nn.fuse import fuse
from nnmpi.nn.mode import current, restore
from nnmpi.nn.module import Module
from nnmpi.nn.skip import Pop, Stash
from nnmpi.tensor.cut import mark
from nnmpi.tensor.function import Function, enable_grad, no_grad
from nnmpi.tensor.parameter import Parameter
from nnmpi.tensor.placement import TensorCut
from nnmpi.tensor.tape import Tape, walk_back
from nnmpi.tensor.tensor import Tensor

REPEATS = 3

Link = Callable[[Tensor], Any]


class Value(NamedTuple):
    """What passes between two links: an array, and which part of a larger one it is, from the inside out."""

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
    """Where a link's graph begins: keeps no value, and takes the gradient."""

    __slots__ = ("taken",)

    def forward(self, x: Array) -> Array:
        self.taken: Array | None = None
        return x

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        self.taken = grad
        return (None,)


class LinkGraph:
    """The graph of one link, without its input and its result, for one backward.

    Args:
        link: what is computed.
        value: what comes to it.
        needed: whether that needs a gradient.

    Attributes:
        result: the value; take it away with `take`.
    """

    def __init__(self, link: Link, value: Value, needed: bool) -> None:
        self._input: _GraphInput | None = None
        x = Tensor(value.array, requires_grad=needed)
        if needed:
            self._input = _GraphInput()
            x = self._input(x)
            self._input.edges = (None,)  # nothing is passed on to the leaf, which would keep the value
        y, cuts = plain(link(value.marked(x)))
        self._node, self._tape = y.node, y.tape
        self._result: Value | None = Value(y.data, cuts)

    def take(self) -> Value:
        """Return the result, which is then here no more."""
        result, self._result = self._result, None
        assert result is not None
        return result

    def take_out(self, outside: Iterable[Array], backend: Backend) -> KeptArrays:
        """Return what was kept, which is then here no more, until it has come back.

        Args:
            outside: arrays that are there anyway.
            backend: whose arrays they are.
        """
        return KeptArrays(self._tape.find().nodes if self._tape is not None else (), outside, backend)

    def backward(self, grad: Array) -> Array | None:
        """Return the gradient of the input; what was kept goes."""
        end = Tensor.blank()
        end.node, end.tape = self._node, self._tape
        self._node, self._tape = None, Tape()
        walk_back(end, grad, retain=False)
        first, self._input = self._input, None
        return None if first is None else first.taken


def forward(link: Link, value: Value) -> Value:
    """Return what a link makes of a value, without a graph."""
    with no_grad():
        x, cuts = plain(link(value.tensor()))
    return Value(x.data, cuts)


def parameters_of(links: Sequence[Link]) -> list[Parameter]:
    """Return the parameters of some links, each once."""
    found = {id(p): p for link in links if isinstance(link, Module) for p in link.parameters()}
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


def find_links(model: Module, value: Value) -> list[int]:
    """Return how many pieces of a model go into each of its links, given what comes to it.

    Raises:
        UsageError: when the model's result is no single tensor.
    """
    counts, count = list[int](), 0
    x: Any = value.tensor()
    start = x
    with again(), no_grad():
        for piece in _pieces(model):
            x, count = piece(x), count + 1
            if isinstance(x, Tensor) and not namespace(x.data).may_share_memory(start.data, x.data):
                counts.append(count)
                start, count = x, 0
    if not isinstance(x, Tensor):
        raise UsageError(f"recomputation needs a model that returns one tensor, not a {type(x).__name__}")
    return [*counts[:-1], sum(counts[-1:]) + count]


def links_of(model: Module, counts: Sequence[int]) -> tuple[Module, ...]:
    """Return a model's links of so many pieces each."""
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


@contextmanager
def _gradients_apart(parameters: Sequence[Parameter], accumulates: bool) -> Iterator[None]:
    """Leave the gradients after the block as they were before."""
    grads = [each.grad for each in parameters]
    kept = [None if grad is None else grad.copy() for grad in grads]
    for each in parameters:
        each.grad = each.buffer if accumulates else None
    try:
        yield
    finally:
        for each, grad, values in zip(parameters, grads, kept, strict=True):
            each.grad = grad
            if grad is not None and values is not None:
                grad[...] = values


def measure(
    links: Sequence[Link],
    names: Sequence[str],
    value: Value,
    needed: bool,
    backend: Backend,
    accumulates: bool = False,
    store: Store | None = None,
) -> list[ChainLinkCost]:
    """Return what each link takes for this value. Collective where layers are.

    No more than one link is kept at a time, and no values between links: what comes to a link is computed anew.

    Args:
        links: of the chain, the loss the last one.
        names: theirs.
        value: what comes to the first one.
        needed: whether that needs a gradient.
        backend: where the links compute.
        accumulates: whether gradients are added to those of earlier microbatches, which needs room.
        store: where what is kept may go, which is tried; None for nowhere.
    """
    parameters = parameters_of(links)
    with again(), unwatched(parameters), _gradients_apart(parameters, accumulates):
        seconds = _times(links, value, needed, backend)
        for each in parameters:
            each.grad = each.buffer if accumulates else None
        with counting(backend) as count:
            sizes, moved = _sizes(links, value, needed, count, backend, store)
    costs = [ChainLinkCost(name, *size, *each) for name, size, each in zip(names, sizes, seconds, strict=True)]
    able = [replace(cost, moves=True) for cost in costs]
    costs = [replace(cost, moves=moved[i] == moved_bytes(able, i)) for i, cost in enumerate(costs)]
    if any(clock.reproducible(cost.keep_s) for cost in costs):
        return costs
    return [replace(c, forward_s=BYTE_S * c.keep_peak, keep_s=BYTE_S * c.keep_peak, backward_s=0.0) for c in costs]


def _times(links: Sequence[Link], value: Value, needed: bool, backend: Backend) -> list[tuple[Any, ...]]:
    """Return each link's seconds forward, forward with its graph, and backward."""

    def time(call: Callable[[], Any]) -> tuple[float, Any]:
        backend.synchronize()
        begin = clock.now()
        result = call()
        backend.synchronize()
        return clock.now() - begin, result

    found, grad = [], None
    for i in reversed(range(len(links))):
        x, takes = value, needed or i > 0
        for link in links[:i]:
            x = forward(link, x)
        rounds = []
        for _ in range(1 + REPEATS):
            forward_s, y = time(lambda: forward(links[i], x))  # noqa: B023
            keep_s, graph = time(lambda: LinkGraph(links[i], x, takes))  # noqa: B023
            graph.take()
            seed = namespace(y.array).ones_like(y.array) if grad is None else grad
            del y
            backward_s, below = time(lambda: graph.backward(seed))  # noqa: B023
            rounds.append((forward_s, keep_s, backward_s))
        grad = below
        found.append(tuple(map(median, zip(*rounds[1:], strict=True))))
    return found[::-1]


def _sizes(
    links: Sequence[Link], value: Value, needed: bool, count: AllocationCount, backend: Backend, store: Store | None
) -> tuple[list[tuple[Any, ...]], list[int]]:
    """Return each link's bytes, as `ChainLinkCost` lists them, and how many of them went away and came back."""
    found: list[tuple[Any, ...]] = []
    moved: list[int] = []
    grad: Any = None
    grad_bytes = 0
    for i in reversed(range(len(links))):
        x, takes = value, needed or i > 0
        for link in links[:i]:
            x = forward(link, x)
        start = _mark(count)
        y = forward(links[i], x)
        forward_peak, result = count.peak - start, count.used - start
        seed_bytes = -count.used
        if grad is None:
            grad = namespace(y.array).ones_like(y.array)
        seed_bytes += count.used
        grad_bytes += seed_bytes
        del y
        start = _mark(count)
        graph = LinkGraph(links[i], x, takes)
        keep_peak, made = count.peak - start, count.used - start
        graph.take()
        keeps_result = result > 0 and count.used - start == made
        parameters = [(each, each.grad) for each in parameters_of(links[i : i + 1])]
        before = _mark(count)
        below = graph.backward(grad)
        peak, before = count.peak - before + seed_bytes, count.used
        if below is None:
            grad_bytes = 0
        else:
            del below
            grad_bytes = before - count.used or grad_bytes  # none has gone where it is the gradient that came
        graph = LinkGraph(links[i], x, takes)
        graph.take()
        before = count.used
        del x
        keeps_input = i > 0 and count.used == before
        moved.append(-1)
        if store is not None and i + 1 < len(links):
            outside = [value.array, *(each.data for each in parameters_of(links[i : i + 1]))]
            moved[-1] = _moved(graph.take_out(outside, backend), store, count)
        for each, first in parameters:
            each.grad = first  # so that this pass finds gradients as the one before did
        before = _mark(count)
        grad = graph.backward(grad)
        peaks = (forward_peak, keep_peak, peak, count.peak - before + seed_bytes)
        del graph
        found.append((result, grad_bytes, made - result, keeps_input, keeps_result, *peaks))
    # Less than nothing is what another thread had of this one's: simulated ranks' messages.
    return [tuple(max(each, 0) for each in sizes) for sizes in reversed(found)], moved[::-1]


def _moved(kept: KeptArrays, store: Store, count: AllocationCount) -> int:
    """Send what a link keeps away, and bring it back; return how many bytes that were, -1 if others hold some of it."""
    before = count.used
    kept.send(store)
    kept.leave()
    gone = before - count.used
    kept.fetch()
    kept.arrive()
    return gone if gone == kept.nbytes and count.used == before else -1


def _mark(count: AllocationCount) -> int:
    """Begin to look for a peak; return the bytes of now."""
    count.reset_peak()
    return count.used
