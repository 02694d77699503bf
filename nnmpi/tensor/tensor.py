"""Tensor: an array that remembers how it was computed, with the operators of its mathematics.

A gradient in three lines:

    x = Tensor([1.0, 2.0], requires_grad=True)
    (x * x).sum().backward()
    x.grad                      # array([2., 4.], dtype=float32)
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, NoReturn

import numpy as np

from nnmpi.backend.array import Array, is_array, mixed_error, namespace, ones
from nnmpi.backend.precision import is_floating
from nnmpi.backend.recording import refuse
from nnmpi.errors import DtypeError, GraphError, ShapeError, UsageError
from nnmpi.launcher import read_launch
from nnmpi.tensor import arithmetic, elementwise, index, reduce, shape
from nnmpi.tensor.matmul import matmul
from nnmpi.tensor.operand import whole_values
from nnmpi.tensor.tape import Deferred, walk_back
from nnmpi.tensor.variable import Variable


class Tensor(Variable):
    """An array with automatic differentiation.

    Args:
        data: an array (kept as it is, not copied), or numbers in lists (floats become float32).
        requires_grad: whether backward passes compute `grad` for it.
        dtype: the dtype to convert to; None keeps an array's own.

    Raises:
        DtypeError: when a gradient is wanted for values that are not floating point, or data are no numbers.
    """

    __slots__ = ()

    def __init__(self, data: Any, requires_grad: bool = False, dtype: Any = None) -> None:
        self.data = _as_array(data, dtype)
        if requires_grad and not is_floating(self.data.dtype):
            raise DtypeError(f"a tensor of {self.data.dtype} can have no gradient; use floating point")
        self.requires_grad = requires_grad
        self.grad = self.node = self.tape = self.buffer = self.hook = self.cut = None

    @staticmethod
    def blank() -> Tensor:
        """Return a tensor without data, for an operation to fill in."""
        tensor = Tensor.__new__(Tensor)
        tensor.requires_grad = False
        tensor.grad = tensor.node = tensor.tape = tensor.buffer = tensor.hook = tensor.cut = None
        return tensor

    def backward(self, grad: Any = None, retain_graph: bool = False, deferred: Deferred | None = None) -> None:
        """Compute the gradients of all leaves that this tensor depends on, adding to the `grad` they have.

        Args:
            grad: the gradient of this tensor, of its shape, converted to its dtype; by default 1, for a tensor of one
                element.
            retain_graph: keep what the operations saved, so that backward can be called again.
            deferred: takes over the parameters' gradients, which its `finish` computes (see `tape.Deferred`).

        Raises:
            GraphError: when nothing was recorded, or the graph or a part of it was used up by an earlier call; for
                `deferred` together with hooks or `retain_graph`.
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
            launch = read_launch(os.environ)
            if launch is None or launch.rank == 0:  # once for all ranks
                warnings.warn(warning, stacklevel=2)
        xp = namespace(self.data)
        if grad is None:
            if self.data.size != 1:
                raise ShapeError(
                    f"backward of a tensor of shape {self.shape} needs grad; without it, reduce to one number"
                )
            seed = ones(xp, 1, self.data.dtype).reshape(self.data.shape)
        else:
            values = whole_values("backward", grad)
            try:
                seed = xp.asarray(values)
            except TypeError as error:
                raise mixed_error((self.data, values)) or error from None
            if seed.dtype != self.data.dtype:
                seed = elementwise.astype(Tensor(seed), self.data.dtype).data  # an operation, which a recording keeps
            if seed.shape != self.shape:
                raise ShapeError(f"backward of a tensor of shape {self.shape} got a gradient of shape {seed.shape}")
        walk_back(self, seed, retain_graph, deferred)

    def detach(self) -> Tensor:
        """Return a tensor of the same values (not copied) that is no part of the graph."""
        return Tensor(self.data)

    def numpy(self) -> Array:
        """Return the values as a NumPy array, copied to the host if they are on a device."""
        refuse("a tensor's array (numpy)")
        get = getattr(self.data, "get", None)
        values: Array = self.data if get is None else get()
        return values

    def item(self) -> float:
        """Return the value of a tensor of one element as a Python number.

        Raises:
            ShapeError: when there is not exactly one element.
        """
        if self.data.size != 1:
            raise ShapeError(f"item of a tensor of shape {self.shape} is no single number")
        refuse("a tensor's number (item, float, bool)")
        number: float = self.data.item()
        return number

    @property
    def shape(self) -> tuple[int, ...]:
        """The lengths of the axes."""
        return self.data.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the values."""
        return self.data.dtype

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return self.data.ndim

    @property
    def size(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    @property
    def T(self) -> Tensor:
        """The tensor with its axes reversed."""
        return shape.transpose(self)

    def __len__(self) -> int:
        if self.data.ndim == 0:
            raise ShapeError("a tensor without axes has no length")
        return len(self.data)

    def __iter__(self) -> Iterator[Tensor]:
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        suffix = ", requires_grad=True" if self.requires_grad else ""
        return f"Tensor({np.array2string(self.numpy(), separator=', ', prefix='Tensor(')}, dtype={self.dtype}{suffix})"

    def __bool__(self) -> bool:
        return bool(self.item())

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __format__(self, form: str) -> str:
        return format(self.item(), form) if form else str(self)

    # An ndarray on the left would otherwise take the tensor apart element by element.
    __array_ufunc__ = None

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        if self.requires_grad and self.data.ndim:  # the graph would end there, and nobody be told
            raise GraphError("a tensor that needs a gradient becomes an array by x.numpy(), or x.detach()")
        return np.array(self.numpy(), dtype, copy=copy)

    def __add__(self, other: Any) -> Tensor:
        return arithmetic.add(self, other)

    def __radd__(self, other: Any) -> Tensor:
        return arithmetic.add(other, self)

    def __sub__(self, other: Any) -> Tensor:
        return arithmetic.subtract(self, other)

    def __rsub__(self, other: Any) -> Tensor:
        return arithmetic.subtract(other, self)

    def __mul__(self, other: Any) -> Tensor:
        return arithmetic.multiply(self, other)

    def __rmul__(self, other: Any) -> Tensor:
        return arithmetic.multiply(other, self)

    def __truediv__(self, other: Any) -> Tensor:
        return arithmetic.divide(self, other)

    def __rtruediv__(self, other: Any) -> Tensor:
        return arithmetic.divide(other, self)

    def __pow__(self, other: Any) -> Tensor:
        return arithmetic.power(self, other)

    def __rpow__(self, other: Any) -> Tensor:
        return arithmetic.power(other, self)

    def __matmul__(self, other: Any) -> Tensor:
        return matmul(self, other)

    def __rmatmul__(self, other: Any) -> Tensor:
        return matmul(other, self)

    def __neg__(self) -> Tensor:
        return elementwise.negate(self)

    def __abs__(self) -> Tensor:
        return elementwise.absolute(self)

    def __getitem__(self, key: Any) -> Tensor:
        return index.getitem(self, key)

    def __setitem__(self, key: Any, value: Any) -> NoReturn:
        raise UsageError(
            "a Tensor's elements cannot be assigned; write to its array, x.data, or use nnmpi.tensor.where"
        )

    # Comparisons give plain boolean arrays: they have no derivative. `==` is an error, as NumPy compares elements
    # there, but with the tensor itself: sets, and those of weak references, compare a key with itself.
    def __eq__(self, other: object) -> bool:
        if self is not other and (is_array(other) or isinstance(other, int | float | Tensor)):
            raise UsageError("== does not compare a Tensor's elements; compare x.data outside of compiled steps")
        return self is other

    __hash__ = Variable.__hash__

    def __lt__(self, other: Any) -> Any:
        refuse("a comparison")
        return self.data < _values(other)

    def __le__(self, other: Any) -> Any:
        refuse("a comparison")
        return self.data <= _values(other)

    def __gt__(self, other: Any) -> Any:
        refuse("a comparison")
        return self.data > _values(other)

    def __ge__(self, other: Any) -> Any:
        refuse("a comparison")
        return self.data >= _values(other)

    def sum(self, axis: reduce.Axis = None, keepdims: bool = False) -> Tensor:
        """Return the sum over axes. See `reduce.total`."""
        return reduce.total(self, axis, keepdims)

    def mean(self, axis: reduce.Axis = None, keepdims: bool = False) -> Tensor:
        """Return the mean over axes. See `reduce.mean`."""
        return reduce.mean(self, axis, keepdims)

    def var(self, axis: reduce.Axis = None, keepdims: bool = False, correction: int = 0) -> Tensor:
        """Return the variance over axes. See `reduce.variance`."""
        return reduce.variance(self, axis, keepdims, correction)

    def max(self, axis: reduce.Axis = None, keepdims: bool = False) -> Tensor:
        """Return the largest element over axes. See `reduce.largest`."""
        return reduce.largest(self, axis, keepdims)

    def min(self, axis: reduce.Axis = None, keepdims: bool = False) -> Tensor:
        """Return the smallest element over axes. See `reduce.smallest`."""
        return reduce.smallest(self, axis, keepdims)

    def argmax(self, axis: int | None = None, keepdims: bool = False) -> Any:
        """Return the indices of the largest elements along an axis, or of all, as a plain array of integers."""
        refuse("argmax")
        return reduce.argmax(self, axis, keepdims)

    def exp(self) -> Tensor:
        """Return e to the power of the elements."""
        return elementwise.exp(self)

    def log(self) -> Tensor:
        """Return the natural logarithm of the elements."""
        return elementwise.log(self)

    def sqrt(self) -> Tensor:
        """Return the square root of the elements."""
        return elementwise.sqrt(self)

    def tanh(self) -> Tensor:
        """Return the hyperbolic tangent of the elements."""
        return elementwise.tanh(self)

    def clip(self, low: float | None = None, high: float | None = None) -> Tensor:
        """Return the elements kept between two bounds. See `elementwise.clip`."""
        return elementwise.clip(self, low, high)

    def astype(self, dtype: Any) -> Tensor:
        """Return the tensor in another dtype. See `elementwise.astype`."""
        return elementwise.astype(self, dtype)

    def reshape(self, *sizes: int | Sequence[int]) -> Tensor:
        """Return the elements in another shape. See `shape.reshape`."""
        return shape.reshape(self, *sizes)

    def transpose(self, *axes: int | Sequence[int]) -> Tensor:
        """Return the tensor with its axes in another order; two numbers exchange these two, as in PyTorch.

        Without axes their order is reversed. See `shape.transpose` and `shape.swapaxes`.
        """
        match axes:
            case (int(first), int(second)):
                return shape.swapaxes(self, first, second)
        return shape.transpose(self, *axes)

    def permute(self, *axes: int | Sequence[int]) -> Tensor:
        """Return the tensor with its axes in the given order. See `shape.transpose`."""
        return shape.transpose(self, *axes)

    view = reshape  # PyTorch's name

    def flatten(self, start: int = 1) -> Tensor:
        """Return the tensor with the axes from `start` on made into one."""
        return shape.flatten(self, start)


def _values(x: Any) -> Any:
    return whole_values("a comparison", x)


def _as_array(data: Any, dtype: Any) -> Array:
    if isinstance(data, Variable):
        whole_values("Tensor", data)
        if dtype is not None:
            data = elementwise.astype(Tensor(data.data), dtype)  # an operation, which a recording keeps
        data, dtype = data.data, None
    if is_array(data) and not isinstance(data, np.generic):
        array: Array = data if dtype is None else data.astype(dtype, copy=False)
    else:
        if isinstance(data, list | tuple) and any(isinstance(each, Variable) for each in data):
            raise UsageError("a tensor is not made of tensors; nnmpi.tensor.stack and concatenate put them together")
        array = np.asarray(data, dtype=dtype)
        if dtype is None and array.dtype == np.float64 and not isinstance(data, np.generic):
            array = array.astype(np.float32)
    if array.dtype.kind not in "fiub" and not is_floating(array.dtype):
        raise DtypeError(f"a tensor holds numbers, not {array.dtype}")
    return array
