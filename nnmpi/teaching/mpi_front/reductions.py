"""mpi4py's reductions: SUM, MAXLOC and the program's own."""

import operator

import numpy as np

from nnmpi.teaching.mpi_front.datatypes import buffer
from nnmpi.teaching.mpi_front.handles import Exception, FrontHandle
from nnmpi.teaching.mpi_front.messages import read

# MPI's reductions: a function of two objects, and NumPy's of two arrays.
_OPS = {
    "SUM": (operator.add, np.add),
    "PROD": (operator.mul, np.multiply),
    "MAX": (lambda x, y: x if x >= y else y, np.maximum),
    "MIN": (lambda x, y: x if x <= y else y, np.minimum),
    "LAND": (lambda x, y: bool(x) & bool(y), np.logical_and),
    "LOR": (lambda x, y: bool(x) | bool(y), np.logical_or),
    "LXOR": (lambda x, y: bool(x) ^ bool(y), np.logical_xor),
    "BAND": (operator.and_, np.bitwise_and),
    "BOR": (operator.or_, np.bitwise_or),
    "BXOR": (operator.xor, np.bitwise_xor),
    "MAXLOC": (lambda x, y: _choose(x, y, operator.gt), lambda x, y: _choose_all(x, y, np.greater)),
    "MINLOC": (lambda x, y: _choose(x, y, operator.lt), lambda x, y: _choose_all(x, y, np.less)),
    "REPLACE": (lambda x, y: y, lambda x, y: y),
    "NO_OP": (lambda x, y: x, lambda x, y: x),
}
# The kinds of dtypes for which MPI does not define them.
_UNDEFINED = {
    **dict.fromkeys(("LAND", "LOR", "LXOR"), "fcV"),
    **dict.fromkeys(("BAND", "BOR", "BXOR"), "bfcV"),
    **dict.fromkeys(("MAXLOC", "MINLOC"), "biufc"),
    **dict.fromkeys(("MAX", "MIN"), "bcV"),
    **dict.fromkeys(("SUM", "PROD"), "bV"),
    **dict.fromkeys(("REPLACE", "NO_OP"), "biufcV"),
}


def _choose(x, y, better):
    """Return the better of two (value, place); of equal values, the lower place."""
    (u, i), (v, j) = x, y
    if better(u, v) or (u == v and i <= j):
        return type(x)(x)
    return type(y)(y)


def _choose_all(x, y, better):
    value, place = x.dtype.names
    first = better(x[value], y[value]) | ((x[value] == y[value]) & (x[place] <= y[place]))
    return np.where(first, x, y)


class Op(FrontHandle):
    """A reduction."""

    @classmethod
    def Create(cls, function, commute=False):
        """Return a reduction of the program's own: (in, in and out, datatype)."""
        if not callable(function):
            raise AttributeError(f"{function!r} is no function")
        return cls._of(("", function, None, commute))

    @classmethod
    def _of_arrays(cls, op):
        """Return a reduction of arrays: one of MPI's, or made by `Create`."""
        if callable(op) and not isinstance(op, cls):
            name = getattr(op, "__name__", "the function")
            raise TypeError(f"{name} reduces objects; make one for arrays by MPI.Op.Create({name})")
        if not isinstance(op, cls):
            raise TypeError(
                f"{op!r} is no reduction of MPI; give one of {', '.join(_OPS)}, or one of your own"
                " by MPI.Op.Create"
            )
        op._given()
        return op

    @classmethod
    def _find(cls, op):
        """Return a reduction: one of MPI's, or a function of two objects."""
        if isinstance(op, cls):
            op._given()
            return op
        if callable(op):
            return cls._of((getattr(op, "__name__", "function"), op, None, True))
        raise TypeError(f"{op!r} is no reduction of MPI; give one of {', '.join(_OPS)}")

    is_predefined = property(lambda self: self._value is None or self._value[0] in _OPS)
    is_commutative = property(lambda self: self.Is_commutative())
    name = property(lambda self: self._value[0] or self._value[1].__name__)

    def __repr__(self):
        return self.name if self else "OP_NULL"

    def Is_commutative(self):
        """Return whether the order of values does not matter."""
        return self._given()[3]

    def __call__(self, x, y):
        """Return the reduction of two objects."""
        if not self:
            raise ValueError("the reduction is OP_NULL; give another")
        name, function, _, _ = self._value
        return function(x, y) if name else function(x, y, None)

    def __reduce__(self):
        if not self.is_predefined:
            return self.Create, (self._value[1], self._value[3])
        return super().__reduce__()

    def _check(self, dtype):
        """Refuse a reduction that MPI does not define for these elements."""
        name = self._given()[0]
        if dtype.kind in _UNDEFINED.get(name, ""):
            raise Exception("ERR_OP", f"{name} is not defined for {dtype}")

    def _combine(self, x, y, kind):
        """Return the reduction of two arrays of one dtype."""
        name, function, ufunc, _ = self._given()
        if ufunc is not None:
            return ufunc(x, y).astype(x.dtype)
        result = np.array(y)
        function(buffer.frombuffer(np.array(x)), buffer.frombuffer(result), kind)
        return result

    def Reduce_local(self, inbuf, inoutbuf):
        """Replace the second buffer's elements by their reductions."""
        mine, other = read(inbuf), read(inoutbuf)
        if (mine.kind, mine.nbytes) != (other.kind, other.nbytes):
            raise ValueError(
                f"{mine.nbytes} bytes of {mine.kind} and {other.nbytes} of {other.kind} cannot be"
                " reduced"
            )
        self._check(mine.kind)
        other.write(self._combine(mine.numbers(), other.numbers(), other.kind))


OPS = {
    name: Op._of((name, *functions, name not in ("REPLACE", "NO_OP")))
    for name, functions in _OPS.items()
}
