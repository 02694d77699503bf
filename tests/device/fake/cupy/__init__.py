"""A double of CuPy: an array library on a device, computed by NumPy, for tests where there is no
device.

It has CuPy's names and parameters and no others (`snapshot.json`, which tests/device/survey.py
writes), and is as strict as CuPy where NumPy is lenient, so that code which runs on it and on NumPy
has a fair chance on a real device:

    an array does not become a NumPy array by itself, and mixes with none
    memory is counted, has a limit, and holds rubbish (NaN) until it is written
    copies on a stream arrive when somebody waits for them, and not before; so do launched graphs
    nothing is computed in a stream that captures, and what needs a value is refused
    what is undefined on a device (an index out of bounds, one index written twice) is an error
    reductions give arrays without axes; elementwise results are C-contiguous whatever the inputs

What it does not show is what the interpreted device beside it is for: nnmpi's kernels, of which it
has none, rounding of the device's functions, hidden waits, and who waits for whom.
"""

import importlib

import numpy as np

from cupy import (
    _functions,
    _methods,  # noqa: F401
)
from cupy._array import ndarray
from cupy._names import MODULES, VERSION
from cupy._ufunc import ufunc

__all__ = ["ndarray", "ufunc"]

__version__ = VERSION
newaxis = None


def asnumpy(a, stream=None, order="C", out=None, *, blocking=True):
    """Return a copy in the host's memory."""
    if isinstance(a, ndarray):
        return a.get(stream=stream, order=order, out=out, blocking=blocking)
    return np.asarray(a, order=order)  # type: ignore[call-overload]


def get_default_memory_pool():
    """Return the pool that arrays come from."""
    return cuda.memory.POOL


def get_default_pinned_memory_pool():
    """Return the pool that page-locked memory comes from."""
    return cuda.pinned_memory.POOL


def __getattr__(name):
    kind = MODULES["cupy"].get(name, "")
    is_module = kind == "module"
    value = (
        importlib.import_module(f"cupy.{name}") if is_module else _functions.find("cupy", name, np)
    )
    globals()[name] = value
    return value


from cupy import cuda  # noqa: E402
