"""All kernels for devices by name."""

from __future__ import annotations

from nnmpi.backend.cuda.dense import Dense
from nnmpi.backend.cuda.images import Images
from nnmpi.backend.cuda.launch import NAMES, Dtype
from nnmpi.backend.cuda.rows import Rows
from nnmpi.backend.cuda.tables import Tables
from nnmpi.backend.cuda.updates import Updates


class DeviceFunctions(Dense, Rows, Images, Tables, Updates):
    """The kernels of one library (CuPy); they are queued on its current stream.

    Those that `backend.jit.table.CompiledFunctions` has too have the same names and arguments.
    """


def works_on(dtype: Dtype) -> bool:
    """Return whether there are kernels for activations of this dtype."""
    return dtype.name in NAMES
