"""A model as a chain of layers that can be cut anywhere, and a part of the chain as a module.

    Sequential(conv, Residual(Sequential(a, b), shortcut), head)

        0: conv   |   1: open   1.body.0: a   1.body.1: b   1: close (+ 1.shortcut)   |   2: head
                      \\______________ stashed as "1" ______________^

This is the only list of a model's cut points: pipeline stages, ZeRO units, memory plans and the
planner read it. Nested sequences and residual blocks are opened. A module with `links` is one layer
per link (a transformer block has two), modules that are one call are one (`container.runs`), and
any other module is one layer. A stashed value that crosses a cut travels beside the activation.
Parameters keep their names in the full model.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from types import MethodType
from typing import Any, TypeAlias

from nnmpi.base.errors import UsageError, is_own
from nnmpi.nn.container import (
    Pop,
    Residual,
    Sequential,
    Stash,
    call_run,
    check_empty,
    fetch,
    runs,
    stash,
)
from nnmpi.nn.module import Module, NamedModules
from nnmpi.tensor.parameter import Parameter

Stashed: TypeAlias = dict[str, Any]
RunLayer: TypeAlias = Callable[[Any, Stashed], Any]


@dataclass(frozen=True)
class ChainLayer:
    """An indivisible layer of a chain.

    Attributes:
        name: the module's full name in the model.
        run: (x, stashed) -> x; it stores values that skip layers in `stashed` and fetches them.
        members: the modules with parameters that it calls, with their full names.
        stashes: the name of the value that it stashes, or None.
        pops: the name of the stashed value that it consumes, or None.
        module: the module, if `run` only calls it.
    """

    name: str
    run: RunLayer
    members: tuple[tuple[str, Module], ...] = ()
    stashes: str | None = None
    pops: str | None = None
    module: Module | None = None


def open_chain(model: Module) -> tuple[ChainLayer, ...]:
    """Set every module's full name (`Module.path`), and return the model's layers in order.

    A model that is not a sequence is one layer.

    Raises:
        UsageError: when stashes and pops do not pair up.
    """
    model.name_modules()
    layers = tuple(_layers(model, ""))
    open_names: Stashed = {}
    for layer in layers:
        if layer.stashes is not None:
            stash(open_names, layer.stashes, None)
        if layer.pops is not None:
            fetch(open_names, layer.pops)
    check_empty(open_names)
    return layers


class KnownLayers:
    """A model's layers, parameters and buffers when it was divided, which those who divide it keep.

    Args:
        model: the full model.
        layers: its chain; empty if it was not cut, and its layers may be others later.
    """

    def __init__(self, model: Module, layers: Sequence[ChainLayer] = ()) -> None:
        self._model, self._layers, self._leaves = model, tuple(layers), model.entries()

    def check(self, remedy: str) -> None:
        """Refuse the model if it has changed since.

        Args:
            remedy: the end of the sentence.

        Raises:
            UsageError: naming the first difference.
        """
        change = self._changed_layer() or self._changed_leaf()
        if change:
            raise UsageError(
                f"the model has changed since it was divided: {change}, so its parts would not be"
                f" the model's; {remedy}"
            )

    def _changed_layer(self) -> str:
        """Return in words which layer is another; empty if all are as they were."""
        if not self._layers:
            return ""
        for before, now in zip_longest(self._layers, open_chain(self._model)):
            if before is None:
                return f"{_named(now)} is new"
            if now is None:
                return f"{_named(before)} is gone"
            if _outline(before) != _outline(now):
                names = _named(before), _named(now)
                return f"{names[0]} is {'another one' if len({*names}) == 1 else f'now {names[1]}'}"
        return ""

    def _changed_leaf(self) -> str:
        """Return in words which parameter or buffer is another; empty if all are as they were."""
        now = self._model.entries()
        for name in {**self._leaves, **now}:
            if self._leaves.get(name) is not now.get(name):
                how = "is new" if name not in self._leaves else "is another one or gone"
                return f"{name} {how}"
        return ""


def _outline(layer: ChainLayer) -> tuple[Any, ...]:
    return layer.name, layer.members, layer.stashes, layer.pops


def _named(layer: ChainLayer) -> str:
    """Return a layer in words, for the sentence of a change."""
    kinds = " and ".join(type(module).__name__ for _, module in layer.members)
    return f"layer {layer.name or 'of the model'}{f' ({kinds})' if kinds else ''}"


def parameters_of(layers: Iterable[ChainLayer]) -> list[Parameter]:
    """Return the parameters of some layers, each once, in order."""
    return list(
        dict.fromkeys(
            p for layer in layers for _, module in layer.members for p in module.parameters()
        )
    )


def base_of(layers: Iterable[ChainLayer]) -> list[Parameter]:
    """Return the parameters of a base that some layers have, each once, in order."""
    named = (
        item for layer in layers for _, module in layer.members for item in module.named_base()
    )
    return list(dict.fromkeys(parameter for _, parameter in named))


def stashed_at(layers: Sequence[ChainLayer], cut: int) -> tuple[str, ...]:
    """Return the sorted names of the stashed values that cross the cut before layer `cut`."""
    names: set[str] = set()
    for layer in layers[:cut]:
        if layer.stashes is not None:
            names.add(layer.stashes)
        if layer.pops is not None:
            names.discard(layer.pops)
    return tuple(sorted(names))


def _layers(module: Module, path: str) -> Iterator[ChainLayer]:
    inside = f"{path}." if path else ""
    if _has_own_forward(module):
        yield ChainLayer(path, partial(without_stash, module), ((path, module),), module=module)
    elif module._forward_hooks and _is_opened(module):
        raise UsageError(
            f"{path or 'the model'} has a forward hook, but a model that is divided between layers"
            f" calls the layers of this {type(module).__name__} one by one; register the hook on"
            " one of them"
        )
    elif type(module) is Sequential:
        names = iter([inside + name for name, _ in module.children()])
        for run in runs(module.layers):
            members = tuple((next(names), item) for item in run)
            name, layer = members[0]
            if len(run) > 1:
                yield ChainLayer(name, partial(without_stash, partial(call_run, run)), members)
            elif isinstance(layer, Stash):
                yield _stash_layer(name, inside + layer.name)
            elif isinstance(layer, Pop):
                yield _pop_layer(name, inside + layer.name, layer, members)
            else:
                yield from _layers(layer, name)
    elif type(module) is Residual:
        start = f"{path} (start)"
        shortcut = () if module.shortcut is None else ((f"{inside}shortcut", module.shortcut),)
        yield _stash_layer(path, start)
        yield from _layers(module.body, f"{inside}body")
        yield _pop_layer(path, start, module.close, shortcut)
    elif "links" in vars(type(module)):
        for name, half, local in module.links:
            members = tuple((inside + item, module.get(item)) for item in local)
            yield ChainLayer(inside + name, partial(without_stash, getattr(module, half)), members)
    else:
        yield ChainLayer(path, partial(without_stash, module), ((path, module),), module=module)


def _is_opened(module: Module) -> bool:
    """Return whether a chain has a module's parts as layers."""
    return type(module) in (Sequential, Residual) or "links" in vars(type(module))


def _has_own_forward(module: Module) -> bool:
    """Return whether a module computes by a function that was written to it, not by its class.

    That of a strategy, a method, calls the module's layers.
    """
    forward = vars(module).get("forward")
    if isinstance(forward, MethodType) and not isinstance(forward.__self__, Module):
        return not is_own(forward)
    return forward is not None


def _stash_layer(path: str, name: str) -> ChainLayer:
    def run(x: Any, stashed: Stashed) -> Any:
        stash(stashed, name, x)
        return x

    return ChainLayer(path, run, stashes=name)


def _pop_layer(
    path: str, name: str, join: Callable[[Any, Any], Any], members: tuple[tuple[str, Module], ...]
) -> ChainLayer:
    return ChainLayer(path, lambda x, stashed: join(x, fetch(stashed, name)), members, pops=name)


class ModelPart(Module, read_once="layers"):
    """Consecutive layers of a chain as a model; parameters keep their names in the full model.

    Args:
        model: the full model; the part shares its modules.
        layers: some of `open_chain(model)`.

    Attributes:
        layers: as given.

    Raises:
        UsageError: from `forward`, when a stashed value crosses an end of the part.
    """

    def __init__(self, model: Module, layers: Sequence[ChainLayer]) -> None:
        self.layers, self._model = tuple(layers), model
        self._full = list(model.named_weights())
        self._names = {parameter: name for name, parameter in self._full}

    def watched(self) -> Iterator[Module]:
        """Yield the full model's modules: in a list of one of them a layer may be replaced."""
        return self._model.watched()

    def children(self) -> NamedModules:
        """Yield the layers' modules with their full names, once per layer that calls them."""
        for layer in self.layers:
            yield from layer.members

    def named_weights(self) -> Iterator[tuple[str, Parameter]]:
        """Yield all parameters by their full names, including those shared with other parts."""
        for name, parameter in super().named_weights():
            yield self._names.get(parameter, name), parameter  # a new one is refused by its name

    def full_weights(self) -> Iterator[tuple[str, Parameter]]:
        """Yield the full model's parameters. See `Module.full_weights`."""
        yield from self._full

    def name_modules(self) -> None:
        """Leave the names of `open_chain` unchanged: they are those of the full model."""

    def forward(self, x: Any) -> Any:
        """Return the last layer's result for the first one's input."""
        stashed: Stashed = {}
        x = run_layers(self.layers, x, stashed)
        check_empty(stashed)
        return x


def closed_parts(layers: Sequence[ChainLayer]) -> Iterator[Sequence[ChainLayer]]:
    """Yield the shortest runs of layers with a single value at each end."""
    start, names = 0, set[str | None]()
    for stop, layer in enumerate(layers, 1):
        names ^= {layer.stashes, layer.pops} - {None}
        if not names:
            yield layers[start:stop]
            start = stop


def run_layers(layers: Sequence[ChainLayer], x: Any, stashed: Stashed) -> Any:
    """Return the output of some layers; update the stashed values."""
    for layer in layers:
        x = layer.run(x, stashed)
    return x


def without_stash(call: Callable[[Any], Any], x: Any, stashed: Stashed) -> Any:
    """Adapt a module, which stashes nothing, to `RunLayer`."""
    return call(x)


def unpack(values: Sequence[Any], single: bool, names: Sequence[str]) -> tuple[Any, Stashed]:
    """Return x and the stashed values from a list in which the stashed ones come last.

    Args:
        values: of x, then the stashed ones.
        single: whether x is one value; otherwise it is a tuple.
        names: of the stashed values, in their order.
    """
    count = len(values) - len(names)
    x = values[0] if single else tuple(values[:count])
    return x, dict(zip(names, values[count:], strict=True))
