"""Parameters and their flat storage: a few long arrays of values, and as many of gradients.

    data    [ 0.weight        | 0.bias | 2.weight       | 2.bias ]     one array per dtype and group
    grads   [ 0.weight        | 0.bias | 2.weight       | 2.bias ]     the same places

A layer declares its parameters; `Module.initialize` gives them values, once the full names are
known, because initial values are drawn from a stream keyed by seed and full name and so do not
depend on the layout. A parameter's `data` and its gradient are views into the flat arrays. So one
optimizer call updates a group, one message sums a bucket, a shard is a range of offsets, and with
an allocator that hands out shared memory the ranks of a node see one another's gradients. Each
parameter begins at a multiple of 64 bytes; the gaps hold zeros.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Integral
from typing import Any, ClassVar, TypeAlias

import numpy as np

from nnmpi.backend.array import Array, Shape, namespace
from nnmpi.backend.recording import active, perform
from nnmpi.errors import GraphError, ShapeError, UninitializedError, UsageError
from nnmpi.shard import Region
from nnmpi.tensor.function import Writes
from nnmpi.tensor.tensor import Tensor

ALIGNMENT_BYTES = 64

Initializer: TypeAlias = Callable[[np.random.Generator, Shape], Array]


def _zeros(_generator: np.random.Generator, shape: Shape) -> Array:
    return np.zeros(shape)


def _given(values: Array, _generator: np.random.Generator, _shape: Shape) -> Array:
    return values


class Parameter(Tensor):
    """A trained tensor, empty until its model is initialized.

    Attributes:
        name: the full name in its model ("2.weight"), set by `Module.initialize`.
        declared: the shape that it will have.
        init: draws its initial values: init(generator, shape) -> array.
        region: which part of a larger parameter this one is, when its ranks share that out; None
            for a whole one.
        apart: whether ranks that share batches have other parts each, whose gradients are complete
            where they are.
        guard: called before a backward pass writes to its gradient; it raises where that must not
            be. Or None.

    Args:
        shape: of the values; or an array or a list of first values, which then needs no `init`. A
            list of whole numbers is a shape.
        init: draws its initial values; zeros by default.
        region: `shape` is then that of the part, and the values are the part's of those that the
            whole would get.

    Raises:
        ShapeError: when the region has another shape.
    """

    __slots__ = ("apart", "declared", "guard", "init", "name", "region", "writes")

    is_table: ClassVar[bool] = False
    guard: Callable[[], None] | None
    writes: Writes | None

    def __init__(
        self, shape: Shape | Array, init: Initializer | None = None, region: Region | None = None
    ) -> None:
        if isinstance(shape, list) and all(isinstance(item, Integral) for item in shape):
            shape = tuple(shape)
        if not isinstance(shape, tuple):
            values = np.array(Tensor(shape).numpy())
            shape, init = values.shape, partial(_given, values)
        if region is not None and region.local_shape != shape:
            raise ShapeError(
                f"a parameter of shape {shape} is not a region of shape {region.local_shape}"
            )
        self.declared: Shape = shape
        self.init: Initializer = init or _zeros
        self.name, self.region, self.apart = "", region, False
        self.requires_grad = True
        self.grad = self.node = self.tape = self.buffer = self.hook = self.guard = self.cut = (
            self.writes
        ) = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy: without gradient and storage, which the copy gets anew."""
        if self.guard is not None:
            raise GraphError(
                "a model that a Worker or a strategy works on is not copied or pickled; call its"
                " release() first, or build the model again and use load_state"
            )
        saved = ("apart", "declared", "init", "name", "region", "requires_grad", "data")
        return {name: getattr(self, name) for name in saved if hasattr(self, name)}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.grad = self.node = self.tape = self.buffer = self.hook = self.guard = self.cut = (
            self.writes
        ) = None
        for name, value in state.items():
            setattr(self, name, value)

    @property
    def shape(self) -> Shape:
        """The lengths of the axes, known before there are values."""
        return self.declared

    def draw(self, generator: np.random.Generator) -> Array:
        """Return initial values in float64; a shard gets the full parameter's values there."""
        if self.region is None:
            return self.init(generator, self.declared)
        return self.region.take(self.init(generator, self.region.shape))

    def finish_gradient(self) -> None:
        """Complete `buffer` with the gradient: zeros if there is none, or a copy."""
        if self.buffer is not None and self.grad is not self.buffer:
            self.buffer[...] = 0 if self.grad is None else self.grad
            self.grad = self.buffer

    def __getattr__(self, name: str) -> Any:
        # reached only when a slot is empty, or a property needs an empty one
        if name == "declared" or (name != "data" and not hasattr(type(self), name)):
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self
            )
        raise UninitializedError(
            f"a parameter of shape {self.declared} has no values yet; call model.initialize(seed=0)"
            " first; a layer that is neither a module's attribute nor an item of a list that is"
            " one is not found then"
        )

    def __repr__(self) -> str:
        return f"Parameter({self.name or 'unnamed'}, shape={self.declared})"


class LookupTable(Parameter):
    """Rows that are looked up and trained by themselves: no matrix to an optimizer of matrices."""

    __slots__ = ()
    is_table = True


def _laid_again(parameters: Sequence[Parameter], groups: Mapping[str, str]) -> "FlatStorage":
    values = {parameter.name: parameter.data for parameter in parameters}
    if any(parameter.buffer is not None for parameter in parameters):
        raise GraphError(
            "a storage is copied with its parameters: copy.deepcopy(model), or load_state"
        )
    zeros = namespace(next(iter(values.values()), np.zeros(0))).zeros
    by_name = {parameter.name: parameter for parameter in parameters}
    return FlatStorage(by_name, values, zeros, lambda name, _: groups[name])


@dataclass(frozen=True)
class Span:
    """Where one parameter lies: elements start..stop-1 of flat array number `buffer`."""

    parameter: Parameter
    buffer: int
    start: int
    stop: int


class FlatStorage:
    """The flat arrays of a model and where each parameter lies in them.

    Args:
        values: the initial values by full name, in registration order, all of one dtype.
        parameters: the parameters by the same names.
        allocate: (elements, dtype) -> a 1-D array of zeros; called twice per group, for data and
            for gradients.
        group: (name, parameter) -> the optimizer group that it belongs to; by default all are in
            "default".
        dtype: of the values, for a mapping that makes each one when it is asked for; by default the
            first one's.

    Attributes:
        data, grads: the flat arrays, one per group, in order of first appearance.
        groups: the group name of each.
        apart: of each, whether its parameters are (see `Parameter`).
        known_groups: these, and those that only other parts of the model have.
        spans: where each parameter lies, in registration order.
        moves: how many times the arrays were replaced by others.
        common: whether `data` is memory that other ranks write too (see `parallel.fused`).
        shared: whether a strategy has given these values to several ranks, or each a part; else a
            rank's are its own.
        state_store: where the state of optimizers over it lies out of memory (`memory.store`); None
            for in memory.
        writes: counts the writes to the parameters.
    """

    def __init__(
        self,
        parameters: Mapping[str, Parameter],
        values: Mapping[str, Array],
        allocate: Callable[[int, Any], Array],
        group: Callable[[str, Parameter], str] | None = None,
        dtype: Any = None,
    ) -> None:
        self.spans: list[Span] = []
        self.data: list[Array] = []
        self.grads: list[Array] = []
        self.moves = 0
        self.common = False
        self.shared = any(parameter.region is not None for parameter in parameters.values())
        self.state_store: Any = None
        self.writes = Writes()
        # with data and buffer as they were bound
        self._views: list[tuple[Parameter, Array, Array]] = []
        buffers: dict[tuple[str, bool], int] = {}
        lengths: list[int] = []
        if dtype is None and values:
            dtype = next(iter(values.values())).dtype
        step = ALIGNMENT_BYTES // dtype.itemsize if dtype is not None else 1
        for name, parameter in parameters.items():
            label = group(name, parameter) if group is not None else "default"
            buffer = buffers.setdefault((label, parameter.apart), len(lengths))
            lengths += [0] * (buffer == len(lengths))
            start = lengths[buffer]
            self.spans.append(Span(parameter, buffer, start, start + parameter.size))
            # rounded up to the alignment
            lengths[buffer] = -(-(start + parameter.size) // step) * step
        self.groups, self.apart = [label for label, _ in buffers], [apart for _, apart in buffers]
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
            self._views.append(self._lay(span))
            self.write(span, value)

    def _allocate(
        self, lengths: Sequence[int], dtype: Any, allocate: Callable[[int, Any], Array]
    ) -> tuple[list[Array], list[Array]]:
        """Make `data` and `grads`; return the arrays in which the parameters and their gradients
        lie: these.
        """
        for length in lengths:
            self.data.append(allocate(length, dtype))
            self.grads.append(allocate(length, dtype))
        return self.data, self.grads

    def write(self, span: Span, value: Array) -> None:
        """Give a parameter its values, of its shape."""
        span.parameter.data[...] = value

    def _lay(self, span: Span) -> tuple[Parameter, Array, Array]:
        """Let a parameter have its place in the flat arrays, and no gradient; return it and its
        views.
        """
        parameter, part = span.parameter, slice(span.start, span.stop)
        parameter.data = self._data[span.buffer][part].reshape(parameter.declared)
        parameter.buffer = self._grads[span.buffer][part].reshape(parameter.declared)
        parameter.grad, parameter.writes, self.writes.arrays = None, self.writes, self._data
        return parameter, parameter.data, parameter.buffer

    def move(
        self, data: Sequence[Array] | None = None, grads: Sequence[Array] | None = None
    ) -> None:
        """Move the parameters, or their gradients, to other arrays of the same lengths and dtypes.

        Nothing is copied: the values are those found there, and gradients are forgotten. Optimizers
        follow at their next step. A model that was initialized again stays in its new storage.

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
        if any(parameter.data is array for parameter, array, _ in self._views):
            self._views = [self._lay(span) for span in self.spans]
        self.moves += 1

    @property
    def has_gradients(self) -> bool:
        """Whether there are gradients that were not forgotten."""
        return any(parameter.grad is not None for parameter in self._parameters)

    @property
    def is_whole(self) -> bool:
        """Whether the parameters are all here, whenever one looks; see `parallel.zero.storage`."""
        return True

    def held(self) -> Iterator[tuple[Span, Array, Array | None]]:
        """Yield each parameter with this rank's trained values and gradient, if any."""
        for span in self.spans:
            yield span, span.parameter.data, span.parameter.grad

    @property
    def size(self) -> int:
        """The number of parameters' elements, gaps not counted."""
        return sum(span.stop - span.start for span in self.spans)

    def held_bytes(self) -> tuple[int, int, int]:
        """Return this rank's bytes of parameters, gradients, and buffers to compute with them."""
        return (
            sum(array.nbytes for array in self.data),
            sum(array.nbytes for array in self.grads),
            0,
        )

    def zero_grad(self) -> None:
        """Forget all gradients: the next backward pass overwrites them."""
        recorder = active()
        if recorder is None:
            self._forget()
        else:
            recorder.perform(self._forget)
            recorder.cleared.update(id(span.parameter) for span in self.spans)

    def _forget(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def finish_gradients(self) -> None:
        """Let the flat arrays hold every parameter's gradient, whatever they held before.

        That is zeros where no backward pass has written since `zero_grad`, and a copy of a gradient
        set by hand.

        Raises:
            UsageError: when a parameter lies elsewhere now, and updates here would not reach it.
        """
        perform(self._finish)

    def _finish(self) -> None:
        self.check_places()
        for parameter, _, buffer in self._views:
            if parameter.grad is not buffer:
                parameter.finish_gradient()

    def check_places(self) -> None:
        """Refuse to continue when a parameter lies elsewhere now.

        Raises:
            UsageError: naming it.
        """
        for parameter, data, buffer in self._views:
            # An update goes to the flat arrays. If somebody has rebound parameter.data, the model
            # would compute with one array and the optimizer train another, without a word.
            if parameter.data is not data or parameter.buffer is not buffer:
                raise UsageError(
                    f"{parameter.name} lies in this storage no more: its model was initialized"
                    " again (then make a new optimizer), or its data replaced (write"
                    " parameter.data[...] = values instead)"
                )

    def finish_update(self) -> None:
        """Mark `data` as changed, so that backward passes detect stale values."""
        self.writes.count += 1

    def frozen(self) -> list[tuple[int, slice]]:
        """Return the spans of parameters that need no gradient, which optimizers skip."""
        return [
            (span.buffer, self.place(span))
            for span in self.spans
            if not span.parameter.requires_grad
        ]

    def place(self, span: Span) -> slice:
        """Return where in its array of `data` lies what this rank trains of a parameter."""
        return slice(span.start, span.stop)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the recipe of a copy or pickle, whose storage is built for its own parameters."""
        groups = {span.parameter.name: self.groups[span.buffer] for span in self.spans}
        return _laid_again, ([span.parameter for span in self.spans], groups)

    def view(self, span: Span, flats: Sequence[Array]) -> Any:
        """Return a parameter's place in arrays that lie as `data` does, in its shape."""
        return flats[span.buffer][span.start : span.stop].reshape(span.parameter.declared)
