"""The compilation of kernels for dtypes, their launches, and the sizes of grids.

A call costs the host a few microseconds, about the time of a small kernel. So results that depend
on dtypes alone are cached, and each call checks only for errors that would read or write memory
outside of an array.
"""

import os
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, TypeAlias

import numpy as np

from nnmpi.backend.array import Array, Dtype
from nnmpi.backend.recording import call
from nnmpi.base.errors import DtypeError, UsageError

# By the dtype's name: NumPy has no other identification of bfloat16.
NAMES = {"float32": "float", "float64": "double", "float16": "float16", "bfloat16": "bfloat16"}

NULL = np.uint64(0)  # a null pointer: CuPy does not convert None to one

THREADS = 256
# An H200 has 132 multiprocessors of 2048 threads: 8 blocks each. Grids have at most 4 times as many
# blocks, so that multiprocessors finish at about the same time; blocks loop over the rest.
BLOCKS = 132 * 8 * 4
# Column sums need a second pass over the blocks' sums, which must be short relative to the first.
SUM_BLOCKS = 132 * 4
ROWS_EACH = 8  # the minimum per thread; with fewer rows the grid has fewer blocks
# The maximal elements of a row for a warp, and for a block of ordinary size. Longer rows are read
# several times, and later reads should hit the cache: so they get larger blocks, of which fewer
# run at the same time.
ROW_OF_WARP, ROW_OF_BLOCK = 1024, 8192

KernelTable: TypeAlias = Mapping[str, tuple[str, str]]  # name -> its family and its arrays' roles
Dims: TypeAlias = tuple[int, ...]
KernelLaunch: TypeAlias = Callable[[Dims, Dims, tuple[Any, ...]], None]


@cache
def source(family: str = "") -> str:
    """Return the CUDA C++ of a family of kernels, after the common part; of none, that alone."""
    files = ["common.cuh", *([f"{family}.cu"] if family else [])]
    return "".join((Path(__file__).parent / name).read_text() for name in files)


def options(t: str, p: str, *others: str) -> tuple[str, ...]:
    """Return compiler options for activations of dtype t, parameters of dtype p, other arrays."""
    a = "float64" if "float64" in (t, p, *others) else "float32"
    return ("-std=c++17", f"-DNNMPI_T={NAMES[t]}", f"-DNNMPI_P={NAMES[p]}", f"-DNNMPI_A={NAMES[a]}")


class KernelLauncher:
    """The compiled kernels of one library (CuPy), by the dtypes of their arguments.

    Args:
        xp: the library.

    Attributes:
        table: the kernels.
    """

    table: ClassVar[KernelTable]

    def __init__(self, xp: ModuleType) -> None:
        self.xp = xp
        self._modules: dict[tuple[str, str, str], Any] = {}
        self._launches: dict[Any, KernelLaunch] = {}

    def flat(self, name: str, n: int, itemsize: int, *args: Any) -> None:
        """Launch a kernel over n elements, 16 bytes per thread; other arguments as for `run`."""
        if n:
            self.run(name, *flat_grid(n, itemsize), *args)

    def over_cells(self, name: str, *args: Any) -> None:
        """Launch a kernel over the elements, one per thread, of its last array, (rows, n)."""
        rows, n = args[-1].shape
        if rows * n:
            self.run(name, *_matrix_grid(rows, n, 16, BLOCKS, 1), *args, rows, n)

    def over_rows(self, name: str, rows: int, n: int, *args: Any) -> None:
        """Launch the variant for rows of this length, a warp or a block per row."""
        if rows * n:
            form, *sizes = row_grid(rows, n)
            self.run(name, *sizes, *args, form=form)

    def whole_samples(self, name: str, x: Array, *args: Any) -> None:
        """Launch a kernel over matrices (samples, rows, n), with one block for a sample's column.

        A sample without rows counts, too.
        """
        if x.shape[0] * x.shape[2]:
            sizes = sample_grid(_sizes(x), x.dtype.itemsize, 1, ROWS_EACH)
            self.run(name, *sizes, x, *args, *_sizes(x))

    def sample_sums(
        self, name: str, arrays: tuple[Array, ...], targets: tuple[Array, ...], *numbers: Any
    ) -> tuple[Array | None, int]:
        """Launch a kernel that computes two numbers for each column of each sample.

        Args:
            name: the kernel.
            arrays: those that it reads; the first one is contiguous, (samples, rows, n), not empty.
            targets: (samples, n) each, receive the results.
            numbers: its last arguments.

        Returns:
            None and 1. If several blocks share a column, their numbers for a second kernel that
            writes to the targets, (samples, blocks, 2, n), and how many they are.
        """
        first, partial = arrays[0], None
        itemsize = first.dtype.itemsize
        grid, block = sample_grid(_sizes(first), itemsize, SUM_BLOCKS, ROWS_EACH)
        if grid[1] > 1:
            shape = (len(first), grid[1], 2, first.shape[2])
            partial = self.xp.empty(shape, targets[0].dtype)
        self.run(name, grid, block, *arrays, *targets, partial, *_sizes(first), *numbers)
        return partial, grid[1]

    def run(
        self,
        name: str,
        grid: Dims,
        block: Dims,
        *args: Any,
        form: str = "",
        like: Array | None = None,
    ) -> None:
        """Check a kernel's arrays and launch it; a recording repeats the launch.

        Args:
            name: in the table.
            grid, block: numbers of blocks and threads.
            args: contiguous arrays on the device, None for a missing one, and numbers.
            form: the suffix of the kernel's name, of one of its variants.
            like: an array of dtype T, if no argument has it.

        Raises:
            UsageError: when an array is in the host's memory, or not C-contiguous.
            DtypeError: when the dtypes do not go together.
        """
        roles = self.table[name][1]
        arrays = [
            (role, x) for role, x in zip(roles, args, strict=False) if role != "." and x is not None
        ]
        for role, array in arrays:
            refuse_host(name, array)
            if role not in "XY" and not array.flags.c_contiguous:
                raise UsageError(
                    f"the kernel {name} needs contiguous arrays, but got one of shape {array.shape}"
                    f" with strides {array.strides}; pass it through ascontiguousarray"
                )
        if like is not None:
            arrays.append(("T", like))
        key = (name + form, tuple([(role, array.dtype) for role, array in arrays]))
        launch = self._launches.get(key)
        if launch is None:
            t, p = _types(self.table, name, key[1])
            launch = self._launches[key] = self.module(self.table[name][0], t, p).get_function(
                name + form
            )
        call(launch, (grid, block), (tuple([NULL if x is None else x for x in args]),))

    def compile_ahead(self, families: Collection[str], t: str, p: str) -> None:
        """Begin to compile families, each by a thread: CUDA's compiler needs no lock of Python's.

        Args:
            families: names.
            t, p: the dtypes of activations and parameters.
        """
        keys = {(family, t, p if _has_parameters(self.table, family) else t) for family in families}
        left = sorted(keys - self._modules.keys())
        if left:
            number = self.xp.cuda.runtime.getDevice()
            pool = ThreadPoolExecutor(min(len(left), os.cpu_count() or 1), "nnmpi-compile")
            self._modules.update((key, pool.submit(self._compiled, number, *key)) for key in left)
            pool.shutdown(wait=False)

    def _compiled(self, number: int, family: str, t: str, p: str) -> Any:
        """Return a family's kernels, compiled and loaded by this thread."""
        self.xp.cuda.Device(number).use()
        module = self.xp.RawModule(code=source(family), options=options(t, p))
        module.compile()
        return module

    def module(self, family: str, t: str, p: str) -> Any:
        """Return a family's kernels, compiled for dtypes t (activations) and p (parameters)."""
        key = (family, t, p)
        found = self._modules.get(key)
        if found is None:
            found = self.xp.RawModule(code=source(family), options=options(t, p))
        elif isinstance(found, Future):
            found = found.result()
        self._modules[key] = found
        return found


def refuse_host(name: str, array: Any) -> None:
    """Refuse an array in the host's memory: CuPy would pass its contents as a number."""
    if isinstance(array, np.ndarray):
        raise UsageError(
            f"the kernel {name} runs on a device, but got an array of shape {array.shape}"
            " in the host's memory; copy it there with backend.asarray"
        )


def _has_parameters(table: KernelTable, family: str) -> bool:
    """Whether a family's kernels are compiled for two dtypes."""
    return any({*"PSX"} & {*roles} for other, roles in table.values() if other == family)


def _types(table: KernelTable, name: str, dtypes: tuple[tuple[str, Dtype], ...]) -> tuple[str, str]:
    """Return the names of T and P, given the arguments' roles and dtypes; refuse others."""
    t = next(dtype.name for role, dtype in dtypes if role in "TY")
    a = "float64" if t == "float64" else "float32"
    # of a kernel without parameters: those that the others of its family mostly have
    rest = a if _has_parameters(table, table[name][0]) else t
    p = next((dtype.name for role, dtype in dtypes if role in "PSX"), rest)
    allowed = {
        "T": {t},
        "Y": {t},
        "P": {p} & {t, a},
        "S": {p},
        "X": {p},
        "A": {a},
        "D": {"float64"},
    }
    allowed |= {"u": {"uint32"}, "b": {"uint8", "uint16", "uint32"}}
    fits = (
        dtype.kind in "iu" if role == "i" else dtype.name in allowed[role] for role, dtype in dtypes
    )
    if not NAMES.keys() >= {t, p} or not all(fits):
        words = ", ".join(dtype.name for _, dtype in dtypes)
        raise DtypeError(
            f"the kernel {name} does not support arrays of {words}; convert one with astype"
        )
    return t, p


def _sizes(x: Array) -> Dims:
    """Return rows, columns and samples of x (samples, rows, columns), as kernels take them."""
    return x.shape[1], x.shape[2], x.shape[0]


def flat_grid(n: int, itemsize: int) -> tuple[Dims, Dims]:
    """Return grid and block for n elements, 16 bytes per thread."""
    return (min(BLOCKS, 1 + (n * itemsize - 1) // (16 * THREADS)),), (THREADS,)


def row_grid(rows: int, n: int) -> tuple[str, Dims, Dims]:
    """Return the variant of a kernel for rows of this length, a warp or a block per row, and its
    grid and block.
    """
    if n <= ROW_OF_WARP:
        return "_warps", (min(1 + (rows - 1) // 8, 2**31 - 1),), (32, 8)
    return "_blocks", (min(rows, 2**31 - 1),), (THREADS if n <= ROW_OF_BLOCK else 1024,)


def sample_grid(sizes: Dims, itemsize: int, blocks: int, least_rows: int) -> tuple[Dims, Dims]:
    """Return grid and block for matrices (rows, n, samples), these along z: see `_matrix_grid`."""
    rows, n, samples = sizes
    grid, block = _matrix_grid(rows, n, itemsize, max(1, blocks // samples), least_rows)
    return (*grid, min(samples, 65535)), block


def _matrix_grid(
    rows: int, n: int, itemsize: int, blocks: int, least_rows: int
) -> tuple[Dims, Dims]:
    """Return grid and block for a matrix (rows, n).

    Columns are along x, up to 32 threads of 16 bytes each, rows along y.

    Args:
        rows, n: of the matrix.
        itemsize: of an element in bytes: 2, 4 or 8.
        blocks: the maximal number of blocks.
        least_rows: the minimal rows per thread, if the matrix has as many.
    """
    pack = 16 // itemsize
    units = n // pack if n % pack == 0 else n
    width = 32 if units > 16 else 1 << max(0, units - 1).bit_length()
    height = THREADS // width
    across = min(1 + (units - 1) // width, BLOCKS)
    down = min(max(1, blocks // across), 1 + (rows - 1) // (height * least_rows), 65535)
    return (across, max(1, down)), (width, height)
