"""Arrays for collectives: their dtypes, their bytes, and copies between device and host."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from types import ModuleType
from typing import Any, TypeAlias, cast

import numpy as np
from numpy.typing import DTypeLike, NDArray

from nnmpi.backend.array import Array, is_array, namespace, plain
from nnmpi.backend.precision import is_low
from nnmpi.backend.upload import pinned
from nnmpi.base.errors import DtypeError, ShapeError, UsageError

CommBuffer: TypeAlias = NDArray[Any]

# Dtypes that both MPI and NumPy add. MPI has no dependable sum of half-precision numbers. When a
# sum of integers overflows, NumPy wraps around, while Open MPI's all-reduce may saturate (seen with
# int8).
_NAMES = "float32 float64 int8 int16 int32 int64 uint8 uint16 uint32 uint64"
DTYPES = frozenset(map(np.dtype, _NAMES.split()))


# 16-bit floats, added in float32. Names, because NumPy has bfloat16 only through a package.
LOW = ("float16", "bfloat16")


def is_device(array: object) -> bool:
    """Return whether an array lies in a device's memory."""
    kind = type(array)
    return (
        is_array(array)
        and not issubclass(kind, np.ndarray)
        and hasattr(kind, "__cuda_array_interface__")
    )


def check_buffer(array: object, low: bool = False) -> CommBuffer:
    """Return the array if it can be summed over ranks in place, else raise.

    Args:
        array: 1-D, C-contiguous, writeable, of NumPy or a device, of a dtype in `DTYPES` in native
            byte order. Of a subclass of NumPy's array the same memory as a plain one is returned.
        low: whether 16-bit floats are allowed, too.

    Raises:
        UsageError: for a masked array.
        ShapeError: for other dimensions, gaps between elements, or a read-only array.
        DtypeError: for another type or dtype.
    """
    if not isinstance(array, np.ndarray) and not is_device(array):
        raise DtypeError(
            f"a collective works on NumPy or device arrays, not {type(array).__name__}; pass one of"
            " these"
        )
    result = plain(cast(CommBuffer, array))
    if not (result.dtype in DTYPES and result.dtype.isnative) and not (
        low and is_low(result.dtype)
    ):
        names = ", ".join(sorted([*(dtype.name for dtype in DTYPES), *(LOW if low else ())]))
        raise DtypeError(
            f"a collective cannot add {result.dtype} arrays; convert to one of {names}"
        )
    if result.ndim != 1:
        raise ShapeError(
            f"a collective works on 1-D arrays, not shape {result.shape}; pass"
            f" {'array' if result is array else 'np.asarray(array)'}.reshape(-1)"
        )
    return check_contiguous(result)


def check_contiguous(array: CommBuffer) -> CommBuffer:
    """Return the array if MPI can read and write it as one block of bytes, else raise.

    Raises:
        UsageError: for a masked array.
        ShapeError: for an array that is not C-contiguous, or a read-only one.
        DtypeError: for an object array: its elements are addresses.
    """
    array = plain(array)
    if array.dtype.hasobject:
        raise DtypeError(
            "an array of Python objects cannot be sent; send numbers, or JSON values by gather or"
            " share"
        )
    if not array.flags.c_contiguous:
        raise ShapeError(
            f"the {array.shape} array with strides {array.strides} is not contiguous;"
            " copy it with ascontiguousarray"
        )
    if not getattr(array.flags, "writeable", True):  # device arrays always are
        raise ShapeError(
            f"the {array.shape} array is read-only, but the result is written into it; pass a copy"
        )
    return array


def as_bytes(array: CommBuffer) -> NDArray[np.uint8]:
    """Return the bytes of a C-contiguous array, any shape, as a view: (array.nbytes,) uint8.

    Raises:
        ShapeError: for an array with a constant stride and gaps. Of any other non-contiguous array
            `reshape` makes a copy: call `check_contiguous` first.
        UsageError: for a masked array.
    """
    try:
        return plain(array).reshape(-1).view(np.uint8)
    except ValueError:
        check_contiguous(array)
        raise


# Counts of MPI messages are 32-bit in most libraries. Half of that leaves room; one more message
# costs nothing beside the seconds of a gigabyte.
MAX_MESSAGE_BYTES = 2**30


def pieces(array: CommBuffer) -> Iterator[CommBuffer]:
    """Cut a 1-D array into views short enough for one message each (at least one element)."""
    length = max(1, MAX_MESSAGE_BYTES // array.itemsize)
    for start in range(0, array.size, length):
        yield array[start : start + length]


# Device arrays go through page-locked host memory, which works with any MPI and any algorithm.
#
#     copy to the host, after pending kernels  ->  messages of host arrays  ->  copy back
#
# So a sum of device arrays has the bits of the same sum of host arrays. A device pointer given to
# an MPI that is not CUDA-aware is a segmentation fault, so the user declares a CUDA-aware one.

VARIABLE = "NNMPI_CUDA_AWARE"


@cache
def cuda_aware() -> bool:
    """Return whether NNMPI_CUDA_AWARE=1 declares that MPI takes device pointers.

    Raises:
        UsageError: for a value other than 0 or 1.
    """
    word = os.environ.get(VARIABLE, "0")
    if word not in ("0", "1"):
        raise UsageError(
            f"{VARIABLE} is {word!r}; give 1 if MPI is built for CUDA and takes device pointers,"
            " else 0"
        )
    return word == "1"


def to_hosts(arrays: Sequence[Array]) -> list[Array]:
    """Return values as C-contiguous NumPy arrays, copied only where necessary.

    Waits until a device has computed and copied them.

    Raises:
        UsageError: for a masked array.
    """
    if not arrays or not is_device(arrays[0]):
        return [
            array if array.flags.c_contiguous else array.copy(order="C")
            for array in map(plain, arrays)
        ]
    hosts = [room_like(array, array.shape) for array in arrays]
    fetch(list(zip(arrays, hosts, strict=True)))
    return hosts


def to_host(array: Array) -> Array:
    """Return the values of one array; see `to_hosts`."""
    return to_hosts([array])[0]


def fetch(pairs: Sequence[tuple[Array, Array]]) -> None:
    """Copy device arrays to host memory from `room_for`, (array, host) pairs; waits once."""
    if pairs:
        start_fetch(pairs)()


def start_fetch(pairs: Sequence[tuple[Array, Array]]) -> Callable[[], None]:
    """Begin the copies of `fetch`, of one pair or more; return a function that waits for them."""
    xp = namespace(pairs[0][0])
    stream = xp.cuda.get_current_stream()
    # (`ascontiguousarray` alone would make a 0-d array 1-d)
    gapless: list[Any] = [
        array if array.flags.c_contiguous else xp.ascontiguousarray(array) for array, _ in pairs
    ]
    for array, (_, host) in zip(gapless, pairs, strict=True):
        if array.size:
            array.get(stream=stream, out=host, blocking=False)
    return cast(Callable[[], None], stream.record().synchronize)


def put(host: Array, array: Array) -> None:
    """Copy host memory from `room_for` to a device array, and wait for the copy."""
    if is_device(array):
        if array.size:
            stream = namespace(array).cuda.get_current_stream()
            array.set(host, stream=stream)  # type: ignore[attr-defined]
            stream.synchronize()
    elif host is not array:
        array[...] = host


def room_for(xp: ModuleType, shape: int | tuple[int, ...], dtype: DTypeLike) -> Array:
    """Return host memory for copies from and to a device: page-locked, so that copies are fast.

    Args:
        xp: the array module of the arrays: NumPy, or a device's.
        shape: of the result; an int for one dimension.
        dtype: of the result.
    """
    elements = math.prod((shape,) if isinstance(shape, int) else shape)
    return (
        np.empty(shape, dtype)
        if xp is np or not elements
        else pinned(xp.cuda, elements, dtype).reshape(shape)
    )


def room_like(array: Array, shape: int | tuple[int, ...]) -> Array:
    """Return host memory for copies of an array, with its dtype; see `room_for`."""
    return room_for(namespace(array), shape, array.dtype)


def from_host(host: Array, xp: ModuleType) -> Array:
    """Return the values as an array of module `xp`; with NumPy, `host` itself."""
    if xp is np:
        return host
    array = xp.empty(host.shape, host.dtype)
    put(host, array)
    return array
