"""A worker's parameters, optimizer state and gradients under the full model's names.

Checkpoints save them. Each entry has its region of the full array.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from nnmpi.backend.array import Array
from nnmpi.backend.precision import bfloat16
from nnmpi.comm.agreement import on_root
from nnmpi.compose.arrange import Arrangement
from nnmpi.nn.lora import BaseDigest, adapters
from nnmpi.nn.module import Module
from nnmpi.optim.optimizer import Optimizer
from nnmpi.parallel.model_state import ArraySource, ModelState, StateEntry
from nnmpi.tensor.parameter import Parameter, Span

SUM = "sum"  # begins the names of a strategy's state, which an optimizer's may not take
OWN = re.compile(rf"(?P<slot>{SUM}\..+)\.(?P<replica>[0-9]+)/(?P<name>.+)")  # of one replica


def model_state(
    arrangement: Arrangement, after_set: Callable[[], object] | None = None
) -> ModelState:
    """Return the parameters and buffers by their full names.

    Args:
        after_set: called after values were set; by default averages of the weights begin anew.
    """
    model = arrangement.model
    storage = model.storage
    parts = _views(model, storage.weights)  # parameters of memory that ranks share are read-only
    rest = ((name, leaf) for name, leaf in model.entries().items() if name not in parts)
    leaves = {**parts, **{name: leaf.data for name, leaf in rest}}
    order = [*arrangement.names_of_parameters(), *arrangement.names_of_buffers()]
    return _state(arrangement, {"": leaves}, order, after_set or storage.note_set)


def base_digest(arrangement: Arrangement) -> str:
    """Return a hash of the weights that adapters are added to; "" without adapters. Collective."""
    model, mesh = arrangement.model, arrangement.mesh
    order = [name for name, item in model.full_weights() if item.is_base]
    if not order:
        return ""
    base = dict(model.named_base())
    # several stages may have one, such as the table of a tied output: the first writes it
    first = {
        name: rank
        for rank, names in reversed([*enumerate(mesh.pp.gather([*base]))])
        for name in names
    }
    entries = [
        StateEntry(
            name,
            _stored(item),
            item.region,
            first[name] == mesh.pp.rank and arrangement.writes_here(item),
        )
        for name, item in base.items()
    ]
    digest = BaseDigest()

    def add(name: str, array: Array) -> None:
        if array.dtype == np.uint16:  # the bits of bfloat16
            array = array.view(bfloat16())
        digest.add(name, array)

    ModelState(entries, order, mesh.world).gather(add)
    return on_root(mesh.world, lambda: str(digest))


def adapter_alphas(arrangement: Arrangement) -> dict[str, float]:
    """Return each adapter's alpha by the full name of its A, see `nn.LoRA`. Collective."""
    here = {layer.lora_a.name: layer.alpha for _, layer in adapters(arrangement.model)}
    stages = arrangement.mesh.pp.gather(here)
    return {name: alpha for stage in stages for name, alpha in stage.items()}


def _stored(item: Parameter) -> Any:
    """Return a base's values for a `StateEntry`, bfloat16 as its bits."""
    if item.home is None:
        array = item.stored
        return array if item.kept is None else array.view(np.uint16)
    shared = item.home.view_of(item)
    bits = shared.values if item.base_dtype is None else shared.values.view(np.uint16)
    return replace(shared, values=bits)


def optimizer_state(
    arrangement: Arrangement, optimizer: Optimizer, after_set: Callable[[], object] = int
) -> ModelState:
    """Return the optimizer's arrays by "slot/full.parameter.name", and the strategy's.

    Collective, if the strategy has a state.
    """
    model, strategy = arrangement.model, arrangement.model.storage.strategy

    def note_set() -> None:
        after_set()
        if strategy is not None:
            strategy.loaded()

    view = model.storage.view
    slots = {
        f"{slot}/": _views(model, partial(view, flats=flats))
        for slot, flats in optimizer.slots().items()
    }
    more = _strategy_state(arrangement)
    return _state(arrangement, slots, arrangement.names_of_parameters(), note_set, more)


def _strategy_state(arrangement: Arrangement) -> tuple[list[StateEntry], list[str]]:
    """Return this rank's entries of the strategy's state, and all ranks' names. Collective.

    "sum.slot/full.parameter.name", or with the number of a replica, "sum.slot.0/...", of what
    differs between the replicas.
    """
    strategy, mesh = arrangement.model.storage.strategy, arrangement.mesh
    if strategy is None or not strategy.has_state:
        return [], []
    names = {parameter: name for name, parameter in arrangement.model.named_parameters()}
    entries = []
    for slot, arrays in strategy.state().items():
        is_own = slot in strategy.per_replica
        start = f"{SUM}.{slot}.{mesh.replicas.rank}" if is_own else f"{SUM}.{slot}"
        for parameter, array in arrays.items():
            # of a replica's own state each replica writes its part
            writes = arrangement.counts_here if is_own else arrangement.writes_here
            name = f"{start}/{names[parameter]}"
            entries.append(StateEntry(name, array, parameter.region, writes(parameter)))
    # a stage of a pipeline does not know of which parameters the others have state
    everywhere = mesh.world.gather([entry.name for entry in entries])
    return entries, sorted(set(chain.from_iterable(everywhere)))


def spread(source: ArraySource, replicas: int) -> ArraySource:
    """Return a file's arrays for so many replicas, whose own state has the same sum as before.

    Args:
        source: of an optimizer's file; it has no arrays but on rank 0.
        replicas: their number now.
    """
    read, specs, file = source
    found = {name: OWN.fullmatch(name) for name in specs or ()}
    parts = {name: match for name, match in found.items() if match is not None}
    former = {int(match["replica"]) for match in parts.values()}
    if specs is None or len(former) in (0, replicas):
        return source
    others = {name: spec for name, spec in specs.items() if name not in parts}
    mine = {
        f"{match['slot']}.{replica}/{match['name']}": specs[name]
        for name, match in parts.items()
        if int(match["replica"]) == min(former)
        for replica in range(replicas)
    }

    def read_part(name: str) -> Array:
        match = OWN.fullmatch(name)
        if match is None:
            return read(name)
        total = sum(
            read(f"{match['slot']}.{replica}/{match['name']}").astype(np.float64)
            for replica in sorted(former)
        )
        return (np.asarray(total) / replicas).astype(mine[name].dtype)

    return read_part, {**others, **mine}, file


def gradient_state(arrangement: Arrangement) -> ModelState:
    """Return the gradients of the last step, by their parameters' full names."""
    model, names = arrangement.model, arrangement.names_of_parameters()
    view = partial(model.storage.view, flats=model.storage.grads)
    return _state(arrangement, {"": _views(model, view)}, names)


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
    more: tuple[Sequence[StateEntry], Sequence[str]] = ((), ()),
) -> ModelState:
    """Return the state of arrays given as {prefix: {name of the parameter or buffer: array}}.

    Args:
        order: the full model's names, in the order of its definition.
        more: entries behind these, and all their names.
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
    entries, names = [*entries, *more[0]], [*names, *more[1]]
    return ModelState(entries, names, arrangement.mesh.world, refuse, after_set)


def _views(model: Module, view: Callable[[Span], Any]) -> dict[str, Any]:
    """Return what the storage shows of each parameter, by name.

    The names are the model's now: a layer may have been put before others since.
    """
    spans = {span.parameter: span for span in model.storage.spans}
    return {name: view(spans[item]) for name, item in model.named_parameters()}
