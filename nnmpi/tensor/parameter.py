"""Parameters and their flat storage: a few long arrays of values, and as many of gradients.

    data    [ 0.weight        | 0.bias | 2.weight       | 2.bias ]     one array per dtype and group
    grads   [ 0.weight        | 0.bias | 2.weight       | 2.bias ]     the same offsets

A layer declares its parameters; `Module.initialize` draws their values once the full names are
known. Initial values come from a stream keyed by seed and full name, so they do not depend on the
layout. A parameter's `data` and gradient are views into the flat arrays. So one optimizer call
updates a group, one message sums a bucket, and a shard is a range of offsets. With an allocator of
shared memory the ranks of a node read one another's gradients. Each parameter begins at a multiple
of 64 bytes; the gaps hold zeros.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Integral
from typing import Any, ClassVar, TypeAlias
from weakref import ref

import numpy as np

from nnmpi.backend.array import Array, Dtype, Shape, namespace, zeros
from nnmpi.backend.kernels import cast
from nnmpi.backend.recording import active, call
from nnmpi.backend.storage import Storage
from nnmpi.base.errors import (
    GraphError,
    ShapeError,
    UninitializedError,
    UsageError,
)
from nnmpi.base.shard import Region
from nnmpi.base.words import raise_missing
from nnmpi.tensor.function import Variable, Version, writable
from nnmpi.tensor.tensor import Tensor

ALIGNMENT_BYTES = 64

Initializer: TypeAlias = Callable[[np.random.Generator, Shape], Array]
Allocate: TypeAlias = Callable[[int, Any], Array]  # (elements, dtype) -> a 1-D array of zeros


def _zeros(_generator: np.random.Generator, shape: Shape) -> Array:
    return np.zeros(shape)


def _given(values: Array, _generator: np.random.Generator, _shape: Shape) -> Array:
    return values


def aligned(elements: int, itemsize: int) -> int:
    """Return the elements up to the next multiple of ALIGNMENT_BYTES."""
    step = ALIGNMENT_BYTES // itemsize
    return -(-elements // step) * step


class Parameter(Tensor):
    """A trained tensor, empty until its model is initialized.

    Attributes:
        name: the full name in its model ("2.weight"), set by `Module.initialize`.
        declared: the shape, known before there are values.
        init: draws its initial values: init(generator, shape) -> array.
        region: the shard's position in a larger parameter; None for a full parameter.
        ranks: the group that holds the other shards; None for a full parameter.
        room: parameters of one room lie together in the flat storage, see `FlatStorage`.
        rank_local: whether each data-parallel rank has a different shard, as of experts. Its
            gradient is complete on its owner and is not summed over the ranks.
        is_base: whether it is of the base that adapters change (see `make_base`).
        base_dtype: the half precision in which a base is to keep its values; None for the model's
            dtype.
        kept: the tensor of these values, and wide, the model's dtype; None for any other parameter.
            Who reads `data` gets a new array of that dtype; products and embeddings read `kept`.
        home: the sharded storage that has a base's values, a part of them on each rank; else None.
        guard: called before a backward pass writes to the gradient, to raise if it must not; or
            None.

    Args:
        shape: of the values. An array, or a list of numbers not all integers, gives initial values
            instead and replaces `init`.
        init: draws its initial values. By default a parameter of one axis begins with zeros; one of
            several needs it, as layers of zeros behind one another learn nothing.
        region: makes the parameter a shard of this region. `shape` is then the shard's; its values
            are the shard of the full parameter's initial values.
        ranks: the group that holds the other shards.

    Raises:
        UsageError: for several axes without initial values.
        ShapeError: when the region has another shape.
    """

    __slots__ = (
        *("rank_local", "declared", "guard", "init", "room", "name", "ranks", "region"),
        *("version", "is_base", "base_dtype", "kept", "wide", "home"),
    )

    is_table: ClassVar[bool] = False
    trees: ClassVar[int] = 0  # counts up with each one made, and when a module gets a part
    guard: Callable[[], None] | None
    version: Version | None
    base_dtype: Dtype | None
    kept: Tensor | None
    wide: Dtype | None
    home: Any

    def __init__(
        self,
        shape: Shape | Array,
        init: Initializer | None = None,
        region: Region | None = None,
        ranks: Any = None,
    ) -> None:
        if init is not None and not callable(init):
            raise UsageError(f"init is {init!r}; give a function, such as nn.Normal(0.02)")
        if isinstance(shape, list) and all(isinstance(item, Integral) for item in shape):
            shape = tuple(shape)
        if not isinstance(shape, tuple):
            values = np.array(Tensor(shape).numpy())
            shape, init = values.shape, partial(_given, values)
        if init is None and len(shape) > 1:
            raise UsageError(
                f"a parameter of shape {shape} would begin with zeros, and layers of zeros behind"
                " one another learn nothing; give init, such as nn.Normal(0.02), or nn.Constant(0)"
            )
        if region is not None and region.local_shape != shape:
            raise ShapeError(
                f"a parameter of shape {shape} is not a region of shape {region.local_shape}"
            )
        Parameter.trees += 1
        self.declared: Shape = shape
        self.init: Initializer = init or _zeros
        self.name, self.region, self.ranks = "", region, ranks
        self.rank_local, self.room = False, ""
        self.requires_grad, self.is_base = True, False
        self.base_dtype = self.kept = self.wide = self.home = None
        self._unbind()

    def _unbind(self) -> None:
        self._grad = self.node = self.tape = self.buffer = self.guard = self.hook = self.shard = (
            self.version
        ) = None
        self.made_by = ""

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, without gradient and storage: a copy gets its own."""
        if self.guard is not None and not self.is_base:
            raise GraphError(
                "a model in a Worker or a strategy cannot be copied or pickled; keep its values,"
                " such as the best ones, by model.state() and model.load_state, or call its"
                " release()"
            )
        saved = (
            "rank_local",
            "declared",
            "init",
            "room",
            "name",
            "ranks",
            "region",
            "requires_grad",
            "is_base",
            "base_dtype",
            "data",
        )
        return {name: getattr(self, name) for name in saved if hasattr(self, name)}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self._unbind()
        self.kept = self.wide = self.home = None
        for name, value in state.items():
            setattr(self, name, value)
        if self.is_base:
            self.make_base(self.base_dtype)

    def make_base(self, dtype: Dtype | None = None) -> None:
        """Freeze it for good: no storage, gradient, optimizer state or message has it from now on.

        It keeps its values, in an array of its own. Its model is initialized afterwards.

        Args:
            dtype: see `base_dtype`.
        """
        values = self._data.copy() if hasattr(self, "_data") else None  # frees the storage
        self._unbind()
        self.requires_grad, self.is_base, self.guard = False, True, self._refuse_gradient
        self.base_dtype = dtype
        if values is not None:
            self.hold(values)
        Parameter.trees += 1

    def hold(self, values: Array, dtype: Dtype | None = None) -> None:
        """Give a base its values, which it keeps in `base_dtype`.

        Args:
            values: in the model's dtype or in that; the array may become the parameter's own.
            dtype: the model's, if it is another one than that of the values.
        """
        if self.base_dtype is not None:
            self.wide, values = dtype or values.dtype, cast(values, self.base_dtype)
        if self.home is not None:
            self.home.fill(self, values)
            return
        self.drop()
        self.place(values)

    def place(self, values: Array) -> None:
        """Let an array be the values, in the dtype in which they are kept."""
        if self.base_dtype is None:
            self.data = values
        else:
            self.kept = Tensor(values)

    def drop(self) -> None:
        """Let go of the values."""
        if self.kept is not None:
            self.kept = None
        elif hasattr(self, "_data"):
            del self._data

    @property
    def has_values(self) -> bool:
        """Whether it has values, on this rank now."""
        return self.kept is not None or hasattr(self, "_data")

    @property
    def stored(self) -> Array:
        """The array that holds the values, of a base perhaps in half precision."""
        return self._data if self.kept is None else self.kept._data

    def _refuse_gradient(self) -> None:
        raise UsageError(
            f"{self.name or 'a parameter'} is of the base that adapters change, and is not trained;"
            " leave its requires_grad at False"
        )

    @property
    def shape(self) -> Shape:
        """The lengths of the axes, known before there are values."""
        return self.declared

    @property
    def ndim(self) -> int:
        """The number of axes, known before there are values."""
        return len(self.declared)

    def draw(self, generator: np.random.Generator) -> Array:
        """Return initial values in float64; a shard takes its region of the full parameter's."""
        if self.region is None:
            return self.init(generator, self.declared)
        return self.region.take(self.init(generator, self.region.shape))

    @property
    def grad(self) -> Array | None:
        """See `Variable.grad`.

        Raises:
            UsageError: for one that ZeRO 2 or 3 has summed, of which this rank keeps a part.
        """
        if self._grad is None and self.version is not None and not self.rank_local:
            storage = self.version.storage()
            if storage is not None and storage.keeps_parts:
                raise UsageError(
                    f"ZeRO has summed the gradient of {self.name}, and each rank keeps only its"
                    " part: change model.storage.grads, or clip by optim.clip_by_global_norm, on"
                    " all ranks; or give ShardedDataParallel stage=1"
                )
        return super().grad

    @grad.setter
    def grad(self, value: Array | None) -> None:
        Variable.grad.__set__(self, value)  # type: ignore[attr-defined]

    def finish_gradient(self) -> None:
        """Complete `buffer`: zeros without a gradient, a copy of a gradient in another array."""
        if self.buffer is not None and self._grad is not self.buffer:
            self.buffer[...] = 0 if self._grad is None else self._grad
            self.grad = self.buffer

    @staticmethod
    def gradients_of(parameters: Iterable["Parameter"]) -> Sequence[Array]:
        """Return the gradients of some parameters, each once; of all of a model, its flat ones.

        Raises:
            UsageError: for a part of a sharded model, whose norm needs the other ranks.
        """
        each = list(dict.fromkeys(parameters))
        storages = [None if item.version is None else item.version.storage() for item in each]
        whole = storages[0]
        if whole is not None and storages == [whole] * len(whole.spans):
            whole.finish_gradients()
            return whole.grads
        for parameter, storage in zip(each, storages, strict=True):
            is_cut = storage is not None and (storage.is_stage or storage.ranks is not None)
            if is_cut or parameter.ranks is not None:
                raise UsageError(
                    "this part of a model is sharded over ranks; give the model's parameters()"
                )
        return [parameter._grad for parameter in each if parameter._grad is not None]

    def _set_hook(self, hook: Callable[[Any], None] | None) -> None:
        if self.guard is not None:
            raise UsageError(
                f"a hook of {self.name} would see this rank's part of the gradient alone, since the"
                " model is in a Worker or a strategy; change the sum instead, between"
                " parallel.backward(...) and optimizer.step()"
            )
        Variable.hook.__set__(self, hook)  # type: ignore[misc, union-attr]

    # a strategy sets hooks before its guards
    hook = property(Variable.hook.__get__, _set_hook)  # type: ignore[misc, union-attr]

    def __getattr__(self, name: str) -> Any:
        # called only for an empty slot, or a property that reads one
        if name in ("data", "_data") and self.kept is not None:
            assert self.wide is not None
            values = cast(self.kept._data, self.wide)
            if isinstance(values, np.ndarray):  # who would write to it would change nothing
                values.flags.writeable = False
            return values
        if name in ("data", "_data") and (self.version is not None or self.home is not None):
            raise UninitializedError(
                f"{self.name} is not on this rank now: ZeRO 3 gathers a layer's weights while the"
                " model's forward computes with them; use them there, or give"
                " ShardedDataParallel stage=1"
            )
        if name in ("data", "_data"):
            raise UninitializedError(
                f"a parameter of shape {self.declared} has no values yet; call"
                " model.initialize(seed=0) first, which finds only layers that are modules'"
                " attributes or items of lists that are"
            )
        return raise_missing(self, name)

    def __repr__(self) -> str:
        return f"Parameter({self.name or 'unnamed'}, shape={self.declared})"


class LookupTable(Parameter):
    """A table of rows looked up by index, such as an embedding.

    Optimizers of matrices (Muon) do not treat it as a matrix: each row is trained by itself.
    """

    __slots__ = ()
    is_table = True


def _rebuild(parameters: Sequence[Parameter], groups: Mapping[str, str]) -> "FlatStorage":
    values = {parameter.name: parameter._data for parameter in parameters}
    if any(parameter.buffer is not None for parameter in parameters):
        raise GraphError("copy a storage with its parameters: copy.deepcopy(model), or load_state")
    xp = namespace(next(iter(values.values()), np.zeros(0)))
    by_name = {parameter.name: parameter for parameter in parameters}
    return FlatStorage(by_name, values, partial(zeros, xp), lambda name, _: groups[name])


@dataclass(frozen=True)
class Span:
    """The location of a parameter: elements start..stop-1 of flat array number `buffer`."""

    parameter: Parameter
    buffer: int
    start: int
    stop: int


class FlatArrays(list[Array]):
    """A storage's flat arrays; in a step that is recorded, what NumPy does to them is, too."""

    def __iter__(self) -> Iterator[Array]:
        arrays = super().__iter__()
        return arrays if active() is None else map(writable, arrays)  # each update looks at them

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        return [*map(writable, found)] if isinstance(key, slice) else writable(found)


class FlatGradients(FlatArrays):
    """A storage's flat gradients, the arguments of a norm and of clipping."""

    def __init__(self, arrays: Iterable[Array], storage: "FlatStorage") -> None:
        super().__init__(arrays)
        self._storage = ref(storage)  # no cycle: the arrays are freed with the storage

    def by_ranks(self) -> dict[tuple[Any, ...], list[Array]]:
        """Return the gradients by the groups of ranks that hold further parts of them."""
        storage = self._storage()
        if storage is None or not storage.is_sharded:
            ranks = None if storage is None else storage.ranks
            return {() if ranks is None else (ranks,): self}
        if storage.is_stage:
            raise UsageError(
                "each rank has only its stages' gradients; nnmpi.Worker(..., clip=1.0) takes the"
                " norm over the pipeline"
            )
        found: dict[tuple[Any, ...], list[Array]] = {}
        for span, _, grad in storage.held():
            groups = (storage.ranks, span.parameter.ranks)
            parts = found.setdefault(tuple(group for group in groups if group is not None), [])
            parts += [] if grad is None else [grad.reshape(-1)]
        return found


class FlatStorage(Storage, read_once="spans groups rank_local dtype version"):
    """The flat arrays of a model and the location of each parameter in them.

    Args:
        values: the initial values by full name, in registration order, all of one dtype.
        parameters: the parameters by the same names.
        allocate: (elements, dtype) -> a 1-D array of zeros; called twice per group, for data and
            for gradients.
        group: (name, parameter) -> the parameter's optimizer group; by default "default" for all.
        dtype: of the values. Needed for a lazy mapping; by default that of the first value, or
            float32.

    Attributes:
        data, grads: the flat arrays, one per group, in order of first appearance.
        dtype: of all arrays; a pipeline stage without parameters has one, too.
        groups: the group name of each array.
        rank_local: per array, the `rank_local` of its parameters (see `Parameter`).
        spans: the location of each parameter, in registration order.
        seed: of the initial values.
        version: the version counter of the parameters.
        ranks: the group that shards these arrays (ZeRO); None if each rank has all of them.
        keeps_parts: whether gradients are there of which each rank keeps a part alone.
        is_stage: whether these are the parameters of some stages of a pipeline.
        check: refuses a model with other parameters than these, and lets those look at a change
            who keep parts of the model (see `nn.module.TreeCheck`); None without a model.
    """

    seed, is_stage, keeps_parts = 0, False, False
    ranks: Any = None
    check: Any = None

    def __init__(
        self,
        parameters: Mapping[str, Parameter],
        values: Mapping[str, Array],
        allocate: Allocate,
        group: Callable[[str, Parameter], str] | None = None,
        dtype: Any = None,
    ) -> None:
        self.spans: list[Span] = []
        self.data, self.grads = [], []
        self.distributed = any(parameter.region is not None for parameter in parameters.values())
        self.version = Version()
        self.version.storage = ref(self)
        # each parameter with the views bound to it, so that `check_places` detects rebinding
        self._views: list[tuple[Parameter, Array, Array]] = []
        # Uneven shards, and what stages share, lie apart: so ranks have what is the same on them at
        # the same places. A sum's order may depend on the place (in a ring: where the chunk
        # begins), and then their bits would differ.
        buffers: dict[tuple[str, bool, str], int] = {}
        lengths: list[int] = []
        if dtype is None:
            dtype = next(iter(values.values())).dtype if values else np.dtype("float32")
        self.dtype = dtype
        for name, parameter in parameters.items():
            label = group(name, parameter) if group is not None else "default"
            kind = label, parameter.rank_local, parameter.room
            buffer = buffers.setdefault(kind, len(lengths))
            lengths += [0] * (buffer == len(lengths))
            start = lengths[buffer]
            self.spans.append(Span(parameter, buffer, start, start + parameter.size))
            # the next parameter begins at a multiple of the alignment
            lengths[buffer] = aligned(start + parameter.size, dtype.itemsize)
        self.groups, self.rank_local = (
            [label for label, *_ in buffers],
            [is_local for _, is_local, _ in buffers],
        )
        self._data, self._grads = self._allocate(lengths, dtype, allocate)
        self.known_groups = set(self.groups)
        self._parameters = tuple(span.parameter for span in self.spans)
        for (name, parameter), span in zip(parameters.items(), self.spans, strict=True):
            value = values[name]
            if value.shape != parameter.declared:
                raise ShapeError(
                    f"{name} got values of shape {value.shape}, not {parameter.declared}"
                )
            parameter.name = name
            self._views.append(self._bind(span))
            self.write(span, value)

    @property
    def data(self) -> list[Array]:
        """This rank's flat values."""
        return self._own_data

    @data.setter
    def data(self, arrays: Iterable[Array]) -> None:
        self._own_data = FlatArrays(arrays)

    @property
    def grads(self) -> list[Array]:
        """This rank's flat gradients."""
        return self._own_grads

    @grads.setter
    def grads(self, arrays: Iterable[Array]) -> None:
        self._own_grads = FlatGradients(arrays, self)

    @property
    def is_sharded(self) -> bool:
        """Whether other ranks hold other parameters of the model, or other shards of them."""
        return self.is_stage or any(span.parameter.ranks is not None for span in self.spans)

    def _allocate(
        self, lengths: Sequence[int], dtype: Any, allocate: Allocate
    ) -> tuple[list[Array], list[Array]]:
        """Allocate `data` and `grads`; return the arrays that the parameters are views of.

        Here these are `data` and `grads` themselves; ZeRO 3 overrides it.
        """
        for length in lengths:
            self.data.append(allocate(length, dtype))
            self.grads.append(allocate(length, dtype))
        return self.data, self.grads

    def write(self, span: Span, value: Array, first: int = 0) -> None:
        """Copy values of a parameter's shape, or some rows from its element `first` on."""
        flat = self._data[span.buffer][span.start + first :][: value.size]
        flat.reshape(value.shape)[...] = namespace(flat).asarray(value)
        self.version.count += 1

    def _bind(self, span: Span) -> tuple[Parameter, Array, Array]:
        """Bind a parameter to its slices of the flat arrays, without gradient; return the views."""
        parameter, part = span.parameter, slice(span.start, span.stop)
        parameter._data = self._data[span.buffer][part].reshape(parameter.declared)
        parameter.buffer = self._grads[span.buffer][part].reshape(parameter.declared)
        if self.node_shared and not self.rank_local[span.buffer]:
            # Each of the ranks would change the one copy, while others read it. NumPy's error says
            # what, and `base.errors.note_read_only` why.
            parameter._data.flags.writeable = False
        parameter.grad, parameter.version, self.version.arrays = None, self.version, self._data
        return parameter, parameter._data, parameter.buffer

    def move(
        self, data: Sequence[Array] | None = None, grads: Sequence[Array] | None = None
    ) -> None:
        """Move the parameters, or their gradients, to other arrays of the same lengths and dtypes.

        Nothing is copied: the parameters take the values in the new arrays, and gradients are
        cleared. Optimizers follow at their next step. A model initialized again since then stays in
        its newer storage.

        Raises:
            ShapeError: for arrays of other lengths or dtypes; nothing is changed then.
        """
        for now, then in ((self.data, data), (self.grads, grads)):
            if then is not None and [(a.shape, a.dtype) for a in now] != [
                (a.shape, a.dtype) for a in then
            ]:
                raise ShapeError(
                    "parameters and gradients can move only to arrays of the same lengths and"
                    " dtypes"
                )
        self.data = self._data = self.data if data is None else list(data)
        self.grads = self._grads = self.grads if grads is None else list(grads)
        if any(parameter._data is array for parameter, array, _ in self._views):
            self._views = [self._bind(span) for span in self.spans]
        self.moves += 1

    @property
    def has_gradients(self) -> bool:
        """Whether any parameter has a gradient."""
        return any(parameter._grad is not None for parameter in self._parameters)

    @property
    def is_whole(self) -> bool:
        """Whether all parameters are always resident; ZeRO 3 gathers them on demand."""
        return True

    def held(self) -> Iterator[tuple[Span, Array, Array | None]]:
        """Yield each parameter with this rank's trained values and gradient, if any."""
        for span in self.spans:
            yield span, span.parameter._data, span.parameter._grad

    @property
    def size(self) -> int:
        """The number of elements of all parameters, without the gaps."""
        return sum(span.stop - span.start for span in self.spans)

    def held_bytes(self) -> tuple[int, int, int]:
        """Return this rank's bytes of parameters, of gradients, and of gather buffers."""
        return (
            sum(array.nbytes for array in self.data),
            sum(array.nbytes for array in self.grads),
            0,
        )

    @property
    def looks(self) -> int:
        """How often the model was looked at, as something of it may have changed."""
        return getattr(self.check, "looks", 0)

    def check_tree(self) -> None:
        """Refuse the model if it has got other parameters, which would not be trained.

        Raises:
            UsageError: naming the first.
        """
        if self.check is not None:
            self.check()

    def zero_grad(self) -> None:
        """Clear all gradients: the next backward pass overwrites them. A Worker's pass begins here.

        Raises:
            UsageError: for a model that is no longer the one that is trained, see `check_tree`.
        """
        self.check_tree()
        self.clear_gradients()

    def clear_gradients(self) -> None:
        """Clear all gradients, at another time than the beginning of a pass."""
        call(self._clear_grads, writes=())
        recorder = active()
        if recorder is not None:
            recorder.cleared.update(map(id, self._parameters))

    def _clear_grads(self) -> None:
        self.unsummed = self.spent = False
        for parameter in self._parameters:
            parameter._grad = None

    def finish_gradients(self) -> None:
        """Complete the flat gradients of all parameters.

        A parameter without a gradient since `zero_grad` gets zeros; a gradient set by hand is
        copied.

        Raises:
            UsageError: when a parameter was bound to other arrays, which updates would not reach.
        """
        call(self._finish)

    def _finish(self) -> None:
        self.check_places()
        for parameter, _, buffer in self._views:
            if parameter._grad is not buffer:
                parameter.finish_gradient()

    def check_places(self) -> None:
        """Refuse to continue when a parameter is bound to other arrays.

        Raises:
            UsageError: naming the parameter.
        """
        for parameter, data, buffer in self._views:
            # Updates go to the flat arrays. After `parameter.data = other` the model would compute
            # with one array while the optimizer silently trains another.
            if getattr(parameter, "_data", data) is not data or parameter.buffer is not buffer:
                raise UsageError(
                    f"{parameter.name} is no longer in this storage: its model was initialized"
                    " again (then make a new optimizer), or its data replaced (write"
                    " parameter.data[...] = values instead)"
                )

    def finish_update(self) -> None:
        """Mark `data` as changed, so that backward passes detect stale values."""
        self.version.count += 1

    def meet(self) -> None:
        """See `Storage.meet`."""
        self.version.meet()

    def note_set(self, spans: Iterable[Span] | None = None) -> None:
        """Let averages of the weights begin anew with values that were set from outside.

        Args:
            spans: of the parameters that were set; all by default.
        """
        parts = None
        if spans is not None:
            parts = [(span.buffer, self.trained_slice(span)) for span in spans]
        for optimizer in self.averaging:
            optimizer.begin_average(parts)

    def frozen(self) -> list[tuple[int, slice]]:
        """Return the spans of parameters that need no gradient, which optimizers skip."""
        return [
            (span.buffer, self.trained_slice(span))
            for span in self.spans
            if not span.parameter.requires_grad
        ]

    def trained_slice(self, span: Span) -> slice:
        """Return a parameter's slice of its array in `data`, as far as this rank trains it."""
        return slice(span.start, span.stop)

    def __reduce__(self) -> tuple[Any, ...]:
        """Let copy and pickle build a new storage around the copied parameters."""
        groups = {span.parameter.name: self.groups[span.buffer] for span in self.spans}
        parameters = [span.parameter for span in self.spans]
        return _rebuild, (parameters, groups), {"is_stage": self.is_stage}

    def view(self, span: Span, flats: Sequence[Array]) -> Any:
        """Return a parameter's slice of arrays laid out like `data`, in its shape."""
        return flats[span.buffer][span.start : span.stop].reshape(span.parameter.declared)

    def weights(self, span: Span) -> Any:
        """Return a parameter's values, to be read and set from outside, in its shape."""
        return self.view(span, self.data)
