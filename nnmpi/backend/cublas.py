"""Products of matrices on a device: cuBLAS called by way of CuPy's bindings, which are no documented interface.

What is gained over cupy.matmul (14.2): float32 results of float16 and bfloat16, stacks of bfloat16 (which it refuses),
stacks of float16 without a detour by way of float32, transposed views without a copy, adding to what is there, TF32.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import Any

import numpy as np

from nnmpi.backend.array import Array, mixed_error
from nnmpi.backend.device import cublas_bindings
from nnmpi.backend.matrices import LIMIT, Plan, StridedLayout, check_operands, plan
from nnmpi.errors import DtypeError, ShapeError

KEPT_CALLS = 4096  # a run has as many as it has products of different shapes

# cuBLAS's codes: cudaDataType_t of the elements, cublasComputeType_t of how they are added up.
REAL = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 14}
COMPUTE_32F, COMPUTE_64F, COMPUTE_32F_FAST_TF32 = 68, 70, 77
DEFAULT_ALGORITHM = -1
# cublasMath_t: a long sum may be cut into parts, and these are not to be added up in the result's 16 bits.
WIDE_SUMS = 16

# What a product is of: the operands' dtype, the result's, and whether float32 may be rounded to TF32.
Kind = tuple[np.dtype[Any], np.dtype[Any], bool]

_SINGLE, _DOUBLE = np.dtype(np.float32), np.dtype(np.float64)


@dataclass(frozen=True, slots=True)
class Calls:
    """The calls of one function of cuBLAS that multiply arrays of one layout in memory: all but the addresses.

    Attributes:
        function: gemmEx or gemmStridedBatchedEx.
        handle: gives the handle.
        swapped: whether a comes before b; see `matrices`.
        head, first, second, result: the arguments before the first address, and behind each of the three.
        factors: the addresses of 0 and 1, one of which is beta.
        narrow: whether the result has 16 bits.
        starts: per call, the bytes to skip in each of the three.
    """

    function: Callable[..., None]
    handle: Callable[[], int]
    swapped: bool
    head: tuple[int, ...]
    first: tuple[int, ...]
    second: tuple[int, ...]
    result: tuple[int, ...]
    factors: tuple[int, int]
    narrow: bool
    starts: tuple[tuple[int, int, int], ...]


class Products:
    """Products of CuPy's arrays.

    Args:
        xp: cupy.
    """

    def __init__(self, xp: ModuleType) -> None:
        self._xp = xp
        self._bindings, self._handle = cublas_bindings()
        self._calls: dict[Any, Calls] = {}
        # cuBLAS reads its two factors from the host's memory, in the type in which it adds up.
        self._factors = {dtype: np.array([0, 1], dtype) for dtype in (_SINGLE, _DOUBLE)}
        self._addresses = {
            dtype: (each.ctypes.data, each.ctypes.data + each.itemsize) for dtype, each in self._factors.items()
        }

    def multiply(self, a: Array, b: Array, out: Array, add: bool, tf32: bool) -> None:
        """Write, or add, a @ b to `out`.

        Args:
            tf32: whether operands of float32 may be rounded to TF32.

        Raises:
            DtypeError, ShapeError: when the arrays do not fit one another.
            DeviceError: when one of them is in the host's memory.
        """
        key = (a.shape, b.shape, out.shape, a.strides, b.strides, out.strides, a.dtype, b.dtype, out.dtype, tf32)
        calls = self._calls.get(key)
        if calls is None:
            self._multiply_new(a, b, out, add, (a.dtype, out.dtype, tf32 and a.dtype == _SINGLE), key)
        else:
            self._launch(calls, a, b, out, add)

    def _multiply_new(self, a: Array, b: Array, out: Array, add: bool, kind: Kind, key: Any) -> None:
        """Multiply arrays whose shapes and strides are new, and remember by the key the calls that this takes."""
        check_operands(a, b, out)
        if kind[0].name not in REAL or kind[1].name not in REAL:
            raise DtypeError(f"a device multiplies no matrices of {kind[0]} to {kind[1]}; convert them with astype")
        if out.size == 0:
            return
        if a.shape[-1] == 0:
            if not add:
                out.fill(0)
            return
        gemms = plan(_layout(a), _layout(b), _layout(out), a.dtype.itemsize)
        if max(gemms.m, gemms.n, gemms.k, gemms.batch, *gemms.leads) > LIMIT:
            raise ShapeError(f"cuBLAS takes no sizes above {LIMIT}, as of shapes {a.shape} and {b.shape}; cut them")
        if True in gemms.copies:
            self._multiply_copied(gemms.copies, a, b, out, add, kind[2])
            return
        calls = self._prepare(gemms, kind)
        if len(self._calls) >= KEPT_CALLS:
            self._calls.clear()
        self._calls[key] = calls
        self._launch(calls, a, b, out, add)

    def _prepare(self, gemms: Plan, kind: Kind) -> Calls:
        """Return a plan in the bindings' words, all but the addresses."""
        size, result_size = kind[0].itemsize, kind[1].itemsize
        given, result = REAL[kind[0].name], REAL[kind[1].name]
        wide = kind[0] == _DOUBLE
        compute = COMPUTE_64F if wide else COMPUTE_32F_FAST_TF32 if kind[2] else COMPUTE_32F
        zero, one = self._addresses[_DOUBLE if wide else _SINGLE]
        stacked = gemms.batch > 1
        apart = [(each,) if stacked else () for each in gemms.apart]
        return Calls(
            function=self._bindings.gemmStridedBatchedEx if stacked else self._bindings.gemmEx,
            handle=self._handle,
            swapped=gemms.swapped,
            head=(*gemms.flags, gemms.m, gemms.n, gemms.k, one),
            first=(given, gemms.leads[0], *apart[0]),
            second=(given, gemms.leads[1], *apart[1]),
            result=(
                result,
                gemms.leads[2],
                *apart[2],
                *((gemms.batch,) if stacked else ()),
                compute,
                DEFAULT_ALGORITHM,
            ),
            factors=(zero, one),
            narrow=result_size < _SINGLE.itemsize,
            starts=tuple((size * x, size * y, result_size * z) for x, y, z in gemms.starts),
        )

    def _launch(self, calls: Calls, a: Array, b: Array, out: Array, add: bool) -> None:
        """Call cuBLAS with the addresses of the arrays."""
        if calls.swapped:
            a, b = b, a
        try:
            at_b, at_a, at_out = b.data.ptr, a.data.ptr, out.data.ptr  # type: ignore[attr-defined]
        except AttributeError as error:
            raise mixed_error((a, b)) or mixed_error((a, b, out)) or error from None
        handle, beta = calls.handle(), calls.factors[add]
        if calls.narrow:
            self._bindings.setMathMode(handle, WIDE_SUMS)  # each time: others use this handle too
        for x, y, z in calls.starts:
            calls.function(
                handle, *calls.head, at_b + x, *calls.first, at_a + y, *calls.second, beta, at_out + z, *calls.result
            )

    def _multiply_copied(
        self, copies: tuple[bool, bool, bool], a: Array, b: Array, out: Array, add: bool, tf32: bool
    ) -> None:
        """Multiply contiguous copies of some of the arrays."""
        xp = self._xp
        a = xp.array(a, order="C") if copies[0] else a
        b = xp.array(b, order="C") if copies[1] else b
        place = out
        if copies[2]:
            place = xp.array(out, order="C") if add else xp.empty(out.shape, out.dtype)
        self.multiply(a, b, place, add, tf32)
        if place is not out:
            out[...] = place


@lru_cache(4)
def products_of(xp: ModuleType) -> Products:
    """Return the products of a library's arrays, with the calls that it has made."""
    return Products(xp)


def multiply_plainly(xp: Any, a: Array, b: Array, out: Array, add: bool) -> None:
    """Write, or add, a @ b to `out` with the library's own matmul, half precision by way of float32.

    Args:
        xp: the arrays' module.
        a: (..., n, k).
        b: (..., k, m), of a's dtype.
        out: (..., n, m), which is written.
        add: whether the product is added to what `out` holds.
    """
    if a.dtype.itemsize == _SINGLE.itemsize // 2:
        a, b = a.astype(_SINGLE), b.astype(_SINGLE)
    # NumPy's dot is quicker than its matmul, which also warns of what OpenBLAS computes in lanes that nobody reads.
    product = xp.dot(a, b) if xp is np and a.ndim == b.ndim == 2 else xp.matmul(a, b)
    if add:
        product = product + out.astype(product.dtype)
    out[...] = product


def _layout(x: Array) -> StridedLayout:
    """Return where an array's elements lie in memory."""
    size = x.dtype.itemsize
    strides = tuple(stride // size if stride % size == 0 else -1 for stride in x.strides)  # -1: to be copied
    return StridedLayout(x.shape, strides)
