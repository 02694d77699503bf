"""Products of NumPy's arrays by MKL, called through its C interface on the arrays as they are: nothing is copied.

    pip install 'nnmpi[mkl]'              with nnmpi.use_blas("mkl"): ...

On Intel's processors it multiplies faster than the OpenBLAS inside NumPy: by 1.12 to 1.2 for large matrices of float32
on a core of a Xeon with AVX-512. A call by ctypes costs a microsecond more than NumPy's, which small products do not
win back: these, and whatever MKL cannot read (see `matrices`), stay with NumPy, by their shapes alone.
"""

import ctypes
import site
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from threadpoolctl import threadpool_info

from nnmpi.backend.array import Array
from nnmpi.backend.blas import loaded_pools
from nnmpi.backend.matrices import LIMIT, Plan, StridedLayout, plan_as_they_lie, product_shape
from nnmpi.backend.recording import Call, active
from nnmpi.errors import ShapeError, UsageError

# Multiplications: a product of fewer is NumPy's. With 64 rows and columns NumPy is ahead, with 128 MKL.
LEAST, LEAST_EACH = 2**20, 2**17
KEPT_LAYOUTS = 4096

# The codes of cblas and of MKL_Set_Threading_Layer.
COLUMNS, PLAIN = 102, 111
OPENMP, SEQUENTIAL = 0, 1

_INT, _POINTER = ctypes.c_int, ctypes.c_void_p
_REAL = {"float32": ("s", ctypes.c_float), "float64": ("d", ctypes.c_double)}


@dataclass(frozen=True, slots=True)
class MatrixCall:
    """The call that multiplies arrays of one layout in memory: all but the addresses.

    Attributes:
        plan: the sizes, in BLAS's order.
        shape: of the result.
        numbers: flags, sizes, leads and how many products there are.
        offsets: per operand, the bytes to skip to each matrix of a stack; None for one product.
    """

    plan: Plan
    shape: tuple[int, ...]
    numbers: Array
    offsets: tuple[Array, Array, Array] | None


class Mkl:
    """The products of one process.

    Args:
        threads: how many MKL may use. The first object of a process decides whether it can have several.
        least: how many multiplications a product must have, and each matrix of a stack.
    """

    def __init__(self, threads: int = 1, least: tuple[int, int] = (LEAST, LEAST_EACH)) -> None:
        self._library = _load(threads > 1)
        self._library.MKL_Set_Num_Threads(_INT(threads))
        self._least = least
        self._known: dict[Any, MatrixCall | None] = {}
        self._single, self._stack = (
            {dtype: each[i] for dtype, each in _functions(self._library).items()} for i in (0, 1)
        )
        self._values = {dtype: np.array([0, 1], dtype) for dtype in self._single}
        self._factors = {
            dtype: (each.ctypes.data, each.ctypes.data + each.itemsize) for dtype, each in self._values.items()
        }

    @property
    def version(self) -> str:
        """MKL's own words, cut to the number."""
        text = ctypes.create_string_buffer(200)
        self._library.MKL_Get_Version_String(text, _INT(len(text)))
        words = text.value.decode(errors="replace").split()
        return words[words.index("Version") + 1].split("-")[0] if "Version" in words else "unknown"

    def multiply(self, xp: Any, a: Array, b: Array, out: Array | None, add: bool) -> Array | None:
        """Return a @ b, written or added to `out`; None, and nothing is done, where NumPy is to compute it.

        Args:
            xp: numpy, or a recorder's stand-in for it; then the call is noted, too.
            a, b, out, add: as for `gemm`.
        """
        key = (a.shape, b.shape, a.strides, b.strides, a.dtype, out is None or (out.shape, out.strides))
        try:
            calls = self._known[key]
        except KeyError:
            calls = self._new(key, a, b, out)
        if calls is None or b.dtype != a.dtype or out is not None and out.dtype != a.dtype:
            return None
        place: Array = xp.empty(calls.shape, a.dtype) if out is None else out
        call = self._bind(calls, a, b, place, add)
        call()
        recorder = active()
        if recorder is not None and xp is not np:
            recorder.note_bound(call, a, b, place)
        return place

    def _new(self, key: Any, a: Array, b: Array, out: Array | None) -> MatrixCall | None:
        """Find out, and remember, how arrays are multiplied whose shapes and strides are new."""
        if len(self._known) >= KEPT_LAYOUTS:
            self._known.clear()
        calls = self._known[key] = self._prepare(a, b, out)
        return calls

    def _prepare(self, a: Array, b: Array, out: Array | None) -> MatrixCall | None:
        if min(a.ndim, b.ndim) < 2 or a.dtype not in self._single:
            return None
        try:
            shape = product_shape(a.shape, b.shape)
        except ShapeError:
            return None  # NumPy says so itself
        layouts = [_layout(each) for each in (a, b)]
        layouts.append(StridedLayout(shape, shape).packed if out is None else _layout(out))
        each = shape[-2] * shape[-1] * a.shape[-1]
        count = int(np.prod(shape[:-2], dtype=np.int64))
        if layouts[2].shape != shape or each * count <= self._least[0] or each <= self._least[1]:
            return None
        if any(stride % x.itemsize for x in (a, b, *([] if out is None else [out])) for stride in x.strides):
            return None
        plan = plan_as_they_lie(*layouts)
        if plan is None or max(plan.m, plan.n, plan.k, *plan.leads) > LIMIT:
            return None
        flags = (PLAIN + flag for flag in plan.flags)
        numbers = np.array([*flags, plan.m, plan.n, plan.k, *plan.leads, plan.batch * len(plan.starts)], np.int32)
        return MatrixCall(plan, shape, numbers, _offsets(plan, a.itemsize))

    def _bind(self, calls: MatrixCall, a: Array, b: Array, out: Array, add: bool) -> Call:
        """Return the call with the arrays' addresses, which are all that it holds of them."""
        plan, dtype = calls.plan, a.dtype
        first, second = (a, b) if plan.swapped else (b, a)
        at = [x.ctypes.data for x in (first, second, out)]
        if calls.offsets is None:
            x, y, z = plan.starts[0]
            size = a.itemsize
            factors = (at[0] + x * size, plan.leads[0], at[1] + y * size, plan.leads[1])
            result = (float(add), at[2] + z * size, plan.leads[2])
            return partial(self._single[dtype], COLUMNS, *calls.numbers[:5].tolist(), 1.0, *factors, *result)
        # A list for each argument, of one group of matrices: their sizes, factors and addresses.
        starts = [each + address for each, address in zip(calls.offsets, at, strict=True)]
        numbers, (zero, one) = calls.numbers, self._factors[dtype]
        of = [numbers.ctypes.data + i * numbers.itemsize for i in range(len(numbers))]
        x, y, z = (each.ctypes.data for each in starts)
        head, one_by_one = of[:5], (one, x, of[5], y, of[6], one if add else zero, z, of[7])
        call = partial(self._stack[dtype], COLUMNS, *head, *one_by_one, 1, of[8])
        return partial(_holding, call, (numbers, starts))


def _holding(call: Callable[[], object], _: Any) -> None:
    """Call a function, whose arguments' memory this partial call keeps."""
    call()


def _layout(x: Array) -> StridedLayout:
    return StridedLayout(x.shape, tuple(stride // x.itemsize for stride in x.strides))


def _offsets(plan: Plan, itemsize: int) -> tuple[Array, Array, Array] | None:
    """Return the bytes from each array's beginning to each of its matrices, as the plan's; None for a single one."""
    if plan.batch * len(plan.starts) == 1:
        return None
    steps = np.arange(plan.batch, dtype=np.int64)[None, :, None] * np.array(plan.apart, np.int64)
    places = np.array(plan.starts, np.int64)[:, None] + steps  # (starts, batch, 3)
    first, second, result = np.ascontiguousarray(places.reshape(-1, 3).T) * itemsize
    return first, second, result


def _functions(library: ctypes.CDLL) -> dict[np.dtype[Any], tuple[Any, Any]]:
    """Return cblas's products of two matrices and of groups of matrices, by dtype.

    gemm(order, transposed x 2, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc)
    gemm_batch           the same, as the addresses of lists, with the number of groups and their sizes
    """
    found = dict[np.dtype[Any], tuple[Any, Any]]()
    for name, (code, real) in _REAL.items():
        single, stack = getattr(library, f"cblas_{code}gemm"), getattr(library, f"cblas_{code}gemm_batch")
        single.restype = stack.restype = None
        single.argtypes = [_INT] * 6 + [real, _POINTER, _INT, _POINTER, _INT, real, _POINTER, _INT]
        stack.argtypes = [_INT] + [_POINTER] * 13 + [_INT, _POINTER]
        found[np.dtype(name)] = single, stack
    return found


def find_mkl() -> Path | None:
    """Return the file of the MKL that belongs to this Python; None where there is none."""
    folders = [Path(sys.prefix, "lib"), Path(site.getuserbase(), "lib")]
    found = [file for folder in folders for file in sorted(folder.glob("libmkl_rt.so*"))]
    return found[-1] if found else None


@cache
def installed_mkl() -> Mkl:
    """Return this process's products by MKL, with as many threads as NumPy's BLAS has.

    Raises:
        UsageError: when MKL is not installed, or cannot be used.
    """
    return Mkl(max((each["num_threads"] for each in threadpool_info() if each["user_api"] == "blas"), default=1))


@cache
def _load(several: bool) -> ctypes.CDLL:
    """Return the library, with threads or without; what is asked for first holds for the process.

    Raises:
        UsageError: when there is none, or it cannot be loaded.
    """
    file = find_mkl()
    if file is None:
        raise UsageError("MKL is not installed; install nnmpi[mkl], or choose NumPy's own BLAS")
    try:
        library = ctypes.CDLL(str(file))
        library.MKL_Set_Threading_Layer(_INT(OPENMP if several else SEQUENTIAL))
    except (OSError, AttributeError) as error:
        raise UsageError(f"MKL cannot be used ({error}); choose NumPy's own BLAS") from None
    loaded_pools.cache_clear()
    return library
