"""What runs in a solution's process: it imports the file, and calls the function.

It imports nothing of nnmpi but what a solution is written with. Around it there is a folder with
copies of these few files, NumPy, and Python's own library: nnmpi's own answers are not there to be
imported. A hook that Python cannot take out again refuses what no solution needs: other files, other
processes, the network, ctypes.
"""

import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import numpy as np

from nnmpi.custom import fault
from nnmpi.exercise.wire import Frames, WireError, pack, unpack

try:
    import resource
except ImportError:  # Windows: the judge's own time limit is left
    resource = None  # type: ignore[assignment]

FIRST_WORD = "begin"
LONG = 60  # characters
REFUSED = ("os.", "subprocess.", "socket.", "ctypes.", "shutil.", "pty.", "winreg.", "_posixsubprocess.", "_winapi.")
LOOKS = ("open", "os.listdir", "os.scandir")
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def main() -> None:
    """Answer calls until the stream ends."""
    wire = Frames(os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb"), FIRST_WORD)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):  # what a solution prints is nobody's verdict
        os.dup2(nowhere, stream)
    begin = wire.receive()
    wire.word = begin["word"]
    file, name = begin["file"], begin["function"]
    _limit(begin["seconds"], begin["bytes"])
    sys.path.extend(begin["path"])
    sys.addaudithook(_guard(begin["roots"], begin["hidden"]))
    function, told = _load(file, name)
    if told:
        wire.send({"raised": told})
    while True:
        try:
            message = wire.receive()
        except WireError:
            os._exit(0)  # nothing that a solution registered is called
        arrays: list[Any] = []
        values = [unpack(each, arrays, _borrower(wire)) for each in message["call"]]
        try:
            found: list[Any] = []
            given = pack(function(*values), found)
            wire.send({"result": given, "arrays": [pack(each, []) for each in arrays]})
        except BaseException as error:  # SystemExit and KeyboardInterrupt are the solution's, too
            shown = map(show, values)
            more = f"; {begin['bytes']:,} bytes are the limit" if isinstance(error, MemoryError) else ""
            wire.send({"raised": fault(function, shown, error) + more})


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


def _load(file: str, name: str) -> tuple[Any, str]:
    """Return the function, and what is wrong with the file."""
    title = os.path.basename(file)
    spec = importlib.util.spec_from_file_location("solution", file)
    assert spec is not None and spec.loader is not None  # the name ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules["solution"] = module
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        return None, f"{title}{f', line {error.lineno}' if error.lineno else ''}: {error.msg}"
    except SystemExit as left:
        return None, f"{title} ends the program, by SystemExit({left}); let it define names alone"
    except BaseException as error:
        lines = [each.lineno for each in traceback.extract_tb(error.__traceback__) if each.filename == file]
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        return None, f"{title}{f', line {lines[-1]}' if lines else ''}: {text}"
    function = getattr(module, name, None)
    return function, "" if callable(function) else f"{title} has no function {name!r}"


def _borrower(wire: Frames) -> Callable[..., Any]:
    """Return what makes objects whose methods the judge's process carries out."""

    def borrow(number: int, methods: list[str], attributes: Mapping[str, Any]) -> Any:
        def method(name: str) -> Callable[..., Any]:
            def ask(*values: Any, **named: Any) -> Any:
                line = sys._getframe(1).f_lineno
                arrays: list[Any] = []
                wire.send({"ask": [number, name, pack([values, named], arrays), line]})
                answer = wire.receive()
                for own, new in zip(arrays, answer["arrays"], strict=True):
                    if own.shape:
                        own[...] = unpack(new, [])
                return unpack(answer["result"], [], borrow)

            return ask

        return SimpleNamespace(**attributes, **{name: method(name) for name in methods})

    return borrow


def show(value: Any) -> str:
    """Return an argument as a sentence has it."""
    if isinstance(value, np.ndarray):
        return f"an array of shape {value.shape}"
    if isinstance(value, list | tuple | dict) and len(repr(value)) > LONG:
        return f"a {type(value).__name__} of {len(value)}"
    return "group" if isinstance(value, SimpleNamespace) else repr(value)
