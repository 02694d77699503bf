"""A model as a chain of layers, to be cut anywhere, and a part of it as a module.

    Sequential(conv, Residual(Sequential(a, b), shortcut), head)

        0: conv   |   1: open   1.body.0: a   1.body.1: b   1: close (+ 1.shortcut)   |   2: head
                      \\________________ kept as "1" _______________^

This is the one list of where a model may be cut: stages of a pipeline, units of ZeRO, memory plans
and the planner read it. Sequences within sequences and residual blocks are opened, a module that
has `links` is as many layers (a transformer's block is two), and any other one is one. Where a cut
leaves a kept value open, it travels beside the activation. Parameters keep the names that they have
in the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, TypeAlias

from nnmpi.errors import UsageError
from nnmpi.nn.container import Pop, Residual, Sequential, Stash, check_empty, fetch, fuse, keep
from nnmpi.nn.mode import current
from nnmpi.nn.module import Module
from nnmpi.tensor.parameter import Parameter

Kept: TypeAlias = dict[str, Any]
Run: TypeAlias = Callable[[Any, Kept], Any]


@dataclass(frozen=True)
class ChainLayer:
    """One piece of a chain that is not cut.

    Attributes:
        name: the module's full name in the model.
        run: (x, kept) -> x; puts values that skip layers into `kept` and takes them from there.
        members: the modules with parameters that it calls, with their full names.
        keeps: the name under which it keeps a value, or None.
        takes: the name of the kept value that it takes, or None.
        module: what it calls, when it does nothing else.
    """

    name: str
    run: Run
    members: tuple[tuple[str, Module], ...] = ()
    keeps: str | None = None
    takes: str | None = None
    module: Module | None = None


def open_chain(model: Module) -> tuple[ChainLayer, ...]:
    """Return the model's layers in order, after giving every module its full name (`Module.path`).

    A model that is no sequence is one layer.

    Raises:
        UsageError: when stashes and pops do not pair up.
    """
    model.name_modules()
    layers = tuple(_layers(model, ""))
    open_names: Kept = {}
    for layer in layers:
        if layer.keeps is not None:
            keep(open_names, layer.keeps, None)
        if layer.takes is not None:
            fetch(open_names, layer.takes)
    check_empty(open_names)
    return layers


def kept_at(layers: Sequence[ChainLayer], cut: int) -> tuple[str, ...]:
    """Return the sorted names of the stashed values that cross the cut before layer `cut`."""
    names: set[str] = set()
    for layer in layers[:cut]:
        if layer.keeps is not None:
            names.add(layer.keeps)
        if layer.takes is not None:
            names.discard(layer.takes)
    return tuple(sorted(names))


def _layers(module: Module, path: str) -> Iterator[ChainLayer]:
    inside = f"{path}." if path else ""
    if type(module) is Sequential:
        for name, layer in module.children():
            if isinstance(layer, Stash):
                yield _keeper(inside + name, inside + layer.name)
            elif isinstance(layer, Pop):
                yield _taker(inside + name, inside + layer.name, layer, ((inside + name, layer),))
            else:
                yield from _layers(layer, inside + name)
    elif type(module) is Residual:
        start = f"{path} (start)"
        shortcut = () if module.shortcut is None else ((f"{inside}shortcut", module.shortcut),)
        yield _keeper(path, start)
        yield from _layers(module.body, f"{inside}body")
        yield _taker(path, start, module.close, shortcut)
    elif "links" in vars(type(module)):
        for name, half, local in module.links:
            members = tuple((inside + item, module.get(item)) for item in local)
            yield ChainLayer(inside + name, partial(alone, getattr(module, half)), members)
    else:
        yield ChainLayer(path, lambda x, kept: module(x), ((path, module),), module=module)


def _keeper(path: str, name: str) -> ChainLayer:
    def run(x: Any, saved: Kept) -> Any:
        keep(saved, name, x)
        return x

    return ChainLayer(path, run, keeps=name)


def _taker(
    path: str, name: str, join: Callable[[Any, Any], Any], members: tuple[tuple[str, Module], ...]
) -> ChainLayer:
    return ChainLayer(path, lambda x, saved: join(x, fetch(saved, name)), members, takes=name)


class ModelPart(Module):
    """A run of a chain's layers as a model; its parameters keep their full names.

    Args:
        model: the whole model, whose modules this part uses.
        layers: the layers; of `open_chain(model)`.

    Attributes:
        layers: as given.

    Raises:
        UsageError: from `forward`, when kept values are open at the ends.
    """

    def __init__(self, model: Module, layers: Sequence[ChainLayer]) -> None:
        self.layers = tuple(layers)
        self._joined = join_layers(layers)
        self._whole = list(model.named_parameters())
        self._names = {id(parameter): name for name, parameter in self._whole}

    def children(self) -> Iterator[tuple[str, Module]]:
        """Yield the layers' modules with their full names, once for each place they stand in."""
        for layer in self.layers:
            yield from layer.members

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Yield the parameters by their full names, including those shared with other parts."""
        for _, parameter in super().named_parameters():
            yield self._names[id(parameter)], parameter

    def whole_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Yield the whole model's parameters. See `Module.whole_parameters`."""
        yield from self._whole

    def name_modules(self) -> None:
        """Leave the names as `open_chain` gave them."""

    def forward(self, x: Any) -> Any:
        """Return the last layer's result for the first one's input."""
        saved: Kept = {}
        x = run_layers(self.layers, self._joined, x, saved)
        check_empty(saved)
        return x


def join_layers(layers: Sequence[ChainLayer]) -> tuple[Run, ...]:
    """Return the calls that run some layers, one call for layers that a sequence fuses."""
    runs: list[Run] = []
    for parent, group in groupby(layers, _sequence_of):
        result = list(group)
        runs += (
            [layer.run for layer in result]
            if parent is None
            else [
                partial(alone, call)
                for call in fuse([layer.module for layer in result if layer.module is not None])
            ]
        )
    return tuple(runs)


def _sequence_of(layer: ChainLayer) -> str | None:
    """Return the name of the sequence in which a layer stands; None where it is more than a
    module's call.
    """
    return None if layer.module is None else layer.name.rpartition(".")[0]


def closed_runs(layers: Sequence[ChainLayer]) -> Iterator[range]:
    """Yield the shortest runs of layers that pass on one value alone and split no fused call."""
    start = 0
    while start < len(layers):
        stop, names = start, set[str | None]()
        while (
            stop == start or names or (stop < len(layers) and _is_joint(layers[start : stop + 1]))
        ):
            names ^= {layers[stop].keeps, layers[stop].takes} - {None}
            stop += 1
        yield range(start, stop)
        start = stop


def _is_joint(layers: Sequence[ChainLayer]) -> bool:
    return len({*map(_sequence_of, layers)} - {None}) == 1 == len(join_layers(layers))


def run_layers(layers: Sequence[ChainLayer], joined: Sequence[Run], x: Any, kept: Kept) -> Any:
    """Return the output of some layers; `kept` holds stashed values, and is updated.

    Args:
        joined: the layers' `join_layers`, which run unless the mode wants every module by itself.
    """
    for run in joined if current().joins else [layer.run for layer in layers]:
        x = run(x, kept)
    return x


def alone(call: Callable[[Any], Any], x: Any, kept: Kept) -> Any:
    """Run something that keeps nothing."""
    return call(x)


def cut_chain(
    layers: Sequence[ChainLayer], cuts: Sequence[range]
) -> tuple[tuple[ChainLayer, ...], ...]:
    """Return the layers of each stage.

    Raises:
        UsageError: when the ranges are not all layers in order, none empty.
    """
    flat = [i for cut in cuts for i in cut]
    if flat != list(range(len(layers))) or not all(len(cut) for cut in cuts):
        raise UsageError(
            f"the cuts {list(cuts)} do not go through all {len(layers)} layers in order, each with"
            " at least one"
        )
    return tuple(tuple(layers[i] for i in cut) for cut in cuts)
