"""The CuPy backend. The only file that imports cupy, and only when it is asked for."""

import importlib
from types import ModuleType

import numpy as np

from nnmpi.backend.array import Array
from nnmpi.backend.record import Backend
from nnmpi.errors import DeviceError


def device_problem() -> str | None:
    """Return why no device can be used here, as half a sentence, or None when one can."""
    try:
        cupy = importlib.import_module("cupy")
    except ImportError as error:
        return f"cupy cannot be imported ({error}); install nnmpi[cuda12] or nnmpi[cuda13]"
    if not cupy.cuda.is_available():
        return "cupy finds no CUDA device (no driver, or none visible); use --backend numpy"
    return None


def cupy_backend(local_rank: int) -> Backend:
    """Return the CuPy backend on the device of this rank: local_rank modulo the number of devices.

    Raises:
        DeviceError: when cupy is not installed or sees no device.
    """
    problem = device_problem()
    if problem is not None:
        raise DeviceError(f"backend cupy cannot be used: {problem}")
    cupy: ModuleType = importlib.import_module("cupy")
    number = local_rank % cupy.cuda.runtime.getDeviceCount()
    cupy.cuda.Device(number).use()
    model = cupy.cuda.runtime.getDeviceProperties(number)["name"].decode()

    def to_host(array: Array) -> Array:
        return array if isinstance(array, np.ndarray) else cupy.asnumpy(array)

    def synchronize() -> None:
        cupy.cuda.get_current_stream().synchronize()

    return Backend("cupy", cupy, f"{model}, device {number}", to_host, synchronize)
