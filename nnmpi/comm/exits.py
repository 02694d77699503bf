"""Noticing that `sys.exit` ends the program, and with which status, while other ranks can still be told.

The interpreter tells nobody: a SystemExit does not reach `sys.excepthook`, and `atexit` is not given the status. But it
reads the exception's `code` once, with no Python code running, when nobody has caught the exception.
"""

import sys
from collections.abc import Callable
from typing import NoReturn


class Exit(SystemExit):
    """A SystemExit that tells its status to `uncaught` at the moment when the interpreter gives up."""

    def __init__(self, code: object, uncaught: Callable[[int, str], None]) -> None:
        super().__init__(code)
        self._code = code
        self._uncaught: Callable[[int, str], None] | None = uncaught

    @property
    def code(self) -> object:  # type: ignore[override]
        """What was given to `sys.exit`."""
        if self._uncaught is not None and _is_interpreter_asking():
            uncaught, self._uncaught = self._uncaught, None
            status, text = read_code(self._code)
            if status != 0:
                uncaught(status, text)
                return status  # a text has been printed by now, once for all ranks
        return self._code

    def __reduce__(self) -> tuple[type[SystemExit], tuple[object]]:
        """Travel to other processes as a plain SystemExit."""
        return SystemExit, (self._code,)


def watch_exit(uncaught: Callable[[int, str], None]) -> None:
    """Let `sys.exit` call `uncaught(status, text)` before the program ends with a status other than 0.

    It replaces `sys.exit`, whose exceptions can be caught as before. An `exit` that was imported earlier stays as it
    is.
    """

    def watched_exit(code: object = None, /) -> NoReturn:
        """Exit the interpreter by raising SystemExit(code)."""
        raise Exit(code, uncaught)

    sys.exit = watched_exit


def read_code(code: object) -> tuple[int, str]:
    """Return the status that the interpreter makes of an exit code, and the text that it prints."""
    if code is None:
        return 0, ""
    if isinstance(code, int):
        return code & 0xFF, ""
    return 1, str(code)


def _is_interpreter_asking() -> bool:
    """Whether the property that calls this was read with no Python code running."""
    try:
        sys._getframe(2)
    except ValueError:
        return True
    return False
