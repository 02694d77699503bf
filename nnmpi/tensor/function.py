"""The autograd graph: variables, the operations between them, and the tape.

Any subclass of `Function` may enter the graph; collectives, recomputation and the ends of pipeline
stages do so too:

    class Square(Function):
        def forward(self, x):
            self.saved = (x,)
            return x * x

        def backward(self, grad):
            (x,) = self.saved
            return (2 * x * grad,)

    y = Square()(x)

The object is the node on the tape: one Python object per operation.

A subclass that says `replayable = True` promises more, so that a recorded step (see
`nnmpi.compile`) can be replayed without it: in `forward` and `backward` all arithmetic on arrays
goes through the functions of `self.xp`, or through `self.invoke`, and views are taken by indexing
alone. `self.xp` is NumPy or CuPy, or writes down what it is asked for:

        y = self.xp.multiply(x, x)               not  x * x
        self.xp.add(y, bias, out=y)              not  y += bias
        self.xp.copyto(inner, x)                 not  inner[...] = x
        self.xp.add.reduce(y, axis=0)            not  y.sum(axis=0)
        self.xp.reshape(y, shape)                not  y.reshape(shape), which may copy

While a step is recorded, any other operation is noted whole, forward and backward: its results are
copied to where the first ones lie.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ClassVar, TypeAlias

import numpy as np

from nnmpi.backend.array import Array, Dtype, Shape, is_array, is_result, mixed_error, namespace
from nnmpi.backend.precision import cast, is_low, to_float32
from nnmpi.backend.recording import Recorder, active, alias
from nnmpi.backend.sums import sum_over
from nnmpi.errors import DtypeError, GraphError, ShapeError
from nnmpi.tensor.placement import Placement, TensorCut, aligned, is_cut

Grads: TypeAlias = tuple[Array | None, ...]  # one for each input, None where there is none

_SCALAR: type = np.generic  # what NumPy returns in place of an array without axes
_recording: ContextVar[bool] = ContextVar("nnmpi_recording", default=True)


def recording() -> bool:
    """Return whether operations are being recorded for a backward pass."""
    return _recording.get()


@contextmanager
def no_grad() -> Iterator[None]:
    """Compute without recording: results need no gradient and keep no inputs alive.

    Example:
        >>> w = nnmpi.Tensor([1.0], requires_grad=True)
        >>> with nnmpi.no_grad():
        ...     print((2 * w).requires_grad)
        False
    """
    token = _recording.set(False)
    try:
        yield
    finally:
        _recording.reset(token)


@contextmanager
def enable_grad() -> Iterator[None]:
    """Record again inside a `no_grad` block."""
    token = _recording.set(True)
    try:
        yield
    finally:
        _recording.reset(token)


class Writes:
    """How often values that lie together in `arrays` were written since they were laid there."""

    arrays: Sequence[Array] = ()
    count = 0


class Variable:
    """An array that the graph can differentiate.

    Attributes:
        data: the values.
        requires_grad: whether a backward pass computes a gradient for it.
        grad: the gradient, an array like `data`; None until a backward pass reaches this leaf.
        node: the operation that computed it; None for a leaf.
        tape: the tape that the operation stands on; None for a leaf.
        cut: which part of a larger tensor this is, see `cut.CutTensor`; None for a whole one.
        buffer: where the first gradient of a pass is written (a view into flat storage), or None.
        hook: called with this leaf, once in every backward pass that gives it a gradient, as soon
            as that is final; or None. Set it before the forward pass: operations look for it when
            they are recorded.
        guard: called before a backward pass writes to its gradient; it raises where that must not
            be. Or None; only parameters have one.
        writes: counts the writes to its values, in place; None where nobody counts, as of all but
            parameters.
    """

    __slots__ = (
        "__weakref__",
        "buffer",
        "cut",
        "data",
        "grad",
        "hook",
        "node",
        "requires_grad",
        "tape",
    )

    data: Array
    requires_grad: bool
    grad: Array | None
    node: Function | None
    tape: Tape | None
    buffer: Array | None
    hook: Callable[[Any], None] | None
    cut: TensorCut | None
    guard: Callable[[], None] | None = None
    writes: Writes | None = None

    def add_grad(self, grad: Array, xp: Any) -> None:
        """Accumulate one operation's contribution to this leaf's gradient, maybe in place.

        `xp` is the arrays' module, or a recorder's stand-in for it.
        """
        if self.guard is not None:
            self.guard()
        if self.grad is not None:
            if grad is not self.grad:  # else it was added there already, see `Function.sum_into`
                xp.add(self.grad, grad, out=self.grad)
            return
        place, recorder = self.buffer, active()
        if place is None:
            place = xp.empty_like(grad)  # a copy: the array may be shared
            xp.copyto(place, grad)
        elif grad is not place:
            xp.copyto(place, grad)
        if recorder is None:
            self.grad = place
        else:
            recorder.perform(setattr, self, "grad", place)
            if self.buffer is None:
                recorder.loose.append((self, place))


class Tape:
    """The operations of one graph, oldest first."""

    __slots__ = ("hooked", "joined", "nodes", "warning")

    def __init__(self) -> None:
        self.nodes: list[Function] = []
        self.hooked = False  # some leaf wants to know when its gradient is final
        self.joined: Tape | None = None  # the tape that took over this one's operations
        self.warning: str | None = None  # what a user who calls `Tensor.backward` should be told

    def find(self) -> Tape:
        """Return the tape on which this one's operations stand now."""
        tape = self
        while tape.joined is not None:
            if tape.joined.joined is not None:
                # shorten the way for the next one who asks (path halving)
                tape.joined = tape.joined.joined
            tape = tape.joined
        return tape


def join(one: Tape, other: Tape) -> Tape:
    """Return the tape that holds the operations of both."""
    one, other = one.find(), other.find()
    if one is other:
        return one
    if len(one.nodes) < len(other.nodes):
        # copy the shorter list: each operation is then moved at most log2(n) times in all
        one, other = other, one
    one.nodes.extend(other.nodes)
    one.hooked = one.hooked or other.hooked
    one.warning = one.warning or other.warning
    other.nodes, other.joined = [], one
    return one


class Function:
    """One application of an operation. Subclasses define `forward` and `backward`.

    Attributes:
        needs: per input, whether its gradient is wanted; set before `forward`. All False when
            nothing is recorded.
        saved: what backward needs, set by `forward`; freed by the backward pass. Keep arrays
            nowhere else.
        edges: per input, the operation or leaf that its gradient goes to, or None. None altogether
            once used up.
        grad: the gradient of the output, while a backward pass is on its way.
        shape, dtype: of the output.
        xp: the module of the arrays that `forward` gets; set before it is called.
        replayable: whether the operation keeps the promise above.
        broadcasts: whether inputs are broadcast to one shape: their gradients may be of the
            result's, and are summed.
        views: whether the result may lie where the input does.
        writes, written: who counts the writes to a parameter among the inputs, and what had been
            counted then.
    """

    __slots__ = (
        "__weakref__",
        "dtype",
        "edges",
        "grad",
        "needs",
        "owns_grad",
        "saved",
        "shape",
        "writes",
        "written",
        "xp",
    )

    replayable: ClassVar[bool] = False
    broadcasts: ClassVar[bool] = False
    views: ClassVar[bool] = False

    xp: Any
    dtype: Dtype

    edges: tuple[Function | Variable | None, ...] | None
    grad: Array | None
    owns_grad: bool
    needs: tuple[bool, ...]
    saved: tuple[Any, ...]
    shape: Shape
    writes: Writes | None

    def forward(self, *inputs: Any) -> Array:
        """Return the output array for input arrays, or plain values for inputs that are no tensors."""
        raise NotImplementedError(f"{type(self).__name__} defines no forward")

    def backward(self, grad: Array) -> Grads:
        """Return one gradient per input, or None. `grad` may be shared: do not write to it."""
        raise NotImplementedError(f"{type(self).__name__} defines no backward")

    def placed(self, *inputs: Any) -> Placement:
        """Return the output's placement, given inputs of which some are shards (`cut.CutTensor`).

        Called before `forward`, which then gets the parts' arrays. Options that speak of the whole
        tensor, such as a shape, are to be set to those of the part here. By default nothing is
        known, and parts are refused.

        Raises:
            LayoutError: where the operation on parts would not give parts of the result.
        """
        part = next(x for x in inputs if is_cut(x))
        raise part.cut.refuse(self, "works on whole tensors")

    def __call__(self, *inputs: Any) -> Any:
        """Apply the operation, and record it if an input needs a gradient.

        Raises:
            GraphError: when no input is a tensor, or this object stands in a graph already.
            DtypeError: when `forward` returns no array.
            LayoutError: for a rank's part of a tensor (see `placed`).
            DeviceError: when some inputs are in the host's memory, and others on a device.
        """
        # This runs once per operation of every step, so it is one loop without helpers: what a
        # small network's step takes beside the arithmetic is spent here.
        recording, first, recorded, part = _recording.get(), None, False, None
        values: list[Any] = []
        needs: list[bool] = []
        for x in inputs:
            needed = False
            if isinstance(x, Variable):
                if first is None:
                    first = x
                if recording and x.requires_grad:
                    needed = recorded = True
                if x.cut is not None:
                    part = x
                x = x.data
            values.append(x)
            needs.append(needed)
        if first is None:
            raise GraphError(
                "an operation needs at least one Tensor among its inputs; wrap the array in"
                " nnmpi.Tensor"
            )
        if part is not None:
            return part.apply(self, inputs)  # type: ignore[attr-defined]
        self.needs, self.saved = tuple(needs), ()
        self.xp = np if type(first.data) is np.ndarray else namespace(first.data)
        recorder = active()
        try:
            data = (
                self.forward(*values)
                if recorder is None
                else self._recorded(recorder, inputs, values)
            )
        except (AttributeError, TypeError) as error:
            mixed = mixed_error(values)
            if mixed is None:
                raise
            raise mixed from error
        # `blank` makes a Tensor without its constructor: this module cannot import Tensor, which is
        # built on it.
        result = first.blank()  # type: ignore[attr-defined]
        result.data = data if type(data) is np.ndarray else self._as_array(data)
        if recorder is not None:
            recorder.made.add(result)
        if recorded:
            self._record(inputs, result)
        else:
            self.saved = ()  # no backward pass will come: let go of the inputs at once
        return result

    def into(self, i: int) -> Array | None:
        """Return the array in which the gradient of input i may be computed in place, or None.

        A backward that returns this very array saves a copy (parameters' gradients live in flat
        storage).
        """
        edges = self.edges
        if edges is None:
            return None
        edge = edges[i]
        if not isinstance(edge, Variable) or edge.buffer is None or edge.grad is not None:
            return None
        # one leaf standing at two inputs gets two gradients, which cannot share one place
        for j, other in enumerate(edges):
            if other is edge and j != i:
                return None
        return edge.buffer

    def sum_into(self, i: int) -> tuple[Array | None, bool]:
        """Return the buffer for input i's gradient, or None, and whether to add to it.

        A backward that can add a product to what an array holds returns that very array when it has
        done so.
        """
        place = self.into(i)
        edge = None if place is not None or self.edges is None else self.edges[i]
        if not isinstance(edge, Variable) or edge.buffer is None or edge.grad is not edge.buffer:
            return place, False
        if sum(other is edge for other in self.edges or ()) != 1:
            return None, False
        if edge.guard is not None:
            edge.guard()  # before the sum is changed: `add_grad`, which asks too, comes after that
        return edge.buffer, True

    def add_grad(self, grad: Array, xp: Any) -> None:
        """Accumulate one use's contribution to the output's gradient, not in shared arrays."""
        if self.grad is None:
            self.grad, self.owns_grad = grad, False
        elif self.owns_grad:
            xp.add(self.grad, grad, out=self.grad)
        else:  # of arrays without axes NumPy makes a number, which cannot be written to
            self.grad, self.owns_grad = xp.add(self.grad, grad), self.shape != ()

    def release(self) -> None:
        """Drop everything that only a backward pass needs."""
        self.edges = None
        self.saved = ()

    def _as_array(self, data: Any) -> Array:
        """Return what `forward` has returned, which must be an array or a scalar of NumPy's."""
        if isinstance(data, _SCALAR):
            return np.asarray(data)
        if not is_array(data):
            what = "nothing" if data is None else f"a {type(data).__name__}"
            raise DtypeError(
                f"{type(self).__name__}.forward returned {what}; return an array, as self.xp makes"
                " them"
            )
        return data

    def _recorded(self, recorder: Any, inputs: tuple[Any, ...], values: list[Any]) -> Any:
        """Return forward's result, after noting for the replay how it is computed."""
        for x in inputs:
            if isinstance(x, Variable) and x.node is None and x not in recorder.made:
                recorder.saw(x)
        if not self.replayable:
            return record_whole(recorder, self.forward, values)
        self.xp = recorder.module(self.xp)
        return self.forward(*values)

    def _record(self, inputs: tuple[Any, ...], result: Variable) -> None:
        if hasattr(self, "edges"):
            name = type(self).__name__
            raise GraphError(
                f"this {name} was applied before; each application needs a Function object of"
                " its own"
            )
        tape: Tape | None = None
        hooked = False
        writes: Writes | None = None
        edges: list[Function | Variable | None] = []
        for x, needed in zip(inputs, self.needs, strict=True):
            if not needed:
                edges.append(None)
            elif x.node is None:
                edges.append(x)
                hooked = hooked or x.hook is not None
                writes = writes or x.writes
            else:
                edges.append(x.node)
                if x.node.views:
                    writes = writes or x.node.writes
                if tape is None:
                    tape = x.tape
                elif tape is not x.tape:
                    tape = join(tape, x.tape)  # two graphs meet in this operation
        # No tape: all inputs are leaves, and a new graph begins. Else it is the inputs' tape, or
        # what took it over.
        tape = Tape() if tape is None else tape if tape.joined is None else tape.find()
        if hooked:
            tape.hooked = True
        tape.nodes.append(self)
        self.edges, self.grad, self.owns_grad = tuple(edges), None, False
        self.writes, self.written = writes, 0 if writes is None else writes.count
        data = result.data
        self.shape, self.dtype = data.shape, data.dtype
        result.requires_grad, result.node, result.tape = True, self, tape


class Elementwise(Function):
    """Element-wise operation with broadcasting. Operands with one sharding give that sharding."""

    __slots__ = ()

    broadcasts = True

    def placed(self, *inputs: Any) -> Placement:
        """Return how the result lies on the ranks, see `placement.aligned`."""
        return aligned(self, inputs, scatters=True)


def unbroadcast(xp: Any, grad: Array, shape: Shape) -> Array:
    """Sum a broadcast result's gradient down to the shape of an operand.

    Args:
        xp: the module whose functions are called.
    """
    if grad.shape == shape:
        return grad
    if is_low(grad.dtype):
        return cast(xp, unbroadcast(xp, to_float32(xp, grad), shape), grad.dtype)
    extra = grad.ndim - len(shape)
    axes = tuple(range(extra)) + tuple(
        extra + i for i, n in enumerate(shape) if n == 1 and grad.shape[extra + i] != 1
    )
    return xp.reshape(sum_over(xp, grad, axes), shape)


class CommonRoot(Function):
    """A common root for a backward pass from several tensors with given gradients."""

    __slots__ = ("grads",)

    def __init__(self, grads: Sequence[Array | None]) -> None:
        self.grads = tuple(grads)

    def forward(self, *inputs: Array) -> Array:
        return namespace(inputs[0]).zeros((), dtype=inputs[0].dtype)

    def backward(self, grad: Array) -> Grads:
        return self.grads


def record_whole(
    recorder: Recorder,
    compute: Callable[..., Any],
    inputs: Sequence[Any],
    places: Sequence[Any] = (),
) -> Any:
    """Return arrays after recording, for replays, how they are computed.

    Args:
        recorder: of the step that is recorded.
        compute: gives the results.
        inputs: its arguments.
        places: arrays besides these that a result may lie in.
    """
    results = recorder.alone(compute, *inputs)
    is_single = is_result(results)
    matches = [results] if is_single else results
    if not isinstance(matches, tuple | list) or not all(
        item is None or is_result(item) for item in matches
    ):
        return results  # whoever called refuses it
    known = (*inputs, *places)
    saved = tuple(None if item is None else _own(recorder, item, known) for item in matches)
    bare, targets = [alias(item) for item in inputs], [alias(item) for item in saved]

    def again() -> None:
        results = compute(*bare)
        for target, result in zip(targets, [results] if is_single else results, strict=True):
            if target is not None and result is not None:
                _put(target, result)

    recorder.note(again)
    return saved[0] if is_single else saved


def _own(recorder: Recorder, result: Any, known: Sequence[Any]) -> Array:
    """Return a result as an array that later ones can be written to.

    One that is, or is a view of, what the operation was given stays so: it will be again. Any other
    one is copied, as it may be somebody's: a row of a table, for example. The copy lies in the
    recording's memory.
    """
    place = np.asarray(result) if isinstance(result, np.generic) else result
    # a device's arrays have no flag that says so
    is_broadcast = 0 in place.strides and place.size > 1
    if is_broadcast or isinstance(place, np.ndarray) and not place.flags.writeable:
        place = place.copy(order="K")
    if any(
        type(item) is type(place) and namespace(place).may_share_memory(item, place)
        for item in known
    ):
        return place
    return recorder.copy(place)


def _put(place: Array, result: Any) -> None:
    """Copy a result to its place, unless it is a view of what lies there.

    Raises:
        ShapeError: when it has another shape than the first one, as what a mask picks may have.
    """
    if result.shape != place.shape:
        raise ShapeError(
            f"an operation of a compiled step gave {result.shape} in place of the {place.shape}"
            " that was recorded; shapes that depend on values, such as x[mask]'s, cannot be"
            " compiled"
        )
    if not (is_array(result) and namespace(place).may_share_memory(place, result)):
        place[...] = result
