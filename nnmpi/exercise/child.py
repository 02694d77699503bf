"""What runs in a solution's process: it imports the file, and calls the function.

Of nnmpi there is what a solution is written with, no more: when a solution comes, nothing further can be imported. A
hook that Python cannot take out again refuses what no solution needs: other files, other processes, the network,
ctypes.
"""

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
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
REFUSED = ("os.", "subprocess.", "socket.", "ctypes.", "shutil.", "pty.", "winreg.", "_posixsubprocess.", "_winapi.")
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
    sys.path.extend(path)
    sys.addaudithook(_guard(roots, hidden))
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


def _guard(roots: Sequence[str], hidden: str) -> Callable[[str, tuple[Any, ...]], None]:
    """Return the hook: what a solution may look at lies in `roots` and not in `hidden`."""

    def inside(path: str, root: str) -> bool:
        return path == root or path.startswith(root.rstrip(os.sep) + os.sep)

    realpath, fsdecode, getcwd = os.path.realpath, os.fsdecode, os.getcwd  # as they are before a solution is there

    def hook(event: str, values: tuple[Any, ...]) -> None:
        if event in LOOKS:
            path = values[0]
            if isinstance(path, int):
                return
            place = realpath(getcwd() if path is None else fsdecode(path))
            writes = event == "open" and isinstance(values[2], int) and values[2] & WRITES
            if writes or inside(place, hidden) or not any(inside(place, root) for root in roots):
                raise PermissionError(f"a solution may not {'write' if writes else 'read'} {place}")
        elif event.startswith(REFUSED):
            raise PermissionError(f"a solution may not use {event}")

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
