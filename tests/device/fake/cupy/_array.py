"""The array on the device: a NumPy array that nobody sees but this library."""

from __future__ import annotations

import math
import sys
from operator import attrgetter

import numpy as np

from cupy import _streams
from cupy.cuda import memory, pinned_memory

# Set by `pytest --backend fake`: what to do with a caller that is a test.
VIEWERS = []


class Flags:
    """How an array lies."""

    __slots__ = ("c_contiguous", "f_contiguous")

    def __init__(self, array):
        flags = array._host.flags
        self.c_contiguous, self.f_contiguous = flags.c_contiguous, flags.f_contiguous


class ndarray:
    """An array on the device."""

    __slots__ = ("__weakref__", "_base", "_host", "_mem")
    __module__ = "cupy"
    __hash__ = None  # type: ignore[assignment]
    __array_priority__ = 100

    def __init__(self, shape, dtype=float, memptr=None, strides=None, order="C"):
        shape = (shape,) if isinstance(shape, int | np.integer) else tuple(shape)
        dtype = np.dtype(dtype)
        pointer = memory.alloc(math.prod(shape) * dtype.itemsize) if memptr is None else memptr
        self._host = memory.array_at(pointer, shape, dtype, strides, order)
        self._mem = pointer.mem
        self._base = None

    # -------------------------------------------------------------- how it lies
    @property
    def shape(self):
        return self._host.shape

    @shape.setter
    def shape(self, shape):
        self._host = self._host.view()
        self._host.shape = shape

    strides, dtype, ndim, size, itemsize, nbytes = (
        property(attrgetter(f"_host.{name}"))
        for name in ("strides", "dtype", "ndim", "size", "itemsize", "nbytes")
    )

    @property
    def flags(self):
        return Flags(self)

    @property
    def base(self):
        return self._base

    @property
    def data(self):
        if not self._mem.size:
            return memory.MemoryPointer(self._mem, 0)
        return memory.MemoryPointer(
            self._mem, self._host.__array_interface__["data"][0] - self._mem.ptr
        )

    @property
    def __cuda_array_interface__(self):
        contiguous = self._host.flags.c_contiguous
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "descr": self.dtype.descr,
            "strides": None if contiguous else self.strides,
            "data": (self.data.ptr, False),
            "version": 3,
            "stream": 1,
        }

    @property
    def T(self):
        return view(self._host.T, self)

    @property
    def _c_contiguous(self):
        return self._host.flags.c_contiguous

    # -------------------------------------------------------------- to the host and back
    def __array__(self, dtype=None, copy=None):
        if VIEWERS and VIEWERS[0](sys._getframe(1)):
            return self._seen() if dtype is None else self._seen().astype(dtype)
        raise TypeError(
            "Implicit conversion to a NumPy array is not allowed. Please use `.get()` to construct"
            " a NumPy array explicitly."
        )

    def _seen(self):
        """Return what a test sees: all that is under way has arrived."""
        _streams.finish_all()
        return self._host.copy()

    def get(self, stream=None, order="C", out=None, blocking=True):
        """Return a copy in the host's memory."""
        if out is None:
            out = np.empty(
                self.shape, self.dtype, "C" if order == "A" and self._c_contiguous else order
            )  # type: ignore[call-overload]
        elif not isinstance(out, np.ndarray):
            raise TypeError("Only numpy.ndarray can be obtained from cupy.ndarray")
        elif self.dtype != out.dtype:
            raise TypeError(f"{out.dtype} array cannot be obtained from {self.dtype} array")
        elif self.shape != out.shape:
            raise ValueError(
                f"Shape mismatch. Expected shape: {self.shape}, actual shape: {out.shape}"
            )
        elif not (out.flags.c_contiguous or out.flags.f_contiguous):
            raise RuntimeError("`out` cannot be specified when copying to non-contiguous ndarray")
        where, source = _streams.current() if stream is None else stream, self._host
        _streams.copy_to_host(
            source.copy, lambda value: np.copyto(out, value), where, pinned_memory.is_pinned(out)
        )
        if blocking:
            where.synchronize()
        return out

    def set(self, arr, stream=None):
        """Copy from the host's memory."""
        if not isinstance(arr, np.ndarray):
            raise TypeError("Only numpy.ndarray can be set to cupy.ndarray")
        if self.dtype != arr.dtype:
            raise TypeError(f"{arr.dtype} array cannot be set to {self.dtype} array")
        if self.shape != arr.shape:
            raise ValueError(f"Shape mismatch. Old shape: {self.shape}, new shape: {arr.shape}")
        if not (self._c_contiguous or self._host.flags.f_contiguous):
            raise RuntimeError("Cannot set to non-contiguous array")
        target = self._host
        pinned = pinned_memory.is_pinned(arr)
        _streams.copy_to_device(arr.copy, lambda value: np.copyto(target, value), stream, pinned)

    def item(self):
        """Return the one element."""
        _streams.reads_host()
        if self.size != 1:
            raise ValueError("can only convert an array of size 1 to a Python scalar")
        return self._host.item()

    def tolist(self):
        """Return nested lists."""
        _streams.reads_host()
        return self._host.tolist()

    def __bool__(self):
        _streams.reads_host()
        return bool(self._host)

    def __float__(self):
        _streams.reads_host()
        return float(self._host)

    def __int__(self):
        _streams.reads_host()
        return int(self._host)

    def __repr__(self):
        return repr(self._host)

    def __str__(self):
        return str(self._host)

    def __format__(self, form):
        return format(self._host.item() if self.ndim == 0 else str(self), form)

    # -------------------------------------------------------------- elements
    def __len__(self):
        return len(self._host)

    def __iter__(self):
        if not self.ndim:
            raise TypeError("iteration over a 0-d array")
        return (self[place] for place in range(len(self)))

    @_streams.queued
    def __getitem__(self, key):
        result = wrap(self._host[self._key(key)])
        if result._mem is self._mem:
            result._base = self if self._base is None else self._base
        return result

    def __setitem__(self, key, value):
        if type(value) is not ndarray and not np.isscalar(value):
            if not (VIEWERS and VIEWERS[0](sys._getframe(1))):
                raise TypeError(f"Unsupported type {type(value)}")
            value = wrap(np.array(value))
        self._set(key, value)

    @_streams.queued
    def _set(self, key, value):
        key, value = self._key(key, writes=True), unwrap(value)
        if isinstance(value, np.ndarray) and value.ndim > np.ndim(self._host[key]):
            raise ValueError(
                f"shapes {value.shape} and {np.shape(self._host[key])} cannot be assigned"
            )
        self._host[key] = value

    def _key(self, key, writes=False):
        """Return the key for NumPy, refusing what is undefined on a device."""
        if type(key) is not tuple:
            return self._part(key, writes) if type(key) not in (int, slice) else key
        indices = sum(type(part) is ndarray for part in key)
        return tuple(self._part(part, writes and indices == 1) for part in key)

    def _part(self, part, writes):
        if isinstance(part, np.ndarray | list):  # CuPy uploads it
            _streams.writes_device()
            host = np.asarray(part)
        elif type(part) is ndarray:
            host = part._host
        else:
            return part
        if host.dtype.kind == "b":
            _streams.reads_host()  # the number of elements
        if host.dtype.kind != "b" and writes and is_doubled(host):
            raise IndexError(
                "an element is written twice in one assignment, which is undefined on a device"
            )
        return host

    def __contains__(self, value):
        return value in self._host

    # -------------------------------------------------------------- NumPy's functions on it
    def __array_ufunc__(self, function, method, *inputs, **kwargs):
        import cupy

        if VIEWERS and VIEWERS[0](sys._getframe(1)):
            return _by_numpy(getattr(function, method), inputs, kwargs)
        if method != "__call__" or function.signature is not None:
            return NotImplemented
        if any(item is not None for item in kwargs.get("out", ()) if not isinstance(item, ndarray)):
            raise TypeError("Output arguments type must be cupy.ndarray")
        return getattr(cupy, function.__name__)(*inputs, **kwargs)

    def __array_function__(self, function, types, args, kwargs):
        import cupy

        if VIEWERS and VIEWERS[0](sys._getframe(1)):
            look = unwrap if function in (np.shares_memory, np.may_share_memory) else seen
            return function(*map(look, args), **{key: look(value) for key, value in kwargs.items()})
        module = cupy
        for part in function.__module__.split(".")[1:]:
            module = getattr(module, part)
        return getattr(module, function.__name__)(*args, **kwargs)


def is_doubled(places):
    """Return whether an element is named twice."""
    several = np.size(places) > 1 and not _streams.is_tracing()
    return bool(several and len(np.unique(places)) != np.size(places))


def seen(value):
    """Return a value with NumPy arrays for device arrays, for tests."""
    if type(value) is ndarray:
        return value._seen()
    if isinstance(value, list | tuple):
        return type(value)(map(seen, value))
    return value


def _by_numpy(function, inputs, kwargs):
    """Return NumPy's result for a test; what is to be written to a device array goes there."""
    places = kwargs.pop("out", (None,))
    result = function(*map(seen, inputs), **kwargs)
    if type(places[0]) is not ndarray:
        return result if places[0] is None else np.copyto(places[0], result) or places[0]
    np.copyto(places[0]._host, result)
    return places[0]


def view(host, base):
    """Return an array that looks at another one's memory."""
    array = ndarray.__new__(ndarray)
    array._host = host
    array._mem = base._mem
    array._base = base if base._base is None else base._base
    return array


def wrap(result):
    """Return a result of NumPy as one of the device's."""
    kind = type(result)
    if kind is not np.ndarray:
        if isinstance(result, np.generic):
            result = np.asarray(result)
        elif kind in (tuple, list):
            return kind(map(wrap, result))
        else:
            return result
    return made(*memory.placed(result))


def made(host, mem):
    """Return an array of values that lie in some memory."""
    array = ndarray.__new__(ndarray)
    array._host, array._mem, array._base = host, mem, None
    return array


def unwrap(value):
    """Return what NumPy computes with; a NumPy array here would be host and device mixed."""
    kind = type(value)
    if kind is ndarray:
        return value._host
    if kind is np.ndarray:
        raise TypeError(f"Unsupported type {kind} (of shape {value.shape})")
    if kind is tuple or kind is list:
        return kind(map(unwrap, value))
    return value
