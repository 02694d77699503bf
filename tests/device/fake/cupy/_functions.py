"""Functions on arrays: CuPy's names and parameters, NumPy's results."""

import inspect

import numpy as np

from cupy import _streams
from cupy._array import is_doubled, made, ndarray, unwrap, view, wrap
from cupy._names import MODULES, parameters
from cupy._ufunc import ufunc
from cupy.cuda import memory

# Those that copy what they are given on the host to the device.
UPLOADS = {"array", "asarray", "asanyarray", "asfortranarray"}
LIKE = {"empty_like", "zeros_like", "ones_like", "full_like"}
EXTENTS = {"shape", "ndim", "size"}
# Those whose result lies as the input does, or is a view of it.
KEEP_ORDER = {"copy", "einsum", "array", "asarray", "asfortranarray"} | LIKE
# Those that take a list of arrays.
LISTS = {
    *("concatenate", "stack", "hstack", "vstack", "dstack", "column_stack", "broadcast_arrays"),
    *("meshgrid", "einsum", "select", "choose", "piecewise", "ix_"),
}
# Those that make arrays of numbers, shapes or lists of the host.
MAKERS = {
    *("empty", "zeros", "ones", "full", "arange", "linspace", "logspace", "eye", "identity"),
    *("tri", "indices", "unravel_index"),
    *UPLOADS,
    *EXTENTS,
}
FROM_HOST = {"iscomplexobj"} | UPLOADS | LIKE | EXTENTS
EMPTY = {"empty", "empty_like"}
# Those whose result has as many elements as the values say: CuPy waits for the number.
COUNTS = {"nonzero", "flatnonzero", "argwhere", "unique", "compress", "extract", "bincount"}
# Functions that are NumPy's own and have nothing to do with a device.
HOST = {
    "result_type",
    "can_cast",
    "promote_types",
    "broadcast_shapes",
    "isscalar",
    "min_scalar_type",
}


def find(module, name, numpy):
    """Return what CuPy's module has under a name.

    Raises:
        AttributeError: where CuPy has nothing.
    """
    kind = MODULES[module].get(name)
    if kind is None or not hasattr(numpy, name):
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    value = getattr(numpy, name)
    if kind.startswith("ufunc") and isinstance(value, np.ufunc):
        return ufunc(name, value)
    if kind in ("type", "value") or name in HOST:
        return value
    if name in SPECIAL:
        return SPECIAL[name]
    return _function(name, value, parameters(kind))


def _renamed(value, known):
    """Return NumPy's names for CuPy's positional parameters, as far as both agree about their
    order.
    """
    try:
        theirs = [parameter.name for parameter in inspect.signature(value).parameters.values()]
    except (TypeError, ValueError):
        return known.positional
    agree = 0
    for mine, other in zip(known.positional, theirs, strict=False):
        if mine != other and (mine in theirs or other in known.positional):
            break
        agree += 1
    return known.positional[:agree]


def _function(name, value, known):
    agreed = len(_renamed(value, known)) if not known.open_ended else 1000
    lists, from_host, poisons = name in LISTS, name in FROM_HOST, name in EMPTY
    makes, keeps = name in MAKERS, name in KEEP_ORDER

    def call(*args, **kwargs):
        known.check(name, args, kwargs)
        out = kwargs.get("out")
        if out is not None and type(out) is not ndarray:
            raise TypeError("Output arguments type must be cupy.ndarray")
        if len(args) > agreed:
            kwargs = {**kwargs, **dict(zip(known.positional[agreed:], args[agreed:], strict=False))}
            args = args[:agreed]
            out = kwargs.get("out")
        first = args[0] if args else None
        if name in COUNTS:
            _streams.reads_host()
        if name in UPLOADS and _is_uploaded(first):
            _streams.writes_device()
        if not (lists or makes) and isinstance(first, list | tuple):
            raise TypeError(f"Unsupported type {type(first)}")
        if not makes and isinstance(first, int | float) and not isinstance(first, np.generic):
            raise AttributeError(f"{type(first).__name__!r} object: cupy.{name} takes arrays alone")
        convert = _from_host if from_host else unwrap
        result = value(*map(convert, args), **{key: convert(item) for key, item in kwargs.items()})
        if out is not None:
            return out
        if type(result) is np.ndarray:
            if poisons:
                return made(*memory.blank(result))
            if type(first) is ndarray:
                if result is first._host:
                    return first
                if memory.OWNERS.get(id(memory.owner_of(result))) is first._mem:
                    return view(result, first)
            if result.ndim > 1 and not keeps and not result.flags.c_contiguous:
                result = np.ascontiguousarray(result)
            if from_host and isinstance(first, np.ndarray) and np.may_share_memory(result, first):
                result = result.copy()
        return wrap(result)

    call.__name__ = name
    return call if poisons else _streams.queued(call)


def _is_uploaded(value):
    """Return whether CuPy copies a value from the host; a number goes with a kernel."""
    if type(value) in (list, tuple):
        return not any(type(item) is ndarray for item in value)
    return type(value) is not ndarray and np.ndim(value) > 0


def _from_host(value):
    if isinstance(value, np.ndarray):
        return value
    if type(value) in (list, tuple):
        return type(value)(map(_from_host, value))
    return unwrap(value)


def _matmul(name, function):
    known = parameters(MODULES["cupy"][name])

    @_streams.queued
    def call(*args, **kwargs):
        known.check(name, args, kwargs)
        if name == "dot" and len(args) == 3:
            kwargs["out"], args = args[2], args[:2]
        left, right = args[:2]
        for item in (left, right):
            if type(item) is not ndarray:
                raise TypeError(f"Unsupported type {type(item)}")
        if max(left.ndim, right.ndim) > 2 and "bfloat16" in (left.dtype.name, right.dtype.name):
            raise TypeError("CuPy's batched matmul takes no bfloat16")
        out = kwargs.pop("out", None)
        if type(out) is tuple:
            (out,) = out
        if out is not None and type(out) is not ndarray:
            raise TypeError("Output arguments type must be cupy.ndarray")
        result = product(function, left._host, right._host)
        if out is None:
            return wrap(np.ascontiguousarray(result) if np.ndim(result) > 1 else result)
        if name == "dot" and not (
            out.dtype == result.dtype and out._c_contiguous and out.shape == result.shape
        ):
            raise ValueError(
                "output array is not acceptable (must have the right type, dimensions and C-order)"
            )
        if out.dtype != result.dtype:
            raise TypeError(f"out of {out.dtype} for a product of {result.dtype}")
        if out.shape != result.shape:
            raise ValueError(f"out of shape {out.shape} for a product of shape {result.shape}")
        np.copyto(out._host, result)
        return out

    return call


def product(function, left, right):
    """Return a product of matrices, of float16 and bfloat16 added up in float32."""
    low = {"float16", "bfloat16"}
    if left.dtype.name in low and right.dtype.name in low:
        kind = np.result_type(left.dtype, right.dtype)
        return np.asarray(function(left.astype(np.float32), right.astype(np.float32))).astype(kind)
    return function(left, right)


@_streams.queued
def _copyto(dst, src, casting="same_kind", where=None):
    if type(dst) is not ndarray:
        raise TypeError(f"Unsupported type {type(dst)}")
    if where is not None and type(where) is not ndarray:
        raise TypeError(f"Unsupported type {type(where)}")
    np.copyto(dst._host, unwrap(src), casting=casting, where=True if where is None else where._host)  # type: ignore[arg-type]


@_streams.queued
def _where(condition, x=None, y=None):
    if (x is None) != (y is None):
        raise ValueError("Must provide both 'x' and 'y' or neither.")
    truth = condition.astype("?", copy=False)  # as there: Python's own numbers have no such method
    if x is None:
        _streams.reads_host()
        return tuple(map(wrap, np.nonzero(unwrap(truth))))
    result = np.where(unwrap(truth), unwrap(x), unwrap(y))
    # it has no loop for that
    return wrap(result.astype(np.float32) if result.dtype.name == "bfloat16" else result)


@_streams.queued
def _take(a, indices, axis=None, out=None):
    if type(a) is not ndarray:
        raise TypeError(f"Unsupported type {type(a)}")
    result = np.take(a._host, unwrap(indices), axis)  # raises where CuPy would wrap
    if out is None:
        return wrap(result)
    if type(out) is not ndarray:
        raise TypeError("Output arguments type must be cupy.ndarray")
    if out.dtype != a.dtype or out.shape != np.shape(result):
        raise ValueError(
            f"out of shape {out.shape} and {out.dtype} for {np.shape(result)} and {a.dtype}"
        )
    np.copyto(out._host, result)
    return out


@_streams.queued
def _put(a, ind, v, mode="wrap"):
    places = unwrap(ind)
    if is_doubled(places):
        raise IndexError("an element is written twice by one put, which is undefined on a device")
    np.put(a._host, places, unwrap(v), "raise")


@_streams.queued
def _ascontiguousarray(a, dtype=None):
    if _is_uploaded(a):
        _streams.writes_device()
    if type(a) is ndarray and a._c_contiguous and a.ndim and dtype in (None, a.dtype):
        return a
    return wrap(np.ascontiguousarray(_from_host(a), dtype).copy())


def _may_share_memory(a, b, max_work=None):
    if type(a) is not ndarray or type(b) is not ndarray:
        raise TypeError(f"expected cupy._core.core._ndarray_base, got {type(a)} and {type(b)}")
    return np.may_share_memory(a._host, b._host)


SPECIAL = {
    "may_share_memory": _may_share_memory,
    "ascontiguousarray": _ascontiguousarray,
    "matmul": _matmul("matmul", np.matmul),
    "dot": _matmul("dot", np.dot),
    "copyto": _copyto,
    "take": _take,
    "where": _where,
    "put": _put,
}
