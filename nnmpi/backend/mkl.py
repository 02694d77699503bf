"""Products of two of NumPy's matrices by MKL, where it is installed (`pip install 'nnmpi[mkl]'`).

On Intel's processors MKL multiplies large float32 matrices 1.12 to 1.2 times as fast as the OpenBLAS inside NumPy (one
core of a Xeon with AVX-512). A call by ctypes costs a microsecond more than NumPy's, so small products stay with
NumPy, by their sizes alone: nothing is timed, and a repeated command has the same bits. Stacks of matrices, and
arrays that lie neither in rows nor in columns, stay with NumPy too.
"""

import ctypes
import site
import sys
from functools import cache
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_info

from nnmpi.backend.array import Array

LEAST = 2**20  # multiplications: with 64 rows and columns NumPy is ahead, with 128 MKL
ROWS, PLAIN, TRANSPOSED = 101, 111, 112  # cblas's codes
OPENMP, SEQUENTIAL = 0, 1  # MKL_Set_Threading_Layer's
_INT, _POINTER = ctypes.c_int, ctypes.c_void_p
_REAL = {"float32": ("s", ctypes.c_float), "float64": ("d", ctypes.c_double)}


class Mkl:
    """MKL's products, with a number of threads that is fixed for the process."""

    def __init__(self, library: ctypes.CDLL, threads: int, least: int = LEAST) -> None:
        library.MKL_Set_Threading_Layer(_INT(OPENMP if threads > 1 else SEQUENTIAL))
        library.MKL_Set_Num_Threads(_INT(threads))
        self._library, self._least = library, least
        self._gemm = {}
        for name, (code, real) in _REAL.items():
            gemm = getattr(library, f"cblas_{code}gemm")
            gemm.restype = None
            gemm.argtypes = [_INT] * 6 + [real, _POINTER, _INT, _POINTER, _INT, real, _POINTER, _INT]
            self._gemm[np.dtype(name)] = gemm

    @property
    def version(self) -> str:
        """MKL's own words, cut to the number."""
        text = ctypes.create_string_buffer(200)
        self._library.MKL_Get_Version_String(text, _INT(len(text)))
        words = text.value.decode(errors="replace").split()
        return words[words.index("Version") + 1].split("-")[0] if "Version" in words else "unknown"

    def takes(self, a: Array, b: Array, out: Array | None) -> bool:
        """Return whether MKL multiplies these: large enough, of one dtype, and each in rows or in columns."""
        if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
            return False
        if a.size * b.shape[1] <= self._least or a.dtype != b.dtype or a.dtype not in self._gemm:
            return False
        if _lead(a) is None or _lead(b) is None:
            return False
        shape = (a.shape[0], b.shape[1])
        if out is None:
            return True
        return out.shape == shape and out.dtype == a.dtype and (_lead(out) or (TRANSPOSED,))[0] == PLAIN

    def multiply(self, a: Array, b: Array, out: Array, add: bool) -> None:
        """Write a @ b to `out`, or add it; only what `takes` allows."""
        (a_flag, a_lead), (b_flag, b_lead), (_, out_lead) = (_lead(x) or (PLAIN, 0) for x in (a, b, out))
        n, m, k = a.shape[0], b.shape[1], a.shape[1]
        left, right, at = (x.ctypes.data for x in (a, b, out))
        gemm = self._gemm[a.dtype]
        gemm(ROWS, a_flag, b_flag, n, m, k, 1.0, left, a_lead, right, b_lead, float(add), at, out_lead)


def _lead(x: Array) -> tuple[int, int] | None:
    """Return cblas's flag for how a matrix lies, and the elements between its rows (or columns); None if neither."""
    (rows, columns), (down, right), size = x.shape, x.strides, x.itemsize
    if right == size and down >= columns * size and not down % size:
        return PLAIN, down // size
    if down == size and right >= rows * size and not right % size:
        return TRANSPOSED, right // size
    return None


@cache
def installed_mkl() -> Mkl | None:
    """Return MKL's products, with as many threads as NumPy's BLAS has; None where MKL cannot be loaded."""
    folders = [Path(sys.prefix, "lib"), Path(site.getuserbase(), "lib")]
    files = [file for folder in folders for file in sorted(folder.glob("libmkl_rt.so*"))]
    if not files:
        return None
    threads = max((each["num_threads"] for each in threadpool_info() if each["user_api"] == "blas"), default=1)
    try:
        return Mkl(ctypes.CDLL(str(files[-1])), threads)
    except (OSError, AttributeError):  # for another processor, or older than these functions
        return None
