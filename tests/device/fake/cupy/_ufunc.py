"""Elementwise functions and operators."""

import sys

import numpy as np

from cupy import _streams
from cupy._array import VIEWERS, ndarray, seen, wrap
from cupy._names import CLASSES

# Types for which CUDA has an atomic addition, or a comparison.
SCATTERED = {
    "add": ("int32", "uint32", "uint64", "float16", "float32", "float64"),
    "subtract": ("int32", "uint32", "uint64", "float16", "float32", "float64"),
    "maximum": ("int32", "uint32", "uint64", "float32", "float64"),
    "minimum": ("int32", "uint32", "uint64", "float32", "float64"),
    "bitwise_and": ("int32", "uint32", "uint64"),
    "bitwise_or": ("int32", "uint32", "uint64"),
    "bitwise_xor": ("int32", "uint32", "uint64"),
}
NUMBERS = (int, float, bool, complex)


class ufunc:
    """An elementwise function on device arrays and numbers."""

    __module__ = "cupy"

    def __init__(self, name, function):
        self.__name__ = name
        self.name = f"cupy_{name}"
        self._function = function
        self.nin, self.nout, self.nargs = function.nin, function.nout, function.nargs

    @_streams.queued
    def __call__(self, *args, out=None, casting="same_kind", dtype=None):
        nin = self.nin
        if len(args) > nin:
            if out is not None:
                raise ValueError("Cannot specify 'out' as both a positional and keyword argument")
            args, out = args[:nin], args[nin] if self.nout == 1 else args[nin:]
        hosts = [arg._host if type(arg) is ndarray else self._number(arg) for arg in args]
        if out is None:
            return wrap(self._function(*hosts, order="C", dtype=dtype, casting=casting))
        if type(out) is tuple:
            (out,) = out
        if type(out) is not ndarray:
            raise TypeError("Output arguments type must be cupy.ndarray")
        target = out._host
        if not any(np.shape(host) == target.shape for host in hosts):
            shape = np.broadcast_shapes(*map(np.shape, hosts))
            if shape != target.shape:
                raise ValueError(
                    f"Out shape is mismatched: the result's is {shape}, that of `out`"
                    f" {target.shape}"
                )
        self._function(*hosts, out=target, dtype=dtype, casting=casting)
        return out

    def _number(self, value):
        if isinstance(value, (*NUMBERS, np.generic)):
            return value
        if hasattr(value, "__cuda_array_interface__"):
            # another library's, or the same memory under another name
            raise TypeError(f"the double takes no {type(value)} yet")
        raise TypeError(f"Unsupported type {type(value)}")

    def reduce(self, array, axis=0, dtype=None, out=None, keepdims=False):
        """Reduce an axis; CuPy has it for sums and products."""
        if self.__name__ not in ("add", "multiply"):
            raise NotImplementedError(f"`{self.name}.reduce` is not supported")
        method = array.sum if self.__name__ == "add" else array.prod
        # by name: a method knows its target by that, also in a capture
        return method(axis=axis, dtype=dtype, out=out, keepdims=keepdims)

    @_streams.queued
    def at(self, a, indices, b=None):
        """Add to elements, each as often as it is named."""
        kinds = SCATTERED.get(self.__name__)
        if kinds is None:
            raise NotImplementedError(f"`{self.name}.at` is not supported")
        if a.dtype.name not in kinds:
            raise TypeError(
                f"cupy.{self.__name__}.at only supports {', '.join(kinds)} as data type, not"
                f" {a.dtype}"
            )
        if isinstance(b, np.ndarray):
            raise TypeError(f"Unsupported type {type(b)}")
        self._function.at(a._host, a._key(indices), b._host if type(b) is ndarray else b)


def _operator(name, reflected):
    import operator

    plain = getattr(operator, {"and": "and_", "or": "or_"}.get(name, name))

    def call(self, other):
        if VIEWERS and isinstance(other, np.ndarray) and VIEWERS[0](sys._getframe(1)):
            mine = seen(self)
            return plain(other, mine) if reflected else plain(mine, other)
        if other is None or isinstance(other, str | list | tuple | dict):
            if name in ("eq", "ne"):
                return NotImplemented
            raise TypeError(f"Unsupported type {type(other)}")
        if not isinstance(other, ndarray | np.ndarray | np.generic | int | float | complex):
            return NotImplemented
        function = _OPERATIONS[name]
        return function(other, self) if reflected else function(self, other)

    return call


def _in_place(name):
    def call(self, other):
        if VIEWERS and isinstance(other, np.ndarray) and VIEWERS[0](sys._getframe(1)):
            other = wrap(other.copy())
        return _OPERATIONS[name](self, other, out=self)

    return call


class _Find(dict):  # type: ignore[type-arg]
    """Functions behind operators, found when they are first used."""

    def __missing__(self, name):
        import cupy

        result = self[name] = getattr(cupy, NAMES[name])
        return result


_OPERATIONS = _Find()
COMPARISONS = {
    "lt": "less",
    "le": "less_equal",
    "gt": "greater",
    "ge": "greater_equal",
    "eq": "equal",
    "ne": "not_equal",
}
BINARY = {
    "add": "add",
    "sub": "subtract",
    "mul": "multiply",
    "truediv": "true_divide",
    "floordiv": "floor_divide",
    "mod": "remainder",
    "pow": "power",
    "and": "bitwise_and",
    "or": "bitwise_or",
    "xor": "bitwise_xor",
    "lshift": "left_shift",
    "rshift": "right_shift",
    "matmul": "matmul",
}
UNARY = {"neg": "negative", "invert": "invert", "abs": "absolute", "pos": "positive"}
NAMES = COMPARISONS | BINARY | UNARY


def _add_operators():
    for name in COMPARISONS:
        setattr(ndarray, f"__{name}__", _operator(name, reflected=False))
    for name in BINARY:
        setattr(ndarray, f"__{name}__", _operator(name, reflected=False))
        setattr(ndarray, f"__r{name}__", _operator(name, reflected=True))
        if name != "matmul":
            setattr(ndarray, f"__i{name}__", _in_place(name))
    for name in UNARY:
        setattr(ndarray, f"__{name}__", lambda self, name=name: _OPERATIONS[name](self))


assert "cupy.ufunc" in CLASSES
_add_operators()
