"""The user's lines: which frames of an error or a stack lie in code that is not nnmpi's."""

import os
import re
import sys
import sysconfig
import traceback
from functools import lru_cache
from pathlib import Path
from types import FrameType

PACKAGE = str(Path(__file__).parents[1])
# the folder of the command `nnmpi`, whose few lines call nnmpi
_OTHERS = tuple(
    folder + os.sep
    for folder in (PACKAGE, os.path.dirname(os.__file__), sysconfig.get_path("scripts"))
)
# site-packages, Debian's dist-packages; below Python's library unless there is an environment
_INSTALLED = "-packages"
# what nnmpi calls itself: "x.npz is truncated" needs no lines of NumPy's reader
_CALLED = re.compile(
    rf"{_INSTALLED}/(numpy|mpi4py|safetensors|filelock|pooch|urllib3|requests|threadpoolctl|numba"
    r"|llvmlite|ml_dtypes|PIL|tokenizers|matplotlib|tensorboardX|onnx|cupyx?|nvmath|cudnn)(/|\.py)"
)
# what compiled modules name as their text, which lies nowhere on this machine:
# "numpy/random/mtrand.pyx", "/build/Python-3.11/Modules/pyexpat.c"
_COMPILED = (".c", ".cc", ".cpp", ".pyx", ".pxd", ".pxi", ".rs")
MOST = 12  # lines of an error: a recursion has thousands


@lru_cache(maxsize=1024)
def is_users(file: str) -> bool:
    """Return whether a file is neither nnmpi's nor its libraries'; other packages are users'."""
    if file.startswith(("<frozen", _OTHERS[0])) or file.endswith(_COMPILED):
        return False
    return not _CALLED.search(file) and (not file.startswith(_OTHERS) or _INSTALLED in file)


def lines_of(error: BaseException) -> list[str]:
    """Return an error's frames in users' code: "net.py:12 in forward: x = ...", innermost last.

    An error that ranks agreed on has the lines of the rank that failed.
    """
    own = [
        f"{shown(frame.filename)}:{frame.lineno} in {frame.name}"
        + (f": {frame.line}" if frame.line else "")
        for (code, _), frame in zip(
            traceback.walk_tb(error.__traceback__),
            traceback.extract_tb(error.__traceback__),
            strict=True,
        )
        # a dataclass's own __init__ is nobody's text
        if is_users(frame.filename) and "__create_fn__" not in code.f_code.co_qualname
    ]
    inner = getattr(error, "lines", ()) or (lines_of(error.__cause__) if error.__cause__ else ())
    lines = list(dict.fromkeys([*own, *inner]))
    return lines if len(lines) <= MOST else [*lines[: MOST // 2], "...", *lines[-MOST // 2 :]]


def users_line() -> tuple[str, int]:
    """Return the file and number of the innermost line of users' code that is being run, if any."""
    frame: FrameType | None = sys._getframe(1)
    while frame and (
        frame.f_code.co_filename.startswith(PACKAGE) or not is_users(frame.f_code.co_filename)
    ):
        frame = frame.f_back
    return (frame.f_code.co_filename, frame.f_lineno) if frame else ("", 0)


def shown(file: str) -> str:
    """Return a file's path, from the current folder if it lies below it."""
    try:
        return str(Path(file).relative_to(Path.cwd()))
    except (OSError, ValueError):  # OSError: the current folder is removed
        return file
