"""What to write instead of names of PyTorch and Horovod, and of other programs' options, in the
errors about them.

The table is `names.md` beside this file, which the documentation shows. It is read at the first
such error.
"""

import re
import sys
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from functools import cache, partial, wraps
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
TABLE = Path(__file__).with_name("names.md")
PAGE = "docs/reference/names.md"
OWNERS = "model", "optimizer", "x", "torch"  # whose attributes have rows of their own
# variables and Python's words in a row's code
_OTHERS = """
torch nn hvd self model optimizer layer layers loss pred values places mask value parameter worker
scheduler schedule lstm key for in py python np print False True None
"""
# Names are guessed by their letters only where most of them agree: of shorter likenesses nearly all
# were others' names ("atan2", and "data" was proposed).
LIKENESS = 0.8
_SUBJECT = re.compile(r"(?:[\w.]+\.)?([A-Za-z_]\w*)(?=\(|$|=)")


@cache
def rows() -> dict[str, str]:
    """Return what to write instead of each name.

    Of an argument "name=", of one function or class alone "f.name=", of an option "--name", of an
    attribute of models, optimizers, tensors and PyTorch's package alone "model.name",
    "optimizer.name", "x.name", "torch.name". A row's subject, `f` in `torch.f(x, k=1)`, goes before
    what only occurs in a row.
    """
    subjects, others = dict[str, str](), dict[str, str]()
    for line in _lines():
        cells = [cell.strip() for cell in line.split(" | ")]
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", cells[1].removesuffix(" |")).replace("`", "")
        for code in re.findall(r"`([^`]+)`", cells[0]):
            if argument := re.fullmatch(r"(\w+)(=\w*)?", code):
                subjects.setdefault(f"{argument[1]}=", text)
            if code.startswith("--"):
                subjects[code] = text
                continue
            subject, plain = _SUBJECT.match(code), re.sub(r'"[^"]*"', "", code)
            for name in re.findall(r"[A-Za-z_]\w+", plain):
                others.setdefault(name, text)
            if owned := re.match(rf"({'|'.join(OWNERS)})\.(\w+)(?=\(|$)", code):
                subjects.setdefault(f"{owned[1]}.{owned[2]}", text)
            if subject:
                subjects.setdefault(subject[1], text)
                for name in re.findall(r"(\w+=)(?!=)", plain.partition("(")[2]):
                    subjects.setdefault(f"{_plain(subject[1])}.{name}", text)
    result = others | subjects
    for name in _OTHERS.split():
        result.pop(name, None)
    return result


def _lines() -> list[str]:
    """Return the table's rows."""
    lines = TABLE.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line.startswith("| ") and "`" in line]


def _subjects(owners: str) -> set[str]:
    """Return the names of these owners, such as "x|pred"."""
    return {*re.findall(rf"`(?:{owners})\.(\w+)", "".join(_lines()))}


@cache
def _of_tensors_only() -> set[str]:
    """Return names that a module of a user's may have, too, and lack by mistake."""
    return _subjects("x|pred|loss|torch|F") - _subjects("model|layers|optimizer|parameter")


def instead(name: str) -> str:
    """Return the end of a sentence: what to write instead of a name, or nothing."""
    text = rows().get(name)
    return f"; in nnmpi: {text} ({PAGE})" if text else ""


def nearest(name: str, known: Iterable[str], count: int = 1) -> list[str]:
    """Return the known names that are like a name, in letters; see `LIKENESS`."""
    return get_close_matches(name, [*known], count, LIKENESS)


def _plain(name: str) -> str:
    """Return a class's name in any number of dimensions: "Conv2d" -> "Conv"."""
    return re.sub(r"\dd$", "", name)


def _instead_of_argument(name: str, *owners: str) -> str:
    """Return the end of a sentence about an argument of a function, or of a class and its bases."""
    keys = (*(f"{_plain(owner)}.{name}=" for owner in owners), f"{name}=")
    return next(filter(None, map(instead, keys)), "")


def raise_missing(owner: object, name: str, word: str = "") -> Any:
    """Raise the error of a missing attribute: a class's `__getattr__`, or its end.

    Args:
        owner: the object.
        name: of the attribute.
        word: which of OWNERS it is.
    """
    kind = type(owner)
    if hasattr(kind, name):  # a property, which raises its own error again
        return object.__getattribute__(owner, name)
    more = instead(f"{word}.{name}")
    if not more and name not in _of_tensors_only():
        more = instead(name)
    return _raise_missing(owner, name, more)


def _raise_missing(owner: object, name: str, more: str) -> NoReturn:
    raise AttributeError(
        f"{type(owner).__name__!r} object has no attribute {name!r}{more}",
        name=name,
        obj=owner,
    )


def _raise_missing_of_tensor(owner: object, name: str) -> NoReturn:
    _raise_missing(owner, name, instead(f"x.{name}") or instead(name))


def offer(package: str) -> list[str]:
    """Return what a package offers, in order: the names in `__all__` of the modules it has loaded.

    The package imports them by `*`; a type checker reads `__all__` there. For another name it says
    what to write instead, see `missing_from`. (A `__getattr__` in its file would tell type checkers
    that it has any name.)
    """
    sys.modules[package].__getattr__ = lambda name: missing_from(package, name)  # type: ignore
    inside = [module for name, module in sys.modules.items() if name.startswith(f"{package}.")]
    return sorted(name for module in inside for name in getattr(module, "__all__", ()))


def missing_from(package: str, name: str, hint: str = "") -> NoReturn:
    """Raise the error of a missing name: a package's `__getattr__`, or its end.

    Args:
        package: its name.
        name: the missing one.
        hint: the end of the sentence without a better one.

    Raises:
        ImportError: in `from package import name`, which would replace another error's sentence.
    """
    more = instead(name) or hint
    at = sys._getframe(2).f_code
    if at.co_name == "_handle_fromlist" and more and not find_spec(f"{package}.{name}"):
        raise ImportError(f"cannot import name {name!r} from {package!r}{more}")
    raise AttributeError(f"module {package!r} has no attribute {name!r}{more}")


def add_missing(kind: type) -> None:
    """Let a tensor's class answer to the names; `__getattr__` would slow down all attributes."""
    for name in _subjects("x|pred|parameter"):
        if not hasattr(kind, name):
            setattr(kind, name, property(partial(_raise_missing_of_tensor, name=name)))


def refuse_words(function: str, words: Iterable[str]) -> None:
    """Refuse arguments that a function does not have.

    Args:
        function: its name.
        words: their names; mostly there are none.

    Raises:
        TypeError: as Python's, with what to write instead.
    """
    for name in words:
        raise TypeError(
            f"{function}() got an unexpected keyword argument {name!r}"
            f"{_instead_of_argument(name, function)}"
        )


def answered(function: F) -> F:
    """Let a function say what to write instead of an argument that it does not have."""

    @wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        try:
            return function(*args, **named)
        except TypeError as error:
            if name := _unexpected(error):
                refuse_words(function.__name__, [name])
            raise

    return call  # type: ignore[return-value]


def _unexpected(error: TypeError) -> str:
    """Return the name of an argument that a call refused, not something within what it called."""
    trace = error.__traceback__
    found = re.search(r"unexpected keyword argument '(\w+)'$", str(error))
    return found[1] if found and trace is not None and trace.tb_next is None else ""


def answering(kind: type[T]) -> type[T]:
    """Let a class say what to write instead of an argument that its constructor does not have.

    Without a row in the table it says which arguments there are.
    """
    make = kind.__init__
    takes = [*signature(make).parameters][1:] if make is not object.__init__ else []

    @wraps(make)
    def __init__(self: Any, *args: Any, **named: Any) -> None:
        try:
            make(self, *args, **named)
        except TypeError as error:
            trace = error.__traceback__
            if trace is not None and trace.tb_next is not None:
                raise  # from within the constructor
            name = _unexpected(error) or next(iter(named if make is object.__init__ else ()), "")
            own, what = type(self).__name__, f"got an unexpected keyword argument {name!r}"
            if not name:  # too many by place, of which PyTorch's last one is often this
                name = "inplace" if args[-1:] != () and args[-1] is True else ""
                what = str(error).partition("() ")[2] if takes else "takes no arguments"
            more = _instead_of_argument(name, *(base.__name__ for base in type(self).__mro__))
            more = more or (f"; {own} takes {', '.join(takes)}" if takes else "")
            raise TypeError(f"{own}() {what}{more}") from None

    kind.__init__ = __init__  # type: ignore[method-assign]
    return kind
