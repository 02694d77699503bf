"""Matrix products on a device: cuBLAS, through NVIDIA's bindings (nvmath-python).

Reasons not to use cupy.matmul (14.2): it has no float32 results of float16 and bfloat16, no
accumulation into `out` and no TF32. It refuses stacks of bfloat16, converts stacks of float16 to
float32, and copies transposed views. CuPy's handle refuses to work while a stream captures a graph.

BLAS expects column-major matrices, NumPy's are row-major: to BLAS, a row-major matrix is its
transpose. So the call is for

    out^T (m, n)  =  b^T (m, k)  a^T (k, n)       instead of       out (n, m)  =  a (n, k)  b (k, m)

and all three are read in place. A column-major operand (a transposed view) is the other way round,
for which BLAS has a flag. Rows may be further apart than they are long (a slice of columns, a head
of attention): their distance is `lead`.

    row-major      column-major     neither: copied
    ..[# # # #]..  [#]. [#]. [#].   [#].[#].[#].     gaps between the elements of both a row and
    ..[# # # #]..  [#]. [#]. [#].                    a column
    lead: 8        lead: 3          [#].[#].[#].

A stack is a single call if its matrices are equally spaced in each of the three arrays (spacing 0
for a broadcast one). Operands that would take many calls are copied too.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import product as product_of
from threading import Lock
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from nnmpi.backend.array import Array, Dtype, Matrices, Shape, collapsed, mixed_error
from nnmpi.base.errors import DtypeError, ShapeError

CACHED_PRODUCTS = 4096  # a run has as many as it has products of different shapes
FEW_CALLS = 8  # these cost about as much as the copy of small operands
CALL_BYTES = 4e6  # of operands that an H100 copies in the time of one more call
LIMIT = 2**31 - 1  # of BLAS's integers

# cuBLAS's codes: cudaDataType_t of the elements, cublasComputeType_t of the accumulation.
REAL = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 14}
COMPUTE_32F, COMPUTE_64F, COMPUTE_32F_FAST_TF32 = 68, 70, 77
DEFAULT_ALGORITHM = -1
# cublasMath_t, "disallow reduced precision reduction": cuBLAS may split a long sum into parts, and
# must not add them in the result's 16 bits. Without its other flags float32 is not rounded to TF32.
WIDE_SUMS = 16
HOPPER = 9  # compute capability
# what cuBLAS's documentation recommends from Hopper on, and before
WORKSPACE_BYTES, SMALL_WORKSPACE_BYTES = 32 << 20, 4 << 20

_SINGLE, _DOUBLE = np.dtype(np.float32), np.dtype(np.float64)

Multiply = Callable[[Any, Any, Any, bool], None]  # (a, b, out, add)


class Handle:
    """cuBLAS on one device, in the current stream.

    Each stream has a workspace: a product's own memory, which cuBLAS would allocate at a time of
    its choice, also during a capture. They come from CuPy's default pool, because the current
    allocator may belong to a capture. A stream of captures has that of the stream in which the
    graphs are launched, `shares_with`. A workspace lives as long as its stream, so a graph must
    keep that one; such graphs must not run at the same time.

    Args:
        xp: cupy.
        bindings: of cuBLAS.
        device: its number; it is the calling thread's current one.
    """

    def __init__(self, xp: ModuleType, bindings: ModuleType, device: int) -> None:
        hopper = xp.cuda.runtime.getDeviceProperties(device)["major"] >= HOPPER
        self._bytes = WORKSPACE_BYTES if hopper else SMALL_WORKSPACE_BYTES
        self._pool, self._current_stream = xp.get_default_memory_pool(), xp.cuda.get_current_stream
        self._bindings, self._device = bindings, device
        self._handle: int = bindings.create()
        self._stream: Any = None
        self._owner: Any = None
        self._workspaces: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
        bindings.set_math_mode(self._handle, WIDE_SUMS)

    def here(self) -> int:
        """Return the handle, set to the current stream."""
        stream = self._current_stream(self._device)
        owner = getattr(stream, "shares_with", stream)
        if stream is not self._stream or owner is not self._owner:
            if owner not in self._workspaces:
                self._workspaces[owner] = self._pool.malloc(self._bytes)
            self._bindings.set_stream(self._handle, stream.ptr)
            # in this order: a new stream takes the workspace away
            workspace = self._workspaces[owner]
            self._bindings.set_workspace(self._handle, workspace.ptr, self._bytes)
            # kept: another one might get its address
            self._stream, self._owner = stream, owner
        return self._handle


class Products:
    """Products of CuPy's arrays, with a cache of prepared calls.

    Args:
        xp: cupy.
    """

    def __init__(self, xp: ModuleType) -> None:
        self._xp = xp
        self._bindings = importlib.import_module("nvmath.bindings.cublas")
        self._handles: dict[int, Handle] = {}  # by device
        self._lock = Lock()  # of the handles: ranks may be threads
        self._prepared: dict[Any, Multiply] = {}
        # 0 and 1 as alpha and beta, which cuBLAS reads from host memory in the type of the sums
        self._factors = {dtype: np.array([0, 1], dtype) for dtype in (_SINGLE, _DOUBLE)}

    def multiply(self, a: Array, b: Array, out: Array, add: bool, tf32: bool) -> None:
        """Write, or add, a @ b to `out`; the caller has checked shapes and dtypes.

        Args:
            tf32: whether operands of float32 may be rounded to TF32.

        Raises:
            DtypeError, ShapeError: for dtypes and sizes that cuBLAS does not support.
            DeviceError: when one of the arrays is in the host's memory.
        """
        key = (
            a.shape,
            b.shape,
            out.shape,
            a.strides,
            b.strides,
            out.strides,
            a.dtype,
            b.dtype,
            out.dtype,
            tf32,
        )
        product = self._prepared.get(key)
        if product is None:
            if a.dtype.name not in REAL or out.dtype.name not in REAL:
                raise DtypeError(
                    f"a device cannot multiply {a.dtype} matrices into {out.dtype}; convert them"
                )
            if out.size == 0:
                return
            if a.shape[-1] == 0:
                if not add:
                    out.fill(0)
                return
            layouts = [Matrices.of(x) for x in (a, b, out)]
            copied = [x.form is None for x in layouts]
            if True not in copied:
                product, calls = self._prepare(layouts, a.dtype, out.dtype, tf32)
                copies = [x.is_spread(out.shape[:-2]) for x in layouts]
                size = sum(x.nbytes * copy for x, copy in zip((a, b, out), copies, strict=True))
                if calls > max(FEW_CALLS, size / CALL_BYTES):
                    copied = copies
            if True in copied or product is None:
                self._multiply_copied(copied, a, b, out, add, tf32)
                return
            if len(self._prepared) >= CACHED_PRODUCTS:
                self._prepared.clear()
            self._prepared[key] = product
        product(a, b, out, add)

    def _handle(self, device: int) -> Handle:
        result = self._handles.get(device)
        if result is None:
            result = self._handles[device] = Handle(self._xp, self._bindings, device)
        return result

    def _prepare(
        self, layouts: list[Matrices], given: Dtype, result_dtype: Dtype, tf32: bool
    ) -> tuple[Multiply, int]:
        """Return a product of arrays in these layouts, none copied, and its number of calls."""
        a, b, out = layouts
        swapped = out.form is not None and out.form[0] == 1
        if swapped:  # out^T = b^T a^T is row-major
            a, b, out = b.flipped, a.flipped, out.flipped
        three, leading = (b, a, out), out.shape[:-2]
        axes = collapsed(leading, *(x.over(leading) for x in three))
        batch: Shape = (1, 0, 0, 0)
        if axes:  # the longest axis is cuBLAS's stack; each element of the others is a call
            batch = axes.pop(max(range(len(axes)), key=lambda i: axes[i][0]))
        stacked, forms = batch[0] > 1, [x.form or (0, 0) for x in three]
        m, n, k = b.shape[-1], a.shape[-2], a.shape[-1]
        if max(m, n, k, batch[0], *(lead for _, lead in forms)) > LIMIT:
            raise ShapeError(
                f"cuBLAS takes sizes up to {LIMIT}, not shapes {a.shape} and {b.shape}; split them"
            )
        bindings = self._bindings
        wide = given == _DOUBLE
        function = bindings.gemm_strided_batched_ex if stacked else bindings.gemm_ex
        compute = (
            COMPUTE_64F
            if wide
            else COMPUTE_32F_FAST_TF32
            if tf32 and given == _SINGLE
            else COMPUTE_32F
        )
        factors = self._factors[_DOUBLE if wide else _SINGLE]
        zero, item = factors.ctypes.data, factors.ctypes.data + factors.itemsize
        dtypes = given, given, result_dtype
        head = (forms[0][0], forms[1][0], m, n, k, item)
        # the arguments after the address of each of the three
        first, second, result = (
            (REAL[dtype.name], lead, *((apart,) if stacked else ()))
            for dtype, (_, lead), apart in zip(dtypes, forms, batch[1:], strict=True)
        )
        tail = (*result, *((batch[0],) if stacked else ()), compute, DEFAULT_ALGORITHM)
        starts = [  # per call, the bytes to skip in each of the three
            [
                x.itemsize * sum(i * axis[j] for i, axis in zip(at, axes, strict=True))
                for j, x in enumerate(dtypes, 1)
            ]
            for at in product_of(*(range(axis[0]) for axis in axes))
        ]

        def call(a: Any, b: Any, out: Any, add: bool) -> None:
            if swapped:
                a, b = b, a
            try:
                at_b, at_a, at_out = b.data.ptr, a.data.ptr, out.data.ptr
                device = out.data.device_id
            except AttributeError as error:
                raise mixed_error((a, b)) or mixed_error((a, b, out)) or error from None
            beta = item if add else zero
            with self._lock:
                handle = self._handle(device).here()
                for x, y, z in starts:
                    function(
                        handle, *head, at_b + x, *first, at_a + y, *second, beta, at_out + z, *tail
                    )

        return call, len(starts)

    def _multiply_copied(
        self, copies: Sequence[bool], a: Array, b: Array, out: Array, add: bool, tf32: bool
    ) -> None:
        """Multiply contiguous copies of some of the arrays."""
        xp = self._xp
        a, b, target = (
            xp.array(x, order="C") if copy else x
            for x, copy in zip((a, b, out), copies, strict=True)
        )
        self.multiply(a, b, target, add, tf32)
        if target is not out:
            out[...] = target


@lru_cache(4)
def products_of(xp: ModuleType) -> Products:
    """Return the products of a library's arrays, cached with their prepared calls."""
    return Products(xp)
