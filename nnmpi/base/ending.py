"""Errors that no caller can be told: of an object that is dropped, or of the interpreter's end."""

import os
import sys
from functools import partial

from nnmpi.base.command import complain
from nnmpi.base.errors import NnmpiError
from nnmpi.base.launcher import read_launch

NAME = "_nnmpi_status"  # in `sys`, which the interpreter clears last


class LastWord:
    """Ends the process with a status when it is dropped, as nothing else of Python is left.

    Attributes:
        said: what was printed; simulated ranks find the same.
    """

    def __init__(self, status: int) -> None:
        self._leave = partial(os._exit, status)  # a global would be gone by then
        self.said: set[str] = set()

    def __del__(self) -> None:
        self._leave()


def fail_at_end(error: NnmpiError) -> None:
    """Print an error now, and let the program end with its status, after all else that ends it.

    What `__del__` and functions of `atexit` raise, Python prints, and ends with status 0.
    """
    if not hasattr(sys, NAME):
        setattr(sys, NAME, LastWord(error.exit_status))
    said: set[str] = getattr(sys, NAME).said
    if str(error) not in said:
        said.add(str(error))
        launch = read_launch(os.environ)
        rank = f" (on rank {launch.rank})" if launch is not None and launch.size > 1 else ""
        complain(f"{error}{rank}")
