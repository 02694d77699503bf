"""Signals before a command has handlers of its own: what ends is said, and what is lost.

It imports nothing of nnmpi, and nnmpi imports it first, so that it stands before anything else is
loaded. A signal before that, in the 0.05 s in which Python itself starts, ends the process as Python
has it: without a sentence, SIGINT with a traceback.
"""

import os
import signal
from collections.abc import Sequence
from types import FrameType

STATUS = 128  # of a process that a signal ends, plus its number, as in a shell


def trains(words: Sequence[str], interpreters: Sequence[str]) -> bool:
    """Return whether a process that begins is `nnmpi train`, in any of its spellings.

    Args:
        words: `sys.argv`.
        interpreters: `sys.orig_argv`, the interpreter's command line.
    """
    if words[:1] == ["-m"]:  # Python looks for the module that it is to run
        words = interpreters[interpreters.index("-m") + 1 :] if "-m" in interpreters else []
    name, command = [*words, "", ""][:2]
    return name == "nnmpi.train" or (os.path.basename(name) == "nnmpi" and command == "train")


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
