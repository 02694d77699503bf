"""What all of mpi4py's objects have in common: handles, constants, errors, groups of ranks.

A handle names something that MPI keeps: a communicator, a group, a request. Copies of a handle are
equal; a handle that is null, because nothing was made or it was freed, is false.
"""

import sys
from collections.abc import Iterable
from operator import eq, le, lt
from types import ModuleType
from typing import Any

from nnmpi.base.errors import CommError, is_own
from nnmpi.base.words import nearest

MODULE = "mpi4py.MPI"
ANY_SOURCE = ANY_TAG = ANY = -1  # Open MPI's values
PROC_NULL, ROOT, UNDEFINED = -2, -4, -32766
IDENT, CONGRUENT, SIMILAR, UNEQUAL = range(4)

# MPI's classes of errors, numbered from 0.
_NAMES = """
    SUCCESS ERR_BUFFER ERR_COUNT ERR_TYPE ERR_TAG ERR_COMM ERR_RANK ERR_REQUEST ERR_ROOT ERR_GROUP
    ERR_OP ERR_TOPOLOGY ERR_DIMS ERR_ARG ERR_UNKNOWN ERR_TRUNCATE ERR_OTHER ERR_INTERN
    ERR_IN_STATUS ERR_PENDING ERR_INFO ERR_INFO_NOKEY ERR_WIN ERR_UNSUPPORTED_OPERATION
"""
ERRORS = _NAMES.split()


class Exception(CommError, RuntimeError):  # noqa: A001 (mpi4py's name)
    """A call with an impossible argument; MPI.Exception.

    Args:
        name: of the class of errors, such as "ERR_RANK".
        text: what is wrong.
    """

    def __init__(self, name="SUCCESS", text=""):
        super().__init__(text or name)
        self.error_class = self.error_code = name if isinstance(name, int) else ERRORS.index(name)
        self.error_string = text or f"MPI_{ERRORS[self.error_class]}"

    def Get_error_class(self):
        """Return the number of the class of errors."""
        return self.error_class

    Get_error_code = Get_error_class
    __int__ = __hash__ = Get_error_class

    def _compare(self, other, operator):
        return operator(self.error_class, int(other)) if isinstance(other, int | Exception) else (
            NotImplemented
        )  # fmt: skip

    def __eq__(self, other):
        return self._compare(other, eq)

    def __lt__(self, other):
        return self._compare(other, lt)

    def __le__(self, other):
        return self._compare(other, le)

    def __bool__(self):
        return self.error_class != 0

    def Get_error_string(self):
        """Return what is wrong."""
        return self.error_string


def as_int(value):
    """Return an argument that is a C int to MPI, of which mpi4py cuts a float's fraction off.

    Raises:
        TypeError: for what is no number.
        OverflowError: for a number that an int has no room for.
    """
    if isinstance(value, str | bytes):
        raise TypeError(f"{value!r} is given for a whole number")
    try:
        number = int(value)
    except (TypeError, ValueError):
        raise TypeError(f"{value!r} is given for a whole number") from None
    if not -(2**31) <= number < 2**31:
        raise OverflowError(f"{number} is too large for an int of MPI")
    return number


def refuse(self, name):
    """Refuse an attribute that the simulated MPI lacks, and name those that are like it."""
    whose = self.__name__ if isinstance(self, ModuleType) else type(self).__name__
    others = [item for item in dir(self) if item[0] != "_" and item != name]
    close = nearest(name, others, 3)
    like = f"; {whose} has {', '.join(close)}" if close else ""
    raise AttributeError(
        f"the simulated MPI has no {whose}.{name}{like}; docs/reference/mpi4py.md lists its calls"
    )


def local():
    """Return the module `mpi4py.MPI` of the rank that runs: what a process has once lies there."""
    return sys.modules[MODULE]


class FrontHandle:
    """A name of something; see the module."""

    __getattr__ = refuse
    _value: Any = None

    @classmethod
    def _checked(cls, other):
        """Return an argument that must be such a handle.

        Raises:
            TypeError: for anything else.
        """
        if not isinstance(other, cls):
            raise TypeError(f"{other!r} is given for a {cls.__name__}")
        return other

    def __init_subclass__(cls):
        if is_own(cls):  # not a program's: where pickle finds it, under mpi4py's name
            cls.__module__, cls.__name__ = MODULE, cls.__name__.removeprefix("Front")
            cls.__qualname__ = cls.__name__

    def __new__(cls, other=None):
        """Return a copy of a handle, or a null one."""
        if other is not None and not isinstance(other, cls._kind()):
            raise TypeError(f"{cls.__name__} of {other!r}")
        result = object.__new__(cls)
        result._value = getattr(other, "_value", None)
        return result

    @classmethod
    def _kind(cls):  # the most general class of handles of this kind
        return cls.__mro__[-3]

    @classmethod
    def _of(cls, value):
        result = object.__new__(cls)
        result._value = value
        return result

    def __bool__(self):
        return self._value is not None

    def __eq__(self, other):
        return isinstance(other, self._kind()) and self._value is other._value

    def __hash__(self):
        return id(self._value)

    def __reduce__(self):
        for name, item in vars(local()).items():
            if item is self:
                return name
        for item in vars(local()).values():
            if isinstance(item, self._kind()) and self == item:
                return type(self), (item,)
        raise ValueError(f"a {type(self).__name__} is this process's own: it cannot be pickled")

    def _given(self):
        """Return what it names.

        Raises:
            Exception: if it is null.
        """
        if self._value is None:
            raise self._error("it is null: it was freed, or never made")
        return self._value

    def _error(self, text):
        name = self._kind().__name__
        error = {"Datatype": "TYPE", "Message": "REQUEST"}.get(name, name.upper())
        return Exception(f"ERR_{error}", f"{name}: {text}")

    def _is_mpis(self):  # groups without ranks are all equal, and may be freed
        return self._value != () and any(
            isinstance(item, self._kind()) and item._value is self._value
            for item in vars(local()).values()
        )

    def Free(self):
        """Make it null.

        Raises:
            Exception: if it is null, or MPI's own.
        """
        self._given()
        if self._is_mpis():
            raise self._error("MPI's own stay to the end")
        self._value = None

    def free(self):
        """Make it null; what is MPI's own stays."""
        if self and not self._is_mpis():
            self.Free()

    @property
    def handle(self):
        """Its number; `fromhandle` finds it again."""
        handles = local()._handles
        return next(
            (number for number, item in enumerate(handles) if item is self._value), None
        ) or (handles.append(self._value) or len(handles) - 1)

    @classmethod
    def fromhandle(cls, number):
        """Return the handle of this number."""
        return cls._of(local()._handles[number])

    def toint(self):
        """Return its number."""
        return self.handle

    py2f = toint
    fromint = f2py = fromhandle


class FrontGroup(FrontHandle):
    """Ranks in order, as their numbers in the world."""

    def _ranks(self):
        return self._given()

    @classmethod
    def _made(cls, ranks: Iterable[int]):
        return cls._of(tuple(ranks))

    def _at(self, ranks):
        mine = self._ranks()
        for rank in ranks:
            if not 0 <= rank < len(mine):
                raise Exception("ERR_RANK", f"there is no rank {rank} in a group of {len(mine)}")
        return [mine[rank] for rank in ranks]

    def Get_size(self):
        """Return the number of ranks."""
        return len(self._ranks())

    def Get_rank(self):
        """Return this rank's number in it, or UNDEFINED."""
        return self._find(local().COMM_WORLD.rank)

    size, rank = property(Get_size), property(Get_rank)

    def _find(self, number):
        return self._ranks().index(number) if number in self._ranks() else UNDEFINED

    def Compare(self, other):
        """Return IDENT, SIMILAR for another order, or UNEQUAL."""
        mine, others = self._both(self, other)
        return IDENT if mine == others else SIMILAR if {*mine} == {*others} else UNEQUAL

    def Translate_ranks(self, ranks=None, group=None):
        """Return the numbers that ranks of this group have in another."""
        ranks = range(self.size) if ranks is None else ranks
        group = local().COMM_WORLD.group if group is None else group
        return [
            PROC_NULL if rank == PROC_NULL else group._find(self._at([rank])[0]) for rank in ranks
        ]

    def Dup(self):
        """Return a copy."""
        return self._made(list(self._ranks()))

    @classmethod
    def Union(cls, group1, group2):
        """Return the ranks of both, the first group's first."""
        first, second = cls._both(group1, group2)
        return cls._made(dict.fromkeys(first + second))

    @classmethod
    def Intersection(cls, group1, group2):
        """Return the first group's ranks that are in the other, too."""
        first, second = cls._both(group1, group2)
        return cls._made(rank for rank in first if rank in second)

    @classmethod
    def Difference(cls, group1, group2):
        """Return the first group's ranks that are not in the other."""
        first, second = cls._both(group1, group2)
        return cls._made(rank for rank in first if rank not in second)

    @classmethod
    def _both(cls, *groups):
        return [cls._checked(group)._ranks() for group in groups]

    def Incl(self, ranks):
        """Return some ranks, in the given order."""
        found = self._at(ranks)
        if len({*found}) < len(found):
            raise Exception("ERR_RANK", f"a rank is given twice: {[*ranks]}")
        return self._made(found)

    def Excl(self, ranks):
        """Return all ranks but some."""
        left = {*self.Incl(ranks)._ranks()}
        return self._made(rank for rank in self._ranks() if rank not in left)

    @staticmethod
    def _spread(ranks):
        found: list[int] = []
        for first, last, stride in ranks:
            if stride == 0 or (last - first) * stride < 0:
                raise Exception("ERR_ARG", f"steps of {stride} lead from {first} to no {last}")
            found += range(first, last + (1 if stride > 0 else -1), stride)
        return found

    def Range_incl(self, ranks):
        """Return the ranks of (first, last, step)."""
        return self.Incl(self._spread(ranks))

    def Range_excl(self, ranks):
        """Return all ranks but those of (first, last, step)."""
        return self.Excl(self._spread(ranks))


class Info(FrontHandle):
    """Hints by name, which a simulation has no use for."""

    @classmethod
    def Create(cls, items=()):
        """Return hints."""
        return cls._of(dict(items))

    def Set(self, key, value):
        """Set a hint."""
        if not isinstance(value, str | bytes):
            raise TypeError(f"the hint {key!r} is {value!r}; give a text")
        self._given()[key] = value

    def Get(self, key):
        """Return a hint, or None."""
        return self._given().get(key)

    def Delete(self, key):
        """Remove a hint."""
        if self._given().pop(key, None) is None:
            raise Exception("ERR_INFO_NOKEY", f"there is no hint {key!r}")

    def Get_nkeys(self):
        """Return the number of hints."""
        return len(self._given())

    def Dup(self):
        """Return a copy."""
        return self.Create(self._given())

    def __getitem__(self, key):
        return self._given()[key]

    __setitem__, __delitem__, __len__ = Set, Delete, Get_nkeys
