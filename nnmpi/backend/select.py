"""Choosing the backend by name: `numpy`, `cupy`, or `auto`."""

from dataclasses import replace

from nnmpi.backend.device import cupy_backend
from nnmpi.backend.record import Backend, numpy_backend
from nnmpi.errors import DeviceError, UsageError

NAMES = ("auto", "numpy", "cupy")


def select(name: str = "auto", local_rank: int = 0) -> Backend:
    """Return the backend of that name; `auto` is CuPy where a device can be used and NumPy elsewhere, and says why.

    Ranks that share a device should then tell each other so, and call `share`: see `Backend.card`.

    Args:
        local_rank: the number of this rank on its node; ranks take the node's devices in turn.

    Raises:
        UsageError: for an unknown name.
        DeviceError: when "cupy" is asked for and cannot work here; the message says what is missing.
    """
    if name not in NAMES:
        raise UsageError(f"backend {name!r} is unknown; choose one of {', '.join(NAMES)}")
    if name == "numpy":
        return numpy_backend()
    if name == "cupy":
        return cupy_backend(local_rank)
    try:
        backend = cupy_backend(local_rank)
    except DeviceError as error:
        why = str(error).removeprefix("backend cupy cannot be used: ").partition(";")[0]  # advice is for who asked
        return replace(numpy_backend(), reason=f"auto chose numpy: {why}")
    return replace(backend, reason=f"auto chose cupy: {backend.device} can be used")
