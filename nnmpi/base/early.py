"""Signals before a command has handlers of its own: what ends is said, and what is lost.

It imports nothing of nnmpi, so that it stands before anything else is loaded.
"""

import os
import signal
from types import FrameType

STATUS = 128  # of a process that a signal ends, plus its number, as in a shell


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
