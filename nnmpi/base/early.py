"""Signals before a command has handlers of its own: what ends is said, and what is lost.

It imports nothing of nnmpi, and nnmpi imports it first, so that it stands before anything else is
loaded. A signal before that, in the 0.05 s in which Python itself starts, ends the process as
Python has it: without a sentence, SIGINT with a traceback.
"""

import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType, TracebackType

STATUS = 128  # of a process that a signal ends, plus its number, as in a shell


def command_of(words: Sequence[str], interpreters: Sequence[str]) -> str:
    """Return the command of a process that begins, in any of its spellings; "" for a program.

    Args:
        words: `sys.argv`.
        interpreters: `sys.orig_argv`, the interpreter's command line.
    """
    if words[:1] == ["-m"]:  # Python looks for the module that it is to run
        words = interpreters[interpreters.index("-m") + 1 :] if "-m" in interpreters else []
    name, command = [*words, "", ""][:2]
    if os.path.basename(name) == "nnmpi":
        return command or name
    return name.removeprefix("nnmpi.") if name.startswith("nnmpi.") else ""


def say_nothing_of_ctrl_c(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print an uncaught exception, as Python does, but Ctrl-C: for `sys.excepthook`."""
    if kind is not KeyboardInterrupt:
        sys.__excepthook__(kind, error, trace)


def explain_signals() -> None:
    """Let SIGINT, SIGTERM and SIGHUP end the process with a sentence.

    One that is ignored stays so, such as SIGHUP under nohup. Training replaces these handlers
    during its steps, and restores them after.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _end)


def _end(number: int, frame: FrameType | None) -> None:
    name = signal.Signals(number).name
    text = f"nnmpi: ended by {name} outside of training's steps; no checkpoint is lost\n"
    os.write(2, text.encode())
    os._exit(STATUS + number)
