"""A solution as the judge sees it: a function in processes of its own, which hands over values.

    judge                                                     a process of each rank
    function(group, x, w)   --- {"call": [lent, x, w]} --->   row_linear(group, x, w)
    group.all_reduce(y)     <-- {"ask": [.., "all_reduce", y]}   group.all_reduce(y)
                            --- {"result": None, "arrays": [y]} -->
                            <-- {"result": y, "arrays": [x, w]} ---

    with Solution(file, "ring_all_reduce") as function:
        EXERCISES["ring-all-reduce"].check(function)

So a check is written as for any function: it calls it, and judges what it gives. What a check may
rely on:

- Arguments and results are values: numbers, texts, lists, tuples, dicts, arrays, ranges, slices,
  steps, instructions (`exercise.wire`). An iterator's values come as a tuple. What else is handed
  over has a type with its name, no more.
- An array among the arguments has, when the call returns, what the function made of it.
- An object whose class has `lent`, the names of methods and attributes, is lent. Its methods are
  carried out here: who waits for whom, what is sent and which seconds it takes are what the
  simulated world counted (`exercise.shared.Ranks`).
- A rank's calls go to that rank's process, by the first lent object with a `rank`; all other calls
  go to one process. No process sees another's values.
- Inputs are drawn anew for each check (`exercise.exercise.draws`): numbers that stand in the package can be
  written down beforehand.
- What goes wrong in a process is a `WrongAnswer` with a sentence; `TimedOut` when it takes too long.

A solution is held to seconds by the clock for the whole check (by a timer, everywhere), and where
there is `resource`, to processor time, memory, no further processes and no files. What is not
defended against stands in docs/grading.md.
"""

import compileall
import os
import re
import secrets
import shutil
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen, TimeoutExpired
from threading import Timer
from typing import Any, Self

import numpy as np

from nnmpi.custom import fault
from nnmpi.errors import NnmpiError
from nnmpi.exercise.child import FIRST_WORD, show
from nnmpi.exercise.exercise import WrongAnswer
from nnmpi.exercise.wire import Frames, WireError, pack, unpack

LIMIT_S = 60.0  # for a whole check, which takes a few seconds at most
LIMIT_BYTES = 2 << 30
PACKAGE = Path(__file__).resolve().parents[1]
IMPORT = re.compile(r"^from nnmpi\.([\w.]+) import", re.MULTILINE)
BEGIN = "import sys; sys.path.insert(0, {!r}); from nnmpi.exercise.child import main; main()"


class TimedOut(WrongAnswer):
    """A solution that takes longer than it may."""


class Surroundings:
    """The folder that solutions' processes import from: `exercise.child` with what it imports, and NumPy.

    One is enough for many solutions.
    """

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="nnmpi-exercise-"))
        given = ["exercise.child"]
        for name in given:  # which grows
            file = Path(*name.split(".")).with_suffix(".py")
            target = self.folder / "nnmpi" / file
            target.parent.mkdir(parents=True, exist_ok=True)
            for package in (target.parent, self.folder / "nnmpi"):
                (package / "__init__.py").touch()
            target.write_bytes((PACKAGE / file).read_bytes())
            given += {*IMPORT.findall(target.read_text("utf-8"))} - {*given}
        compileall.compile_dir(self.folder, quiet=2)  # once for all processes
        site = Path(np.__file__).resolve().parents[1]
        self.roots = [self.folder]
        for library in (site / "numpy", site / "numpy.libs"):
            if library.exists():
                self.roots.append(library)
                with suppress(OSError):  # Windows allows no links
                    (self.folder / library.name).symlink_to(library, target_is_directory=True)
        self.path = [] if (self.folder / "numpy").exists() else [str(site)]
        self.roots.append(Path(os.__file__).resolve().parent)

    def start(self) -> Popen[bytes]:
        """Return a new process in which no solution is yet."""
        path = "".join(f"sys.path.append({each!r}); " for each in self.path)
        system = {name: os.environ[name] for name in ("SYSTEMROOT", "LD_LIBRARY_PATH") if name in os.environ}
        return Popen(
            [sys.executable, "-I", "-S", "-B", "-c", path + BEGIN.format(str(self.folder))],
            stdin=PIPE,
            stdout=PIPE,
            stderr=DEVNULL,
            cwd=self.folder,
            env={**system, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
            start_new_session=True,
        )

    def close(self) -> None:
        """Remove it."""
        shutil.rmtree(self.folder, ignore_errors=True)


class Solution:
    """A function of a file that anybody may have written. It is called as if it were here.

    Args:
        file: where it is defined.
        name: of the function.
        around: what its processes import from; made for this one if it is None.
        folder: whose files it may import and read; None: no other than its own.
        limit_s: seconds by the clock, from the first call on.
        limit_bytes: of memory for each process.
    """

    def __init__(
        self,
        file: Path,
        name: str,
        around: Surroundings | None = None,
        folder: Path | None = None,
        limit_s: float = LIMIT_S,
        limit_bytes: int = LIMIT_BYTES,
    ) -> None:
        self.file, self.__name__ = file.resolve(), name
        self._around, self._own = around or Surroundings(), around is None
        self._folder, self._limit_s, self._limit_bytes = folder and folder.resolve(), limit_s, limit_bytes
        self._processes: dict[int | None, tuple[Popen[bytes], Frames]] = {}
        self._timer: Timer | None = None
        self._expired = False

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """End its processes."""
        if self._timer is not None:
            self._timer.cancel()
        self._kill()
        for process, _ in self._processes.values():
            process.communicate()
        if self._own:
            self._around.close()

    def __call__(self, *values: Any) -> Any:
        """Return what the function makes of these values.

        Raises:
            WrongAnswer: for an exception in it, for what is no value, and for a process that ends.
            TimedOut: when it takes too long.
        """
        lent: list[Any] = []

        def lend(value: Any) -> Any:
            names = getattr(type(value), "lent", None)
            if names is None:
                return None
            lent.append(value)
            found = {name: getattr(value, name) for name in names}
            attributes = {name: each for name, each in found.items() if not callable(each)}
            return len(lent) - 1, [name for name in names if name not in attributes], attributes

        arrays: list[Any] = []
        message = {"call": [pack(each, arrays, lend) for each in values]}
        rank = next((each.rank for each in lent if hasattr(each, "rank")), None)
        process, wire = self._process(rank)
        try:
            wire.send(message)
            answer = wire.receive()
            while "ask" in answer:
                number, name, given, line = answer["ask"]
                theirs: list[Any] = []
                positional, named = unpack(given, theirs)
                method = self._method(lent[number], name, [*positional, *named.values()])
                result = self._ask(method, positional, named, line)
                wire.send({"result": pack(result, [], lend), "arrays": [pack(each, []) for each in theirs]})
                answer = wire.receive()
            if "raised" in answer:
                raise WrongAnswer(str(answer["raised"]))
            found = unpack(answer["result"], [])
            for own, new in zip(arrays, unpack(answer["arrays"], []), strict=True):
                if isinstance(own, np.ndarray) and own.flags.writeable:
                    own[...] = new
        except (WireError, OSError, LookupError, TypeError, ValueError) as error:
            if isinstance(error, NnmpiError) and not isinstance(error, WireError):
                raise
            raise self._ended(process, error) from None
        return found

    def _process(self, rank: int | None) -> tuple[Popen[bytes], Frames]:
        """Return the process of a rank, in which the file is loaded when it is first asked."""
        if self._timer is None:
            self._timer = Timer(self._limit_s, self._expire)
            self._timer.daemon = True
            self._timer.start()
        if rank not in self._processes:
            process = self._around.start()
            assert process.stdout is not None and process.stdin is not None
            wire = Frames(process.stdout, process.stdin, FIRST_WORD)
            self._processes[rank] = process, wire
            word = secrets.token_hex(16)
            roots = [*self._around.roots, self._folder or self.file]
            begin = {
                "word": word,
                "file": str(self.file),
                "function": self.__name__,
                "seconds": int(self._limit_s) + 1,
                "bytes": self._limit_bytes,
                "path": [str(self._folder)] * (self._folder is not None),
                "roots": [str(each.resolve()) for each in roots],
                "hidden": str(PACKAGE),
            }
            with suppress(OSError):  # it has ended, as the first answer tells
                wire.send(begin)
            wire.word = word
        return self._processes[rank]

    def _method(self, lent: Any, name: str, values: list[Any]) -> Callable[..., Any]:
        """Return a method that a solution may call with these values."""
        names = type(lent).lent
        texts = [each for each in values if isinstance(each, str)]
        if name not in names or not all(each.replace("-", "").isalnum() for each in texts):
            raise WireError(f"{name} is not among what it may call")
        return getattr(lent, name)

    def _ask(self, method: Callable[..., Any], values: list[Any], named: dict[str, Any], line: int) -> Any:
        """Return what a method gives; it seems to be called by the solution's own line, which sentences name."""
        scope: dict[str, Any] = {"call": lambda: method(*values, **named)}
        begin = "\n" * (min(int(line), 100_000) - 1)
        try:
            exec(compile(f"{begin}done = call()", str(self.file), "exec"), scope)
        except NnmpiError:
            raise
        except Exception as error:
            raise WrongAnswer(f"{fault(method, map(show, values), error)} (line {line} of {self.file.name})") from error
        return scope["done"]

    def _expire(self) -> None:
        self._expired = True
        self._kill()

    def _kill(self) -> None:
        for process, _ in [*self._processes.values()]:
            with suppress(OSError):
                os.killpg(process.pid, 9) if hasattr(os, "killpg") else process.kill()

    def _ended(self, process: Popen[bytes], error: Exception) -> WrongAnswer:
        """Return what is to be said of a process that hands over no value."""
        if self._expired:
            return TimedOut(f"{self.__name__} takes longer than {self._limit_s:g} s, and is ended")
        if not isinstance(error, OSError) and "ended" not in str(error):
            return WrongAnswer(f"{self.__name__} hands over what is no value: {error}")
        with suppress(TimeoutExpired):
            process.wait(5)
        self._kill()  # it may have closed its streams, and live
        return WrongAnswer(f"{self.__name__} ends its process (status {process.wait()}) and hands over no value")
