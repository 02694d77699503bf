"""The end of a rank's program: together with the other ranks, or by aborting the job.

With MPI alone a failed rank waits in MPI_Finalize, and the others wait in their next message. Here
every rank announces its end first, in one small non-blocking all-gather:

    all ranks end            each with its own status; an error shared by several is printed once
    not all ranks end, and
      this one has failed    after `GRACE_S` it prints its traceback and aborts the job
      this one ended well    it waits for the others, at most `limit_s`, then aborts the job

Afterwards nnmpi's calls are refused, as objects that are deleted last may make them, and what else
waits then is ended by a limit.

Covered: uncaught exceptions of the main and of other threads, Ctrl-C, and an end of the program on
some ranks only. `sys.exit(status)` counts as a good end, because Python shows its status to no
hook: a rank that fails alone must raise an exception. Signals, crashes and `os._exit` are detected
by the launcher; a completed training leaves `finished.json`. (An earlier version replaced
`sys.exit` and `os._exit` for the process, which rewrote the interpreter for a user's other code.)
"""

import contextlib
import faulthandler
import hashlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from math import inf
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, NoReturn

import nnmpi.base.clock as clock
from nnmpi.base.command import complain, describe_uncaught, leave_fork
from nnmpi.base.errors import name_ranks, note_read_only

AT_END = "MPI's end, for the other ranks"
GRACE_S = 1.0
# The launcher forwards printed text only while the job lives: text was lost on a busy machine.
DRAIN_S = 0.2
# more than DRAIN_S, so that the first rank to give up ends the job before the next one prints
STAGGER_S = 0.35
LONGEST_TURN_S = 1.4
STALLED = os.EX_TEMPFAIL  # exit status of a job aborted for a long wait


class Shutdown:
    """Ends one rank, however its program ends. Making one is collective.

    Args:
        mpi: mpi4py's MPI module, initialized.
        limit_s: seconds that a rank that ended well waits for the others.
        world: the `MpiWorld`.
    """

    def __init__(self, mpi: ModuleType, limit_s: float, world: Any) -> None:
        self.limit_s, self._world = limit_s, world
        self._mpi = mpi
        self._comm: Any = mpi.COMM_WORLD.Dup()
        self._process = os.getpid()
        self._announced = False
        # called on all ranks together when all have ended
        self.close: Callable[[], None] = lambda: None

    def on_exception(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """End because of an uncaught exception: for `sys.excepthook`."""
        if self._is_child():
            sys.__excepthook__(kind, error, trace)
            leave_fork(1)
        note_read_only(error)
        status, text = describe_uncaught(error)
        rank = self._comm.Get_rank()
        same = self._announce(status, text, GRACE_S + self._turn_s())
        if same is None:
            self._print(text, [rank])
            abort(self._mpi, status)
        # With ranks on several nodes, the launcher tells those of the others to end when one has.
        signal.signal(signal.SIGTERM, lambda *_: os._exit(status))
        if rank == min(same):
            self._print(text, same)
        raise SystemExit(status)  # sets the interpreter's exit status

    def on_thread_exception(self, args: threading.ExceptHookArgs) -> None:
        """End the job because of an uncaught exception in a thread: for `threading.excepthook`."""
        if self._is_child() or args.exc_value is None:
            threading.__excepthook__(args)
        elif not isinstance(args.exc_value, SystemExit):
            # (SystemExit in a thread ends only the thread)
            name = args.thread.name if args.thread else "unknown"
            status, text = describe_uncaught(args.exc_value)
            self._print(f"In thread {name}:\n{text}", [self._comm.Get_rank()])
            abort(self._mpi, status)

    def on_end(self) -> None:
        """End normally, after the program: for `atexit`."""
        if self._is_child():
            leave_fork(0)
        if self._mpi.Is_finalized():
            return
        if self._announced:
            # All have failed. Open MPI's launcher kills the other ranks when the first one ends, so
            # finalize, which waits for all, before this process ends.
            _limit_the_rest(self.limit_s)
            self.close()
            self._mpi.Finalize()
            time.sleep(DRAIN_S)
            return
        if self._announce(0, "", self.limit_s + self._turn_s()) is None:
            self._print(
                f"this rank ended its program and waited {self.limit_s:g} s for the others, which"
                " have not ended; end all ranks together, or raise the limit NNMPI_EXIT_LIMIT_S,"
                " in seconds",
                [self._comm.Get_rank()],
            )
            abort(self._mpi, 1)
        _limit_the_rest(self.limit_s)
        self.close()

    def _turn_s(self) -> float:
        """Return the seconds that this rank waits longer than rank 0 before it aborts.

        So when several ranks give up, the first one ends the job before the others print the same
        text again.
        """
        return float(min(STAGGER_S * self._comm.Get_rank(), LONGEST_TURN_S))

    def _announce(self, status: int, text: str, limit_s: float) -> list[int] | None:
        """Announce this rank's end; return the ranks with the same status and text.

        Return None if not all ranks end in time.
        """
        self._announced, self._world.waiter = True, None
        self._world.operations.append((time.monotonic(), AT_END))
        local = hashlib.blake2b(
            f"{status} {text}".encode(errors="backslashreplace"), digest_size=16
        ).digest()
        gathered = bytearray(len(local) * self._comm.Get_size())
        # Non-blocking: a rank whose partners never end must time out and abort.
        request = self._comm.Iallgather([local, self._mpi.BYTE], [gathered, self._mpi.BYTE])
        in_time = self._world.wait_until(request.Test, clock.now() + limit_s)
        self._world.has_ended = True
        if not in_time:
            return None
        digests = [bytes(gathered[i : i + len(local)]) for i in range(0, len(gathered), len(local))]
        return [rank for rank, digest in enumerate(digests) if digest == local]

    def _print(self, text: str, ranks: list[int]) -> None:
        """Write the text to stderr; name the ranks unless all ranks share a sentence."""
        if not text:
            return
        size = self._comm.Get_size()
        if size > 1 and ("Traceback" in text or len(ranks) < size):
            step = (
                ""
                if self._world.step is None or "Traceback" not in text
                else f", in step {self._world.step}"
            )
            text = f"{name_ranks(ranks)} of {size}{step}: {text}"
        complain(text)

    def _is_child(self) -> bool:
        """Whether this is a fork of the process that started MPI: it must not touch MPI."""
        return os.getpid() != self._process


def _limit_the_rest(limit_s: float) -> None:
    """End this process with its stack if the interpreter's own end takes longer than the limit.

    Objects are deleted then, whose `__del__` may call MPI, past nnmpi, and wait for ever.
    """
    if limit_s != inf and sys.__stderr__ is not None:
        with contextlib.suppress(OSError, ValueError):  # it is closed
            faulthandler.dump_traceback_later(limit_s, exit=True, file=sys.__stderr__.fileno())


def abort(mpi: ModuleType, status: int) -> NoReturn:
    """Abort the job, after printed text has left."""
    time.sleep(DRAIN_S)
    remove_mapped("mpich_shm_")  # MPICH leaves them behind at an abort
    mpi.COMM_WORLD.Abort(status)
    os._exit(status)  # for an MPI whose Abort returns


def remove_mapped(prefix: str) -> None:
    """Remove the files of shared memory that this process has mapped, by their names' beginning.

    A process that has one mapped keeps its memory.
    """
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/maps").read_text().splitlines()
        for name in {line.split()[-1] for line in lines if f"/dev/shm/{prefix}" in line}:
            with contextlib.suppress(OSError):
                os.unlink(name)


@contextlib.contextmanager
def exit_refused() -> Iterator[None]:
    """Turn SystemExit, say of a user's model, into an error: other ranks would wait for ever."""
    try:
        yield
    except SystemExit as left:
        raise RuntimeError(f"SystemExit({left.code!r}) before the end of the command") from left
