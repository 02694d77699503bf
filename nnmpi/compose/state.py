"""A worker's parameters, optimizer state and gradients under the full model's names.

Checkpoints save them. Each entry has its region of the full array.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nnmpi.backend.array import Array
from nnmpi.compose.arrange import Arrangement
from nnmpi.optim.optimizer import Optimizer
from nnmpi.parallel.model_state import ModelState, StateEntry
from nnmpi.tensor.parameter import FlatStorage


def model_state(arrangement: Arrangement) -> ModelState:
    """Return the parameters and buffers by their full names."""
    model = arrangement.model
    storage = model.storage
    parts = _views(storage, storage.data)  # parameters of memory that ranks share are read-only
    rest = ((name, leaf) for name, leaf in model.entries().items() if name not in parts)
    leaves = {**parts, **{name: leaf.data for name, leaf in rest}}
    return _state(arrangement, {"": leaves}, [*arrangement.parameters, *arrangement.buffers])


def optimizer_state(arrangement: Arrangement, optimizer: Optimizer) -> ModelState:
    """Return the optimizer's arrays by "slot/full.parameter.name"."""
    storage = arrangement.model.storage
    slots = {f"{slot}/": _views(storage, flats) for slot, flats in optimizer.slots().items()}
    return _state(arrangement, slots, arrangement.parameters)


def gradient_state(arrangement: Arrangement) -> ModelState:
    """Return the gradients of the last step, by their parameters' full names."""
    storage = arrangement.model.storage
    return _state(arrangement, {"": _views(storage, storage.grads)}, arrangement.parameters)


def _state(
    arrangement: Arrangement, arrays: Mapping[str, Mapping[str, Any]], order: Iterable[str]
) -> ModelState:
    """Return the state of arrays given as {prefix: {name of the parameter or buffer: array}}.

    Args:
        order: the full model's names, in the order of its definition.
    """
    leaves = arrangement.model.entries()
    entries = [
        StateEntry(start + name, array, leaves[name].region, arrangement.writes_here(leaves[name]))
        for start, item in arrays.items()
        for name, array in item.items()
    ]
    names = [start + name for start in arrays for name in order]
    return ModelState(entries, names, arrangement.mesh.world)


def _views(storage: FlatStorage, flats: Sequence[Array]) -> dict[str, Any]:
    """Return each parameter's view of flat arrays that have the storage's layout, by name."""
    return {span.parameter.name: storage.view(span, flats) for span in storage.spans}
