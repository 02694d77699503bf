"""Compiling kernels for the dtypes at hand, looking at their arguments, and choosing how many threads run.

A call costs the host a few microseconds, as long as a small kernel runs: what depends on dtypes alone is looked up, and
what is looked at in every call is what would otherwise read or write memory that is not the array's.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np

from nnmpi.backend.array import Array
from nnmpi.errors import DtypeError, UsageError

# By the dtype's name, which for bfloat16 is all that NumPy knows of it.
NAMES = {"float32": "float", "float64": "double", "float16": "float16", "bfloat16": "bfloat16"}
LOW = frozenset({"float16", "bfloat16"})

# The address of nothing: CuPy takes None for something else.
NOTHING = np.uint64(0)

THREADS = 256
# An H200 has 132 multiprocessors for 2048 threads each: 8 blocks. Grids have a few times that, so that no
# multiprocessor waits long for the last; each block then goes on through what is left.
BLOCKS = 132 * 8 * 4
# Column sums take a second pass over the blocks' sums, which must stay short beside the first.
SUM_BLOCKS = 132 * 4
ROWS_EACH = 8  # of a thread, at least, before more blocks share the rows
# Elements of a row that is a warp's, and of one that is an ordinary block's. Still longer rows are read more often than
# once, and come from the cache then: the fewer are worked on at the same time the better.
ROW_OF_WARP, ROW_OF_BLOCK = 1024, 8192

Sizes: TypeAlias = tuple[int, ...]
Launch: TypeAlias = Callable[[Sizes, Sizes, tuple[Any, ...]], None]
Dtype: TypeAlias = np.dtype[Any]


class Library(Protocol):
    """The part of CuPy that kernels need."""

    empty: Callable[..., Array]
    argsort: Callable[..., Array]
    RawModule: Any


@cache
def source(family: str) -> str:
    """Return the CUDA C++ of a family of kernels, with what all families share before it."""
    folder = Path(__file__).parent
    return (folder / "common.cuh").read_text() + (folder / f"{family}.cu").read_text()


def options(t: str, p: str) -> tuple[str, ...]:
    """Return the compiler's options for activations of dtype t and parameters of dtype p, given by their names."""
    a = "float64" if "float64" in (t, p) else "float32"
    return ("-std=c++17", f"-DNNMPI_T={NAMES[t]}", f"-DNNMPI_P={NAMES[p]}", f"-DNNMPI_A={NAMES[a]}")


class Family:
    """What all families of kernels share: the compiled ones, by the dtypes of their arguments.

    Roles, one letter per array:

        T    an activation's dtype, floating point        P    T's, or float32 where T has 16 bits
        A    float32, or float64 where T is                S    any floating point: where T and P are independent
        i    integers of any kind                          b    numbers of winners, unsigned
        u    uint32                                        d    float64
    """

    def __init__(self, xp: Library) -> None:
        self.xp = xp
        self._modules: dict[tuple[str, str, str], Any] = {}
        self._found: dict[Any, Launch] = {}

    def kernel(self, family: str, name: str, roles: str, *arrays: Array | None) -> Launch:
        """Return the kernel for these arrays' dtypes, after a look at them; None stands for an array left out.

        Args:
            family: the file that has the kernel.
            name: of the kernel.
            roles: a letter for each array's dtype, as the class explains.
            arrays: those that the kernel reads and writes.

        Raises:
            UsageError: when an array is in the host's memory, or not C-contiguous.
            DtypeError: when the dtypes do not go together.
        """
        for array in arrays:
            if type(array) is np.ndarray:  # CuPy would hand over its contents as a number
                raise UsageError(
                    f"the kernel {name} runs on a device, and got an array of shape {array.shape} in the host's "
                    "memory; copy it there with backend.asarray"
                )
            if array is not None and not array.flags.c_contiguous:
                raise UsageError(
                    f"the kernel {name} needs arrays without gaps, and got one of shape {array.shape} with strides "
                    f"{array.strides}; pass it through ascontiguousarray"
                )
        dtypes = tuple([None if array is None else array.dtype for array in arrays])
        found = self._found.get((name, dtypes))
        if found is None:
            found = self._found[name, dtypes] = self._made(family, name, roles, dtypes)
        return found

    def _made(self, family: str, name: str, roles: str, dtypes: tuple[Dtype | None, ...]) -> Launch:
        t, p = _types(name, roles, dtypes)
        made: Launch = self.module(family, t, p).get_function(name)
        return made

    def module(self, family: str, t: str, p: str) -> Any:
        """Return a family's kernels, compiled for activations of dtype t and parameters of dtype p."""
        key = (family, t, p)
        if key not in self._modules:
            self._modules[key] = self.xp.RawModule(code=source(family), options=options(t, p))
        return self._modules[key]

    def totals(self, columns: int, blocks: int, dtype: Dtype) -> Any:
        """Return scratch memory for the blocks' sums of columns, or nothing where one block has all rows.

        Args:
            columns: of the matrix.
            blocks: how many share each column.
            dtype: of what is added up. Sums of float64 are float64, all others float32.
        """
        if blocks == 1:
            return NOTHING
        return self.xp.empty((blocks, columns), "float64" if dtype.name == "float64" else "float32")


def _types(name: str, roles: str, dtypes: tuple[Dtype | None, ...]) -> tuple[str, str]:
    """Return the names of T and P.

    Raises:
        DtypeError: when the dtypes do not go together.
    """
    named = [(role, dtype.name) for role, dtype in zip(roles, dtypes, strict=True) if dtype is not None]
    t = next(found for role, found in named if role == "T")
    p = next((found for role, found in named if role in "PS"), t)
    a = "float64" if t == "float64" else "float32"
    wanted = {"T": {t}, "P": {p} & ({t, a} if t in LOW else {t}), "S": {p}, "A": {a}, "d": {"float64"}}
    wanted |= {"u": {"uint32"}, "b": {"uint8", "uint16", "uint32"}}
    kinds = {role: allowed & set(NAMES) if role in "TPSA" else allowed for role, allowed in wanted.items()}
    for (role, found), dtype in zip(named, (each for each in dtypes if each is not None), strict=True):
        if (role == "i" and dtype.kind not in "iu") or (role != "i" and found not in kinds[role]):
            words = ", ".join(each.name for each in dtypes if each is not None)
            raise DtypeError(f"the kernel {name} has no form for arrays of {words}; convert one with astype")
    return t, p


def flat_grid(n: int, itemsize: int) -> Sizes:
    """Return the blocks for n elements, 16 bytes per thread at a time."""
    return (min(BLOCKS, 1 + (n * itemsize - 1) // (16 * THREADS)),)


def columns_grid(rows: int, n: int, itemsize: int) -> tuple[Sizes, Sizes]:
    """Return grid and block for a matrix: columns along x, up to 32 threads of 16 bytes each, rows along y.

    Args:
        rows: of the matrix.
        n: its columns.
        itemsize: of an element in bytes: 2, 4 or 8.
    """
    return _matrix_grid(rows, n, itemsize, BLOCKS, ROWS_EACH // 2)


def _matrix_grid(rows: int, n: int, itemsize: int, blocks: int, each: int) -> tuple[Sizes, Sizes]:
    """Return grid and block, of so many blocks at most, each thread with so many rows at least if there are as many."""
    pack = 16 // itemsize
    units = n // pack if n % pack == 0 else n
    width = 32 if units > 16 else 1 << max(0, units - 1).bit_length()
    height = THREADS // width
    across = min(1 + (units - 1) // width, BLOCKS)
    down = min(max(1, blocks // across), 1 + (rows - 1) // (height * each), 65535)
    return (across, max(1, down)), (width, height)


def sums_grid(rows: int, n: int, itemsize: int) -> tuple[Sizes, Sizes]:
    """Return grid and block for sums over the rows; grid[1] blocks share each column.

    Args:
        rows: of the matrix.
        n: its columns.
        itemsize: of an element in bytes: 2, 4 or 8.
    """
    return _matrix_grid(rows, n, itemsize, SUM_BLOCKS, ROWS_EACH)


def totals_grid(columns: int) -> tuple[Sizes, Sizes]:
    """Return grid and block that add up the blocks' sums of so many columns."""
    return (1 + (columns - 1) // 32,), (32, 8)


def rows_grid(rows: int, n: int) -> tuple[str, Sizes, Sizes]:
    """Return the form of a kernel that works on rows ("warps" or "blocks"), grid and block."""
    if n <= ROW_OF_WARP:
        return "warps", (min(1 + (rows - 1) // 8, 2**31 - 1),), (32, 8)
    return "blocks", (min(rows, 2**31 - 1),), (THREADS if n <= ROW_OF_BLOCK else 1024,)


def integer_bytes(array: Array) -> int:
    """Return how a kernel tells kinds of integers apart: their bytes, negative where they have no sign."""
    return array.dtype.itemsize if array.dtype.kind == "i" or array.dtype.itemsize == 8 else -array.dtype.itemsize
