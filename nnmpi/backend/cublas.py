"""Products of matrices on a device: cuBLAS called by way of CuPy's bindings, which are no documented interface.

So each kind of product is tested at its first use in a process, on small whole numbers for which every dtype is exact,
and where a test fails, or NNMPI_GEMM=matmul is set, cupy.matmul computes that kind instead. `Products.notice` says so.

What is gained over cupy.matmul (14.2): float32 results of float16 and bfloat16, stacks of bfloat16 (which it refuses),
stacks of float16 without a detour by way of float32, transposed views without a copy, adding to what is there, TF32.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import Any

import numpy as np

from nnmpi.backend.array import Array, mixed_error
from nnmpi.backend.device import cublas_bindings
from nnmpi.backend.matrices import LIMIT, Plan, StridedLayout, check_operands, plan
from nnmpi.backend.precision import low_dtype
from nnmpi.errors import ShapeError, UsageError

VARIABLE = "NNMPI_GEMM"
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
        wanted: what NNMPI_GEMM says: "cublas", or "matmul" for never to call cuBLAS directly.

    Raises:
        UsageError: for another word.
    """

    def __init__(self, xp: ModuleType, wanted: str = "cublas") -> None:
        if wanted not in ("cublas", "matmul"):
            raise UsageError(f"{VARIABLE}={wanted} is unknown; choose cublas or matmul")
        self._xp, self._wanted = xp, wanted
        self._bindings: Any = None
        self._handle: Any = None
        self._calls: dict[Any, Calls] = {}
        self._trouble: dict[Kind, str | None] = {}
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

    def trouble(self, kind: Kind) -> str | None:
        """Return why cuBLAS is not called for this kind of product, None if it is; tests it if that is unknown."""
        if kind not in self._trouble:
            self._trouble[kind] = self._find_trouble(kind)
        return self._trouble[kind]

    def notice(self, mode: str) -> str | None:
        """Return a sentence on what cupy.matmul computes instead in a mode of `precision`; None if it is nothing."""
        low = low_dtype(mode)
        kinds: list[Kind] = [(_SINGLE, _SINGLE, mode == "tf32")]
        if low is not None:
            kinds += [(low, low, False), (low, _SINGLE, False)]
        found = [(f"{kind[0]} to {kind[1]}", self.trouble(kind)) for kind in kinds]
        names = [name for name, reason in found if reason is not None]
        if not names:
            return None
        reason = next(reason for _, reason in found if reason is not None)
        without = ", without TF32" if mode == "tf32" else ""
        return f"cupy.matmul computes products of {', '.join(names)}{without}: {reason}"

    def _find_trouble(self, kind: Kind) -> str | None:
        if self._wanted == "matmul":
            return f"{VARIABLE}=matmul says so"
        if kind[0].name not in REAL or kind[1].name not in REAL:
            return f"cuBLAS has no products of {kind[0]} to {kind[1]}"
        try:
            self._bindings, self._handle = cublas_bindings()
            return self._test(kind)
        except (ImportError, AttributeError, TypeError, ValueError, RuntimeError) as error:
            return f"cuBLAS, called by nnmpi, failed its test ({type(error).__name__}: {error})"

    def _test(self, kind: Kind) -> str | None:
        """Multiply whole numbers, whose products and sums every dtype can tell, in every way there is."""
        generator = np.random.Generator(np.random.PCG64(0))
        for stack, n, k, m in (((), 3, 5, 7), ((3,), 2, 3, 4), ((), 64, 32, 128)):
            for flags in range(8):
                values = [generator.integers(-1, 2, (*stack, *shape)) for shape in ((n, k), (k, m), (n, m))]
                dtypes = (kind[0], kind[0], kind[1])
                a, b, out = (
                    _placed(self._xp, value, dtype, bool(flags >> i & 1))
                    for i, (value, dtype) in enumerate(zip(values, dtypes, strict=True))
                )
                self._multiply_new(a, b, out, False, kind)
                self._multiply_new(a, b, out, True, kind)
                if not np.array_equal(self._xp.asnumpy(out).astype(np.float64), 2.0 * (values[0] @ values[1])):
                    return f"cuBLAS, called by nnmpi, gave a wrong product of sizes {n} x {k} x {m} in its test"
        return None

    def _multiply_new(self, a: Array, b: Array, out: Array, add: bool, kind: Kind, key: Any = None) -> None:
        """Multiply arrays whose shapes and strides are new, and remember the calls that this takes.

        Args:
            key: by which it is remembered; None in cuBLAS's test, which neither needs that nor to have been passed.
        """
        check_operands(a, b, out)
        if key is not None and self.trouble(kind) is not None:
            multiply_plainly(self._xp, a, b, out, add)
            return
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
            self._multiply_copied(gemms.copies, a, b, out, add, kind, key is not None)
            return
        calls = self._prepare(gemms, kind)
        if key is not None:
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
        self, copies: tuple[bool, bool, bool], a: Array, b: Array, out: Array, add: bool, kind: Kind, tested: bool
    ) -> None:
        """Multiply contiguous copies of some of the arrays."""
        xp = self._xp
        a = xp.array(a, order="C") if copies[0] else a
        b = xp.array(b, order="C") if copies[1] else b
        place = out
        if copies[2]:
            place = xp.array(out, order="C") if add else xp.empty(out.shape, out.dtype)
        if tested:
            self.multiply(a, b, place, add, kind[2])
        else:
            self._multiply_new(a, b, place, add, kind)
        if place is not out:
            out[...] = place


@lru_cache(4)
def products_of(xp: ModuleType) -> Products:
    """Return the products of a library's arrays, with what was found out about them; NNMPI_GEMM is read once."""
    return Products(xp, os.environ.get(VARIABLE, "cublas"))


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


def _placed(xp: Any, values: Array, dtype: np.dtype[Any], flipped: bool) -> Array:
    """Return numbers on the device, in rows with room between them, or in columns."""
    if flipped:
        values = values.swapaxes(-1, -2)
    *stack, rows, columns = values.shape
    wide = np.zeros((*stack, rows, columns + 1), dtype)
    wide[..., :columns] = values
    array: Array = xp.asarray(wide)[..., :columns]
    return array.swapaxes(-1, -2) if flipped else array
