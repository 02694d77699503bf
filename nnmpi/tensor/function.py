"""The autograd graph: variables, the operations between them, and the tape.

Any subclass of `Function` may enter the graph. Collectives, recomputation and the ends of pipeline
stages are such subclasses:

    class Square(Function):
        def forward(self, x):
            self.saved = (x,)
            return x * x

        def backward(self, grad):
            (x,) = self.saved
            return (2 * x * grad,)

    y = Square()(x)

The object itself is the node on the tape: one Python object per operation.

While a step is recorded (see `nnmpi.compile`), arrays note what NumPy does to them, and a replay
calls the array functions directly, without the `Function`. `self.xp` is NumPy or CuPy; the arrays
that its functions make share the recording's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import count
from operator import attrgetter
from typing import Any, ClassVar, NoReturn, TypeAlias

import numpy as np

from nnmpi.backend.array import (
    Array,
    Dtype,
    Shape,
    is_array,
    is_result,
    mixed_error,
    namespace,
)
from nnmpi.backend.kernels import add, cast, kernels_of, to_float32
from nnmpi.backend.precision import FLOAT32, is_floating, is_low, precision
from nnmpi.backend.program.record import bare
from nnmpi.backend.recording import Recorder, active
from nnmpi.backend.sums import sum_over
from nnmpi.base.errors import DtypeError, GraphError
from nnmpi.tensor.dtypes import product_dtype
from nnmpi.tensor.placement import Placement, Shard, elementwise_placement, first_shard
from nnmpi.tensor.traits import NotExported, Sample, Traits

Grads: TypeAlias = tuple[Array | None, ...]  # one per input; None for an input without gradient

_recording: ContextVar[bool] = ContextVar("nnmpi_recording", default=True)


def grad_enabled() -> bool:
    """Return whether operations are being recorded for a backward pass."""
    return _recording.get()


@contextmanager
def no_grad() -> Iterator[None]:
    """Compute without recording: results need no gradient and hold no references to inputs.

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


class Version:
    """A version counter of parameters that share flat `arrays`: incremented at each update.

    Backward compares it with its value at the forward pass to detect overwritten saved parameters.
    One counter per storage is enough: an optimizer updates all parameters at once.

    Attributes:
        meet: waits for the ranks that share the values, if there are any.
        storage: returns the parameters' storage, or None once it is gone.
    """

    storage: Callable[[], Any]
    arrays: Sequence[Array] = ()
    count = 0
    meet: Callable[[], object] = int


class Variable:
    """An array that the graph can differentiate.

    Attributes:
        data: the values. What NumPy does to them in a step that is recorded is recorded, too;
            nnmpi's own code reads `_data`.
        requires_grad: whether a backward pass computes a gradient for it.
        node: the operation that computed it; None for a leaf.
        tape: the tape with that operation; None for a leaf.
        shard: a shard's position in its full tensor (see `sharded.ShardedTensor`); otherwise None.
        buffer: a view into flat storage that receives the first gradient of a pass, or None.
        hook: called with this leaf as soon as its gradient is final, once in every backward pass
            that gives it one; or None. Set it before the forward pass: operations read it when
            they are recorded.
        guard: called before a backward pass writes to the gradient, to raise if it must not; or
            None. Only parameters have one.
        version: the version counter of the values; None for all but parameters.
        kept, wide: see `Parameter`; None for all but some parameters.
        made_by: the operation or layer whose result this is, if it is often taken for something
            else: "sigmoid", "softmax", "LSTM" ...; or "".
    """

    __slots__ = (
        "__weakref__",
        "_data",
        "_grad",
        "buffer",
        "shard",
        "hook",
        "made_by",
        "node",
        "requires_grad",
        "tape",
    )

    _data: Array
    requires_grad: bool
    _grad: Array | None
    node: Function | None
    tape: Tape | None
    buffer: Array | None
    hook: Callable[[Any], None] | None
    shard: Shard | None
    made_by: str
    guard: Callable[[], None] | None = None
    version: Version | None = None
    kept: Any = None
    wide: Dtype | None = None

    @property
    def data(self) -> Array:
        """The values, see the class."""
        recorder = active()
        if recorder is None:
            return self._data
        if self.node is None and self not in recorder.made:
            recorder.record_leaf(self)
        return recorder.wrap(self._data)

    @data.setter
    def data(self, value: Array) -> None:
        self._data = assigned("x.data", value, getattr(self, "_data", None))

    @property
    def grad(self) -> Array | None:
        """The gradient, an array like `data`; None until a backward pass reaches this leaf.

        A compiled step that changes it in place, or sets it to None, does so in its replays as
        well. One that assigns another array stays eager.
        """
        recorder = active()
        if recorder is None or self._grad is None:
            return self._grad
        recorder.record_leaf(self)
        return recorder.wrap(self._grad)

    @grad.setter
    def grad(self, value: Array | None) -> None:
        recorder = active()
        if recorder is not None and value is None:
            recorder.record(setattr, self, "_grad", None)
            recorder.cleared.add(id(self))
        self._grad = None if value is None else assigned("x.grad", value, self._grad)

    def check_floating(self) -> None:
        """Refuse a dtype without gradients, also of a tensor whose `requires_grad` was assigned."""
        if not is_floating(self._data.dtype):
            raise DtypeError(
                f"a tensor of {self._data.dtype} can have no gradient; use floating point"
            )

    def add_grad(self, grad: Array) -> None:
        """Accumulate one operation's contribution to this leaf's gradient, maybe in place."""
        if self.guard is not None:
            self.guard()
        recorder = active()
        given = grad if recorder is None else bare(grad)
        if self._grad is not None:
            if given is not self._grad:  # else backward has added it (`Function.sum_into`)
                np.add(writable(self._grad), grad, out=writable(self._grad))
            return
        # without a buffer a copy: the array may be shared
        target = np.empty_like(grad) if self.buffer is None else self.buffer
        if given is not target:
            np.copyto(writable(target), grad)
        self._grad = target if recorder is None else bare(target)
        if recorder is not None:
            recorder.record(setattr, self, "_grad", self._grad)
            if self.buffer is None:
                recorder.loose.append((self, bare(target)))


_numbers = count()  # of recorded operations; simulated ranks share it, and each compares its own
_number = attrgetter("number")


class Tape:
    """The operations of one graph, oldest first once they are `ordered`."""

    __slots__ = ("hooked", "joined", "mixed", "nodes", "warning")

    def __init__(self) -> None:
        self.nodes: list[Function] = []
        self.mixed = False  # whether another tape was appended since `ordered`
        self.hooked = False  # whether some leaf has a gradient hook
        self.joined: Tape | None = None  # the tape that this one was appended to
        self.warning: Callable[[], None] | None = None  # for users who call `Tensor.backward`

    def find(self) -> Tape:
        """Return the tape that now has this one's operations (find of a union-find structure)."""
        tape = self
        while tape.joined is not None:
            if tape.joined.joined is not None:
                tape.joined = tape.joined.joined  # path halving
            tape = tape.joined
        return tape

    def ordered(self) -> list[Function]:
        """Return the operations in the order in which they were recorded."""
        if self.mixed:  # runs in order, which a sort merges
            self.nodes.sort(key=_number)
            self.mixed = False
        return self.nodes


def join(a: Tape, b: Tape) -> Tape:
    """Return the tape that holds the operations of both."""
    a, b = a.find(), b.find()
    if a is b:
        return a
    if len(a.nodes) < len(b.nodes):
        # copy the shorter list: each operation is then moved at most log2(n) times in all
        a, b = b, a
    a.nodes.extend(b.nodes)
    a.mixed, a.hooked = True, a.hooked or b.hooked
    a.warning = a.warning or b.warning
    b.nodes, b.joined = [], a
    return a


def assigned(name: str, value: Any, before: Any) -> Any:
    """Return what an attribute is to hold; drop a recording whose replays would not assign it."""
    recorder = active()
    if recorder is not None:
        value = bare(value)
        if value is not before:  # `x.data += 1` assigns the same array again
            recorder.spoil(f"the step assigns another array to {name}")
    return value


def writable(array: Array) -> Array:
    """Return an array that outlives the step for an operation to write to."""
    recorder = active()
    return array if recorder is None else recorder.wrap(array)


def kind_of(x: Any) -> str:
    """Return what a function returned, as text."""
    return "nothing" if x is None else f"an instance of {type(x).__name__}"


class Function:
    """One application of an operation. Subclasses define `forward` and `backward`.

    Attributes:
        number: its place in the order of recording.
        needs: per input, whether it needs a gradient; set before `forward`. All False under
            `no_grad`.
        saved: the values that backward reads, set by `forward`, freed by the backward pass. Store
            arrays nowhere else.
        edges: per input, the operation or leaf that receives its gradient, or None. The attribute
            itself is None after a backward pass has released the operation.
        grad: the gradient of the output, during a backward pass.
        shape, dtype: of the output.
        xp: the module of the input arrays; set before `forward` is called.
        computes: the dtype in which half precision is computed: "float32", to which tensors are
            converted; "kernels", the same, unless a device's kernels read them as they are;
            "parameters", so, but they read the first input alone; "product", the same, but what is
            half precision the context decides, see `dtypes.product_dtype`; or "" for its own.
        returns: the dtype of that result: "float32"; or "" for the inputs', to which it is rounded
            once.
        product_dtype: the dtype in which a device's product reads its inputs and writes the result;
            None for NumPy's.
        rounds: for "product", whether the host rounds operands to bfloat16, in both passes.
        is_call: whether a recording repeats it as one call of `forward` and one of `backward`, on
            plain arrays: if it exchanges messages, draws numbers, or decides by values.
        captured: whether a graph of a device may contain it nevertheless.
        broadcasts: whether inputs broadcast to one shape. Backward may then return gradients of the
            result's shape, which the tape sums; and beside shards a full input is scattered.
        views: whether the result may be a view of the input.
        traits: what others must know of the operation; None for what only others are built on.
        version, version_read: the version counter of a parameter among the inputs, and its value at
            the forward pass.
    """

    __slots__ = (
        "__weakref__",
        "dtype",
        "edges",
        "grad",
        "needs",
        "number",
        "owns_grad",
        "product_dtype",
        "rounds",
        "saved",
        "shape",
        "version",
        "version_read",
        "xp",
    )
    varies: ClassVar[tuple[str, ...]] = (
        __slots__  # from one application to the next: see `program.compare`
    )

    computes: ClassVar[str] = ""
    returns: ClassVar[str] = ""
    is_call: ClassVar[bool] = False
    captured: bool = False
    product_dtype: Dtype | None
    broadcasts: ClassVar[bool] = False
    views: ClassVar[bool] = False
    traits: ClassVar[Traits | None] = None

    xp: Any
    dtype: Dtype

    edges: tuple[Function | Variable | None, ...] | None
    grad: Array | None
    owns_grad: bool
    needs: tuple[bool, ...]
    number: int
    rounds: bool
    saved: tuple[Any, ...]
    shape: Shape
    version: Version | None

    @property
    def averages(self) -> bool:
        """Whether the result is a mean."""
        return False

    @property
    def summands(self) -> tuple[int, ...]:
        """The number of losses that the result is the sum or the mean of, if they are known.

        It is given three times: those that count, the rows, and all elements.
        """
        return ()

    @property
    def alike(self) -> str:
        """What ranks that train one model have in common, as text: a loss's options, a mode."""
        return ""

    def __reduce__(self) -> NoReturn:
        raise GraphError(
            "a tensor of a graph cannot be copied or pickled; copy x.detach(), or compute it under"
            " nnmpi.no_grad()"
        )

    def forward(self, *inputs: Any) -> Array:
        """Return the output array. Tensors arrive as their arrays, other inputs unchanged."""
        raise NotImplementedError(f"{type(self).__name__} defines no forward")

    def backward(self, grad: Array) -> Grads:
        """Return one gradient per input, or None. `grad` may be shared: do not write to it."""
        raise NotImplementedError(f"{type(self).__name__} defines no backward")

    def placed(self, *inputs: Any) -> Placement:
        """Return the output's placement; some inputs are shards (`sharded.ShardedTensor`).

        Called before `forward`, which then gets the shards' arrays. An override also converts
        options that describe the full tensor, such as a shape, to the shard's. The default refuses
        shards.

        Raises:
            LayoutError: when the operation on shards would not give shards of the result.
        """
        raise first_shard(inputs).shard.error(self, "works on whole tensors")

    def __call__(self, *inputs: Any) -> Any:
        """Apply the operation, and record it if an input needs a gradient.

        Raises:
            GraphError: when no input is a tensor, or this object is in a graph already.
            DtypeError: when `forward` returns no array.
            LayoutError: for a shard that the operation does not support (see `placed`).
            DeviceError: when some inputs are in the host's memory and others on a device.
        """
        # One loop without helpers: this runs once per operation of every step, and a small
        # network's overhead beside the arithmetic is spent here.
        grad_enabled, first, recorded, part = _recording.get(), None, False, None
        low = None
        if self.computes:
            inputs, low = self.raised(inputs)
        values: list[Any] = []
        needs: list[bool] = []
        for x in inputs:
            needed = False
            if isinstance(x, Variable):
                if first is None:
                    first = x
                if grad_enabled and x.requires_grad:
                    needed = recorded = True
                if x.shard is not None:
                    part = x
                x = x._data
            values.append(x)
            needs.append(needed)
        if first is None:
            name = type(self).__name__.removesuffix("Function")
            raise GraphError(
                f"{name} needs at least one Tensor among its inputs; wrap the array in nnmpi.Tensor"
            )
        if part is not None:
            return lowered(part.apply(self, inputs), low)  # type: ignore[attr-defined]
        self.needs, self.saved = tuple(needs), ()
        self.xp = np if type(first._data) is np.ndarray else namespace(first._data)
        recorder = active()
        try:
            data = (
                self.forward(*values) if recorder is None else recorder.apply(self, inputs, values)
            )
        except (AttributeError, TypeError) as error:
            mixed = mixed_error(values)
            if mixed is None:
                raise
            raise mixed from error
        # `blank` makes a Tensor: this module cannot import the class, which is built on it.
        result = first.blank()  # type: ignore[attr-defined]
        result._data = data if type(data) is np.ndarray else self._as_array(data)
        if recorder is not None:
            recorder.made.add(result)
        if recorded:
            self._record(inputs, result)
        else:
            self.saved = ()  # no backward pass will read them
        return result if low is None else lowered(result, low)

    def raised(self, inputs: tuple[Any, ...]) -> tuple[tuple[Any, ...], Dtype | None]:
        """Return the inputs in the dtypes that `computes` states, and the dtype to round to."""
        if self.computes == "product":
            return self._product_inputs(inputs)
        for x in inputs:
            if isinstance(x, Variable) and is_low(x._data.dtype):
                break
        else:
            return inputs, None
        low, kept = None if self.returns else x._data.dtype, 0
        if self.computes != "float32" and kernels_of(inputs[0]._data).of_device:
            low, kept = None, 1 if self.computes == "parameters" else len(inputs)
        return (*inputs[:kept], *map(_wide, inputs[kept:])), low

    def _product_inputs(self, inputs: tuple[Any, ...]) -> tuple[tuple[Any, ...], Dtype | None]:
        dtype = product_dtype(type(self).__name__, *[x for x in inputs if x is not None])
        if not isinstance(inputs[0]._data, np.ndarray):
            self.product_dtype, self.rounds = dtype if is_floating(dtype) else None, False
            return inputs, None
        self.product_dtype, self.rounds = None, precision() == "bf16"
        if is_low(dtype):
            return tuple(map(_wide, inputs)), None if self.returns else dtype
        return tuple(map(_wide, inputs)) if self.rounds else inputs, None

    def into(self, i: int) -> Array | None:
        """Return the array in which the gradient of input i may be computed in place, or None.

        The array is a parameter's slice of the flat gradients. A backward that computes into it and
        returns it saves a copy.
        """
        leaf = self._leaf(i)
        if leaf is None or leaf.buffer is None or leaf._grad is not None:
            return None
        return writable(leaf.buffer)

    def sum_into(self, i: int) -> tuple[Array | None, bool]:
        """Return the buffer for input i's gradient, or None, and whether to add to it.

        A backward whose product can accumulate (beta = 1 of BLAS) returns the buffer after adding
        to it; `add_grad` then skips its own addition.
        """
        leaf = self._leaf(i)
        if leaf is None or leaf._grad is not leaf.buffer:
            return self.into(i), False
        if leaf.guard is not None:
            leaf.guard()  # here, since `add_grad` calls it only after the sum has changed
        assert leaf.buffer is not None
        return writable(leaf.buffer), True

    def _leaf(self, i: int) -> Variable | None:
        """Return input i's leaf if it has a buffer, and is no other input: two gradients cannot
        share one.
        """
        edges = self.edges or (None,) * (i + 1)
        leaf = edges[i]
        if not isinstance(leaf, Variable) or leaf.buffer is None:
            return None
        return leaf if [*map(id, edges)].count(id(leaf)) == 1 else None

    def add_grad(self, grad: Array) -> None:
        """Accumulate one use's contribution to the output's gradient.

        The first array may be shared, so the second contribution goes to a new one; from then on
        the sum is in place.
        """
        if self.grad is None:
            self.grad, self.owns_grad = grad, False
        elif self.owns_grad:
            add(self.grad, grad, self.grad)
        else:  # the sum of two 0-d arrays is a NumPy scalar, which `out` cannot write to
            self.grad, self.owns_grad = add(self.grad, grad), self.shape != ()

    def own_grad(self, xp: Any) -> Array:
        """Return the output's gradient so far, for the caller to add to parts of it."""
        if self.grad is None:
            self.grad = xp.zeros(self.shape, self.dtype)
        elif not self.owns_grad:
            total = xp.empty(self.shape, self.dtype)
            np.copyto(total, self.grad)
            self.grad = total
        self.owns_grad = True
        return self.grad

    def release(self) -> None:
        """Drop everything that only a backward pass needs."""
        self.edges = None
        self.saved = ()

    def _as_array(self, data: Any) -> Array:
        """Return forward's result as an array; refuse all but arrays and NumPy's scalars.

        NumPy's functions return a scalar in place of an array without axes.
        """
        if isinstance(data, np.generic):
            return np.asarray(data)
        if not is_array(data):
            raise DtypeError(
                f"{type(self).__name__}.forward returned {kind_of(data)}; return an array, as"
                " self.xp makes them"
            )
        return data

    def recorded(self, recorder: Any, inputs: tuple[Any, ...], values: list[Any]) -> Any:
        """Run forward and record it for replays."""
        for x in inputs:
            if isinstance(x, Variable) and x.node is None and x not in recorder.made:
                recorder.record_leaf(x)
        if self.is_whole(recorder):
            return recorder.whole(self.forward, values)
        plain = self.xp
        self.xp = recorder.module(plain)
        try:
            with self._recorded_attributes(recorder):
                return bare(self.forward(*map(recorder.wrap, values)))
        except Exception as error:
            # perhaps compiled code, which takes nothing but NumPy's arrays
            recorder.spoil(f"{type(self).__name__}.forward raised {type(error).__name__}")
            self.xp = plain
            return self.forward(*values)

    def recorded_backward(self, recorder: Recorder, grad: Array) -> Grads:
        """Run backward; if it takes no recorded arrays, on plain ones, and drop the recording."""
        try:
            with self._recorded_attributes(recorder):
                return self.backward(grad)
        except Exception as error:
            recorder.spoil(f"{type(self).__name__}.backward raised {type(error).__name__}")
            self.saved, self.xp = bare(self.saved), namespace(bare(grad))
            return self.backward(bare(grad))

    @contextmanager
    def _recorded_attributes(self, recorder: Recorder) -> Iterator[None]:
        """Let the arrays among the attributes of an operation of one's own be recorded ones."""
        attributes = getattr(self, "__dict__", {})
        arrays = {k: x for k, x in attributes.items() if type(x) is np.ndarray}
        attributes.update({name: recorder.wrap(array) for name, array in arrays.items()})
        try:
            yield
        finally:
            for name, array in arrays.items():
                if bare(attributes.get(name)) is array:
                    attributes[name] = array

    def is_whole(self, recorder: Recorder) -> bool:
        """Whether a recording repeats the operation as one call."""
        return self.is_call and not (recorder.captures and self.captured)

    def _record(self, inputs: tuple[Any, ...], result: Variable) -> None:
        if hasattr(self, "edges"):
            name = type(self).__name__
            raise GraphError(
                f"this {name} was applied before; each application needs a Function object of"
                " its own"
            )
        tape: Tape | None = None
        hooked = False
        version: Version | None = None
        edges: list[Function | Variable | None] = []
        for x, needed in zip(inputs, self.needs, strict=True):
            if not needed:
                edges.append(None)
            elif x.node is None:
                if x.buffer is None:
                    x.check_floating()
                edges.append(x)
                hooked = hooked or x.hook is not None
                version = version or x.version
            else:
                edges.append(x.node)
                if x.node.views:
                    version = version or x.node.version
                if tape is None:
                    tape = x.tape
                elif tape is not x.tape:
                    tape = join(tape, x.tape)  # two graphs meet in this operation
        # Without a tape all inputs are leaves, and a new graph begins. Otherwise it is the inputs'
        # tape, or the tape that it was joined to.
        tape = Tape() if tape is None else tape if tape.joined is None else tape.find()
        if hooked:
            tape.hooked = True
        tape.nodes.append(self)
        self.number = next(_numbers)
        self.edges, self.grad, self.owns_grad = tuple(edges), None, False
        self.version, self.version_read = version, 0 if version is None else version.count
        data = result._data
        self.shape, self.dtype = data.shape, data.dtype
        result.requires_grad, result.node, result.tape = True, self, tape


class Elementwise(Function):
    """Element-wise operation with broadcasting. Operands with one sharding give that sharding."""

    __slots__ = ()

    broadcasts = True

    def placed(self, *inputs: Any) -> Placement:
        """See `placement.elementwise_placement`."""
        return elementwise_placement(self, inputs, scatters=True)


def unbroadcast(grad: Array, shape: Shape) -> Array:
    """Sum a broadcast result's gradient down to the shape of an operand."""
    if grad.shape == shape:
        return grad
    if is_low(grad.dtype):
        return cast(unbroadcast(to_float32(grad), shape), grad.dtype)
    extra = grad.ndim - len(shape)
    axes = tuple(range(extra)) + tuple(
        extra + i for i, n in enumerate(shape) if n == 1 and grad.shape[extra + i] != 1
    )
    return sum_over(grad, axes).reshape(shape)


class AsType(Elementwise):
    """x in another dtype; its gradient has the dtype of x."""

    __slots__ = ("target",)

    traits = Traits(
        onnx=lambda f, y, x: x.each("Cast", to=y.dtype),
        samples=(Sample("astype", lambda x: AsType(np.dtype("float64"))(x).astype(x.dtype)),),
    )

    def __init__(self, target: Dtype) -> None:
        self.target = target

    def forward(self, x: Array) -> Array:
        self.saved = (x.dtype,)
        return cast(x, self.target)

    def backward(self, grad: Array) -> Grads:
        return (cast(grad, self.saved[0]),)


def converted(x: Any, dtype: Dtype) -> Any:
    """Convert an array, or a tensor as an operation of the graph; return one of the dtype as is."""
    if isinstance(x, Variable):
        return x if x._data.dtype == dtype else AsType(dtype)(x)
    return cast(x, dtype)


def lowered(x: Any, low: Dtype | None) -> Any:
    """Return a float32 tensor in a dtype of half precision, others and for None as they are."""
    return x if low is None or x._data.dtype != FLOAT32 else AsType(low)(x)


def _wide(x: Any) -> Any:
    """Return tensors and arrays of half precision in float32, others as they are."""
    values = x._data if isinstance(x, Variable) else x
    return converted(x, FLOAT32) if is_result(values) and is_low(values.dtype) else x


class CommonRoot(Function):
    """A common root for a backward pass from several tensors with given gradients."""

    __slots__ = ("grads",)

    traits = Traits(onnx=NotExported(), tested_in="tests/tensor/test_tape.py")

    def __init__(self, grads: Sequence[Array | None]) -> None:
        self.grads = tuple(grads)

    def forward(self, *inputs: Array) -> Array:
        return namespace(inputs[0]).zeros((), inputs[0].dtype)

    def backward(self, grad: Array) -> Grads:
        return self.grads
