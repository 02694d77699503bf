"""A double of NVIDIA's bindings of cuBLAS: products of matrices, computed by NumPy from the
addresses that are given.

As there, matrices lie in columns, C is not read if beta is 0, factors are read from the host's
memory, a matrix lies within one allocation, and a new stream takes the workspace away. What else
cuBLAS takes and refuses is the interpreted device's business.
"""

from collections import deque
from dataclasses import dataclass

import ml_dtypes
import numpy as np
from cupy import _capture, _streams
from cupy._address import bytes_at
from cupy.cuda import memory

_TYPES = {0: np.dtype("f4"), 1: np.dtype("f8"), 2: np.dtype("f2"), 14: np.dtype(ml_dtypes.bfloat16)}
TF32 = 77
_ONE = {"stride_a": 0, "stride_b": 0, "stride_c": 0, "batch_count": 1}


class cuBLASError(Exception):
    """A call of cuBLAS failed."""


@dataclass
class Handle:
    """What has been set.

    Attributes:
        stream: the stream's pointer.
        workspace: address and bytes; none if cuBLAS is to take memory by itself.
        mode: how it adds up.
    """

    stream: int = 0
    workspace: tuple[int, int] = (0, 0)
    mode: int = 0


HANDLES = {}
# The last calls, by name: tests look at them.
CALLS = deque(maxlen=1000)


def create():
    """Return a new handle."""
    handle = 0xB1A5 + len(HANDLES)
    HANDLES[handle] = Handle()
    return handle


def set_stream(handle, stream_id):
    """Set the stream, and forget the workspace."""
    HANDLES[handle].stream, HANDLES[handle].workspace = stream_id, (0, 0)


def set_workspace(handle, workspace, workspace_size_in_bytes):
    """Give the memory in which products are computed."""
    if memory.base_of(workspace, workspace_size_in_bytes) is None:
        raise cuBLASError("INVALID_VALUE (7)")
    HANDLES[handle].workspace = workspace, workspace_size_in_bytes


def set_math_mode(handle, mode):
    """Set how it adds up."""
    HANDLES[handle].mode = mode


def gemm_ex(
    handle,
    transa,
    transb,
    m,
    n,
    k,
    alpha,
    a,
    atype,
    lda,
    b,
    btype,
    ldb,
    beta,
    c,
    ctype,
    ldc,
    compute_type,
    algo,
):
    """Multiply two matrices."""
    _multiply("gemm_ex", locals() | _ONE)


def gemm_strided_batched_ex(
    handle,
    transa,
    transb,
    m,
    n,
    k,
    alpha,
    a,
    atype,
    lda,
    stride_a,
    b,
    btype,
    ldb,
    stride_b,
    beta,
    c,
    ctype,
    ldc,
    stride_c,
    batch_count,
    compute_type,
    algo,
):
    """Multiply the matrices of two stacks."""
    _multiply("gemm_strided_batched_ex", locals())


def _multiply(name, g):
    """Compute C = alpha op(A) op(B) + beta C for each matrix of the stacks."""
    CALLS.append((name, g))
    if HANDLES[g["handle"]].stream != _streams.current().ptr:
        raise cuBLASError("the double computes in the current stream, and this is another one")
    rows_a, columns_a = (g["k"], g["m"]) if g["transa"] else (g["m"], g["k"])
    rows_b, columns_b = (g["n"], g["k"]) if g["transb"] else (g["k"], g["n"])
    if g["lda"] < max(1, rows_a) or g["ldb"] < max(1, rows_b) or g["ldc"] < max(1, g["m"]):
        raise cuBLASError("INVALID_VALUE (7)")
    given, result = _TYPES[g["atype"]], _TYPES[g["ctype"]]
    wide = np.dtype("f8" if given.itemsize == 8 else "f4")
    alpha, beta = (bytes_at(g[item], wide.itemsize).view(wide)[0] for item in ("alpha", "beta"))

    def compute():
        for i in range(g["batch_count"]):
            a = _matrix(g["a"], i * g["stride_a"], given, rows_a, columns_a, g["lda"]).astype(wide)
            b = _matrix(g["b"], i * g["stride_b"], given, rows_b, columns_b, g["ldb"]).astype(wide)
            c = _matrix(g["c"], i * g["stride_c"], result, g["m"], g["n"], g["ldc"])
            if g["compute_type"] == TF32:
                a, b = (
                    ((x.view("u4") + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view("f4")
                    for x in (a, b)
                )
            product = alpha * ((a.T if g["transa"] else a) @ (b.T if g["transb"] else b))
            c[...] = product if beta == 0 else product + beta * c.astype(product.dtype)

    _capture.submit(compute, g["a"], g["b"], g["c"])


def _matrix(address, start, dtype, rows, columns, lead):
    """Return a view of a matrix in columns."""
    if rows == 0 or columns == 0:
        return np.empty((rows, columns), dtype)
    address += start * dtype.itemsize
    size = dtype.itemsize * ((columns - 1) * lead + rows)
    if memory.base_of(address, size) is None:
        raise cuBLASError("EXECUTION_FAILED (13)")
    return np.ndarray(
        (rows, columns), dtype, bytes_at(address, size), 0, (dtype.itemsize, lead * dtype.itemsize)
    )
