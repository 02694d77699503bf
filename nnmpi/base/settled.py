"""Objects to which nothing is written that they would ignore."""

from functools import wraps
from typing import Any, ClassVar

from nnmpi.base.errors import UsageError, is_own
from nnmpi.base.words import answering, raise_missing


class Settled:
    """An object to which nothing is written that it would ignore.

    A subclass names what it reads when it is made: `class SGD(Optimizer, read_once="momentum")`.
    Such an attribute cannot be assigned later. nnmpi's own classes also refuse public names that
    they lack, as they do when these are read; a user's class has names of its own.
    """

    _read_once: ClassVar[frozenset[str]] = frozenset()
    _is_made = False

    def __init_subclass__(cls, read_once: str = "", **options: Any) -> None:
        super().__init_subclass__(**options)
        cls._read_once = cls._read_once.union(read_once.split())
        if not is_own(cls) or hasattr(cls, "__post_init__"):  # a dataclass's `__init__` is to come
            return
        make = answering(cls).__init__

        @wraps(make)
        def __init__(self: Any, *args: Any, **named: Any) -> None:
            make(self, *args, **named)
            if type(self) is cls:  # not a base of it, whose subclass is not made yet
                object.__setattr__(self, "_is_made", True)

        cls.__init__ = __init__  # type: ignore[method-assign]

    def __setattr__(self, name: str, value: Any) -> None:
        if name[0] != "_":
            _check_written(self, name)
        object.__setattr__(self, name, value)


def _check_written(owner: Settled, name: str) -> None:
    """Refuse to write a public attribute that its owner would ignore; see `Settled`.

    Raises:
        UsageError: for one that was read when the owner was made.
        AttributeError: for one that the owner lacks.
    """
    kind = type(owner)
    is_read_once, is_made = name in kind._read_once, owner._is_made
    # nobody says when an object of a user's class is made: there the first value is the last
    if is_read_once and (is_made or (not is_own(kind) and name in vars(owner))):
        again = "call its release() and make" if hasattr(kind, "release") else "make"
        raise UsageError(
            f"{name} is read when {kind.__name__} is made, and a later value would change nothing;"
            f" {again} another one"
        )
    if is_made and not _has(owner, name) and is_own(kind) and not hasattr(kind, name):
        raise_missing(owner, name)


def _has(owner: object, name: str) -> bool:
    """Return whether an object has an attribute of its own; a look at `vars` would slow it down."""
    try:
        object.__getattribute__(owner, name)
    except AttributeError:
        return False
    return True
