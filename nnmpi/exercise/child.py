"""What runs in a solution's process: it imports the file, and calls the function.

Of nnmpi there is what a solution is written with, no more: when a solution comes, nothing further
can be imported but files of its own, as source. An audit hook refuses what no solution needs: other
files, other processes, the network, ctypes, machine code. That is no sandbox: docs/grading.md says
what is left.
"""

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from nnmpi.custom import fault, load_file, raised
from nnmpi.errors import NnmpiError
from nnmpi.exercise.wire import Frames, WireError

try:
    import resource
except ImportError:  # Windows: the judge's own time limit is left
    resource = None  # type: ignore[assignment]

LONG = 60  # characters
REFUSED = (
    *(
        "os.",
        "subprocess.",
        "socket.",
        "ctypes.",
        "shutil.",
        "pty.",
        "winreg.",
        "_posixsubprocess.",
        "_winapi.",
    ),
    *(
        "signal.",
        "resource.",
        "fcntl.",
        "syslog.",
        "sqlite3.",
        "mmap.",
        "gc.",
        "marshal.",
        "code.",
        "cpython.PyInt",
    ),
)
# no events
UNHEARD = (
    "mkfifo",
    "mknod",
    "setpriority",
    "sched_setaffinity",
    "sched_setscheduler",
    "pidfd_open",
)
MAY = (
    "__future__ abc array bisect cmath collections contextlib copy dataclasses decimal enum"
    " fractions functools heapq itertools json math numbers numpy numpy.fft numpy.linalg"
    " numpy.random operator pathlib random re statistics string textwrap time types typing warnings"
)
LOOKS = ("open", "os.listdir", "os.scandir")
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def main() -> None:
    """Answer calls until the stream ends."""

    def do(lent: Any, name: str, values: Sequence[Any], *_: Any) -> Any:
        return function(*values)

    wire = Frames(os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb"), do, borrows=True)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):  # what a solution prints is nobody's verdict
        os.dup2(nowhere, stream)
    wire.word, file, name, seconds, nbytes, path, roots, hidden = wire.receive()
    _limit(seconds, nbytes)
    for module in MAY.split():  # which import others, and so before the hook
        import_module(module)
    for each in UNHEARD:
        for system in (os, sys.modules[os.name]):
            vars(system).pop(each, None)
    own = [each.partition(".")[0] for folder in path for each in os.listdir(folder)]
    sys.implementation.cache_tag = None  # type: ignore[assignment]  # no compiled files: helpers are source, too
    roots += sys.path
    sys.path.extend(path)
    sys.addaudithook(_guard(roots, hidden, own))
    function, told = _load(Path(file), name)
    if told:
        wire.send("raised", told, [])
    while True:
        try:
            _, *call = wire.receive()
        except WireError:
            os._exit(0)  # nothing that a solution registered is called
        try:
            wire.answer(*call)
        except BaseException as error:  # SystemExit and KeyboardInterrupt are the solution's, too
            more = f"; {nbytes:,} bytes are the limit" if isinstance(error, MemoryError) else ""
            wire.send("raised", fault(function, map(show, call[2]), error) + more, [])


def _limit(seconds: int, nbytes: int) -> None:
    for name, most in (("CPU", seconds), ("AS", nbytes), ("FSIZE", 0), ("CORE", 0), ("NPROC", 0)):
        with suppress(AttributeError, ValueError, OSError):  # no such limit here, or a lower one
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most))


def _guard(
    roots: Sequence[str], hidden: str, own: Sequence[str]
) -> Callable[[str, tuple[Any, ...]], None]:
    """Return the hook: what a solution may look at lies in `roots` and not in `hidden`.

    What it needs stands in cells, and it calls nothing that is written in Python: all else could be
    replaced.
    """
    sep, up, kind, text, number, forbidden = os.sep, os.pardir, type, str, int, PermissionError
    may = frozenset({*own} - sys.stdlib_module_names | {"encodings", "nnmpi", "numpy"})
    absent, refused, looks, writing = ModuleNotFoundError, REFUSED, LOOKS, WRITES
    inside, hides, ends = (
        tuple(f"{root}{sep}" for root in roots),
        f"{hidden}{sep}",
        frozenset(roots),
    )

    def hook(event: str, values: tuple[Any, ...]) -> None:
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
    """Return the function, and what is wrong with the file."""
    try:
        function = getattr(load_file(file, file.name), name, None)
        return function, "" if callable(function) else f"{file.name} has no function {name!r}"
    except NnmpiError as error:
        return None, str(error)
    except BaseException as error:
        return None, raised(file.name, str(file), error)


def show(value: Any) -> str:
    """Return an argument as a sentence has it."""
    if isinstance(value, np.ndarray):
        return f"an array of shape {value.shape}"
    if isinstance(value, list | tuple | dict) and len(repr(value)) > LONG:
        return f"a {type(value).__name__} of {len(value)}"
    return "group" if isinstance(value, SimpleNamespace) else repr(value)
