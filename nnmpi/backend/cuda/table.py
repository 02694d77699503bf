"""All kernels for devices by name."""

from __future__ import annotations

from functools import cache
from types import ModuleType

from nnmpi.backend.cuda.dense import Dense
from nnmpi.backend.cuda.images import Images
from nnmpi.backend.cuda.launch import NAMES, Dtype
from nnmpi.backend.cuda.rows import Rows
from nnmpi.backend.cuda.tables import Tables
from nnmpi.backend.cuda.updates import Updates


class DeviceKernels(Dense, Rows, Images, Tables, Updates):
    """The kernels of one library (CuPy); they are queued on its current stream.

    Those that `backend.kernels.table.Kernels` has too have the same names and arguments.
    """

    is_device = True


def device_kernels(xp: ModuleType) -> DeviceKernels | None:
    """Return the kernels of a device's library, or None for a library that compiles none. Nothing is compiled yet."""
    return _table(xp) if hasattr(xp, "RawModule") else None


@cache
def _table(xp: ModuleType) -> DeviceKernels:
    return DeviceKernels(xp)


def works_on(dtype: Dtype) -> bool:
    """Return whether there are kernels for activations of this dtype."""
    return dtype.name in NAMES
