"""Measures what each link of a chain costs: its time forward and backward, and its parameters.

Only one link has values at a time, so that a model can be measured that does not fit into memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nnmpi import clock
from nnmpi.backend.array import Array, namespace
from nnmpi.backend.record import Backend
from nnmpi.nn.chain import ChainLink, Kept, ModelPart
from nnmpi.nn.mode import training
from nnmpi.nn.module import Module
from nnmpi.parallel.pipeline.boundary import pack
from nnmpi.parallel.pipeline.stage import CommonRoot
from nnmpi.tensor.tensor import Tensor

REPEATS = 3
PARAMETER_S = 1e-9  # what a parameter costs where computing takes no time, or none that may decide about the cuts


@dataclass(frozen=True)
class LinkCost:
    """One link's cost for one microbatch.

    Attributes:
        name: the link's.
        seconds: of a forward and a backward, the fastest of some.
        elements: of its parameters on this rank.
    """

    name: str
    seconds: float
    elements: int


def profile(model: Module, links: Sequence[ChainLink], x: Array, dtype: str, backend: Backend) -> list[LinkCost]:
    """Return what each link of a model costs for this input. Collective where layers are.

    The model is left uninitialized; initialize it (or its part) afterwards.

    Args:
        model: not initialized, or to be initialized anew.
        links: `open_chain(model)`.
        x: one microbatch, (batch, ...).
        dtype: of the parameters.
        backend: where they live.
    """
    value: Any = Tensor(backend.asarray(x))
    kept: Kept = {}
    costs = []
    for link in links:
        part = ModelPart(model, [link])
        part.initialize(dtype=dtype, backend=backend)
        seconds, (value, kept) = _measure(link, value, kept, backend)
        parameters = part.parameters()
        costs.append(LinkCost(link.name, seconds, sum(parameter.size for parameter in parameters)))
        for parameter in parameters:
            del parameter.data
            parameter.grad = parameter.buffer = None
    if any(clock.reproducible(cost.seconds) for cost in costs):
        return costs
    return [replace(cost, seconds=PARAMETER_S * (1 + cost.elements)) for cost in costs]


def _measure(link: ChainLink, value: Any, kept: Kept, backend: Backend) -> tuple[float, tuple[Any, Kept]]:
    """Return the link's time, and what it makes of the value, cut off from the graph."""
    best = float("inf")
    for _ in range(REPEATS):
        backend.synchronize()
        begin = clock.now()
        around = {name: _cut_off(each) for name, each in kept.items()}
        with training():
            result = link.run(_map(value, _cut_off), around)
        tensors, _ = pack(result, around, 0)
        needing = [tensor for tensor in tensors if tensor.requires_grad]
        if needing:
            seeds = [namespace(tensor.data).ones_like(tensor.data) for tensor in needing]
            root = CommonRoot(seeds)(*needing)
            root.backward(namespace(root.data).ones_like(root.data))
        backend.synchronize()
        best = min(best, clock.now() - begin)
    return best, (_map(result, _cut_off), {name: _cut_off(each) for name, each in around.items()})


def _cut_off(tensor: Tensor) -> Tensor:
    """Return a leaf of these values. Nobody wants the gradient of the input, nor of what depends on it alone."""
    return Tensor(tensor.data, requires_grad=tensor.requires_grad)


def _map(value: Any, work: Callable[[Tensor], Tensor]) -> Any:
    return tuple(work(each) for each in value) if isinstance(value, tuple | list) else work(value)
