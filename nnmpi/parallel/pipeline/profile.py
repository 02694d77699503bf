"""Measures what each layer of a chain costs: its time forward and backward, its parameters, and what it hands on.

Only one layer has values at a time, so that a model can be measured that does not fit into memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nnmpi import clock
from nnmpi.backend.array import Array, namespace
from nnmpi.backend.backend import Backend
from nnmpi.memory.activation_offload import saved_memory
from nnmpi.nn.chain import ChainLayer, Kept, ModelPart
from nnmpi.nn.mode import training
from nnmpi.nn.module import Module
from nnmpi.parallel.pipeline.boundary import pack
from nnmpi.parallel.pipeline.stage import CommonRoot
from nnmpi.tensor.backward import Deferred
from nnmpi.tensor.tensor import Tensor

REPEATS = 3
PARAMETER_S = 1e-9  # what a parameter costs where computing takes no time, or none that may decide about the cuts


@dataclass(frozen=True)
class LayerProfile:
    """One layer's cost for one microbatch.

    Attributes:
        name: the layer's.
        seconds: of a forward and a backward, the fastest of some.
        elements: of its parameters on this rank.
        forward_s: of the forward alone.
        value_bytes: of all that goes over a cut behind it: its result, and values that later layers take.
        input_s: of the first half of a backward in halves, which gives the gradient of what came in.
        weights_s: of the second half, which gives those of the parameters.
        kept_bytes: that its operations save for their backward.
    """

    name: str
    seconds: float
    elements: int
    forward_s: float = 0.0
    value_bytes: int = 0
    input_s: float = 0.0
    weights_s: float = 0.0
    kept_bytes: int = 0

    @property
    def backward_s(self) -> float:
        """Of the backward alone."""
        return self.seconds - self.forward_s


def profile(model: Module, layers: Sequence[ChainLayer], x: Array, dtype: str, backend: Backend) -> list[LayerProfile]:
    """Return what each layer of a model costs for this input. Collective where layers are.

    The model is left uninitialized; initialize it (or its part) afterwards.

    Args:
        model: not initialized, or to be initialized anew.
        layers: `open_chain(model)`.
        x: one microbatch, (batch, ...).
        dtype: of the parameters.
        backend: where they live.
    """
    value: Any = Tensor(backend.asarray(x))
    kept: Kept = {}
    costs = []
    for layer in layers:
        part = ModelPart(model, [layer])
        part.initialize(dtype=dtype, backend=backend)
        one = _Measured(layer, value, kept, backend)
        one.time()
        value, kept = one.after
        value_bytes = sum(tensor.data.nbytes for tensor in pack(value, kept, 0)[0])
        parameters = part.parameters()
        elements = sum(parameter.size for parameter in parameters)
        times = one.seconds, elements, one.forward_s, value_bytes, one.input_s, one.weights_s, one.kept_bytes
        costs.append(LayerProfile(layer.name, *times))
        for parameter in parameters:
            del parameter.data
            parameter.grad = parameter.buffer = None
    if any(clock.reproducible(cost.seconds) for cost in costs):
        return costs
    return [
        replace(cost, seconds=PARAMETER_S * (1 + cost.elements), forward_s=PARAMETER_S * (1 + cost.elements) / 3)
        for cost in costs
    ]


class _Measured:
    """One layer and what comes to it, passed through some times.

    Attributes:
        seconds, forward_s: of the fastest pass: all of it, and its forward.
        input_s, weights_s: of the fastest backward in halves: its first, and its second one.
        after: what the layer makes of what comes to it, cut off from the graph.
    """

    def __init__(self, layer: ChainLayer, value: Any, kept: Kept, backend: Backend) -> None:
        self._layer, self._value, self._kept, self._backend = layer, value, kept, backend
        self.seconds = self.forward_s = self.input_s = self.weights_s = float("inf")
        self.kept_bytes = 0
        self.after: tuple[Any, Kept] = value, kept

    def time(self) -> None:
        """Take the times."""
        for _ in range(REPEATS):
            self._backend.synchronize()
            begin = clock.now()
            result, around = self._forward()
            self._backend.synchronize()
            middle = clock.now()
            self.kept_bytes = self._count(result, around)
            paused_s = clock.now() - middle
            self._backward(result, around)
            self._backend.synchronize()
            end = clock.now() - paused_s
            if end - begin < self.seconds:
                self.seconds, self.forward_s = end - begin, middle - begin
            self.after = _map(result, _cut_off), {name: _cut_off(each) for name, each in around.items()}
            result, around = self._forward()
            self._backend.synchronize()
            begin, rest = clock.now(), Deferred()
            self._backward(result, around, rest)
            self._backend.synchronize()
            middle = clock.now()
            rest.finish()
            self._backend.synchronize()
            end = clock.now()
            if end - begin < self.input_s + self.weights_s:
                self.input_s, self.weights_s = middle - begin, end - middle

    def _forward(self) -> tuple[Any, Kept]:
        around = {name: _cut_off(each) for name, each in self._kept.items()}
        with training():
            return self._layer.run(_map(self._value, _cut_off), around), around

    def _count(self, result: Any, around: Kept) -> int:
        """Return the bytes that the tapes of the layer's results save, parameters apart."""
        tapes = {id(tape): tape for each in pack(result, around, 0)[0] if each.tape and (tape := each.tape.find())}
        own = [parameter.data for _, module in self._layer.members for parameter in module.parameters()]
        return sum(saved_memory((node for tape in tapes.values() for node in tape.nodes), own).values())

    @staticmethod
    def _backward(result: Any, around: Kept, deferred: Deferred | None = None) -> None:
        tensors, _ = pack(result, around, 0)
        needing = [tensor for tensor in tensors if tensor.requires_grad]
        if needing:
            seeds = [namespace(tensor.data).ones_like(tensor.data) for tensor in needing]
            root = CommonRoot(seeds)(*needing)
            root.backward(namespace(root.data).ones_like(root.data), deferred=deferred)


def _cut_off(tensor: Tensor) -> Tensor:
    """Return a leaf of these values. Nobody wants the gradient of the input, nor of what depends on it alone."""
    return Tensor(tensor.data, requires_grad=tensor.requires_grad)


def _map(value: Any, work: Callable[[Tensor], Tensor]) -> Any:
    return tuple(work(each) for each in value) if isinstance(value, tuple | list) else work(value)
