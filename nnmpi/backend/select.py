"""Choosing the backend by name: `numpy`, `cupy`, or `auto`."""

from nnmpi.backend.device import cupy_backend, device_problem
from nnmpi.backend.record import Backend, numpy_backend
from nnmpi.errors import UsageError

NAMES = ("auto", "numpy", "cupy")


def select(name: str = "auto", local_rank: int = 0) -> Backend:
    """Return the backend of that name; `auto` is CuPy where a device can be used and NumPy elsewhere.

    Args:
        local_rank: the number of this rank on its node; ranks take the node's devices in turn.

    Raises:
        UsageError: for an unknown name.
        DeviceError: when "cupy" is asked for and cannot work here; the message says what is missing.
    """
    if name not in NAMES:
        raise UsageError(f"backend {name!r} is unknown; choose one of {', '.join(NAMES)}")
    if name == "cupy" or (name == "auto" and device_problem() is None):
        return cupy_backend(local_rank)
    return numpy_backend()
