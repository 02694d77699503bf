"""User code by name on the command line: FILE.py:NAME or package.module:NAME.

Wherever a command takes the name of an algorithm, schedule, optimizer, loss, data set or model, it
also takes such a name. In the library, pass the function itself.

Only what is named is imported, with what it imports itself: see `beside`.
"""

import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from nnmpi.base.errors import NnmpiError, ScheduleError, UsageError, raised_as

_LIBRARY = Path(os.__file__).parent
LIBRARY = (str(_LIBRARY), str(_LIBRARY / "lib-dynload"))  # the standard one's in `sys.path`


class Custom(str):
    """FILE.py:NAME or package.module:NAME, as the value of an option, taken apart once.

    Attributes:
        source: the file or module, before the last colon.
        function: the name in it.
        file: the file; None for a module.
        is_own: whether it is a module of nnmpi; a folder may have any name, such as "nnmpi.run:1".

    Raises:
        ValueError: for other text.
    """

    source: str
    function: str
    file: Path | None
    is_own: bool

    def __new__(cls, name: str) -> "Custom":
        """Return the name; raise if it is not of this form."""
        source, _, function = name.rpartition(":")
        if not (source and function.isidentifier()):
            raise ValueError(name)
        self = super().__new__(cls, name)
        self.source, self.function = source, function
        self.file = Path(source) if source.endswith(".py") else None
        parts = source.split(".")
        self.is_own = (
            self.file is None and parts[0] == "nnmpi" and all(map(str.isidentifier, parts))
        )
        return self


def as_custom(name: object) -> Custom | None:
    """Return the name of a user's function or class as such a name; None for anything else."""
    with suppress(ValueError):
        return Custom(name) if isinstance(name, str) else None
    return None


def is_custom(name: object) -> bool:
    """Return whether this is a user's function, class or module, or the name of one."""
    return callable(name) or as_custom(name) is not None


def is_foreign(name: object) -> bool:
    """Return whether this is the name of user code outside of nnmpi."""
    custom = as_custom(name)
    return custom is not None and not custom.is_own


def names_in(value: object) -> list[object]:
    """Return the names in an option's value: those of a list, or the value itself."""
    return [*value] if isinstance(value, list | tuple) else [value]


def as_option(value: object) -> str:
    """Return a user's object in the form of its name, for a run's files: "program:Net"."""
    name = name_of(value)
    return f"program:{name if name.isidentifier() else 'function'}"


def short_name(name: str) -> str:
    """Return a name for use in a folder's name: "nets/mine.py:build" -> "mine-build"."""
    custom = as_custom(name)
    if custom is None:
        return name
    stem = custom.file.stem if custom.file else custom.source.rpartition(".")[2]
    return f"{stem}-{custom.function}"


def custom_file(name: object) -> Path | None:
    """Return the file of the name; None for other names and installed modules."""
    custom = as_custom(name)
    return custom.file if custom and custom.file and custom.file.is_file() else None


def load_custom(name: Any, option: str, signature: str) -> Any:
    """Return the function or class of this name; nnmpi's own names are returned unchanged.

    Args:
        name: FILE.py:NAME or package.module:NAME, or another.
        option: its option, such as "--model", for messages.
        signature: its arguments, such as "(sample_shape, classes)", for messages.

    Raises:
        UsageError: when there is no such file, module or function, or the file cannot be read.
    """
    custom = as_custom(name)
    if custom is None:
        return name
    source, function, given = custom.source, custom.function, f"{option} {name}"
    with beside(custom.file.resolve().parent if custom.file else Path.cwd()):
        module = load_file(custom.file, given) if custom.file else _load_module(source, given)
    result = getattr(module, function, None)
    if not callable(result):
        raise UsageError(
            f"{given}: {source} has no function {function!r}; define {function}{signature}"
        )
    return result


def call_custom(name: Any, option: str, signature: str, *values: Any) -> Any:
    """Return the result of the function of this name for these values.

    Args:
        name, option, signature: see `load_custom`.

    Raises:
        UsageError: as `load_custom`, and for a function with other arguments.
    """
    function = load_custom(name, option, signature)
    try:
        return function(*values)
    except TypeError as error:
        if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
            raise  # from within the function
        raise UsageError(
            f"{option} {name_of(name)}: {error}; define {name_of(function)}{signature}"
        ) from None


def call_user(function: Callable[..., Iterable[Any]], kind: type, *values: Any) -> tuple[Any, ...]:
    """Call a user's function and return its result, such as steps or instructions.

    Args:
        function: returns an iterable.
        kind: the type of its items.
        values: its arguments.

    Raises:
        ScheduleError: for an exception in it, with its line, and for items of another type.
    """
    try:
        result = function(*values)
        items = tuple(result) if isinstance(result, Iterable) else (result,)
    except NnmpiError:
        raise
    except (Exception, SystemExit) as error:  # SystemExit would end the program without an error
        raise ScheduleError(fault(function, values, error)) from error
    for item in items:
        if not isinstance(item, kind):
            raise ScheduleError(
                f"{called(function, values)} gives a {type(item).__name__}; give a list of"
                f" {kind.__name__}"
            )
    return items


def name_of(named: Any) -> str:
    """Return the name of a choice: the name itself, or a user's function's name."""
    return named if isinstance(named, str) else getattr(named, "__name__", type(named).__name__)


def called(function: Callable[..., Any], shown: Iterable[Any]) -> str:
    """Return a function's call as text: "my_ring(0, 4)"."""
    return f"{name_of(function)}({', '.join(map(str, shown))})"


def fault(function: Callable[..., Any], shown: Iterable[Any], error: BaseException) -> str:
    """Return a sentence with a function's exception, its arguments and its line."""
    return raised(
        called(function, shown),
        getattr(getattr(function, "__code__", None), "co_filename", None),
        error,
    )


def raised(call: str, file: str | None, error: BaseException) -> str:
    """Return a sentence about an exception, with its line in a file."""
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == file
    ]
    location = f" in line {lines[-1]} of {Path(str(file)).name}" if lines else ""
    return f"{call} raised {type(error).__name__}{location}: {error}"


@contextmanager
def beside(folder: Path) -> Iterator[None]:
    """Let the body import modules of a folder; afterwards they are found behind all others.

    A file that is called as a module of the standard library must not be imported in its place, be
    it by nnmpi or by NumPy: so the folder never stands before the library. In the body, which
    imports what the user has named, it stands before installed packages, as for `python FILE.py`.
    Afterwards it stands behind these, for imports within the user's functions.
    """
    name = str(folder)
    behind = 1 + max((n for n, entry in enumerate(sys.path) if entry in LIBRARY), default=-1)
    if name in sys.path[:behind]:  # a program's own folder, or one of PYTHONPATH
        yield
        return
    sys.path.insert(behind, name)
    try:
        yield
    finally:
        with suppress(ValueError):  # the user's code has removed it
            sys.path.remove(name)
        if name not in sys.path:
            sys.path.append(name)


def load_file(file: Path, given: str) -> Any:
    """Return a file as a module; a UsageError begins with `given`."""
    with raised_as(UsageError, f"{given}: {file} cannot be read"):
        if not file.is_file():
            raise UsageError(f"{given}: there is no file {file}")
        file.open("rb").close()
    title = f"nnmpi_custom_{file.stem}"
    spec = importlib.util.spec_from_file_location(title, file)
    assert spec is not None and spec.loader is not None  # the name ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[title] = module  # classes of the file look up their module there
    try:
        spec.loader.exec_module(module)
    except SystemExit as left:
        raise UsageError(
            f"{given}: {file} ends the program with SystemExit({left}); let it only define names"
        ) from left
    return module


def _load_module(source: str, given: str) -> Any:
    try:
        result = importlib.util.find_spec(source)
    except (ImportError, ValueError):
        result = None
    if result is None:
        raise UsageError(
            f"{given}: there is no module {source}; give FILE.py:NAME, or set PYTHONPATH"
        )
    return importlib.import_module(source)
