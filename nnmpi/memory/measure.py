"""What each layer of a chain takes: bytes that its operations save, and seconds, forward and back, with one input.

No more than one layer is kept at a time, and no values between layers: what comes to a layer is computed anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from statistics import median
from typing import Any

from nnmpi import clock
from nnmpi.backend.array import namespace
from nnmpi.backend.backend import Backend
from nnmpi.memory.activation_offload import owner_id, saved_memory
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
        accumulates: whether gradients are added to those of earlier microbatches.
        store: where what is kept may go, which is tried; None for nowhere.
    """
    parameters = parameters_of(layers)
    found: list[LayerCost] = []
    with again(), unwatched(parameters), _gradients_apart(parameters, accumulates):
        grad: Any = None
        for i in reversed(range(len(layers))):
            cost, grad = _measure_layer(layers, i, value, needed or i > 0, grad, backend)
            found.append(replace(cost, name=names[i]))
        found = found[::-1]
        if store is not None:
            able = [replace(cost, moves=True) for cost in found]
            for i in range(len(found) - 1):
                moves = _moves(layers, i, value, needed or i > 0, moved_bytes(able, i), backend, store)
                found[i] = replace(found[i], moves=moves)
    if any(clock.reproducible(cost.keep_s) for cost in found):
        return found
    sizes = [cost.value + cost.kept for cost in found]
    return [
        replace(c, forward_s=BYTE_S * n, keep_s=BYTE_S * n, backward_s=0.0) for c, n in zip(found, sizes, strict=True)
    ]


def _measure_layer(
    layers: Sequence[Layer], i: int, value: Value, takes: bool, grad: Any, backend: Backend
) -> tuple[LayerCost, Any]:
    """Return what a layer takes, and the gradient of what comes to it."""

    def time(call: Callable[[], Any]) -> tuple[float, Any]:
        backend.synchronize()
        begin = clock.now()
        result = call()
        backend.synchronize()
        return clock.now() - begin, result

    x, layer = _input(layers, i, value), layers[i]
    outside = [each.data for each in parameters_of([layer])]
    rounds, below = [], None
    for _ in range(1 + REPEATS):
        forward_s, y = time(lambda: forward(layer, x))
        keep_s, graph = time(lambda: LayerGraph(layer, x, takes))
        y = graph.take()
        saved = saved_memory(graph.operations, outside)
        seed = namespace(y.array).ones_like(y.array, order="C") if grad is None else grad
        backward_s, below = time(lambda: graph.backward(seed))  # noqa: B023
        rounds.append((forward_s, keep_s, backward_s))
    ends = owner_id(x.array), owner_id(y.array)
    times = map(median, zip(*rounds[1:], strict=True))
    return LayerCost(
        "",
        y.array.nbytes,
        x.array.nbytes if below is not None and i else 0 if below is None else below.nbytes,
        sum(nbytes for owner, nbytes in saved.items() if owner not in ends),
        i > 0 and ends[0] in saved,
        ends[1] in saved,
        *times,
    ), below


def _input(layers: Sequence[Layer], i: int, value: Value) -> Value:
    for layer in layers[:i]:
        value = forward(layer, value)
    return value


def _moves(
    layers: Sequence[Layer], i: int, value: Value, takes: bool, nbytes: int, backend: Backend, store: Store
) -> bool:
    """Send what a layer keeps away, and bring it back; return whether nobody else holds some of it."""
    graph = LayerGraph(layers[i], _input(layers, i, value), takes)
    graph.take()
    kept = graph.take_out([value.array, *(each.data for each in parameters_of([layers[i]]))], backend)
    memory = kept.watch()
    kept.send(store)
    kept.leave()
    gone = all(each() is None for each in memory)
    kept.fetch()
    kept.arrive()
    return gone and kept.nbytes == nbytes
