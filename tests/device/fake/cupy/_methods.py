"""The array's methods that NumPy computes: those of CuPy's array, with its parameters."""

import numpy as np

from cupy import _streams
from cupy._array import ndarray, unwrap, view, wrap
from cupy._functions import COUNTS
from cupy._names import CLASSES, parameters
from cupy.cuda import memory


def _method(name, entry):
    """Return a method that NumPy computes."""
    known = parameters(entry)
    function = getattr(np.ndarray, name)
    in_c = name not in (
        "astype",
        "transpose",
        "swapaxes",
        "reshape",
        "view",
        "squeeze",
        "diagonal",
        "copy",
    )

    @_streams.queued
    def call(self, *args, **kwargs):
        known.check(name, args, kwargs)
        if name in COUNTS:
            _streams.reads_host()
        out = dict(zip(known.positional, args, strict=False)).get("out", kwargs.get("out"))
        if out is not None and type(out) is not ndarray:
            raise TypeError("Output arguments type must be cupy.ndarray")
        if args:
            args = tuple(map(unwrap, args))
        if kwargs:
            kwargs = {key: unwrap(value) for key, value in kwargs.items()}
        result = function(self._host, *args, **kwargs)
        if out is not None:
            return out
        if type(result) is np.ndarray:
            if result is self._host:
                return self
            if memory.owner_of(result) is memory.owner_of(self._host):
                return view(result, self)
            if in_c and result.ndim > 1:
                result = np.ascontiguousarray(result)
        return wrap(result)

    call.__name__ = name
    return call


def _add_methods():
    for name, entry in CLASSES["cupy.ndarray"].items():
        if (
            entry.startswith("function")
            and not hasattr(ndarray, name)
            and hasattr(np.ndarray, name)
        ):
            setattr(ndarray, name, _method(name, entry))


_add_methods()
