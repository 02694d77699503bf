"""The table of kernels, compiling them for the dtypes at hand, and choosing how many threads run.

A call costs the host a few microseconds, as long as a small kernel runs: what depends on dtypes
alone is looked up, and what is looked at in every call is what would otherwise read or write memory
that is not the array's.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np

from nnmpi.backend.array import Array, Dtype
from nnmpi.backend.recording import perform
from nnmpi.errors import DtypeError, UsageError

# By the dtype's name, which for bfloat16 is all that NumPy knows of it.
NAMES = {"float32": "float", "float64": "double", "float16": "float16", "bfloat16": "bfloat16"}
LOW = frozenset({"float16", "bfloat16"})

NOTHING = np.uint64(0)  # the address of nothing: CuPy takes None for something else

# Each kernel's source, and the roles of its first arguments, one letter for each:
#
#     T    an activation's dtype, floating point        P    T's, or float32 where T has 16 bits
#     A    float32, or float64 where T is                S    any floating point: where T and P are independent
#     i    integers of any kind                          b    numbers of winners, unsigned
#     u    uint32                                        .    a number
#
# Numbers follow. T comes first in a kernel of sums, for which nothing else tells it.
KERNELS = {
    "bias_relu": ("dense", "TP"),
    "relu_grad_bias": ("dense", "TTTPA"),
    "slope_grad_bias": ("dense", "TTTPA"),
    "column_sum": ("dense", "TPA"),
    "column_total": ("dense", "AP"),
    "bias_gelu_slope": ("gelu", "TPT"),
    "bias_gelu_tanh_slope": ("gelu", "TPT"),
    "softmax": ("softmax", "TT"),
    "softmax_grad": ("softmax", "TTT"),
    "softmax_loss": ("softmax", "Ti.AP"),
    "layer_norm": ("layer_norm", "TPP.TAA"),
    "layer_norm_grad": ("layer_norm", "TTAAPT"),
    "layer_norm_sums": ("layer_norm", "TTAAPPA"),
    "layer_norm_total": ("layer_norm", "APP"),
    "embedding": ("embedding", "Si.T"),
    "embedding_grad": ("embedding", "Ti.iS"),
    "dropout": ("dropout", "TTu"),
    "max_pool": ("pooling", "TTb"),
    "max_pool_grad": ("pooling", "TbT"),
    "sgd": ("updates", "TT"),
    "sgd_momentum": ("updates", "TTT"),
    "adam": ("updates", "TTTT"),
}

THREADS = 256
# An H200 has 132 multiprocessors for 2048 threads each: 8 blocks. Grids have a few times that, so
# that no multiprocessor waits long for the last; each block then continues through what is left.
BLOCKS = 132 * 8 * 4
# Column sums take a second pass over the blocks' sums, which must stay short beside the first.
SUM_BLOCKS = 132 * 4
ROWS_EACH = 8  # of a thread, at least, before more blocks share the rows
# Elements of a row that is a warp's, and of one that is an ordinary block's. Still longer rows are
# read more often than once, and come from the cache then: the fewer are worked on at the same time
# the better.
ROW_OF_WARP, ROW_OF_BLOCK = 1024, 8192

Sizes: TypeAlias = tuple[int, ...]
Launch: TypeAlias = Callable[[Sizes, Sizes, tuple[Any, ...]], None]


@cache
def source(family: str) -> str:
    """Return the CUDA C++ of a family of kernels, with what all families share before it."""
    folder = Path(__file__).parent
    return (folder / "common.cuh").read_text() + (folder / f"{family}.cu").read_text()


def options(t: str, p: str) -> tuple[str, ...]:
    """Return compiler options for activations of dtype t and parameters of dtype p."""
    a = "float64" if "float64" in (t, p) else "float32"
    return ("-std=c++17", f"-DNNMPI_T={NAMES[t]}", f"-DNNMPI_P={NAMES[p]}", f"-DNNMPI_A={NAMES[a]}")


class KernelLauncher:
    """The compiled kernels of one library (CuPy), by the dtypes of their arguments.

    Args:
        xp: the library.
    """

    def __init__(self, xp: ModuleType) -> None:
        self.xp = xp
        self._modules: dict[tuple[str, str, str], Any] = {}
        self._found: dict[Any, Launch] = {}

    def flat(self, name: str, n: int, itemsize: int, *args: Any) -> None:
        """Launch a kernel over n elements, 16 bytes per thread; other arguments as for `run`."""
        if n:
            self.run(
                name, (min(BLOCKS, 1 + (n * itemsize - 1) // (16 * THREADS)),), (THREADS,), *args
            )

    def over_columns(self, name: str, y: Array, n: int, *args: Any) -> None:
        """Launch a kernel over a matrix (..., n): columns along x, rows along y."""
        if y.size:
            grid, block = _matrix_grid(y.size // n, n, y.dtype.itemsize, BLOCKS, ROWS_EACH // 2)
            self.run(name, grid, block, y, *args, y.size // n, n)

    def over_rows(self, name: str, rows: int, n: int, *args: Any) -> None:
        """Launch the variant for rows of this length, a warp or a block per row."""
        if rows * n and n <= ROW_OF_WARP:
            self.run(name, (min(1 + (rows - 1) // 8, 2**31 - 1),), (32, 8), *args, form="_warps")
        elif rows * n:
            block = (THREADS if n <= ROW_OF_BLOCK else 1024,)
            self.run(name, (min(rows, 2**31 - 1),), block, *args, form="_blocks")

    def sums(
        self, name: str, total: str, arrays: tuple[Any, ...], places: tuple[Array | None, ...]
    ) -> None:
        """Launch a kernel that sums columns, and a second one over its blocks if there are several.

        Args:
            name, total: the two.
            arrays: what the first reads and writes, without gaps; each row has as many elements as
                a sum.
            places: (n,) each, where sums go; those that nobody wants are None, and not all are.
        """
        first, n = arrays[0], next(place.size for place in places if place is not None)
        if n == 0:
            return
        rows, columns = first.size // n, n * len(places)
        grid, block = _matrix_grid(rows, n, first.dtype.itemsize, SUM_BLOCKS, ROWS_EACH)
        partial = None
        if grid[1] > 1:
            partial = self.xp.empty(
                (grid[1], columns), "float64" if first.dtype.name == "float64" else "float32"
            )
        self.run(name, grid, block, *arrays, *places, partial, rows, n)
        if partial is not None:
            around = (1 + (columns - 1) // 32,), (32, 8)
            self.run(total, *around, partial, *places, grid[1], n, like=first)

    def run(
        self,
        name: str,
        grid: Sizes,
        block: Sizes,
        *args: Any,
        form: str = "",
        like: Array | None = None,
    ) -> None:
        """Launch a kernel, after a look at its arrays; a recorded step notes the launch.

        Args:
            name: in the table.
            grid, block: numbers of blocks and threads.
            args: arrays on the device, without gaps, None for one left out, and numbers.
            form: of the kernel, behind its name.
            like: has the dtype T where no argument has it.

        Raises:
            UsageError: when an array is in the host's memory, or not C-contiguous.
            DtypeError: when the dtypes do not go together.
        """
        roles = KERNELS[name][1]
        arrays = [
            (role, x) for role, x in zip(roles, args, strict=False) if role != "." and x is not None
        ]
        for _, array in arrays:
            if type(array) is np.ndarray:  # CuPy would hand over its contents as a number
                raise UsageError(
                    f"the kernel {name} runs on a device, and got an array of shape {array.shape}"
                    " in the host's memory; copy it there with backend.asarray"
                )
            if not array.flags.c_contiguous:
                raise UsageError(
                    f"the kernel {name} needs arrays without gaps, and got one of shape"
                    f" {array.shape} with strides {array.strides}; pass it through"
                    " ascontiguousarray"
                )
        if like is not None:
            arrays.append(("T", like))
        key = (name + form, tuple([(role, array.dtype) for role, array in arrays]))
        launch = self._found.get(key)
        if launch is None:
            t, p = _types(name, key[1])
            launch = self._found[key] = self.module(KERNELS[name][0], t, p).get_function(
                name + form
            )
        perform(launch, grid, block, tuple([NOTHING if x is None else x for x in args]))

    def module(self, family: str, t: str, p: str) -> Any:
        """Return a family's kernels, compiled for dtypes t (activations) and p (parameters)."""
        key = (family, t, p)
        if key not in self._modules:
            self._modules[key] = self.xp.RawModule(code=source(family), options=options(t, p))
        return self._modules[key]


def _types(name: str, dtypes: tuple[tuple[str, Dtype], ...]) -> tuple[str, str]:
    """Return the names of T and P for dtypes by their roles, or refuse dtypes that do not go
    together.
    """
    t = next(dtype.name for role, dtype in dtypes if role == "T")
    p = next((dtype.name for role, dtype in dtypes if role in "PS"), t)
    a = "float64" if t == "float64" else "float32"
    allowed = {"T": {t}, "P": {p} & {t, a if t in LOW else t}, "S": {p}, "A": {a}}
    allowed |= {"u": {"uint32"}, "b": {"uint8", "uint16", "uint32"}}
    fits = (
        dtype.kind in "iu" if role == "i" else dtype.name in allowed[role] for role, dtype in dtypes
    )
    if not NAMES.keys() >= {t, p} or not all(fits):
        words = ", ".join(dtype.name for _, dtype in dtypes)
        raise DtypeError(
            f"the kernel {name} has no form for arrays of {words}; convert one with astype"
        )
    return t, p


def _matrix_grid(rows: int, n: int, itemsize: int, blocks: int, each: int) -> tuple[Sizes, Sizes]:
    """Return grid and block for a matrix: columns along x, up to 32 threads of 16 bytes each, rows
    along y.

    Args:
        rows, n: of the matrix.
        itemsize: of an element in bytes: 2, 4 or 8.
        blocks: the most there may be.
        each: rows of a thread, at least, if there are as many.
    """
    pack = 16 // itemsize
    units = n // pack if n % pack == 0 else n
    width = 32 if units > 16 else 1 << max(0, units - 1).bit_length()
    height = THREADS // width
    across = min(1 + (units - 1) // width, BLOCKS)
    down = min(max(1, blocks // across), 1 + (rows - 1) // (height * each), 65535)
    return (across, max(1, down)), (width, height)
