"""A solution: a function of an untrusted file that runs in other processes and passes values.

    judge                                                     a process of each rank
    function(group, x, w)   ------ x, w ------>   row_linear(group, x, w)
    group.all_reduce(y)     <------- y --------   group.all_reduce(y)
                            ------- sum ------>
                            <--- the result ---

    with Solution(file, "ring_all_reduce") as function:
        EXERCISES["ring-all-reduce"].check(function)

A check calls it like any function and judges the result. These rules hold:

- Arguments and results are values: numbers, strings, lists, tuples, dicts, arrays, ranges, slices,
  steps, instructions (`exercise.wire`). An iterator's values arrive as a tuple. Of any other object
  only the type's name arrives.
- Changes that the function makes to an array argument are visible after the call.
- An object whose class has `lent`, a list of methods and attributes, is lent. Its methods run in
  the judge's process, so the simulated world itself counts waits, bytes and seconds
  (`exercise.group_operations.Ranks`).
- A rank's calls go to that rank's process, chosen by the first lent object with a `rank`; all other
  calls go to one process. No process sees another's values.
- Inputs are drawn for each check: a solution could contain the answers to fixed ones.
- An error in a process is a `WrongAnswer` with a sentence, or `TimedOut`.

Limits: wall-clock seconds for the full check (by a timer), and with `resource` also CPU time,
memory, no new processes and no files; on Linux the wall of `exercise.wall`. docs/grading.md says
what holds where.
"""

import ast
import os
import re
import secrets
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from shlex import quote
from subprocess import DEVNULL, PIPE, Popen, TimeoutExpired
from threading import Timer
from typing import Any, Self

import numpy as np

from nnmpi.base.custom import called, raised
from nnmpi.base.errors import CommError, NnmpiError, UsageError, raised_as
from nnmpi.base.launcher import VARIABLES
from nnmpi.teaching.exercise.child import show
from nnmpi.teaching.exercise.wire import Frames, WireError, WrongAnswer

LIMIT_S = 60.0  # for a whole check, which takes a few seconds at most
LIMIT_BYTES = 2 << 30
PACKAGE, SITE, LIBRARY = (
    Path(file).resolve().parent for file in (__file__, np.__file__, os.__file__)
)
PACKAGE, SITE = PACKAGE.parents[1], SITE.parent
# The first lines of a process: nnmpi's packages are empty modules, so that their __init__ files do
# not run; submodules can be imported until the child is loaded.
BEGIN = """
import sys, types
sys.path.append({site!r})
packages = {packages!r}
for name, folder in packages.items():
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [folder]
from nnmpi.teaching.exercise.child import main
for name in packages:
    sys.modules[name].__path__ = []
sys.path.pop()
sys.path_importer_cache.clear()
main()
"""
# sources
ANSWERS = """comm/algorithms schedule comm/synchrony parallel teaching/exercise comm/group.py
base/shard.py"""
NAMES = re.compile(r"\b(id|arg|name)='\w*'")  # in a dumped tree
LEAST = 60  # nodes of a body; shorter ones, such as GPipe's, may be equal without copying
MOST = 4000  # nodes of a body; nnmpi's longest function has a sixth
MOST_BYTES, MOST_BYTES_OF_ALL, MOST_FILES = 1 << 17, 1 << 19, 200


class TimedOut(WrongAnswer):
    """A solution over its time limit."""


def how_to_give(file: Path) -> str:
    """Return what makes a solution of an archive or a notebook; "" for other files."""
    if file.suffix == ".ipynb":
        return (
            f"{file.name} is a notebook; save its code as a file of Python: jupyter nbconvert --to"
            f" script {quote(file.name)}"
        )
    if file.suffix in (".zip", ".tar", ".gz", ".tgz", ".bz2", ".xz", ".7z", ".rar"):
        unpack = f": unzip {quote(file.name)} -d {quote(file.stem)}"
        return (
            f"{file.name} is an archive; unpack it, and give the folder"
            f"{unpack if file.suffix == '.zip' else ''}"
        )
    return ""


@dataclass(eq=False)
class Solution:
    """A function of an untrusted file, called like a local one; a context manager.

    Args:
        file: the source file.
        name: of the function.
        folder: files in it may be imported and read; None: only `file`.
        limit_s: wall-clock seconds from the first call on.
        limit_bytes: of memory for each process.
    """

    file: Path
    name: str
    folder: Path | None = None
    limit_s: float = LIMIT_S
    limit_bytes: int = LIMIT_BYTES

    def __post_init__(self) -> None:
        """Prepare; the first call starts a process."""
        self.__name__, self._expired = self.name, False
        self._processes: dict[int | None, tuple[Popen[bytes], Frames]] = {}
        self._timer = Timer(self.limit_s, self._expire)
        self._timer.daemon = True

    def __enter__(self) -> Self:
        """Return itself.

        Raises:
            UsageError: for a file that cannot be read.
            WrongAnswer: for links, and for a copy of one of nnmpi's functions, whatever its
                names, comments and types.
        """
        if self.file.suffix != ".py":
            raise WrongAnswer(
                how_to_give(self.file) or f"{self.file.name} must be a file whose name ends in .py"
            )
        files = (
            [self.file]
            if self.folder is None
            else [*islice(self.folder.rglob("*"), MOST_FILES + 1)]
        )
        if len(files) > MOST_FILES:
            raise WrongAnswer(
                f"{self.folder} has more than {MOST_FILES} files; hand in only your own"
            )
        with raised_as(UsageError, f"{self.file} cannot be read"):
            code = sum(file.lstat().st_size for file in files if file.suffix == ".py")
        if code > MOST_BYTES_OF_ALL:
            raise WrongAnswer(
                f"{self.folder} has more than {MOST_BYTES_OF_ALL:,} bytes of code; hand in only"
                " your own"
            )
        for file in files:
            if self.folder and file.is_symlink():
                raise WrongAnswer(f"{file.name} is a link; hand in the file itself")
            if not (file.is_file() or (self.folder and file.is_dir())):
                raise WrongAnswer(
                    f"{file.name} is no ordinary file: to open a pipe or a device might take for"
                    " ever"
                )
            if file.suffix == ".py" and file.is_file():
                _refuse_own_text(file)
        self.file = self.file.resolve()
        return self

    def __exit__(self, *error: object) -> None:
        """End its processes."""
        self._timer.cancel()
        self._kill()
        for process, _ in self._processes.values():
            process.wait()
            for stream in (process.stdin, process.stdout):
                # not read to its end, which another holder of the pipe could keep open
                with suppress(OSError):
                    stream.close()  # type: ignore[union-attr]

    def __call__(self, *values: Any) -> Any:
        """Call the function in the process of the values' rank, and return its result.

        Raises:
            WrongAnswer: if the function raises, returns something other than plain data, or ends
                its process.
            TimedOut: if it takes too long.
        """
        process, wire = self._process(
            next((value.rank for value in values if hasattr(value, "rank")), None)
        )
        try:
            return wire.ask(0, "", values, {}, 0)
        except NnmpiError:
            raise
        except (OSError, LookupError, TypeError, ValueError) as error:
            raise self._ended(process, called(self, map(show, values)), error) from None

    def _process(self, rank: int | None) -> tuple[Popen[bytes], Frames]:
        """Return the process of a rank; start it and load the file on the first call."""
        if not self._processes:
            self._timer.start()
        if rank not in self._processes:
            folders = {
                ".".join(("nnmpi", *file.parent.relative_to(PACKAGE).parts)): f"{file.parent}"
                for file in PACKAGE.rglob("__init__.py")
            }
            begin = BEGIN.format(site=f"{SITE}", packages=folders)
            names = os.environ.keys() & {"SYSTEMROOT", "LD_LIBRARY_PATH"}
            process = Popen(
                [sys.executable, "-I", "-S", "-B", "-c", begin],
                stdin=PIPE,
                stdout=PIPE,
                stderr=DEVNULL,
                cwd=LIBRARY,
                env={name: os.environ[name] for name in names} | dict.fromkeys(VARIABLES, "1"),
                start_new_session=True,
            )
            assert process.stdout is not None and process.stdin is not None
            wire = Frames(process.stdout, process.stdin, self._do)
            self._processes[rank] = process, wire
            folder = [str(self.folder.resolve())] if self.folder else []
            roots = [
                *map(str, (LIBRARY, SITE / "numpy", SITE / "numpy.libs")),
                *(folder or [str(self.file)]),
            ]
            word = secrets.token_hex(16)
            with suppress(OSError):  # a process that has ended: the first call reports it
                wire.send(
                    word,
                    str(self.file),
                    self.name,
                    int(self.limit_s) + 1,
                    int(self.limit_bytes),
                    folder,
                    roots,
                    str(PACKAGE),
                )
            wire.word = word
        return self._processes[rank]

    def _do(
        self, lent: Any, name: str, values: Sequence[Any], named: dict[str, Any], line: int
    ) -> Any:
        """Call a lent method from a code object with the solution's file and line, for errors."""
        # a string could name an algorithm in a file, which would run in the judge's process
        strings = any(isinstance(value, str) for value in (*values, *named.values()))
        if strings or name not in getattr(type(lent), "lent", ()):
            raise WireError(f"{name} is not lent to the solution")
        method = getattr(lent, name)
        scope: dict[str, Any] = {"call": lambda: method(*values, **named)}
        text = "\n" * (min(int(line), 100_000) - 1) + "done = call()"
        try:
            exec(compile(text, str(self.file), "exec"), scope)
        except (CommError, WrongAnswer):
            raise  # the first names the lines of all ranks
        except Exception as error:
            call = called(method, map(show, values))
            raise WrongAnswer(raised(call, str(self.file), error)) from error
        return scope["done"]

    def _expire(self) -> None:
        self._expired = True
        self._kill()

    def _kill(self) -> None:
        for process, _ in [*self._processes.values()]:
            with suppress(OSError):
                os.killpg(process.pid, 9) if hasattr(os, "killpg") else process.kill()

    def _ended(self, process: Popen[bytes], call: str, error: Exception) -> WrongAnswer:
        if self._expired:
            return TimedOut(f"{call} is not over after {self.limit_s:g} s and was ended")
        if not isinstance(error, OSError) and "ended" not in str(error):
            return WrongAnswer(f"{call} returns no readable value: {error}")
        with suppress(TimeoutExpired):
            process.wait(5)
        self._kill()  # it may have closed its streams and still run
        return WrongAnswer(
            f"{call} ended its process (status {process.wait()}) and returned no value"
        )


# ---- copies of the package's functions ----


def _refuse_own_text(file: Path) -> None:
    with raised_as(UsageError, f"{file} cannot be read"), file.open("rb") as stream:
        text = stream.read(MOST_BYTES + 1)
    if len(text) > MOST_BYTES:
        raise WrongAnswer(f"{file.name} has more than {MOST_BYTES:,} bytes; hand in only your code")
    try:
        for shape, name in _functions(text):
            if shape in _answers():
                raise WrongAnswer(
                    f"apart from names, {name} is nnmpi's {_answers()[shape]}; write your own"
                )
    except (RecursionError, MemoryError):
        raise WrongAnswer(
            f"{file.name} is nested too deeply to be read; write it flatter"
        ) from None
    except (SyntaxError, ValueError):  # its import reports these
        return


@cache
def _answers() -> dict[str, str]:
    return {
        shape: f"{name} ({file.relative_to(PACKAGE.parent).as_posix()})"
        for place in ANSWERS.split()
        for file in (PACKAGE / place, *(PACKAGE / place).rglob("*.py"))
        if file.suffix == ".py"
        for shape, name in _functions(file.read_bytes())
    }


def _functions(text: bytes) -> Iterator[tuple[str, str]]:
    """Yield body (without names) and name of each function of LEAST to MOST nodes."""
    for node in ast.walk(ast.parse(text)):
        # counted before it is written out: nested functions are, at every level
        if isinstance(node, ast.FunctionDef) and len([*islice(ast.walk(node), MOST + 1)]) <= MOST:
            body = node.body[ast.get_docstring(node) is not None :]
            shape = NAMES.sub("", "".join(map(ast.dump, body)))
            if shape.count("(") >= LEAST:
                yield shape, node.name
