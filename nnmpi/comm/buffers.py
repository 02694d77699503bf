"""Which arrays a collective can work on, and their bytes as MPI sees them."""

from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from nnmpi.backend.precision import is_low
from nnmpi.errors import DtypeError, ShapeError

Buffer: TypeAlias = NDArray[Any]

# What both MPI and NumPy can add. MPI has no dependable sum of half-precision numbers; and where a sum of integers does
# not fit, NumPy wraps around while Open MPI's own all-reduce may stop at the largest number (seen with int8).
DTYPES = frozenset(
    np.dtype(name)
    for name in ("float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
)


# Floating-point numbers of 16 bits, by name as NumPy knows bfloat16 only through a package. Sums take them as float32.
LOW = ("float16", "bfloat16")


def is_device(array: object) -> bool:
    """Return whether an array lies in a device's memory."""
    return not isinstance(array, np.ndarray) and hasattr(type(array), "__cuda_array_interface__")


def check_any(array: object) -> Buffer:
    """Return the array if a collective can work on it, on the host or on a device, of 16-bit floating point too.

    Raises:
        ShapeError, DtypeError: see `check_buffer`.
    """
    if isinstance(array, np.ndarray):
        return check_buffer(array.view(np.uint16)).view(array.dtype) if is_low(array.dtype) else check_buffer(array)
    return check_device(array)


def check_device(array: object) -> Buffer:
    """Return the device array if a collective can work on it in place.

    Args:
        array: 1-D, C-contiguous, of a dtype in `DTYPES` or `LOW`.

    Raises:
        ShapeError, DtypeError: see `check_buffer`.
    """
    if not is_device(array):
        raise DtypeError(f"a collective works on NumPy or device arrays, not {type(array).__name__}; pass one of these")
    found: Any = array
    if found.dtype not in DTYPES and not is_low(found.dtype):
        names = ", ".join(sorted([*LOW, *(dtype.name for dtype in DTYPES)]))
        raise DtypeError(f"a collective cannot add {found.dtype} arrays; convert to one of {names}")
    if found.ndim != 1:
        raise ShapeError(f"a collective works on 1-D arrays, not shape {found.shape}; pass array.reshape(-1)")
    if not found.flags.c_contiguous:
        raise ShapeError(f"the {found.shape} array with strides {found.strides} has gaps; copy it: ascontiguousarray")
    return found


def check_buffer(array: object) -> Buffer:
    """Return the array if its sum over ranks can be taken in place.

    Args:
        array: 1-D C-contiguous writeable NumPy array of a dtype in `DTYPES`, in the machine's byte order.

    Raises:
        ShapeError: for more or fewer dimensions, gaps between elements, or a read-only array.
        DtypeError: for something that is no NumPy array, or a dtype outside `DTYPES`.
    """
    if not isinstance(array, np.ndarray):
        raise DtypeError(f"a collective works on NumPy arrays, not {type(array).__name__}; copy it to the host first")
    if array.dtype not in DTYPES or not array.dtype.isnative:
        names = ", ".join(sorted(dtype.name for dtype in DTYPES))
        raise DtypeError(f"a collective cannot add {array.dtype} arrays; convert to one of {names}")
    if array.ndim != 1:
        raise ShapeError(f"a collective works on 1-D arrays, not shape {array.shape}; pass array.reshape(-1)")
    return check_contiguous(array)


def check_contiguous(array: Buffer) -> Buffer:
    """Return the array if its bytes lie together, so that MPI can read and write them.

    Raises:
        ShapeError: for an array with gaps or another order of its elements, or a read-only one.
        DtypeError: for an object array, whose elements are addresses.
    """
    if array.dtype.hasobject:
        raise DtypeError("an array of Python objects cannot be sent; send numbers, or JSON values by gather or share")
    if not array.flags.c_contiguous:
        raise ShapeError(
            f"the {array.shape} array with strides {array.strides} has gaps; copy it: np.ascontiguousarray"
        )
    if not array.flags.writeable:
        raise ShapeError(f"the {array.shape} array is read-only, but the result is written into it; pass a copy")
    return array


def as_bytes(array: Buffer) -> NDArray[np.uint8]:
    """Return the bytes of a C-contiguous array, any shape, as a view: (array.nbytes,) uint8.

    Raises:
        ShapeError: for an array whose elements lie apart at even distances; of other ones the bytes are copied.
    """
    try:
        return array.reshape(-1).view(np.uint8)
    except ValueError as error:
        words = f"the {array.shape} array with strides {array.strides} has gaps; copy it: ascontiguousarray"
        raise ShapeError(words) from error


def pieces(array: Buffer, max_bytes: int) -> Iterator[Buffer]:
    """Cut a 1-D array into views of whole elements, at most max_bytes each (but at least one element)."""
    length = max(1, max_bytes // array.itemsize)
    for start in range(0, array.size, length):
        yield array[start : start + length]
