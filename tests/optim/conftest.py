"""A stand-in for a device's array library: computed by NumPy, but it mixes with nothing and converts to nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

# What nnmpi.optim may use; CuPy has all of these with the same arguments.
UFUNCS = ("add", "subtract", "multiply", "divide", "sqrt")


class DeviceArray:
    """Holds an ndarray that only the library below may see; like CuPy's, it refuses to become one silently."""

    __array_ufunc__ = None
    __cuda_array_interface__: dict[str, Any] = {}
    waits = 0  # how often a value was fetched to the host, which waits for the device

    def __init__(self, host: np.ndarray) -> None:
        self.host = host

    def __getattr__(self, name: str) -> Any:
        if name not in ("shape", "dtype", "size", "ndim", "strides", "flags"):
            raise AttributeError(f"a device array has no {name}")
        return getattr(self.host, name)

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        raise TypeError("implicit conversion to a NumPy array is not allowed")

    def __array_namespace__(self, api_version: str | None = None) -> Any:
        return LIBRARY

    def __getitem__(self, index: Any) -> DeviceArray:
        return DeviceArray(self.host[index])

    def __setitem__(self, index: Any, value: DeviceArray) -> None:
        self.host[index] = unwrap(value)

    def __radd__(self, other: float) -> DeviceArray:
        return DeviceArray(np.asarray(self.host + unwrap(other)))

    __add__ = __radd__

    def __float__(self) -> float:
        DeviceArray.waits += 1
        return float(self.host)

    def reshape(self, *shape: Any) -> DeviceArray:
        return DeviceArray(self.host.reshape(*shape))

    def astype(self, dtype: Any, copy: bool = True) -> DeviceArray:
        return DeviceArray(self.host.astype(dtype, copy=copy))


def unwrap(value: Any) -> Any:
    """Return what NumPy may compute with; a raw array would be a mix of host and device."""
    if isinstance(value, np.ndarray):
        raise TypeError(f"a NumPy array of shape {value.shape} was given to the device's library")
    return value.host if isinstance(value, DeviceArray) else value


def _ufunc(name: str) -> Any:
    def call(*operands: Any, out: DeviceArray) -> DeviceArray:
        getattr(np, name)(*map(unwrap, operands), out=unwrap(out))
        return out

    return call


LIBRARY = SimpleNamespace(
    __name__="device",
    zeros=lambda shape, dtype: DeviceArray(np.zeros(shape, dtype)),
    dot=lambda a, b: DeviceArray(np.asarray(np.dot(unwrap(a), unwrap(b)))),
    **{name: _ufunc(name) for name in UFUNCS},
)


@pytest.fixture
def device() -> type[DeviceArray]:
    """The device's array class: `device(host_array)` moves an array there, `.host` looks at it, `.waits` counts."""
    DeviceArray.waits = 0
    return DeviceArray
