"""How a rank leaves the job: together with the others, or by ending it for all. Nobody waits for ever.

MPI itself lets a rank that has failed wait in MPI_Finalize, and the others in their next message. Here every rank that
leaves first announces it in one small non-blocking all-gather of its own:

    all ranks arrive            each leaves with its own status; an error that several share is printed once
    the others do not, and
      this one has failed       after `GRACE_S` it prints its traceback and aborts the job
      this one has ended well   it waits for them, at most `limit_s`, then aborts the job

Covered: uncaught exceptions of the main and of other threads, `sys.exit(status)` at any depth, Ctrl-C, and the end of
the program on some ranks only. Not covered: `raise SystemExit(status)` and an `exit` imported from sys before the
start, which count as a good end (the limit holds), and `os._exit`, a signal or a crash, which the launcher must
notice (Open MPI's and MPICH's do for a signal; MPICH's does not for `os._exit`).
"""

import contextlib
import hashlib
import os
import sys
import threading
import time
import traceback
from types import ModuleType, TracebackType
from typing import Any, NoReturn

from nnmpi.comm.wording import name_ranks
from nnmpi.errors import NnmpiError

GRACE_S = 1.0
DRAIN_S = 0.2  # the launcher forwards what was printed only while the job lives: seen lost on a busy machine
STAGGER_S = 0.35  # more than DRAIN_S, so that the first to give up ends the job before the next one prints
LONGEST_TURN_S = 1.4
INTERRUPTED = 130


class Leaving:
    """One rank's way out.

    Args:
        mpi: mpi4py's MPI module, initialised. Collective over the world: a communicator is made.
        limit_s: how long a rank that ended well waits for the others; None for ever.
    """

    def __init__(self, mpi: ModuleType, limit_s: float | None) -> None:
        self.limit_s = limit_s
        self._mpi = mpi
        self._comm: Any = mpi.COMM_WORLD.Dup()
        self._process = os.getpid()
        self._announced = False

    def failed(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Leave because of an uncaught exception: what `sys.excepthook` calls.

        Raises:
            SystemExit: with the error's status, when no abort is needed; the interpreter then ends with it.
        """
        if self._is_child():
            sys.__excepthook__(kind, error, trace)
            sys.stderr.flush()
            os._exit(1)  # the interpreter's own end would finalise MPI in the name of the parent
        status, text = judge(kind, error, trace)
        self._leave(status, text)
        raise SystemExit(status)

    def thread_failed(self, args: threading.ExceptHookArgs) -> None:
        """End the job because of an uncaught exception in a thread: what `threading.excepthook` calls."""
        if self._is_child() or args.exc_value is None:
            threading.__excepthook__(args)
        elif not isinstance(args.exc_value, SystemExit):  # in a thread it ends the thread and means nothing more
            name = args.thread.name if args.thread else "unknown"
            status, text = judge(args.exc_type, args.exc_value, args.exc_traceback)
            self._print(f"In thread {name}:\n{text}", [self._comm.Get_rank()])
            self._abort(status)

    def exited(self, status: int, text: str = "") -> None:
        """Leave because `sys.exit` was called with another status than 0, and nobody caught it."""
        if not self._is_child():
            self._leave(status, text, alone=f"sys.exit({status}) while other ranks went on")

    def ended(self) -> None:
        """Leave because the program has come to its end: what `atexit` calls."""
        if self._announced or self._is_child() or self._mpi.Is_finalized():
            return
        limit_s = None if self.limit_s is None else self.limit_s + self._turn_s()
        if self._announce(0, "", limit_s) is None:
            self._print(
                f"this rank ended its program and waited {self.limit_s:g} s for the others, which have not come to "
                "their end; let all ranks end together, or raise the limit: NNMPI_EXIT_LIMIT_S, in seconds",
                [self._comm.Get_rank()],
            )
            self._abort(1)

    def _leave(self, status: int, text: str, alone: str = "") -> None:
        """Print what went wrong, once, and return if all ranks leave; else abort the job.

        With nothing to print, `alone` says why the job is aborted.
        """
        rank = self._comm.Get_rank()
        alike = self._announce(status, text, GRACE_S + self._turn_s())
        if alike is None:
            self._print(text or alone, [rank])
            self._abort(status)
        if rank == min(alike):
            self._print(text, alike)

    def _turn_s(self) -> float:
        """Return how much longer than rank 0 this rank waits before it aborts.

        When several ranks give up, the first one ends the job, which saves the reader from the same text twice.
        """
        return float(min(STAGGER_S * self._comm.Get_rank(), LONGEST_TURN_S))

    def _announce(self, status: int, text: str, limit_s: float | None) -> list[int] | None:
        """Tell the other ranks that this one leaves; return those that leave alike, None if not all leave in time."""
        self._announced = True
        own = hashlib.blake2b(f"{status} {text}".encode(), digest_size=16).digest()
        everyones = bytearray(len(own) * self._comm.Get_size())
        request = self._comm.Iallgather([own, self._mpi.BYTE], [everyones, self._mpi.BYTE])
        deadline = None if limit_s is None else time.monotonic() + limit_s
        pause = 1e-4
        while not request.Test():
            if deadline is not None and time.monotonic() > deadline:
                return None
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        digests = [bytes(everyones[i : i + len(own)]) for i in range(0, len(everyones), len(own))]
        return [rank for rank, digest in enumerate(digests) if digest == own]

    def _print(self, text: str, ranks: list[int]) -> None:
        """Write the text to stderr; the ranks are named unless it is everybody's sentence."""
        if not text:
            return
        size = self._comm.Get_size()
        if size > 1 and ("\n" in text or len(ranks) < size):
            text = f"{name_ranks(ranks)} of {size}: {text}"
        with contextlib.suppress(OSError, ValueError):  # closed, or its reader is gone
            sys.stdout.flush()
            sys.stderr.write(text + "\n")
            sys.stderr.flush()

    def _abort(self, status: int) -> NoReturn:
        time.sleep(DRAIN_S)
        self._mpi.COMM_WORLD.Abort(status)
        os._exit(status)  # for an MPI whose Abort returns

    def _is_child(self) -> bool:
        """Whether this is a fork of the process that started MPI: it must not touch MPI."""
        return os.getpid() != self._process


def judge(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> tuple[int, str]:
    """Return the status that an uncaught exception ends the program with, and what to print of it.

    Of nnmpi's own errors the sentence is printed, of any other the traceback, and of Ctrl-C nothing.
    """
    if isinstance(error, NnmpiError):
        return error.exit_status, str(error)
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED, ""
    return 1, "".join(traceback.format_exception(kind, error, trace)).rstrip()
