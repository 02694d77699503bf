"""A stand-in for a device and its array library, so that device code runs where there is no device.

NumPy computes; but as with CuPy, a device array mixes with no NumPy array of one or more dimensions, does not become
one by itself, and reductions give arrays without axes instead of numbers. What CuPy 14 lacks of NumPy is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from nnmpi.backend.record import Backend

# Names that NumPy has and CuPy 14 has not, of those that array code is tempted to use.
MISSING = {"block", "insert", "unstack", "vecdot", "matvec", "vecmat", "nditer", "ndenumerate", "errstate", "spacing"}
# Keywords that CuPy's reductions have not.
REFUSED = {"sum": {"where", "initial"}, "max": {"where", "initial"}, "min": {"where", "initial"}, "var": {"correction"}}
COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift")


class DeviceArray:
    """An array that lives on the stand-in device."""

    __array_ufunc__ = None
    __cuda_array_interface__: dict[str, Any] = {}  # noqa: RUF012
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, host: Any) -> None:
        self.host = np.asarray(host)

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("implicit conversion to a NumPy array is not allowed; use get()")

    def __array_namespace__(self, api_version: str | None = None) -> Any:
        return LIBRARY

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.host, name)
        if not callable(value) or name in ("item",):
            return (
                value
                if isinstance(value, tuple | int | str | np.dtype) or not isinstance(value, np.ndarray)
                else wrap(value)
            )
        return _wrapped(value, name)

    def get(self) -> Any:
        """Copy to the host."""
        return self.host.copy()

    def __getitem__(self, key: Any) -> Any:
        return wrap(self.host[unwrap(key)])

    def __setitem__(self, key: Any, value: Any) -> None:
        self.host[unwrap(key)] = unwrap(value)

    def __len__(self) -> int:
        return len(self.host)

    def __bool__(self) -> bool:
        return bool(self.host)

    def __float__(self) -> float:
        return float(self.host)

    def __int__(self) -> int:
        return int(self.host)

    def __neg__(self) -> Any:
        return wrap(-self.host)

    def __invert__(self) -> Any:
        return wrap(~self.host)

    def __abs__(self) -> Any:
        return wrap(abs(self.host))


def _operator(name: str, in_place: bool) -> Callable[[DeviceArray, Any], Any]:
    def call(self: DeviceArray, other: Any) -> Any:
        result = getattr(self.host, name)(unwrap(other))
        if in_place:
            return self
        return NotImplemented if result is NotImplemented else wrap(result)

    return call


for _name in (*COMPARISONS, *BINARY):
    setattr(DeviceArray, f"__{_name}__", _operator(f"__{_name}__", in_place=False))
    if _name in BINARY:
        setattr(DeviceArray, f"__r{_name}__", _operator(f"__r{_name}__", in_place=False))
        setattr(DeviceArray, f"__i{_name}__", _operator(f"__i{_name}__", in_place=True))


def unwrap(value: Any) -> Any:
    """Return what NumPy computes with; a NumPy array here would be host and device mixed."""
    if isinstance(value, np.ndarray) and value.ndim:
        raise TypeError(f"a NumPy array of shape {value.shape} is mixed with device arrays")
    if isinstance(value, DeviceArray):
        return value.host
    if isinstance(value, tuple | list):
        return type(value)(unwrap(item) for item in value)
    return value


def wrap(value: Any) -> Any:
    """Return NumPy's result as the device would give it."""
    return DeviceArray(value) if isinstance(value, np.ndarray | np.generic) else value


def _wrapped(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        refused = REFUSED.get(name, set()) & kwargs.keys()
        if refused:
            raise TypeError(f"{name} has no {', '.join(refused)} on the device")
        result = function(*map(unwrap, args), **{key: unwrap(value) for key, value in kwargs.items()})
        return kwargs["out"] if kwargs.get("out") is not None else wrap(result)

    return call


class _Library(ModuleType):
    """The device's numpy."""

    def __getattr__(self, name: str) -> Any:
        if name in MISSING:
            raise AttributeError(f"the device's library has no {name}")
        value = getattr(np, name)
        if name == "add":
            return _Add()
        if isinstance(value, type) or not callable(value):
            return _Library(name) if name == "lib" else value
        return _wrapped(value, name)

    def asarray(self, values: Any, dtype: Any = None) -> DeviceArray:
        """Bring values to the device."""
        host = values.host if isinstance(values, DeviceArray) else np.array(values)
        return DeviceArray(host if dtype is None else host.astype(dtype))

    array = asarray

    @property
    def stride_tricks(self) -> Any:
        """The module of `lib` that both libraries have."""
        tricks = ModuleType("stride_tricks")
        tricks.as_strided = _wrapped(np.lib.stride_tricks.as_strided, "as_strided")  # type: ignore[attr-defined]
        return tricks


class _Add:
    """The addition, and its unbuffered form."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _wrapped(np.add, "add")(*args, **kwargs)

    @staticmethod
    def at(array: DeviceArray, key: Any, values: Any) -> None:
        np.add.at(array.host, unwrap(key), unwrap(values))


LIBRARY = _Library("device")


def device_backend() -> Backend:
    """Return a backend on the stand-in device."""
    return Backend(
        "cupy",
        LIBRARY,
        "stand-in device",
        to_host=lambda array: array.host.copy() if isinstance(array, DeviceArray) else array,
        synchronize=lambda: None,
    )
