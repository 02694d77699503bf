"""Tensor: an array that records how it was computed, with its operations as methods.

A gradient in three lines:

    x = Tensor([1.0, 2.0], requires_grad=True)
    (x * x).sum().backward()
    x.grad                      # array([2., 4.], dtype=float32)

Sums and means of float16 and bfloat16 accumulate in float32. In mixed precision the result stays
float32, as losses do, since a sum may exceed the range of float16. Otherwise it is rounded to the
input's dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partialmethod
from itertools import accumulate, pairwise
from math import prod
from operator import ge, gt, index, le, lt
from types import MappingProxyType
from typing import Any, NoReturn, TypeAlias

import numpy as np

import nnmpi.tensor.reduce as reduce
from nnmpi.backend.activations import TANH
from nnmpi.backend.array import (
    Array,
    Dtype,
    Shape,
    asarray,
    is_array,
    is_result,
    mixed_error,
    namespace,
    ones,
    plain,
)
from nnmpi.backend.kernels import to_float32
from nnmpi.backend.precision import (
    FLOAT32,
    dtype_named,
    is_floating,
    is_low,
    rounds_products,
)
from nnmpi.backend.program.record import RecordedArray, bare
from nnmpi.backend.recording import active, refuse, to_library
from nnmpi.base.errors import (
    DtypeError,
    GraphError,
    LayoutError,
    NnmpiError,
    ShapeError,
    UsageError,
    check_int,
    number,
    shortened,
)
from nnmpi.base.wings import Drawn
from nnmpi.base.words import add_missing, answered, instead
from nnmpi.tensor.backward import Deferred, walk_back
from nnmpi.tensor.dtypes import may_meet, product_dtype
from nnmpi.tensor.elementwise import Clip, Extremum, Pointwise, Power, Where, activated, add_low
from nnmpi.tensor.function import AsType, Function, Variable, converted
from nnmpi.tensor.operand import (
    check_broadcast,
    checked_axes,
    operands,
    refuse_parts,
    require_floating,
    values_of,
    values_or_refuse,
)
from nnmpi.tensor.placement import is_sharded
from nnmpi.tensor.shape import (
    Concatenate,
    GetItem,
    Pad,
    Reshape,
    Sort,
    Transpose,
    View,
    is_basic,
    order_of,
)

Axis: TypeAlias = int | tuple[int, ...] | list[int] | None


# What is written for NumPy's functions, where it is no method of that name.
_WRITTEN = MappingProxyType(
    {
        "add": "x + y",
        "subtract": "x - y",
        "multiply": "x * y",
        "divide": "x / y",
        "power": "x ** y",
        "matmul": "x @ y",
        "absolute": "abs(x)",
        "negative": "-x",
        "square": "x ** 2",
        "reciprocal": "1 / x",
        "amax": "x.max()",
        "amin": "x.min()",
        "std": "x.var().sqrt()",
        "repeat": "x[np.repeat(np.arange(len(x)), 2)]",
        "expand_dims": "x[None]",
        "tile": "x.repeat(...)",
        "split": "x.split(size), with the size of a part",
        "einsum": "nnmpi.tensor.einsum(...)",
        "where": "nnmpi.tensor.where(...)",
        "stack": "nnmpi.tensor.stack(...)",
        "maximum": "nnmpi.tensor.maximum(...)",
        "minimum": "nnmpi.tensor.minimum(...)",
        "concatenate": "nnmpi.tensor.concatenate(...)",
    }
)

# What reads no values, so that no gradient is lost.
_OF_SHAPES = frozenset(
    [
        np.shape,
        np.ndim,
        np.size,
        np.isrealobj,
        np.iscomplexobj,
        np.result_type,
        np.can_cast,
        np.zeros_like,
        np.ones_like,
        np.empty_like,
    ]
)


def _refuse_numpys(name: str) -> NoReturn:
    """Refuse one of NumPy's functions for a tensor, with what to write instead.

    Raises:
        UsageError: always.
    """
    ours = _WRITTEN.get(name) or (f"x.{name}(...)" if callable(vars(Tensor).get(name)) else "")
    # Rows of other names, such as a list's `append`, say nothing about NumPy's functions.
    others = instead(f"x.{name}") or instead(f"torch.{name}")
    told = f"; where a gradient is needed, write {ours}" if ours else others
    raise UsageError(f"numpy.{name} takes arrays; of a tensor, give x.numpy() for the values{told}")


def _needs_gradient(value: Any) -> bool:
    """Return whether a value, or one in its lists, is a tensor that needs a gradient."""
    if isinstance(value, list | tuple):
        return any(map(_needs_gradient, value))
    return isinstance(value, Tensor) and value.requires_grad


def _values(value: Any) -> Any:
    """Return a value with the arrays of the tensors in its lists."""
    if isinstance(value, list | tuple):
        return type(value)(map(_values, value)) if type(value) in (list, tuple) else value
    return np.asarray(value) if isinstance(value, Tensor) else value


class _Size(int):
    """A number of elements, which PyTorch's users call."""

    __slots__ = ()

    def __call__(self, *_: Any) -> NoReturn:
        raise TypeError(f"size is a number and not callable{instead('size')}")


# Layers that return a tuple in PyTorch, and what to write instead.
UNPACKED = MappingProxyType(
    {
        "LSTM": "for the last state, too, call h, (last, c) = lstm.with_state(x)",
        "GRU": "for the last state, too, call h, last = gru.with_state(x)",
        "RNN": "for the last state, too, call h, last = rnn.with_state(x)",
        "max": "the positions are x.argmax(axis)",
        "min": "the positions are (-x).argmax(axis)",
        "sort": "the positions are x.argsort(axis)",
        "MultiheadAttention": "write h = attention(x): its weights are not returned",
    }
)
# What a tensor on the right does for an array's operator, by the name of NumPy's function.
_NAMES = "add subtract multiply divide power matmul less less_equal greater greater_equal"
_OURS = "radd rsub rmul rtruediv rpow rmatmul gt ge lt le eq ne"
REFLECTED = dict(zip(f"{_NAMES} equal not_equal".split(), _OURS.split(), strict=True))
PROBABILITIES = "sigmoid", "softmax"  # operations whose results are often taken for logits


class Tensor(Drawn, Variable):
    """An array with automatic differentiation.

    Args:
        data: an array (not copied), or numbers in lists (floats become float32).
        requires_grad: whether backward passes compute `grad` for it.
        dtype: the dtype to convert to; None leaves an array's dtype.

    Raises:
        DtypeError: for `requires_grad` with a dtype that is not floating point, or data that are no
            numbers.

    Example:
        >>> x = nnmpi.Tensor([1.0, 2.0, 3.0], requires_grad=True)
        >>> (x * x).sum().backward()
        >>> x.grad
        array([2., 4., 6.], dtype=float32)
    """

    __slots__ = ()
    __pandas_priority__ = 5000  # above its tables', whose operators would take rows for numbers

    def __init__(self, data: Any, requires_grad: bool = False, dtype: Any = None) -> None:
        self._data = _as_array(data, dtype)
        if issubclass(type(data), RecordedArray) and (recorder := active()) is not None:
            recorder.made.add(self)
        if requires_grad:
            self.check_floating()
        self.requires_grad = requires_grad
        self._grad = self.node = self.tape = self.buffer = self.hook = self.shard = None
        self.made_by = ""

    @staticmethod
    def blank() -> Tensor:
        """Return a tensor without data, for an operation to fill in."""
        tensor = Tensor.__new__(Tensor)
        tensor.requires_grad = False
        tensor._grad = tensor.node = tensor.tape = tensor.buffer = tensor.hook = tensor.shard = None
        tensor.made_by = ""
        return tensor

    def backward(
        self, grad: Any = None, retain_graph: bool = False, deferred: Deferred | None = None
    ) -> None:
        """Accumulate the gradients of all leaves that this tensor depends on into their `grad`.

        Args:
            grad: the gradient of this tensor, of its shape, converted to its dtype; by default 1,
                for a tensor of one element.
            retain_graph: keep the saved arrays, so that backward can be called again.
            deferred: postpones the parameters' gradients until its `finish` (see
                `backward.Deferred`).

        Raises:
            GraphError: when nothing was recorded, or an earlier call used up the graph or a part of
                it; for `deferred` together with gradient hooks or `retain_graph`.
            ShapeError: when `grad` is needed and missing, or has another shape.
            DeviceError: when `grad` is on a device and the tensor is not.
        """
        if not self.requires_grad:
            raise GraphError(
                "backward of a tensor that depends on nothing that needs a gradient; "
                "was it computed under no_grad, or detached?"
            )
        warning = None if self.tape is None else self.tape.find().warning
        if warning is not None:
            warning()
        xp = namespace(self._data)
        if grad is None:
            if self._data.size != 1:
                raise ShapeError(
                    f"backward of a tensor of shape {self.shape} needs grad; without it, reduce to"
                    " one number"
                )
            seed = ones(self._data, 1).reshape(self._data.shape)
        else:
            values = values_or_refuse("backward", grad)
            try:
                seed = to_library(xp, values)
            except TypeError as error:
                raise mixed_error((self._data, values)) or error from None
            if seed.dtype != self._data.dtype:
                # an operation, so that a recording includes it
                seed = Tensor(seed).astype(self._data.dtype)._data
            if seed.shape != self.shape:
                raise ShapeError(
                    f"backward of a tensor of shape {self.shape} got a gradient of shape"
                    f" {seed.shape}"
                )
        walk_back(self, seed, retain_graph, deferred)

    def detach(self) -> Tensor:
        """Return a tensor of the same values (not copied) without history in the graph."""
        return Tensor(self._data)

    def numpy(self) -> Array:
        """Return the values as a NumPy array, copied to the host if they are on a device."""
        refuse("a tensor's array (numpy)")
        get = getattr(self._data, "get", None)
        return self._data if get is None else get()

    def item(self) -> float:
        """Return the value of a tensor of one element as a Python number.

        Raises:
            ShapeError: when there is not exactly one element.
        """
        if self._data.size != 1:
            raise ShapeError(f"item of a tensor of shape {self.shape} is not a single number")
        refuse("a tensor's number (item, float, bool)")
        return self._data.item()

    @property
    def shape(self) -> Shape:
        """The lengths of the axes."""
        return self._data.shape

    @property
    def dtype(self) -> Dtype:
        """The dtype of the values."""
        return self._data.dtype

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return self._data.ndim

    @property
    def size(self) -> int:
        """The number of elements."""
        return _Size(prod(self.shape))

    @property
    def T(self) -> Tensor:
        """The tensor with its axes reversed."""
        return self.permute()

    def __len__(self) -> int:
        if self._data.ndim == 0:
            raise TypeError("len() of a tensor without axes; x.size is 1")
        return len(self._data)

    def __iter__(self) -> Iterator[Tensor]:
        if self.made_by in UNPACKED:
            raise UsageError(
                f"{self.made_by} returns one tensor, whose rows would be unpacked here;"
                f" {UNPACKED[self.made_by]}, and to read rows, h[0], h[1] ..."
            )
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        suffix = ", requires_grad=True" if self.requires_grad else ""
        return (
            f"Tensor({np.array2string(self.numpy(), separator=', ', prefix='Tensor(')},"
            f" dtype={self.dtype}{suffix})"
        )

    def __bool__(self) -> bool:
        return bool(self.item())

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __format__(self, form: str) -> str:
        return format(self.item(), form) if form else str(self)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **named: Any) -> Tensor:
        """Compute `array + x`; refuse `numpy.exp(x)`, whose gradient would be lost."""
        name = ufunc.__name__
        if name in REFLECTED and method == "__call__" and not named and inputs[1] is self:
            return getattr(self, f"__{REFLECTED[name]}__")(inputs[0])
        return _refuse_numpys(name if method == "__call__" else f"{name}.{method}")

    def __array_function__(
        self, function: Callable[..., Any], types: Any, args: Any, named: Any
    ) -> Any:
        """Compute `numpy.argmax(x)` of the values; refuse where a gradient would be lost."""
        if function in _OF_SHAPES:
            given = [item._data if isinstance(item, Tensor) else item for item in args]
            return function(*given, **named)
        if _needs_gradient([args, list(named.values())]):
            _refuse_numpys(function.__name__)
        return function(*_values(args), **{name: _values(item) for name, item in named.items()})

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.array(self._lent().numpy(), dtype, copy=copy)

    def __dlpack__(self, **named: Any) -> Any:
        """Lend the values to another library: torch.from_dlpack(x), jax.numpy.from_dlpack(x)."""
        return self._lent()._data.__dlpack__(**named)

    def __dlpack_device__(self) -> Any:
        return self._data.__dlpack_device__()

    def _lent(self) -> Tensor:
        """Return the tensor for a library that knows no graph, or refuse."""
        if self.requires_grad:  # the graph would silently end there
            raise GraphError(
                "a tensor that needs a gradient is not an array; use x.numpy(), x.detach(), or"
                " loss.item() for the number, and nnmpi.tensor.stack where a gradient is needed"
            )
        refuse("a tensor's array (numpy)")
        return self

    def __add__(self, other: Any) -> Tensor:
        mixed = add_low(self, other)
        if mixed is not None:
            return mixed
        return Pointwise("add")(*operands("add", self, other))

    __radd__ = __add__

    def __sub__(self, other: Any) -> Tensor:
        return _difference(self, other)

    def __rsub__(self, other: Any) -> Tensor:
        return _difference(other, self)

    def __mul__(self, other: Any) -> Tensor:
        return Pointwise("multiply")(*operands("multiply", self, other))

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Tensor:
        return _pointwise("divide", self, other)

    def __rtruediv__(self, other: Any) -> Tensor:
        return _pointwise("divide", other, self)

    def __pow__(self, other: Any) -> Tensor:
        return _pointwise("power", self, other, function=Power())

    def __rpow__(self, other: Any) -> Tensor:
        return _pointwise("power", other, self, function=Power())

    def __matmul__(self, other: Any) -> Tensor:
        return _product(self, other)

    def __rmatmul__(self, other: Any) -> Tensor:
        return _product(other, self)

    def __neg__(self) -> Tensor:
        if self._data.dtype.kind == "b":
            raise DtypeError("negate of a bool tensor is undefined; convert with astype('float32')")
        return Pointwise("negative")(self)

    def __abs__(self) -> Tensor:
        return Pointwise("absolute")(self)

    def __getitem__(self, key: Any) -> Tensor:
        try:
            parts = tuple(map(_index, key if isinstance(key, tuple) else (key,)))
            if is_basic(parts):
                return self._passed_on(View(parts)(self))
            function = GetItem(parts)
            if not isinstance(self._data, np.ndarray):
                function.check(self.shape)
            return function(self)
        except NnmpiError:
            raise
        except (IndexError, TypeError, ValueError) as error:
            raise ShapeError(f"index {key!r} does not fit shape {self.shape}: {error}") from None

    def __setitem__(self, key: Any, value: Any) -> NoReturn:
        raise UsageError(
            "a Tensor's elements cannot be assigned; write to its array, x.data, or use"
            " nnmpi.tensor.where"
        )

    # Comparisons return plain boolean arrays, since they have no derivative. `==` cannot compare
    # elements, since dictionaries and sets of tensors need it for identity. It raises for operands
    # that NumPy would compare by element, so that nobody takes the one bool for an array.
    def __eq__(self, other: object) -> bool:
        if self is not other and (is_result(other) or isinstance(other, int | float | Tensor)):
            raise UsageError(
                "== does not compare a Tensor's elements; compare x.data outside of compiled steps"
            )
        return self is other

    __hash__ = Variable.__hash__

    def _compare(self, operator: Callable[[Any, Any], Any], other: Any) -> Any:
        refuse("a comparison")
        values = values_or_refuse("a comparison", other)
        try:
            return operator(self._data, values)
        except (TypeError, ValueError):
            raise UsageError(
                f"a comparison of a tensor of shape {self.shape} needs a number or an array that"
                f" broadcasts, not {shortened(repr(values))}"
            ) from None

    __lt__ = partialmethod(_compare, lt)
    __le__ = partialmethod(_compare, le)
    __gt__ = partialmethod(_compare, gt)
    __ge__ = partialmethod(_compare, ge)

    @answered
    def sum(self, axis: Axis = None, keepdims: bool = False) -> Tensor:
        """Return the sum over axes, by default all; `keepdims` keeps them with length 1."""
        return reduce.Sum(_axes(self, axis, keepdims), keepdims)(self)

    @answered
    def mean(self, axis: Axis = None, keepdims: bool = False) -> Tensor:
        """Return the mean over axes. Same arguments as `sum`.

        Raises:
            ShapeError: when there is nothing to average.
        """
        function = reduce.Sum(_axes(self, axis, keepdims), keepdims, averages=True)
        return function(require_floating("mean", self))

    @answered
    def var(self, axis: Axis = None, keepdims: bool = False, correction: int = 0) -> Tensor:
        """Return the variance over axes; the other arguments as for `sum`.

        Args:
            correction: subtracted from the number of elements in the denominator; 1 gives the
                unbiased estimate.

        Raises:
            ShapeError: when there are not more elements than `correction`.
        """
        number("correction", correction)
        function = reduce.Variance(_axes(self, axis, keepdims), keepdims, correction)
        return function(require_floating("variance", self))

    @answered
    def max(self, axis: Axis = None, keepdims: bool = False) -> Tensor:
        """Return the maximum over axes; ties share the gradient evenly. Arguments as for `sum`."""
        return self._extreme("max", axis, keepdims)

    @answered
    def min(self, axis: Axis = None, keepdims: bool = False) -> Tensor:
        """Return the minimum over axes; ties share the gradient evenly. Arguments as for `sum`."""
        return self._extreme("min", axis, keepdims)

    def _extreme(self, name: str, axis: Axis, keepdims: bool) -> Tensor:
        axes = _axes(self, axis, keepdims)
        result = reduce.Largest(axes, keepdims, largest=name == "max")(self)
        result.made_by = name
        return result

    @answered
    def argmax(self, axis: int | None = None, keepdims: bool = False) -> Any:
        """Return the indices of the maxima along an axis, or of all, as an integer array."""
        refuse("argmax")
        # not every array library implements argmax of bfloat16
        values: Any = to_float32(self._data)
        at = None if axis is None else checked_axes(values.ndim, axis)[0]
        return values.argmax(axis=at, keepdims=keepdims)

    @answered
    def cumsum(self, axis: int) -> Tensor:
        """Return the sums of an axis's elements up to each one.

        Raises:
            ShapeError: for an axis that the tensor does not have.
        """
        (at,) = checked_axes(self.ndim, axis)
        return reduce.CumSum(at)(require_floating("cumsum", self))

    @answered
    def sort(self, axis: int = -1, descending: bool = False) -> Tensor:
        """Return the elements along an axis in order; NaN counts as the largest.

        The positions, PyTorch's second result, are `argsort`'s.

        Raises:
            ShapeError: for an axis that the tensor does not have.
        """
        (at,) = checked_axes(self.ndim, axis)
        result = Sort(at, _flag("descending", descending))(self)
        result.made_by = "sort"
        return result

    @answered
    def argsort(self, axis: int = -1, descending: bool = False) -> Any:
        """Return the positions of an axis's elements in sorted order, as an integer array.

        Equal elements keep their order. Same errors as `sort`.
        """
        refuse("argsort")
        (at,) = checked_axes(self.ndim, axis)
        # not every array library sorts bfloat16
        return order_of(to_float32(self._data), at, _flag("descending", descending))

    def exp(self) -> Tensor:
        """Return e to the power of the elements."""
        return _pointwise("exp", self)

    def log(self) -> Tensor:
        """Return the natural logarithm of the elements."""
        return _pointwise("log", self)

    def sqrt(self) -> Tensor:
        """Return the square root of the elements."""
        return _pointwise("sqrt", self)

    def sin(self) -> Tensor:
        """Return the sine of the elements."""
        return _pointwise("sin", self)

    def cos(self) -> Tensor:
        """Return the cosine of the elements."""
        return _pointwise("cos", self)

    def tanh(self) -> Tensor:
        """Return the hyperbolic tangent of the elements."""
        return activated(TANH, self)

    def clip(self, low: float | None = None, high: float | None = None) -> Tensor:
        """Return the elements clipped to two bounds; None stands for no bound.

        Raises:
            UsageError: when neither bound is given, low > high, or one is no number.
            DtypeError: for a bound with a fraction and a tensor of integers.
        """
        if low is None and high is None:
            raise UsageError("clip needs at least one of low and high")
        bounds = [
            None if bound is None else operands("clip", self, bound)[1] for bound in (low, high)
        ]
        if not all(bound is None or isinstance(bound, int | float) for bound in bounds):
            raise UsageError(
                "clip's bounds are numbers; for those of arrays or tensors, call"
                " nnmpi.tensor.maximum(x, low) and nnmpi.tensor.minimum(x, high)"
            )
        if low is not None and high is not None and low > high:
            raise UsageError(f"clip has low {low} above high {high}; exchange them")
        return Clip(*bounds)(self)

    def astype(self, dtype: Any) -> Tensor:
        """Return the tensor in another dtype; itself when it has that dtype already.

        Raises:
            DtypeError: for a dtype that holds no numbers, and for a tensor that needs a gradient
                and a dtype that can have none (integers, booleans).
        """
        expected = _named(dtype)
        if expected == self._data.dtype:
            return self
        if self.requires_grad and not is_floating(expected):
            raise DtypeError(
                f"a tensor that needs a gradient cannot become {expected}; use detach() first"
            )
        return AsType(expected)(self)

    def reshape(self, *sizes: int | Sequence[int]) -> Tensor:
        """Return the elements, in order, in another shape; one size may be -1.

        Unlike NumPy's, it accepts an empty batch: `x.reshape(len(x), -1)` of zero rows has as many
        columns as it would with rows.

        Raises:
            ShapeError: when the sizes do not fit the number of elements.
        """
        expected, old = _numbers(sizes), self.shape
        rest = int(old[:1] == expected[:1] == (0,))  # the axes without an empty batch's
        size, known, new = prod(old[rest:]), prod(n for n in expected[rest:] if n != -1), expected
        if expected.count(-1) == 1 and known > 0 and size % known == 0:
            new = tuple([size // known if n == -1 else n for n in expected])
        if min(new, default=0) < 0 or prod(new) != prod(old):
            raise ShapeError(f"reshape of {old} ({prod(old)} elements) to {expected} does not fit")
        return self._passed_on(Reshape(new)(self))

    view = reshape  # PyTorch's name

    def _passed_on(self, view: Tensor) -> Tensor:
        """Return a view, of probabilities if these are some."""
        if self.made_by in PROBABILITIES:
            view.made_by = self.made_by
        return view

    @answered
    def flatten(self, start: int = 1) -> Tensor:
        """Return the tensor with the axes from `start` on flattened into one."""
        start = check_int("flatten's start", start, -self.ndim)
        return self.reshape(*self.shape[:start], prod(self.shape[start:]))

    def permute(self, *axes: int | Sequence[int]) -> Tensor:
        """Return the tensor with its axes in the given order; without axes, reversed.

        Raises:
            ShapeError: when `axes` is not a permutation of the tensor's axes.
        """
        ndim = self._data.ndim
        order = _numbers(axes) if axes else tuple(range(ndim))[::-1]
        if sorted(i + ndim if i < 0 else i for i in order) != list(range(ndim)):
            raise ShapeError(
                f"transpose to {order} is not a permutation of the {ndim} axes of shape"
                f" {self._data.shape}"
            )
        return Transpose(tuple(i % ndim for i in order))(self)

    def transpose(self, *axes: int | Sequence[int]) -> Tensor:
        """Return the tensor with its axes permuted; two numbers exchange those axes."""
        match axes:
            case (int(first), int(second)):
                return self.swapaxes(first, second)
        return self.permute(*axes)

    def swapaxes(self, first: int, second: int) -> Tensor:
        """Return the tensor with two axes exchanged.

        Raises:
            ShapeError: for an axis that the tensor does not have.
        """
        order = list(range(self._data.ndim))
        first, second = checked_axes(len(order), first, second)
        order[first], order[second] = second, first
        return Transpose(tuple(order))(self)

    @answered
    def split(self, sizes: int | Sequence[int], axis: int = 0) -> tuple[Tensor, ...]:
        """Return the parts of an axis one after another, as views.

        Args:
            sizes: of the parts, in elements; a number for parts of this size, of which the last one
                may be smaller. (`numpy.split` takes the number of parts.)
            axis: the axis.

        Raises:
            ShapeError: for sizes that are not the axis's length in all, or an axis that the tensor
                does not have.
        """
        (at,) = checked_axes(self.ndim, axis)
        length = self.shape[at]
        if isinstance(sizes, Sequence):
            stops = [0, *accumulate(check_int("a size of split", size, 0) for size in sizes)]
        else:
            step = check_int("split's size", sizes, 1)
            stops = [*range(0, length, step), length] if length else [0, 0]
        if stops[-1] != length:
            raise ShapeError(
                f"split of axis {axis}, which has {length} elements, into {sizes} does not fit"
            )
        before = (slice(None),) * at
        return tuple(self[(*before, slice(*part))] for part in pairwise(stops))

    @answered
    def roll(self, shift: int | Sequence[int], axis: Axis = None) -> Tensor:
        """Return the elements moved along axes; those that leave at the end come back in front.

        Args:
            shift: by how many places, one number or one for each axis; negative ones move back.
            axis: one axis or several; by default the elements move in order, whatever their axes.

        Raises:
            ShapeError: for an axis that the tensor does not have.
            UsageError: for another number of shifts than of axes.
        """
        if axis is None:
            return self.reshape(-1).roll(shift, 0).reshape(self.shape)
        axes = checked_axes(self.ndim, *(axis if isinstance(axis, tuple | list) else (axis,)))
        shifts = _numbers((shift,))
        if len(shifts) != len(axes):
            raise UsageError(
                f"roll has {len(shifts)} shifts for {len(axes)} axes; give one for each axis"
            )
        x = self
        for places, at in zip(shifts, axes, strict=True):
            first = places % max(x.shape[at], 1)
            if first:
                front, back = x.split([x.shape[at] - first, first], at)
                x = concatenate([back, front], at)
        return x

    def repeat(self, *counts: int | Sequence[int]) -> Tensor:
        """Return copies one after another along the axes, as PyTorch's (NumPy calls it `tile`).

        Args:
            counts: of the copies, for each axis; more of them than axes add axes in front.

        Raises:
            ShapeError: for fewer counts than axes, or a negative one.
        """
        numbers = _numbers(counts)
        if len(numbers) < self.ndim or min(numbers, default=0) < 0:
            raise ShapeError(
                f"repeat needs a count of at least 0 for each axis of shape {self.shape}, not"
                f" {numbers}"
            )
        x = self.reshape(*(1,) * (len(numbers) - self.ndim), *self.shape)
        for axis, count in enumerate(numbers):
            if count == 0:
                x = x[(*(slice(None),) * axis, slice(0, 0))]
            elif count > 1:
                x = concatenate([x] * count, axis)
        return x

    def pad(self, widths: Sequence[tuple[int, int]], value: float = 0.0) -> Tensor:
        """Return the tensor with a border.

        Args:
            widths: (before, after) for every axis, in elements.
            value: of the border's elements.

        Raises:
            ShapeError: when there is not one non-negative pair per axis.
            DtypeError: for a value that is no number, or that the tensor's dtype cannot hold.
        """
        pairs: Any = None
        with suppress(TypeError, ValueError):
            pairs = tuple((check_int("before", a, 0), check_int("after", b, 0)) for a, b in widths)
        if pairs is None or len(pairs) != self._data.ndim:
            raise ShapeError(
                f"pad needs one non-negative (before, after) per axis of shape {self._data.shape},"
                f" not {widths!r}"
            )
        # NumPy's pad refuses an empty list
        return Pad(pairs, operands("pad", self, value)[1])(self) if pairs else self


add_missing(Tensor)


def maximum(a: Any, b: Any) -> Tensor:
    """Return the larger of a and b, elementwise; equal elements share the gradient."""
    return Extremum(largest=True)(*operands("maximum", a, b))


def minimum(a: Any, b: Any) -> Tensor:
    """Return the smaller of a and b, elementwise; equal elements share the gradient."""
    return Extremum(largest=False)(*operands("minimum", a, b))


def where(condition: Any, a: Any, b: Any) -> Tensor:
    """Return a where `condition` (a boolean array or tensor) is True, b elsewhere.

    Raises:
        DtypeError: when the condition is not boolean, or a and b differ in dtype.
        ShapeError: when the three do not broadcast.
    """
    values = values_of(condition)
    kind = getattr(values, "dtype", f"a {type(values).__name__}")
    if kind != "bool":
        raise DtypeError(f"where needs a boolean condition, not {kind}")
    a, b = operands("where", a, b)
    if any(map(is_sharded, (condition, a, b))):  # `placed` of the operation compares the placements
        return Where()(condition, a, b)
    check_broadcast("where", values.shape, *(x.shape for x in (a, b) if hasattr(type(x), "shape")))
    return Where()(values, a, b)


@answered
def concatenate(tensors: Sequence[Tensor], axis: int = 0) -> Tensor:
    """Return the tensors one after another along an axis.

    Raises:
        ShapeError: for an empty sequence, or shapes that differ elsewhere than along the axis.
        DtypeError: for dtypes that differ.
    """
    _check_items("concatenate", tensors)
    shapes = [x.shape for x in tensors]
    (at,) = checked_axes(len(shapes[0]), axis)
    if len({x.dtype for x in tensors}) > 1:
        tensors = [converted(x, FLOAT32) for x in tensors]
    if len({s[:at] + s[at + 1 :] + (len(s),) for s in shapes}) > 1:
        raise ShapeError(f"concatenate of shapes {shapes} along axis {axis} does not fit")
    return Concatenate(at)(*tensors)


@answered
def stack(tensors: Sequence[Tensor], axis: int = 0) -> Tensor:
    """Return tensors of one shape along a new axis. Same errors as `concatenate`."""
    _check_items("stack", tensors)
    (at,) = checked_axes(len(tensors[0].shape) + 1, axis)
    return concatenate([x.reshape(*x.shape[:at], 1, *x.shape[at:]) for x in tensors], at)


def _check_items(name: str, tensors: Sequence[Tensor]) -> None:
    if not isinstance(tensors, Sequence) or not tensors:
        raise ShapeError(f"{name} needs a list of tensors, not {shortened(repr(tensors))}")
    may_meet(name, *tensors)


def _difference(a: Any, b: Any) -> Tensor:
    a, b = operands("subtract", a, b)
    if all(isinstance(x, bool) or getattr(values_of(x), "dtype", None) == "bool" for x in (a, b)):
        raise DtypeError(
            "subtract of bool and bool is undefined; convert one with astype('float32')"
        )
    return Pointwise("subtract")(a, b)


def _pointwise(name: str, *inputs: Any, function: Function | None = None) -> Tensor:
    """Apply an operation, and refuse integers, as its result would have another dtype."""
    for x in inputs:
        if isinstance(x, Variable) or len(inputs) == 1:
            require_floating(name, x)
    given = inputs if len(inputs) == 1 else operands(name, *inputs)
    return (function or Pointwise(name))(*given)


def _product(a: Any, b: Any) -> Tensor:
    """Return a @ b: (..., n, k) or (k,) by (..., k, m) or (k,); leading dimensions broadcast."""
    a = a if isinstance(a, Variable) else asarray(a)
    b = b if isinstance(b, Variable) else asarray(b)
    x, y = values_of(a), values_of(b)
    if not is_array(x) or not is_array(y) or x.ndim == 0 or y.ndim == 0:
        raise ShapeError("matmul needs arrays of at least one dimension; use * for numbers")
    inner = y.shape[0] if y.ndim == 1 else y.shape[-2]
    if x.shape[-1] != inner:
        refuse_parts("matmul", a, b)
        raise ShapeError(
            f"matmul of shapes {x.shape} and {y.shape}: the inner sizes {x.shape[-1]} and {inner}"
            " differ"
        )
    reads = product_dtype("matmul", a, b)
    on_host = type(x) is np.ndarray
    if (is_low(reads) or rounds_products(x)) if on_host else is_floating(reads):
        a, b = converted(a, reads), converted(b, reads)
    try:
        return reduce.MatMul()(a, b)
    except LayoutError:
        raise
    except ValueError as error:
        raise ShapeError(f"matmul of shapes {x.shape} and {y.shape}: {error}") from None


def _axes(x: Tensor, axis: Axis, keepdims: bool) -> reduce.Axes:
    """Return the axes of a reduction as non-negative numbers.

    Raises:
        ShapeError: for an axis that the array does not have, or one named twice.
        UsageError: for a second axis in the position of keepdims.
    """
    if not isinstance(keepdims, bool):
        raise UsageError(
            f"keepdims is True or False, not {keepdims!r}; several axes are a tuple, such as (0, 1)"
        )
    ndim = x.ndim
    given = range(ndim) if axis is None else axis if isinstance(axis, tuple | list) else (axis,)
    result = checked_axes(ndim, *given)
    if len(set(result)) != len(result):
        raise ShapeError(f"axis {axis} names an axis twice")
    return result


def _flag(name: str, value: Any) -> bool:
    """Return a setting that is True or False; refuse others, such as a second axis."""
    if not isinstance(value, bool):
        raise UsageError(f"{name} is True or False, not {value!r}")
    return value


def _numbers(arguments: tuple[Any, ...]) -> tuple[int, ...]:
    """Accept both f(2, 3) and f((2, 3))."""
    given = arguments[0] if len(arguments) == 1 and hasattr(arguments[0], "__iter__") else arguments
    try:
        return tuple(index(n) for n in given)
    except TypeError:
        raise UsageError(f"{given} are no sizes or axes; give whole numbers") from None


def _index(part: Any) -> Any:
    """Convert a part of a key to NumPy's form: an array, an integer, a slice."""
    values = values_or_refuse("an index", part)
    if hasattr(values, "dtype") and getattr(values, "ndim", 1) == 0 and values.dtype.kind in "iu":
        if isinstance(part, Variable):
            refuse("an index that is a tensor's number")
        return int(values)
    return values


def _named(dtype: Any) -> Dtype:
    """Return the dtype of a tensor by its name; refuse what holds no numbers."""
    try:
        # NumPy takes None for float64
        result = dtype_named(dtype) if isinstance(dtype, str) else np.dtype(dtype or "none")
    except TypeError:
        raise DtypeError(
            f"there is no dtype {dtype!r}; choose one such as 'float32' or 'int64'"
        ) from None
    if result.kind not in "fiub" and not is_floating(result):
        raise DtypeError(f"a tensor holds numbers, not {result}")
    return result


def _as_array(data: Any, dtype: Any) -> Array:
    if dtype is not None:
        dtype = _named(dtype)
    if isinstance(data, Variable):
        values_or_refuse("Tensor", data)
        if dtype is not None:
            data = Tensor(data._data).astype(dtype)  # an operation, so that recordings include it
        data, dtype = data._data, None
    data = asarray(data)
    if is_array(data) or issubclass(type(data), RecordedArray):
        array = plain(bare(data if dtype is None else data.astype(dtype, copy=False)))
    else:
        if isinstance(data, list | tuple) and any(isinstance(item, Variable) for item in data):
            raise UsageError(
                "a tensor cannot be made of tensors; join them with nnmpi.tensor.stack or"
                " concatenate"
            )
        try:
            array = np.asarray(data, dtype)
        except (TypeError, ValueError, OverflowError):
            raise DtypeError(
                f"a tensor holds numbers, in rows of one length, not {shortened(repr(data))}"
            ) from None
        if dtype is None and array.dtype == np.float64 and not isinstance(data, np.generic):
            array = array.astype(np.float32)
    _named(array.dtype)
    return array
