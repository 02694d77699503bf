"""A worker's parameters, optimizer state and gradients under the full model's names.

Checkpoints save them. Each entry has its region of the full array.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from nnmpi.backend.array import Array
from nnmpi.compose.arrange import Arrangement
from nnmpi.nn.module import Module
from nnmpi.optim.optimizer import Optimizer
from nnmpi.parallel.model_state import ModelState, StateEntry


def model_state(
    arrangement: Arrangement, after_set: Callable[[], object] | None = None
) -> ModelState:
    """Return the parameters and buffers by their full names.

    Args:
        after_set: called after values were set; by default averages of the weights begin anew.
    """
    model = arrangement.model
    storage = model.storage
    parts = _views(model, storage.data)  # parameters of memory that ranks share are read-only
    rest = ((name, leaf) for name, leaf in model.entries().items() if name not in parts)
    leaves = {**parts, **{name: leaf.data for name, leaf in rest}}
    order = [*arrangement.names_of_parameters(), *arrangement.names_of_buffers()]
    return _state(arrangement, {"": leaves}, order, after_set or storage.note_set)


def optimizer_state(
    arrangement: Arrangement, optimizer: Optimizer, after_set: Callable[[], object] = int
) -> ModelState:
    """Return the optimizer's arrays by "slot/full.parameter.name"."""
    model = arrangement.model
    slots = {f"{slot}/": _views(model, flats) for slot, flats in optimizer.slots().items()}
    return _state(arrangement, slots, arrangement.names_of_parameters(), after_set)


def gradient_state(arrangement: Arrangement) -> ModelState:
    """Return the gradients of the last step, by their parameters' full names."""
    model, names = arrangement.model, arrangement.names_of_parameters()
    return _state(arrangement, {"": _views(model, model.storage.grads)}, names)


def training_state(arrangement: Arrangement, optimizer: Optimizer) -> tuple[ModelState, ModelState]:
    """Return both states. The optimizer's has the average of the weights, if one is kept.

    So an average that is restored with it stays as it is, in whichever order the two are set.
    """
    storage, averages = arrangement.model.storage, list[Optimizer]()

    def note_average() -> None:
        optimizer.has_average()
        averages.append(optimizer)

    def note_weights() -> None:
        if not averages:
            storage.note_set()

    return (
        model_state(arrangement, note_weights),
        optimizer_state(arrangement, optimizer, note_average),
    )


def _state(
    arrangement: Arrangement,
    arrays: Mapping[str, Mapping[str, Any]],
    order: Iterable[str],
    after_set: Callable[[], object] = int,
) -> ModelState:
    """Return the state of arrays given as {prefix: {name of the parameter or buffer: array}}.

    Args:
        order: the full model's names, in the order of its definition.
    """
    arrangement.model.storage.check_tree()
    leaves = arrangement.model.entries()
    entries = [
        StateEntry(start + name, array, leaves[name].region, arrangement.writes_here(leaves[name]))
        for start, item in arrays.items()
        for name, array in item.items()
    ]
    names = [start + name for start in arrays for name in order]
    refuse = partial(arrangement.model.storage.check_weights, "loading values")
    return ModelState(entries, names, arrangement.mesh.world, refuse, after_set)


def _views(model: Module, flats: Sequence[Array]) -> dict[str, Any]:
    """Return each parameter's view of flat arrays that have the storage's layout, by name.

    The names are the model's now: a layer may have been put before others since.
    """
    storage = model.storage
    spans = {span.parameter: span for span in storage.spans}
    return {name: storage.view(spans[item], flats) for name, item in model.named_parameters()}
