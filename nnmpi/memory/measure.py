"""What each layer of a chain takes: bytes and seconds, forward and back, measured with one input.

No more than one layer is kept at a time, and no values between layers: what comes to a layer is computed anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from statistics import median
from typing import Any

from nnmpi import clock
from nnmpi.backend.allocations import AllocationCount, counting
from nnmpi.backend.array import Array, namespace
from nnmpi.backend.backend import Backend
from nnmpi.memory.activation_offload import KeptArrays
from nnmpi.memory.chain import Layer, LayerGraph, Value, again, forward, parameters_of, unwatched
from nnmpi.memory.plan import LayerCost, moved_bytes
from nnmpi.memory.store import BYTE_S, Store
from nnmpi.tensor.parameter import Parameter

REPEATS = 3


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
    layers: Sequence[Layer],
    names: Sequence[str],
    value: Value,
    needed: bool,
    backend: Backend,
    accumulates: bool = False,
    store: Store | None = None,
) -> list[LayerCost]:
    """Return what each layer takes for this value. Collective where layers are.

    Args:
        layers: of the chain, the loss the last one.
        names: theirs.
        value: what comes to the first one.
        needed: whether that needs a gradient.
        backend: where the layers compute.
        accumulates: whether gradients are added to those of earlier microbatches, which needs room.
        store: where what is kept may go, which is tried; None for nowhere.
    """
    parameters = parameters_of(layers)
    with again(), unwatched(parameters), _gradients_apart(parameters, accumulates):
        seconds = _times(layers, value, needed, backend)
        for each in parameters:
            each.grad = each.buffer if accumulates else None
        with counting(backend) as count:
            sizes, moved = _sizes(layers, value, needed, count, backend, store)
    costs = [LayerCost(name, *size, *each) for name, size, each in zip(names, sizes, seconds, strict=True)]
    able = [replace(cost, moves=True) for cost in costs]
    costs = [replace(cost, moves=moved[i] == moved_bytes(able, i)) for i, cost in enumerate(costs)]
    if any(clock.reproducible(cost.keep_s) for cost in costs):
        return costs
    return [replace(c, forward_s=BYTE_S * c.keep_peak, keep_s=BYTE_S * c.keep_peak, backward_s=0.0) for c in costs]


def _times(layers: Sequence[Layer], value: Value, needed: bool, backend: Backend) -> list[tuple[Any, ...]]:
    """Return each layer's seconds forward, forward with its graph, and backward."""

    def time(call: Callable[[], Any]) -> tuple[float, Any]:
        backend.synchronize()
        begin = clock.now()
        result = call()
        backend.synchronize()
        return clock.now() - begin, result

    found, grad = [], None
    for i in reversed(range(len(layers))):
        x, takes = value, needed or i > 0
        for layer in layers[:i]:
            x = forward(layer, x)
        rounds = []
        for _ in range(1 + REPEATS):
            forward_s, y = time(lambda: forward(layers[i], x))  # noqa: B023
            keep_s, graph = time(lambda: LayerGraph(layers[i], x, takes))  # noqa: B023
            graph.take()
            seed = _ones(y.array) if grad is None else grad
            del y
            backward_s, below = time(lambda: graph.backward(seed))  # noqa: B023
            rounds.append((forward_s, keep_s, backward_s))
        grad = below
        found.append(tuple(map(median, zip(*rounds[1:], strict=True))))
    return found[::-1]


def _sizes(
    layers: Sequence[Layer], value: Value, needed: bool, count: AllocationCount, backend: Backend, store: Store | None
) -> tuple[list[tuple[Any, ...]], list[int]]:
    """Return each layer's bytes, as `LayerCost` lists them, and how many of them went away and came back."""
    found: list[tuple[Any, ...]] = []
    moved: list[int] = []
    grad: Any = None
    grad_bytes = 0
    for i in reversed(range(len(layers))):
        x, takes = value, needed or i > 0
        for layer in layers[:i]:
            x = forward(layer, x)
        start = _mark(count)
        y = forward(layers[i], x)
        forward_peak, result = count.peak - start, count.used - start
        seed_bytes = -count.used
        if grad is None:
            grad = _ones(y.array)
        seed_bytes += count.used
        grad_bytes += seed_bytes
        del y
        start = _mark(count)
        graph = LayerGraph(layers[i], x, takes)
        keep_peak, made = count.peak - start, count.used - start
        graph.take()
        keeps_result = result > 0 and count.used - start == made
        parameters = [(each, each.grad) for each in parameters_of(layers[i : i + 1])]
        before = _mark(count)
        below = graph.backward(grad)
        peak, before = count.peak - before + seed_bytes, count.used
        if below is None:
            grad_bytes = 0
        else:
            del below
            grad_bytes = before - count.used or grad_bytes  # none has gone where it is the gradient that came
        graph = LayerGraph(layers[i], x, takes)
        graph.take()
        before = count.used
        del x
        keeps_input = i > 0 and count.used == before
        moved.append(-1)
        if store is not None and i + 1 < len(layers):
            outside = [value.array, *(each.data for each in parameters_of(layers[i : i + 1]))]
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


def _ones(y: Array) -> Array:
    """Return a gradient for the last result: in rows, as it is where it comes in a message."""
    ones: Array = namespace(y).ones_like(y, order="C")
    return ones


def _moved(kept: KeptArrays, store: Store, count: AllocationCount) -> int:
    """Send what a layer keeps away, and bring it back; return how many bytes, -1 if others hold some of it."""
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
