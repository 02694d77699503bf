"""A worker's arrays as those of the whole model, wherever its parts lie: what checkpoints are made of."""

from collections.abc import Mapping, Sequence

from nnmpi.backend.array import Array
from nnmpi.comm.group import Group
from nnmpi.compose.arrange import Arrangement
from nnmpi.nn.module import Buffer, Module
from nnmpi.optim.optimizer import Optimizer
from nnmpi.parallel.model_state import ModelState, ShardedArray, StateEntry
from nnmpi.parallel.zero.storage import ShardedStorage
from nnmpi.tensor.parameter import FlatStorage, Parameter


def model_state(model: Module, group: Group, arrangement: Arrangement) -> ModelState:
    """Return the parameters and buffers by their full names."""
    leaves: list[tuple[str, Parameter | Buffer]] = [*model.named_parameters(), *model.named_buffers()]
    storage = model.storage
    parts = {} if storage.is_whole else _parts(storage, {"": storage.data})
    entries = [
        StateEntry(name, parts.get(f"/{name}", leaf.data), leaf.region, arrangement.writes(name, leaf))
        for name, leaf in leaves
    ]
    return ModelState(entries, list(arrangement.order), group)


def optimizer_state(model: Module, optimizer: Optimizer, group: Group, arrangement: Arrangement) -> ModelState:
    """Return the optimizer's arrays by "slot/full.parameter.name"."""
    parameters = dict(model.named_parameters())
    views: Mapping[str, Array | ShardedArray] = _parts(model.storage, optimizer.slots()) or slots(
        model.storage, optimizer
    )
    entries = []
    for name, view in views.items():
        parameter = parameters[name.partition("/")[2]]
        writes = arrangement.writes(parameter.name, parameter)
        entries.append(StateEntry(name, view, parameter.region, writes))
    order = [f"{slot}/{name}" for slot in optimizer.slots() for name in arrangement.parameters]
    return ModelState(entries, order, group)


def gradient_state(model: Module, group: Group, arrangement: Arrangement) -> ModelState:
    """Return the gradients that the last step used, by their parameters' full names."""
    parts = _parts(model.storage, {"": model.storage.grads})
    entries = []
    for span in model.storage.spans:
        parameter = span.parameter
        grad = parts.get(f"/{parameter.name}", parameter.buffer)
        assert grad is not None
        writes = arrangement.writes(parameter.name, parameter)
        entries.append(StateEntry(parameter.name, grad, parameter.region, writes))
    return ModelState(entries, list(arrangement.parameters), group)


def slots(storage: FlatStorage, optimizer: Optimizer) -> dict[str, Array]:
    """Return views of the optimizer's arrays on this rank, parameter by parameter."""
    return {
        f"{slot}/{name}": view
        for slot, flats in optimizer.slots().items()
        for number, flat in enumerate(flats)
        for name, view in storage.split(number, flat).items()
    }


def _parts(storage: FlatStorage, flats: Mapping[str, Sequence[Array]]) -> dict[str, ShardedArray]:
    """Return this rank's parts of arrays that lie as the storage's, by "name/parameter"; none if all are whole."""
    if not isinstance(storage, ShardedStorage):
        return {}
    return {
        f"{name}/{span.parameter.name}": storage.parts(span, arrays)
        for name, arrays in flats.items()
        for span in storage.spans
    }
