"""The engine's array type, the library behind an array, its layout, and cached constant arrays.

The engine computes with NumPy's and CuPy's arrays. Those of other libraries enter by one door,
`asarray`. An object is asked for its type alone: its own attributes may run a user's code, or
answer to every name.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import lru_cache
from math import prod
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from nnmpi.base.errors import DeviceError, UsageError, shortened

# CuPy has no type information and follows NumPy's interface, so NumPy's type stands for both.
Array: TypeAlias = NDArray[Any]
Integers: TypeAlias = NDArray[np.int64]
Dtype: TypeAlias = np.dtype[Any]
Shape: TypeAlias = tuple[int, ...]

# The values that a kernel saves for its gradient's kernel, mostly arrays. The operation stores them
# without interpreting them.
Residuals: TypeAlias = tuple[Any, ...]

LIBRARIES = frozenset(("numpy", "cupy", "nnmpi"))  # of the engine's arrays; nnmpi's are recorded
HOST_NUMBERS = float, int, np.generic, np.ndarray  # the types that `float` reads without a device


def namespace(array: Array) -> ModuleType:
    """Return the module (numpy or cupy) whose functions work on this array."""
    if type(array) is np.ndarray:
        return np
    if hasattr(type(array), "__array_namespace__"):
        return array.__array_namespace__()
    # CuPy's arrays have no `__array_namespace__`
    return sys.modules[type(array).__module__.partition(".")[0]]


def masked(keep: Array, x: Array) -> Array:
    """Return x where `keep` is True and 0 elsewhere, with broadcasting; unlike a product, drop NaN.

    On the host as integers: on random masks NumPy's `where` mispredicts branches, and takes six
    times as long.
    """
    if not isinstance(x, np.ndarray) or not x.ndim:
        chosen = np.where(keep, x, 0)
        # CuPy makes bfloat16 float32
        return chosen if chosen.dtype == x.dtype else chosen.astype(x.dtype)
    kind = f"i{x.itemsize}"
    bits, given = x.view(kind), keep if isinstance(keep, np.ndarray) else x
    result = np.empty(keep.shape, kind, like=given)
    np.copyto(result, keep)  # not `astype`: a replay's would be copied once more
    if result.shape == bits.shape:
        result *= bits  # without a third array
    else:
        result = result * bits
    return result.view(x.dtype)


def is_array(x: Any) -> bool:
    """True for an array of the engine's libraries, not a number (also NumPy's) or a list."""
    return isinstance(x, np.ndarray) or (is_result(x) and not isinstance(x, np.generic))


def plain(x: Any) -> Any:
    """Return an array of a subclass of NumPy's as a plain one.

    Raises:
        UsageError: for a masked array: computing would use the values under the mask.
    """
    if type(x) is np.ndarray:
        return x
    if not isinstance(x, np.ndarray):
        return x
    if isinstance(x, np.ma.MaskedArray):
        raise UsageError("a masked array has gaps, which would count as values; fill them first")
    return np.asarray(x)


def is_result(x: Any) -> bool:
    """True for an array, or a NumPy number, which NumPy returns in place of a 0-d array."""
    kind: Any = type(x)
    return isinstance(x, np.generic) or _role(kind) == OURS


OURS, SPARSE, FOREIGN = "ours", "sparse", "foreign"


@lru_cache(4096)
def _role(kind: Any) -> str:
    """Return what the objects of a class are: arrays of one of these sorts, or "" for others."""
    homes = {base.__module__.partition(".")[0] for base in kind.__mro__}
    known = {name for base in kind.__mro__ for name in vars(base)}
    if not LIBRARIES.isdisjoint(homes):
        return OURS * (not known.isdisjoint(("__array_namespace__", "__cuda_array_interface__")))
    if "toarray" in known:
        return SPARSE
    return FOREIGN * (not known.isdisjoint(("__array__", "__array_interface__", "__dlpack__")))


def asarray(x: Any) -> Any:
    """Return another library's array, table or column as NumPy's; anything else unchanged.

    JAX's, PyTorch's and Arrow's arrays in the host's memory keep it, without a copy.

    Raises:
        UsageError: for a sparse matrix, and for what NumPy cannot read, such as a device's array.
    """
    kind: Any = type(x)
    role = _role(kind)
    if role == SPARSE:
        raise UsageError(f"a {kind.__name__} is sparse, and arrays here are not; give x.toarray()")
    if role != FOREIGN:
        return x
    lends_only = hasattr(kind, "__dlpack__") and not hasattr(kind, "__array__")
    try:
        return np.from_dlpack(x) if lends_only else np.asarray(x)
    except (TypeError, ValueError, RuntimeError, BufferError) as error:  # the library's own
        raise UsageError(
            f"NumPy cannot read this {kind.__module__.partition('.')[0]} {kind.__name__}"
            f" ({shortened(str(error))}); convert it to a NumPy array"
        ) from None


def is_on_device(x: Any) -> bool:
    """True for an array on a device; JAX's and PyTorch's are strangers."""
    return is_array(x) and type(x).__module__.partition(".")[0] == "cupy"


def mixed_error(values: Iterable[Any]) -> DeviceError | None:
    """Return the error for an operation that mixes host and device arrays; None for others.

    The libraries refuse such arrays themselves, but without naming the inputs or a remedy.
    """
    arrays = [(i, x) for i, x in enumerate(values) if is_array(x)]
    host, device = (
        [
            f"{i} (shape {x.shape}, {x.dtype})"
            for i, x in arrays
            if isinstance(x, np.ndarray) is here
        ]
        for here in (True, False)
    )
    if not host or not device:
        return None
    return DeviceError(
        f"one operation was given arrays in the host's memory (input {', '.join(host)}) and on the"
        f" device (input {', '.join(device)}): move them to the model's memory with"
        " backend.asarray(x) or backend.to_host(x)"
    )


LINE_BYTES = 64  # of the cache


def empty(xp: Any, shape: Shape, dtype: Any) -> Array:
    """Return an uninitialized array; on the host it begins at a cache line.

    NumPy's own large arrays begin 16 bytes after one. Then each vector of AVX-512 crosses two
    lines, which doubles the time of sums and products, and of products of matrices that OpenBLAS
    does not copy.

    Args:
        xp: the array library, or a recorder's stand-in, whose arrays begin there anyway.
        shape, dtype: of the array.
    """
    return _aligned(np.empty, shape, dtype) if xp is np else xp.empty(shape, dtype)


def zeros(xp: Any, shape: int | Shape, dtype: Any) -> Array:
    """Return an array of zeros that begins there too; the system clears its pages at first use."""
    sizes = shape if isinstance(shape, tuple) else (shape,)
    # ValueError: beyond the address space. A device's memory has its own report.
    beyond = (ValueError, MemoryError) if xp is np else (ValueError,)
    try:
        return _aligned(np.zeros, sizes, dtype) if xp is np else xp.zeros(sizes, dtype)
    except beyond:
        raise DeviceError(
            f"{prod(sizes)} elements do not fit into memory; make the model smaller, or divide it"
            " over ranks"
        ) from None


def _aligned(make: Any, shape: Shape, dtype: Any) -> Array:
    kind = np.dtype(dtype)
    size = kind.itemsize * prod(shape)
    memory = make(size + LINE_BYTES, np.uint8)
    first = -memory.__array_interface__["data"][0] % LINE_BYTES
    return memory[first : first + size].view(kind).reshape(shape)


CACHED = 64  # constants of each kind; a run has as many as it has batch sizes


def ones(like: Array, count: int) -> Array:
    """Return ones, (count,), read-only, of an array's library and dtype."""
    is_here, dtype = isinstance(like, np.ndarray), like.dtype
    return _cached("ones", count, dtype) if is_here else namespace(like).ones(count, dtype)


def steps(like: Array, count: int, step: int) -> Array:
    """Return 0, step, 2 step ... , (count,), int64, read-only, of an array's library.

    Args:
        count: the number of elements.
        step: the difference of two elements, at least 1.
    """
    numbers = 0, count * step, step, "int64"
    is_here = isinstance(like, np.ndarray)
    return _cached("arange", *numbers) if is_here else namespace(like).arange(*numbers)


def zero(like: Array) -> Array | int:
    """Return 0 as an operand of a universal function with another one.

    A cached array, since NumPy takes 0.4 us per call to convert a Python number.
    """
    return _cached("zeros", (), like.dtype) if isinstance(like, np.ndarray) else 0


@lru_cache(3 * CACHED)
def _cached(name: str, *args: Any) -> Array:
    array = getattr(np, name)(*args)
    array.flags.writeable = False
    return array


class Matrices(NamedTuple):
    """The memory layout of an array of two or more axes: shape and strides in elements."""

    shape: Shape
    strides: Shape

    @classmethod
    def of(cls, x: Array) -> Matrices:
        """Return the layout of an array; a stride of -1 is no multiple of the element."""
        size = x.dtype.itemsize
        return cls(
            x.shape, tuple(stride // size if stride % size == 0 else -1 for stride in x.strides)
        )

    @property
    def flipped(self) -> Matrices:
        """The matrices transposed."""
        return Matrices(
            (*self.shape[:-2], *self.shape[:-3:-1]), (*self.strides[:-2], *self.strides[:-3:-1])
        )

    @property
    def form(self) -> tuple[int, int] | None:
        """(0, lead) for row-major matrices, (1, lead) for column-major ones, else None."""
        (rows, columns), (down, right) = self.shape[-2:], self.strides[-2:]
        if min(self.strides) < 0:
            return None
        if (right == 1 or columns == 1) and (rows == 1 or down >= columns):
            return 0, max(columns, 1) if rows == 1 else down
        if (down == 1 or rows == 1) and (columns == 1 or right >= rows):
            return 1, max(rows, 1) if columns == 1 else right
        return None

    def over(self, leading: Shape) -> Shape:
        """Return the strides of the leading axes after broadcasting them to `leading`."""
        local = [
            0 if length == 1 else stride
            for length, stride in zip(self.shape[:-2], self.strides[:-2], strict=True)
        ]
        return (0,) * (len(leading) - len(local)) + tuple(local)

    def is_spread(self, leading: Shape) -> bool:
        """True if the array is no single stack, and a copy of the same size would be one."""
        strides = self.over(leading)
        repeated = any(
            length > 1 and stride == 0 for length, stride in zip(leading, strides, strict=True)
        )
        return not repeated and len(collapsed(leading, strides)) > 1


def collapsed(lengths: Shape, *strides: Shape) -> list[Shape]:
    """Merge axes that are contiguous in all arrays; return each axis as its length and strides.

    The merged axes visit the same elements in the same order.
    """
    result: list[Shape] = []
    for length, *steps in zip(lengths, *strides, strict=True):
        if length == 1:
            continue
        if result and all(
            outer == inner * length for outer, inner in zip(result[-1][1:], steps, strict=True)
        ):
            result[-1] = (result[-1][0] * length, *steps)
        else:
            result.append((length, *steps))
    return result
