"""Module: a part of a model, with parameters, buffers and modules as attributes.

A subclass assigns them in `__init__` and computes in `forward`:

    class Twice(Module):
        def __init__(self, features):
            self.first = Linear(features, features)
            self.rest = [ReLU(), Linear(features, features)]      # a list of modules is fine too

        def forward(self, x):
            x = self.first(x)
            for layer in self.rest:
                x = layer(x)
            return x

Lists may hold parameters too. A full name is the path of attributes: "first.weight", "rest.1.bias".
Parameters have no values until `initialize`: each draws from a random stream that its full name
seeds, and full names exist only in a complete model.

Initializers, called as init(generator, shape), draw the initial values of a parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod, sqrt
from types import FunctionType
from typing import Any, ClassVar, Protocol, Self, TypeAlias
from weakref import ref
from zlib import crc32

import numpy as np

from nnmpi.backend.array import Array, Dtype, Shape, asarray, is_array, namespace
from nnmpi.backend.backend import Backend, numpy_backend
from nnmpi.backend.program.record import bare
from nnmpi.backend.random import stream
from nnmpi.backend.recording import active
from nnmpi.backend.rotary import Rotary
from nnmpi.base.errors import (
    CheckpointError,
    DtypeError,
    GraphError,
    UninitializedError,
    UsageError,
    is_own,
)
from nnmpi.base.settled import Settled
from nnmpi.base.shard import Region
from nnmpi.base.words import answered, raise_missing
from nnmpi.nn.hooks import ForwardHook, Hook, call_hooks
from nnmpi.nn.mode import current
from nnmpi.nn.sharding import NO_TABLE, NO_UNITS, Reach, ShardingTable, Units
from nnmpi.nn.summary import ModelSummary, summarize
from nnmpi.tensor.function import Variable, assigned
from nnmpi.tensor.parameter import Allocate, FlatStorage
from nnmpi.tensor.parameter import Parameter as Parameter
from nnmpi.tensor.tensor import Tensor

__all__ = ["Buffer", "Constant", "Module", "Normal", "Parameter", "Uniform", "fan_in", "kaiming"]

NamedModules: TypeAlias = "Iterator[tuple[str, Module]]"


def own_reach(layer: Module) -> Reach | None:
    """Return what a layer's own class says of its reach: a subclass may compute something else."""
    return vars(type(layer)).get("reach")


class _Draws(dict[str, Array]):
    """The initial values of parameters, drawn on access.

    Drawing all of them first would need the full model's memory. A rank of a sharded model holds
    one full parameter at a time.
    """

    def __init__(
        self, parameters: Mapping[str, Parameter], seed: int, dtype: Dtype, backend: Backend
    ) -> None:
        self._parameters, self._seed, self.dtype, self._backend = parameters, seed, dtype, backend

    def __missing__(self, name: str) -> Array:
        drawn = self._parameters[name].draw(stream(self._seed, "init", name))
        return self._backend.asarray(np.asarray(drawn, self.dtype))


class Follower(Protocol):
    """Somebody who keeps parts of a model: it takes the change of the tree over, or refuses it."""

    def follow(self) -> None:
        """Look at the model, which may have changed."""


class TreeCheck:
    """Compares a model with its storage, and lets those look who keep parts of the model.

    Only if some tree may have changed since the last look, so a step may call it: a module or a
    parameter was made or assigned, a module's setting was, or a list of this tree has other items.
    This is the only place that notices a change. It keeps nobody alive, so that a model and its
    storage are freed at once.

    Attributes:
        looks: how often it has looked.
    """

    def __init__(self, model: Module) -> None:
        self._model, self._trees, self.looks = ref(model), -1, 0
        self._lists, self._known = list[list[Any]](), list[list[Any]]()
        self._others = list[tuple[list[Any], list[int]]]()
        self._followers = list[ref[Follower]]()

    def tell(self, follower: Follower) -> None:
        """Let somebody look now, and after each change."""
        if all(known() is not follower for known in self._followers):
            alive = [known for known in self._followers if known() is not None]
            self._followers = [*alive, ref(follower)]
        follower.follow()

    def __call__(self) -> None:
        # lists of modules are compared by their items' identity at once; parameters define ==
        if (
            self._trees == Parameter.trees
            and self._lists == self._known
            and (not self._others or all([*map(id, x)] == known for x, known in self._others))
        ):
            return
        self.looks += 1
        model, trees = self._model(), Parameter.trees
        if model is not None:
            model.check_stored()
            model.name_modules()  # a new module's name keys its dropout
            for known in self._followers:
                follower = known()
                if follower is not None:
                    follower.follow()
            values = (value for part in model.watched() for value in vars(part).values())
            lists = [value for value in values if isinstance(value, list)]
            self._lists = [items for items in lists if _only_modules(items)]
            self._known, self._trees = [[*items] for items in self._lists], trees
            self._others = [
                (items, [*map(id, items)])
                for items in lists
                if _may_hold_modules(items) and not _only_modules(items)
            ]


class Buffer:
    """An array that belongs to a module's state but is not trained, such as running statistics.

    Attributes:
        data: the values, an array of `shape`.
        shape: of this rank's shard.
        value: the initial value of all elements.
        region: the shard's position in a larger array; None for a full one.
    """

    __slots__ = ("_data", "region", "shape", "value")

    def __init__(self, shape: Shape, value: float, region: Region | None = None) -> None:
        self.shape, self.value, self.region = shape, value, region
        self._data: Array = np.full(shape, value, np.float32)

    @property
    def data(self) -> Array:
        """The values, see the class."""
        recorder = active()
        return self._data if recorder is None else recorder.wrap(self._data)

    @data.setter
    def data(self, value: Array) -> None:
        self._data = assigned("buffer.data", value, self._data)


def run_with_kept_buffers(model: Module, read: Any, run: Any, x: Any, *key: Any) -> Any:
    """Return run(x, *key). A recomputation reads the buffers of the first run, and changes none.

    Args:
        model: of the buffers.
        read: their values before the first run, by key.
    """
    now = {buffer: buffer._data for _, buffer in model.named_buffers()}
    if not current().recomputing:
        read[key] = {buffer: bare(buffer.data.copy()) for buffer in now}
        return run(x, *key)
    _put(read[key])
    result = run(x, *key)
    _put(now)
    return result


def _put(values: Mapping[Buffer, Array]) -> None:
    for buffer, value in values.items():
        buffer._data = value


class Module(Settled):
    """A part of a model. See `nn.module` for how to write one.

    Attributes:
        path: the full name in the initialized model ("" for the model itself).
        storage: the flat storage; only the model on which `initialize` was called has it.
        sharding: the model's default sharding table, for tensor parallelism.
        units: child's name -> the indivisible units of that child's features, for sharding. A
            child without an entry may be sharded between any two features.
        replayable: True lets a `Worker` record and replay the model (see `nnmpi.compile`). Set it
            in a class of your own if `forward` consists of operations on Tensors and depends on
            shapes and the mode alone. Subclasses do not inherit it.
        axes: of the layer's weight, in words: layers that share one must read it alike.
        reach: of a layer, what an element of its result is computed from; None if nobody said, and
            in a subclass that does not say it anew. Then it gets full inputs on every rank.
        links: the methods that `forward` calls one after another. A chain may be cut between them
            (see `nn.chain`). Each entry is (layer name, method name, names of the modules that the
            method calls).

    Example:
        >>> class Gated(nn.Module):
        ...     def __init__(self, features):
        ...         self.value = nn.Linear(features, features)
        ...         self.gate = nn.Linear(features, features)
        ...     def forward(self, x):
        ...         return self.value(x) * ops.sigmoid(self.gate(x))
        >>> model = nn.Sequential(Gated(4), nn.Linear(4, 2)).initialize(seed=0)
        >>> model(np.ones((3, 4), "float32")).shape, sum(p.size for p in model.parameters())
        ((3, 2), 50)
    """

    replayable: ClassVar[bool] = False
    axes: ClassVar[str] = ""
    reach: ClassVar[Reach | None] = None
    links: ClassVar[tuple[tuple[str, str, tuple[str, ...]], ...]] = ()
    path: str = ""
    _forward_hooks: tuple[ForwardHook, ...] = ()
    sharding: ShardingTable = NO_TABLE
    units: Mapping[str, Units] = NO_UNITS
    storage: FlatStorage

    def forward(self, *inputs: Any) -> Any:
        """Compute the result. Subclasses define it."""
        raise NotImplementedError(f"{type(self).__name__} defines no forward")

    def shape_after(self, shape: Shape) -> Shape | None:
        """Return the shape of a sample after a layer, given that before it; None if unknown.

        Args:
            shape: without the batch.
        """
        return shape if own_reach(self) else None

    def input_features(self) -> int | None:
        """Return the length of the input's last axis, if a layer's parameters define it."""
        return None

    def product_input(self, x: Tensor) -> Tensor:
        """Return the input of the layer's product; tensor parallelism adds its collective here."""
        return x

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Return forward's result; arrays among the inputs become tensors.

        Raises:
            DtypeError: for a list of numbers, which has no dtype.
            GraphError: for None as the first input, if `forward` fails for it.
        """
        recorder = active()
        if recorder is not None:
            recorder.enter(self)
        try:
            if named:
                named = {name: _input(x) for name, x in named.items()}
            result = self.forward(*map(_input, inputs), **named)
        except (AttributeError, TypeError, GraphError) as error:
            if not inputs or inputs[0] is not None:
                raise
            raise GraphError(
                f"{type(self).__name__} got None; the forward that made it must return its result"
            ) from error
        if self._forward_hooks:
            result = call_hooks(self, tuple(map(_input, inputs)), result)
        observe = current().observe
        if observe is not None:
            observe(self, result)
        return result

    def summary(self, *inputs: Any) -> ModelSummary:
        """Return a table of the layers: results, parameters, multiply-adds, memory of the results.

        Multiply-adds are those of products of matrices, such as a convolution's or an attention's;
        a step of training does about three times as many. The memory is that of the arrays which
        the layers' operations make of these inputs: a training keeps at most these until its
        backward pass. Each number is a layer's own, without those of layers within it. Collective
        for a model with sharded layers, of which it shows this rank's part.

        Args:
            inputs: as for a call of the model: a sample, or a batch.

        Raises:
            UsageError: without inputs, and for a forward that decides by values.

        Example:
            >>> model = nn.Sequential(nn.Linear(3, 4), nn.ReLU()).initialize(seed=0)
            >>> model.summary(np.ones((2, 3), "float32"))
            layer       result  parameters  multiply-adds  memory
            Sequential  2x4
            | 0 Linear  2x4     16          24             32 B
            | 1 ReLU    2x4                                32 B
            total       2x4     16          24             64 B
        """
        return summarize(self, inputs)

    def register_forward_hook(self, hook: Hook) -> ForwardHook:
        """Call a function with each result of this module, from now on.

        It is called in each pass: of training and of evaluation, of layers that are computed again
        for want of memory, and of a trial by which a layout is chosen. On each rank it gets the
        rank's rows, and of layers that tensor parallelism shards the rank's features. Methods
        beside the call of a module, such as an LSTM's `with_state`, do not call it. Meanwhile steps
        are done by Python and not replayed.

        Args:
            hook: (module, inputs, result) -> None, or a result to use in its place. The inputs are
                a tuple.

        Returns:
            A handle: `handle.remove()` ends it, and so does the end of a `with` block.

        Raises:
            UsageError: for no function, and for a layer of which each rank has a part.

        Example:
            >>> model, seen = nn.Sequential(nn.Linear(3, 4), nn.ReLU()).initialize(seed=0), []
            >>> with model[0].register_forward_hook(lambda layer, x, y: seen.append(y.shape)):
            ...     y = model(np.ones((2, 3), "float32"))
            >>> seen
            [(2, 4)]
        """
        if not callable(hook):
            raise UsageError(f"a forward hook is a function (module, inputs, result), not {hook!r}")
        part = vars(self).get("_part")
        if part is not None:
            raise UsageError(
                f"this {type(self).__name__} is sharded over ranks, and its part on this rank is"
                f" used in its place; register the hook at arrangement.model.get({part!r})"
            )
        handle = ForwardHook(self, hook)
        self._forward_hooks = (*self._forward_hooks, handle)
        return handle

    def __setattr__(self, name: str, value: Any) -> None:
        held = self.__dict__
        if name in ("axes", "links", "reach", "replayable"):
            raise UsageError(f"{name} is read from the class; write it there, not to one module")
        if name == "storage":
            spans = value.spans if isinstance(value, FlatStorage) else ()
            if {span.parameter for span in spans} != {*self.parameters()}:
                raise UsageError(
                    "a model's storage holds its own parameters; call model.initialize(seed=0)"
                    " to make one"
                )
            held[name], value.check = value, TreeCheck(self)
            return
        if name in ("sharding", "units") and "storage" in held:
            raise UsageError(
                f"{name} is read when a model is arranged, but this one is arranged and has its"
                " values; build it again, and set it before that"
            )
        if "_part" in held and name in held:
            raise UsageError(
                f"this {type(self).__name__} is sharded over ranks, and its part on this rank is"
                f" used in its place; write to arrangement.model.get({held['_part']!r})"
            )
        if (is_array(value) or type(value) is Tensor) and isinstance(held.get(name), Parameter):
            # it would not be trained
            raise UsageError(
                f"{name} is a parameter; write its values by {name}.data[...] = values"
            )
        is_setting = name[0] != "_" and isinstance(value, SETTINGS)
        if is_setting or _is_tree(value) or _is_tree(held.get(name)):
            Parameter.trees += 1
        if isinstance(value, STRUCTURE) and name not in self._read_once:
            object.__setattr__(self, name, value)  # a part of the tree may have a new name
        else:
            super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        Parameter.trees += 1

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        """Take a copy's attributes; its storage checks the copy."""
        vars(self).update(state)
        storage = state.get("storage")
        if storage is not None and storage.check is None:  # a new one
            self.storage = storage

    def __getattr__(self, name: str) -> Any:
        # called only for missing attributes
        if name == "storage":
            raise UninitializedError(
                "this model has no storage yet; call model.initialize(seed=0) first"
            )
        return raise_missing(self, name, "model")

    def __repr__(self) -> str:
        """Show the module tree with kinds, shapes and the number of parameters.

        Sequential               26 parameters
        |  0  Linear             20   weight (4, 4), bias (4,)
        |  1  ReLU
        """
        rows = [_describe(path, module) for path, module in self.named_modules()]
        first, second = (max(len(row[column]) for row in rows) for column in (0, 1))
        lines = [
            f"{tree:<{first}}  {count:>{second}}  {shapes}".rstrip() for tree, count, shapes in rows
        ]
        return "\n".join(
            [f"{lines[0]} parameters" if rows[0][1] and not rows[0][2] else lines[0], *lines[1:]]
        )

    def settings(self) -> list[str]:
        """Return each module's name, class and settings as text; the same on all ranks.

        Of a user's module only functions of nnmpi are shown: other attributes may be the rank's
        own, such as its number, a file, or what the last batch was like.
        """
        lines: list[str] = []
        for path, module in self.named_modules():
            kind = type(module)
            values = {
                name: getattr(value, "__qualname__", value)
                for name, value in vars(module).items()
                if name[0] != "_" and name != "path" and isinstance(value, SETTINGS)
                if is_own(kind) or (isinstance(value, FunctionType) and is_own(value))
            }
            options = vars(module).get("options") if is_own(kind) else None
            for name, value in options.items() if isinstance(options, dict) else ():  # of a loss
                is_array = isinstance(value, np.ndarray)
                values[name] = crc32(np.ascontiguousarray(value).data) if is_array else value
            texts = [f"{name}={value!r}" for name, value in values.items()]
            lines.append(f"{path} {kind.__name__}({', '.join(texts)})".lstrip())
        return lines

    def children(self) -> NamedModules:
        """Yield the modules directly below this one, with their names here."""
        yield from self._members(Module)

    def named_modules(self, prefix: str = "", above: tuple[Module, ...] = ()) -> NamedModules:
        """Yield this module and its descendants with full names, parents first, as defined.

        Raises:
            UsageError: when it is one of the modules `above`, which contain it.
        """
        if self in above:
            raise UsageError(f"module {prefix!r} contains itself; remove that attribute")
        yield prefix, self
        for name, child in self.children():
            yield from child.named_modules(f"{prefix}.{name}".strip("."), (*above, self))

    def watched(self) -> Iterator[Module]:
        """Yield the modules whose attributes decide what this one computes."""
        return (module for _, module in self.named_modules())

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Yield parameters with full names in definition order; shared ones once, by first name.

        Without those of the base that adapters change (see `nn.LoRA`).
        """
        return (item for item in self.named_weights() if not item[1].is_base)

    def named_base(self) -> Iterator[tuple[str, Parameter]]:
        """Yield the parameters of the base that adapters change, as `named_parameters`."""
        return (item for item in self.named_weights() if item[1].is_base)

    def named_weights(self) -> Iterator[tuple[str, Parameter]]:
        """Yield all parameters, those of a base, too."""
        seen: set[int] = set()
        for name, value in self._leaves(Parameter):
            if id(value) not in seen:
                seen.add(id(value))
                yield name, value

    def named_buffers(self) -> Iterator[tuple[str, Buffer]]:
        """Yield all buffers with their full names, in order of definition."""
        yield from self._leaves(Buffer)

    def own_buffers(self, path: str) -> Iterator[tuple[str, Buffer]]:
        """Yield this module's own buffers, not its children's; their names begin with `path`."""
        for name, buffer in self._members(Buffer):
            yield f"{path}.{name}".strip("."), buffer

    def entries(self) -> dict[str, Any]:
        """Return all parameters and buffers by their full names."""
        return dict([*self.named_parameters(), *self.named_buffers()])

    def full_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Yield the parameters of the full model, as `named_parameters`."""
        return (item for item in self.full_weights() if not item[1].is_base)

    def full_weights(self) -> Iterator[tuple[str, Parameter]]:
        """Yield all parameters of the full model; a pipeline stage overrides this."""
        yield from self.named_weights()

    def parameters(self) -> ModelParameters:
        """Return all parameters in order of definition."""
        return ModelParameters(self)

    def _members(self, kind: type[Any]) -> Iterator[tuple[str, Any]]:
        """Yield this module's attributes of a kind, and items of its lists and tuples, by name."""
        for name, value in vars(self).items():
            if isinstance(value, kind):
                yield name, value
            elif isinstance(value, (list, tuple)):
                # not `list | tuple`: a union, built at each call, takes three times as long
                for i, item in enumerate(value):
                    if isinstance(item, kind):
                        yield f"{name}.{i}", item

    def _leaves(self, kind: type[Any]) -> Iterator[tuple[str, Any]]:
        for path, module in self.named_modules():
            for name, value in module._members(kind):
                yield f"{path}.{name}".strip("."), value

    def initialize(
        self,
        seed: int = 0,
        dtype: Any = None,
        backend: Backend | None = None,
        group: Callable[[str, Parameter], str] | None = None,
        allocate: Allocate | None = None,
        storage: Callable[..., FlatStorage] = FlatStorage,
    ) -> Self:
        """Draw the initial values of all parameters, in flat storage, and return the model.

        The values depend on the seed and each parameter's full name alone, and are drawn in
        float64: every rank and every layout gets the same ones.

        Args:
            dtype: "float32" or "float64"; by default that which `nnmpi.arrange` got, or float32.
            backend: the arrays' library and device; NumPy by default.
            group: (full name, parameter) -> optimizer group; "default" for all by default.
            allocate: (elements, dtype) -> a 1-D array of zeros to use as storage.
            storage: constructs the storage, with the arguments of `FlatStorage`.

        Raises:
            UsageError: for another dtype, also than `arrange` got; for a module or parameter in a
                dictionary or a nested list; while an average of the weights is in their place.
        """
        self._refuse_hidden()
        for held in {item.version.storage() for item in self.parameters() if item.version}:
            if held is not None:
                held.check_weights("drawing initial values")
        arranged = vars(self).get("_arranged_dtype")
        dtype = dtype_of_values(arranged or "float32" if dtype is None else dtype)
        if dtype != (arranged or dtype):
            raise UsageError(
                f"the model was arranged for {arranged}, by which its layers were cut and its bytes"
                f" counted; give arrange(..., dtype={dtype!r}) too, or leave out one of the two"
            )
        backend = backend or numpy_backend()
        self.name_modules()
        parameters = dict(self.named_parameters())
        values = _Draws(parameters, seed, np.dtype(dtype), backend)
        kept = self._values_of_parts(values)
        for _, buffer in self.named_buffers():
            if buffer not in kept:
                buffer._data = backend.asarray(np.full(buffer.shape, buffer.value, dtype))
        self.storage = storage(parameters, values, allocate or backend.zeros, group, values.dtype)
        self._draw_base(seed, np.dtype(dtype), backend)
        self.storage.seed = seed
        everything = dict(self.full_parameters())
        self.storage.is_stage = len(everything) > len(parameters)
        if group is not None:
            self.storage.known_groups |= {
                group(name, parameter) for name, parameter in everything.items()
            }
        return self

    def _draw_base(self, seed: int, dtype: Dtype, backend: Backend) -> None:
        """Draw the values of a base that has none; those that it has are kept."""
        base = dict(self.named_base())
        drawn = _Draws(base, seed, dtype, backend)
        for name, parameter in base.items():
            parameter.name = name
            if parameter.home is not None and parameter.home.has(parameter):
                continue
            is_new = parameter.home is not None or not parameter.has_values
            given = drawn[name] if is_new else parameter._data
            parameter.hold(backend.asarray(given.astype(dtype, copy=False)))

    def _stored_parts(self) -> Iterator[tuple[Module, FlatStorage]]:
        """Yield the parts that were initialized or loaded alone, with their storage."""
        for _, part in self.named_modules():
            storage = vars(part).get("storage") if part is not self else None
            # not one that the storage of a larger model has taken over
            if storage and all(span.parameter.version is storage.version for span in storage.spans):
                yield part, storage

    def _values_of_parts(self, values: dict[str, Array]) -> set[Buffer]:
        """Keep the values of parts that were initialized or loaded alone; return their buffers."""
        names = {id(parameter): name for name, parameter in self.named_parameters()}
        kept: set[Buffer] = set()
        for part, storage in [*self._stored_parts()]:
            kept |= {buffer for _, buffer in part.named_buffers()}
            values |= {
                names[id(span.parameter)]: span.parameter._data
                for span in storage.spans
                if id(span.parameter) in names
            }
            del part.storage
        return kept | self._values_of_others(values)

    def _values_of_others(self, values: dict[str, Array]) -> set[Buffer]:
        """Keep the values of parts of other models, or copies of them, beside new parts."""
        if "storage" in vars(self) or all(hasattr(x, "data") for _, x in self.full_parameters()):
            return set()  # the whole model is drawn anew
        named = (item for item in self.named_parameters() if item[0] not in values)
        found = {name: item._data for name, item in named if hasattr(item, "data")}
        values |= found
        return {
            buffer
            for path, part in self.named_modules()
            if any(f"{path}.{name}".strip(".") in found for name, _ in part._members(Parameter))
            for _, buffer in part._members(Buffer)
        }

    def _refuse_hidden(self, stored: Iterable[Parameter] = ()) -> None:
        """Refuse modules and parameters in a dictionary or a nested list: they would not be
        trained. Refuse one weight of two layers that read its axes differently.

        Args:
            stored: those that had a place, and are known.
        """
        named = {id(item) for _, item in (*self.named_weights(), *self.full_weights())}
        named |= {*map(id, stored)}
        readers = dict[int, tuple[str, str]]()
        for path, module in self.named_modules():
            path_of_first, axes = readers.setdefault(
                id(vars(module).get("weight") if module.axes else module), (path, module.axes)
            )
            if axes and module.axes not in (axes, ""):
                raise UsageError(
                    f"{path}.weight is {path_of_first}.weight, but {path} reads it as {module.axes}"
                    f" and {path_of_first} as {axes}; for an output with an embedding's table, use"
                    " nn.TiedLinear(embedding)"
                )
            for name, value in vars(module).items():
                for item, local in _within(value):
                    if not named.issuperset(map(id, local)):
                        raise UsageError(
                            f"{f'{path}.{name}'.strip('.')} holds a {type(item).__name__}"
                            " that is not registered and would not be trained; make it an"
                            " attribute, an item of a list (nn.ModuleList) that is one, or a module"
                            " given to Sequential"
                        )

    def name_modules(self) -> None:
        """Set the full names of this module and its descendants; `initialize` calls this."""
        for path, module in self.named_modules():
            if module.path != path:
                object.__setattr__(module, "path", path)  # which is no change of the tree

    def check_stored(self) -> None:
        """Refuse parameters that are not in the model's storage: they would not be trained.

        Raises:
            UsageError: naming the first.
        """
        stored = {span.parameter for span in self.storage.spans}
        for name, parameter in self.named_parameters():
            if parameter not in stored:
                raise UsageError(
                    f"{name!r} is not in the model's storage: its module was added later; call"
                    " model.initialize() again, which draws all values anew, and load kept ones"
                )
        self._refuse_hidden(stored)

    @answered
    def zero_grad(self) -> None:
        """Clear all gradients: the next backward pass overwrites them."""
        storage = vars(self).get("storage")
        if storage is not None:  # faster: it has a list of all parameters
            storage.zero_grad()
            return
        for parameter in self.parameters():
            parameter.grad = None

    def state(self) -> dict[str, Array]:
        """Return copies, in host memory, of all parameters and buffers by full name."""
        return {
            name: np.array(Tensor(entry._data).numpy())
            for name, entry in self._state_entries().items()
        }

    def load_state(self, state: Mapping[str, Array]) -> None:
        """Overwrite parameters and buffers from arrays with exactly the same names and shapes.

        Collective for a model in a Worker or a strategy, as its ranks may share the values.

        Raises:
            CheckpointError: when a name is missing or unknown, a value is no array, or a shape or
                dtype differs. Nothing is changed then.
        """
        if not isinstance(state, Mapping):
            raise CheckpointError(
                f"the state is a {type(state).__name__}; give arrays by name, as state() does"
            )
        state = {name: asarray(values) for name, values in state.items()}
        drawn = any(hasattr(parameter, "data") for parameter in self.parameters())
        if not drawn and "storage" not in vars(self) and state:
            dtypes = {str(getattr(values, "dtype", "")) for values in state.values()}
            # allocates the storage; the values drawn here are all overwritten below
            self.initialize(dtype="float64" if dtypes == {"float64"} else "float32")
        entries = self._state_entries()
        missing = sorted(entries.keys() - state.keys())
        unknown = sorted(state.keys() - entries.keys(), key=str)
        if missing or unknown:
            raise CheckpointError(
                f"the state does not fit the model: missing {missing or 'nothing'}, unknown"
                f" {unknown or 'nothing'}"
            )
        for name, entry in entries.items():
            ours, theirs = entry._data, state[name]
            expected = f"{ours.dtype} {ours.shape}"
            actual = (
                f"{theirs.dtype} {theirs.shape}"
                if hasattr(theirs, "dtype")
                else f"a {type(theirs).__name__}"
            )
            if actual != expected:
                raise CheckpointError(
                    f"{name} is {actual} in the state, but {expected} in the model; to convert"
                    " PyTorch's order of axes, see nnmpi.models.torch_weights"
                )
        found = {getattr(entry, "version", None) for entry in entries.values()}
        versions = [version for version in found if version is not None]
        for version in versions:
            version.storage().check_weights("loading a state")
        for version in versions:
            version.meet()  # ranks that share these values may still read them
        spans = {
            id(span.parameter): (version.storage(), span)
            for version in versions
            for span in version.storage().spans
        }
        for name, entry in entries.items():
            if id(entry) in spans:
                storage, span = spans[id(entry)]
                storage.write(span, namespace(entry._data).asarray(state[name]))
            else:
                entry._data[...] = namespace(entry._data).asarray(state[name])
        for version in versions:
            ours, loaded = version.storage(), set(map(id, entries.values()))
            ours.note_set([span for span in ours.spans if id(span.parameter) in loaded])
            version.count += 1
            version.meet()

    state_dict, load_state_dict = state, load_state  # PyTorch's names

    def _state_entries(self) -> dict[str, Any]:
        """Return all parameters and buffers by name; refuse a model with sharded values."""
        entries = self.entries()
        versions = {getattr(entry, "version", None) for entry in entries.values()}
        storages = [version.storage() for version in versions if version]  # also of a part's model
        if (
            any(storage is not None and not storage.is_whole for storage in storages)
            or any(entry.region is not None for entry in entries.values())
            or any(name not in entries for name, _ in self.full_parameters())
        ):
            raise UsageError(
                "each rank has only part of this model's parameters; gather them with"
                " Worker.state() or ShardedDataParallel.gather_model()"
            )
        return entries

    def get(self, path: str) -> Module:
        """Return the module of that full name.

        Raises:
            UsageError: for an unknown name; the message lists the names.
        """
        modules = dict(self.named_modules())
        if path not in modules:
            raise UsageError(
                f"no module {path!r}; there are {', '.join(repr(name) for name in modules)}"
            )
        return modules[path]

    def replace(self, path: str, module: Module) -> None:
        """Replace the module with this full name; initialize the model afterwards.

        Raises:
            UsageError: for an unknown name, and for "", which names the model itself.
        """
        self.get(path)
        for parent_path, parent in self.named_modules():
            for name, _ in parent.children():
                if f"{parent_path}.{name}".strip(".") == path:
                    parent.set_child(name, module)
                    return
        raise UsageError("the model itself cannot be replaced; name a module in it")

    def set_child(self, name: str, part: Module | Parameter | Buffer) -> None:
        """Replace a direct child, such as "body", or "rest.1" for an item of a list or tuple.

        Raises:
            UsageError: when no child has this name.
        """
        attribute, _, number = name.partition(".")
        value = vars(self).get(attribute)
        if number.isdigit() and isinstance(value, list | tuple) and int(number) < len(value):
            setattr(
                self,
                attribute,
                type(value)(part if i == int(number) else item for i, item in enumerate(value)),
            )
        elif not number and isinstance(value, Module | Parameter | Buffer):
            setattr(self, attribute, part)
        else:
            raise UsageError(f"{type(self).__name__} has no module {name!r} that can be replaced")


SETTINGS = (bool, float, int, str, FunctionType, Rotary, type(None))  # what `Module.settings` shows
STRUCTURE = (Module, Parameter, Buffer, list, tuple, dict)
PARTS = (Module, Parameter)


def dtype_of_values(dtype: Any) -> str:
    """Return the name of a dtype that parameters may have.

    Raises:
        UsageError: for another one.
    """
    if dtype not in ("float32", "float64", np.float32, np.float64):
        raise UsageError(f"dtype {dtype!r} is not supported; choose float32 or float64")
    return np.dtype(dtype).name


def _only_modules(items: list[Any]) -> bool:
    """Return whether a list holds modules alone; an empty one may get some."""
    return all(isinstance(item, Module) for item in items)


def _may_hold_modules(items: list[Any]) -> bool:
    """Return whether a list holds a module or parameter, or has the place for one."""
    return any(item is None or isinstance(item, PARTS) for item in items)


def _is_tree(value: Any) -> bool:
    """Return whether a value is, or directly contains, a module or a parameter."""
    if isinstance(value, (list, tuple, dict)):
        items = value.values() if isinstance(value, dict) else value
        return any(isinstance(item, PARTS) for item in items)
    return isinstance(value, PARTS)


def _within(value: Any) -> Iterator[tuple[Module | Parameter, list[Parameter]]]:
    """Yield the modules and parameters in a nested container, each with its own parameters."""
    if isinstance(value, Module | Parameter):
        yield value, [value] if isinstance(value, Parameter) else value.parameters()
    elif isinstance(value, dict | list | tuple | set | frozenset):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _within(item)


class ModelParameters(list[Parameter]):
    """The parameters of a model, as the first argument of an optimizer.

    A list with a reference to the model, whose storage the optimizer needs. `optim.SGD(
    model.parameters())` is PyTorch's call.
    """

    def __init__(self, model: Module) -> None:
        super().__init__(parameter for _, parameter in model.named_parameters())
        self._model = model

    @property
    def storage(self) -> FlatStorage:
        """The model's storage. An uninitialized model is first initialized, with seed 0.

        PyTorch's models draw their values when they are built, so its programs never call
        `initialize`.

        Raises:
            UsageError: for parameters that have values in another storage.
        """
        if self._is_part():
            raise UsageError(
                "these parameters have values in another model's storage, which would be drawn"
                " again; give the parameters() of the model that was initialized or loaded (and"
                " freeze others by requires_grad = False), or initialize the new model and copy"
                " them by state() and load_state"
            )
        if "storage" not in vars(self._model):
            self._model.initialize()
        self._model.check_stored()
        return self._model.storage

    def _is_part(self) -> bool:
        """Return whether parameters have values in the storage of a larger model."""
        if "storage" in vars(self._model):
            return False
        parts = [storage for _, storage in self._model._stored_parts()]
        own = {span.parameter for storage in parts for span in storage.spans}
        return any(hasattr(parameter, "data") and parameter not in own for parameter in self)


def _describe(path: str, module: Module) -> tuple[str, str, str]:
    """Return a line of the tree in three columns: name and class, number of parameters, shapes."""
    local = [*module._members(Parameter), *module._members(Buffer)]
    shapes = [
        f"{name} {leaf.declared if isinstance(leaf, Parameter) else leaf.shape}"
        for name, leaf in local
    ]
    count = sum(prod(parameter.declared) for _, parameter in module.named_parameters())
    depth, name = path.count(".") + 1 if path else 0, path.rpartition(".")[2]
    tree = f"{'|  ' * depth}{name}{'  ' if name else ''}{type(module).__name__}"
    return tree, f"{count:,}" if count else "", ", ".join(shapes)


def _input(x: Any) -> Any:
    """Convert arrays to tensors, refuse lists of numbers, pass anything else to the module."""
    if isinstance(x, Variable):
        return x
    x = asarray(x)
    if is_array(x):
        return Tensor(x)
    first = x
    while isinstance(first, list | tuple) and first:
        first = first[0]
    if first is not x and isinstance(first, int | float):
        raise DtypeError(
            "a model works on arrays and Tensors, not on lists of numbers; convert with"
            " numpy.asarray"
        )
    return x


@dataclass(frozen=True)
class Uniform:
    """Uniform between -bound and bound."""

    bound: float

    def __call__(self, generator: np.random.Generator, shape: Shape) -> Array:
        """Return float64 values of that shape."""
        return generator.uniform(-self.bound, self.bound, shape)


@dataclass(frozen=True)
class Normal:
    """Normal with mean 0 and this standard deviation."""

    std: float

    def __call__(self, generator: np.random.Generator, shape: Shape) -> Array:
        """Return float64 values of that shape."""
        values = generator.standard_normal(shape)
        values *= self.std  # in place: a table of many tokens is a model's largest array
        return values


@dataclass(frozen=True)
class Constant:
    """The same value everywhere."""

    value: float

    def __call__(self, generator: np.random.Generator, shape: Shape) -> Array:
        """Return float64 values of that shape."""
        return np.full(shape, self.value)


def fan_in(inputs: int) -> Uniform:
    """Return the initializer uniform between -1 / sqrt(inputs) and 1 / sqrt(inputs).

    LeCun et al., "Efficient BackProp", 1998; the default of PyTorch's Linear and Conv2d.
    """
    return Uniform(1 / sqrt(max(inputs, 1)))


def kaiming(inputs: int) -> Normal:
    """Return He et al.'s initializer for ReLU layers (2015): std sqrt(2 / inputs)."""
    return Normal(sqrt(2 / max(inputs, 1)))
