"""The program of a solution's process: it imports the file and calls the function.

The process has only the parts of nnmpi that solutions are written with. Before it loads the
solution, it closes imports to all but the solution's own source files. An audit hook refuses what
no solution needs: other files, processes, the network, ctypes, machine code. The hook tells
students what they may not do, and is no sandbox: that is `exercise.wall`. docs/grading.md says what
holds where.
"""

import _imp
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from nnmpi.base.custom import fault, load_file, raised
from nnmpi.base.errors import NnmpiError
from nnmpi.teaching.exercise.wall import WRITES, raise_wall
from nnmpi.teaching.exercise.wire import Frames, WireError

try:
    import resource
except ImportError:  # Windows: only the judge's time limit applies
    resource = None  # type: ignore[assignment]

LONG = 60  # characters
REFUSED = (  # prefixes of audit events
    "os. subprocess. socket. ctypes. shutil. pty. winreg. _posixsubprocess. _winapi. signal."
    " resource. fcntl. syslog. sqlite3. mmap. gc. marshal. code. cpython.PyInt"
)
# functions that raise no audit event, so they are deleted; create_builtin makes modules anew, with
# all functions again
SILENT = "mkfifo mknod setpriority sched_setaffinity sched_setscheduler pidfd_open create_builtin"
PACKAGES = "site-packages", "dist-packages"  # in Python's library, perhaps with nnmpi
SPARE_S = 5  # from the judge's limit of time to the process's own, if the judge is gone
MAY = (  # modules that a solution may import
    "__future__ abc array bisect cmath collections contextlib copy dataclasses decimal enum"
    " fractions functools heapq itertools json math numbers numpy numpy.fft numpy.linalg"
    " numpy.random operator pathlib random re statistics string textwrap time types typing warnings"
)
LOOKS = ("open", "os.listdir", "os.scandir")


def main() -> None:
    """Answer calls until the stream ends."""

    def do(lent: Any, name: str, values: Sequence[Any], *_: Any) -> Any:
        return function(*values)

    wire = Frames(os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb"), do, borrows=True)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):  # a solution's output must not pass for a verdict
        os.dup2(null, stream)
    wire.word, file, name, seconds, nbytes, path, roots, hidden = wire.receive()
    _limit(seconds, nbytes)
    for module in MAY.split():  # before the hook, which would refuse the modules that these import
        import_module(module)
    for silent in SILENT.split():
        for system in (os, sys.modules[os.name], _imp):
            vars(system).pop(silent, None)
    local = [entry.partition(".")[0] for folder in path for entry in os.listdir(folder)]
    # a .pyc file could differ from the source that the judge has read
    sys.implementation.cache_tag = None  # type: ignore[assignment]
    library, *others = roots
    others += [entry for entry in sys.path if entry != library]
    others += [entry.path for entry in os.scandir(library) if entry.name not in PACKAGES]
    roots += sys.path
    sys.path.extend(path)
    raise_wall(others, [library], seconds + SPARE_S)
    sys.addaudithook(_guard(roots, hidden, local))
    function, problem = _load(Path(file), name)
    if problem:
        wire.send("raised", problem, [])
    while True:
        try:
            _, *call = wire.receive()
        except WireError:
            os._exit(0)  # skips the solution's atexit functions
        try:
            wire.answer(*call)
        except BaseException as error:  # also SystemExit and KeyboardInterrupt
            more = f"; {nbytes:,} bytes are the limit" if isinstance(error, MemoryError) else ""
            wire.send("raised", fault(function, map(show, call[2]), error) + more, [])


def _limit(seconds: int, nbytes: int) -> None:
    for name, most in (("CPU", seconds), ("AS", nbytes), ("FSIZE", 0), ("CORE", 0), ("NPROC", 0)):
        with suppress(AttributeError, ValueError, OSError):  # no such limit here, or a lower one
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most))


def _guard(
    roots: Sequence[str], hidden: str, local: Sequence[str]
) -> Callable[[str, tuple[Any, ...]], None]:
    """Return the audit hook: a solution may read files in `roots` but not in `hidden`.

    The hook reads only its arguments' defaults and calls only C functions, because a solution
    could replace globals and Python functions, and since Python 3.13 also change a closure, by the
    frame in the traceback of a refusal. An import that reaches it is a file still to load: modules
    that are loaded already, such as those of MAY, raise no event.
    """

    def hook(
        event: str,
        values: tuple[Any, ...],
        *,
        sep: str = os.sep,
        up: str = os.pardir,
        kind: Any = type,
        text: type = str,
        number: type = int,
        forbidden: type[Exception] = PermissionError,
        absent: type[Exception] = ModuleNotFoundError,
        may: frozenset[str] = frozenset(
            {*local} - sys.stdlib_module_names | {"encodings", "numpy"}
        ),
        looks: tuple[str, ...] = LOOKS,
        writing: int = WRITES,
        refused: tuple[str, ...] = tuple(REFUSED.split()),
        inside: tuple[str, ...] = tuple(f"{root}{os.sep}" for root in roots),
        hides: str = f"{hidden}{os.sep}",
        ends: frozenset[str] = frozenset(roots),
    ) -> None:
        if event == "import":
            name = values[0]
            if kind(name) is not text or values[1] or name.partition(".")[0] not in may:
                raise absent(
                    f"No module named {name!r} for solutions, which have NumPy and some of"
                    " Python's own"
                )
        elif event in looks:
            path = values[0]
            if kind(path) is number or path is None:
                return
            writes = event == "open" and kind(values[2]) is number and values[2] & writing
            plain = (
                kind(path) is text
                and up not in path.split(sep)
                and not f"{path}{sep}".startswith(hides)
            )
            here = plain and (path in ends or path.startswith(inside) or not path.startswith(sep))
            if writes or not here:
                raise forbidden(f"a solution may not {'write' if writes else 'read'} {path!r}")
        elif event.startswith(refused) or (
            event == "object.__setattr__" and values[1] == "__code__"
        ):
            raise forbidden(f"a solution may not use {event}")

    return hook


def _load(file: Path, name: str) -> tuple[Any, str]:
    """Return the function, and a sentence if the file has none."""
    try:
        function = getattr(load_file(file, file.name), name, None)
        return function, "" if callable(function) else f"{file.name} has no function {name!r}"
    except NnmpiError as error:
        return None, str(error)
    except BaseException as error:
        return None, raised(file.name, str(file), error)


def show(value: Any) -> str:
    """Return an argument as text for an error sentence."""
    if isinstance(value, np.ndarray):
        return f"an array of shape {value.shape}"
    if isinstance(value, list | tuple | dict) and len(repr(value)) > LONG:
        return f"a {type(value).__name__} of {len(value)}"
    return "group" if isinstance(value, SimpleNamespace) else repr(value)
