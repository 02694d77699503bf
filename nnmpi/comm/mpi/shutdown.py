"""How a rank's program ends: together with the others', or by aborting the job for all. Nobody waits for ever.

MPI itself lets a rank that has failed wait in MPI_Finalize, and the others in their next message. Here every rank that
comes to its end announces it first, in one small non-blocking all-gather:

    all ranks come to their end    each ends with its own status; an error that several share is printed once
    the others do not, and
      this one has failed          after `GRACE_S` it prints its traceback and aborts the job
      this one has ended well      it waits for them, at most `limit_s`, then aborts the job

Covered: uncaught exceptions of the main and of other threads, `sys.exit(status)` at any depth, Ctrl-C, and the end of
the program on some ranks only, and `os._exit`, which MPICH's launcher may take for a success. Not covered:
`raise SystemExit(status)` and an `exit` imported from sys before the start, which count as a good end (the limit
holds), and a signal or a crash, which the launcher and the watchdog notice.
"""

import contextlib
import hashlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, NoReturn

from nnmpi.comm.agreement import name_ranks
from nnmpi.comm.world import World
from nnmpi.command import printable
from nnmpi.errors import NnmpiError

leave = os._exit  # the system's own, whatever `watch_exit` puts in its place
GRACE_S = 1.0
DRAIN_S = 0.2  # the launcher forwards what was printed only while the job lives: seen lost on a busy machine
STAGGER_S = 0.35  # more than DRAIN_S, so that the first to give up ends the job before the next one prints
LONGEST_TURN_S = 1.4
INTERRUPTED = 130
STALLED = os.EX_TEMPFAIL  # the status of a job that is ended because it has waited for too long


class Shutdown:
    """What one rank does when its program ends, in whichever way.

    Args:
        mpi: mpi4py's MPI module, initialized. Collective over the world: a communicator is made.
        limit_s: how long a rank that ended well waits for the others; None for ever.
        world: which hears of it.
    """

    def __init__(self, mpi: ModuleType, limit_s: float | None, world: World) -> None:
        self.limit_s, self._world = limit_s, world
        self._mpi = mpi
        self._comm: Any = mpi.COMM_WORLD.Dup()
        self._process = os.getpid()
        self._announced = False
        self.farewell: Callable[[], None] = lambda: None  # told to the watchdog, for which an end without it is a fault

    def on_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """End because of an uncaught exception: what `sys.excepthook` calls.

        Args:
            kind, error, trace: as `sys.excepthook` gets them.

        Raises:
            SystemExit: with the error's status, when no abort is needed; the interpreter then ends with it.
        """
        if self._is_child():
            sys.__excepthook__(kind, error, trace)
            _leave_fork(1)
        status, text = describe_uncaught(kind, error, trace)
        self._end(status, text)
        raise SystemExit(status)

    def on_thread_exception(self, args: threading.ExceptHookArgs) -> None:
        """End the job because of an uncaught exception in a thread: what `threading.excepthook` calls."""
        if self._is_child() or args.exc_value is None:
            threading.__excepthook__(args)
        elif not isinstance(args.exc_value, SystemExit):  # in a thread it ends the thread and means nothing more
            name = args.thread.name if args.thread else "unknown"
            status, text = describe_uncaught(args.exc_type, args.exc_value, args.exc_traceback)
            self._print(f"In thread {name}:\n{text}", [self._comm.Get_rank()])
            self._abort(status)

    def on_exit(self, status: int, text: str = "") -> None:
        """End because `sys.exit` was called with another status than 0, and nobody caught it."""
        if self._is_child():
            _leave_fork(status, text)
        self._end(status, text, alone=f"sys.exit({status}) while other ranks went on")

    def on_leave(self, status: int) -> None:
        """End the job because `os._exit` was called, and nobody has agreed on the end."""
        if not (self._announced or self._is_child() or self._mpi.Is_finalized()):
            step = "" if self._world.step is None else f", in step {self._world.step}"
            self._print(f"os._exit({status}) while other ranks went on{step}", [self._comm.Get_rank()])
            self._abort(status or 1)

    def on_end(self) -> None:
        """End because the program has come to its end: what `atexit` calls."""
        if self._is_child():
            _leave_fork(0)
        if self._mpi.Is_finalized():
            return
        if self._announced:  # all have failed: Open MPI's launcher kills who is not yet through when the first one ends
            self._mpi.Finalize()
            time.sleep(DRAIN_S)
            return
        limit_s = None if self.limit_s is None else self.limit_s + self._turn_s()
        if self._announce(0, "", limit_s) is None:
            self._print(
                f"this rank ended its program and waited {self.limit_s:g} s for the others, which have not come to "
                "their end; let all ranks end together, or raise the limit: NNMPI_EXIT_LIMIT_S, in seconds",
                [self._comm.Get_rank()],
            )
            self._abort(1)

    def _end(self, status: int, text: str, alone: str = "") -> None:
        """Print what went wrong, once, and return if all ranks come to their end; else abort the job.

        With nothing to print, `alone` says why the job is aborted.
        """
        rank = self._comm.Get_rank()
        same = self._announce(status, text, GRACE_S + self._turn_s())
        if same is None:
            self._print(text or alone, [rank])
            self._abort(status)
        if rank == min(same):
            self._print(text, same)

    def waits_for(self) -> str:
        """Return what it waits for, in words."""
        return "the end of the others' programs"

    def _turn_s(self) -> float:
        """Return how much longer than rank 0 this rank waits before it aborts.

        When several ranks give up, the first one ends the job, which saves the reader from the same text twice.
        """
        return float(min(STAGGER_S * self._comm.Get_rank(), LONGEST_TURN_S))

    def _announce(self, status: int, text: str, limit_s: float | None) -> list[int] | None:
        """Announce this rank's end, and return the ranks that end with the same status and text.

        Returns:
            None if not all ranks come to their end in time.
        """
        self._announced = True
        self.farewell()
        self._world.waiter = self
        own = hashlib.blake2b(f"{status} {text}".encode(errors="backslashreplace"), digest_size=16).digest()
        everyones = bytearray(len(own) * self._comm.Get_size())
        # Not blocking: a rank whose partners never come to their end must notice and abort.
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
            step = "" if self._world.step is None or "\n" not in text else f", in step {self._world.step}"
            text = f"{name_ranks(ranks)} of {size}{step}: {text}"
        with contextlib.suppress(OSError, ValueError):  # closed, or its reader is gone
            sys.stdout.flush()
            sys.stderr.write(printable(text) + "\n")
            sys.stderr.flush()

    def _abort(self, status: int) -> NoReturn:
        self.farewell()
        time.sleep(DRAIN_S)
        forget_memory()
        self._mpi.COMM_WORLD.Abort(status)
        leave(status)  # for an MPI whose Abort returns

    def _is_child(self) -> bool:
        """Whether this is a fork of the process that started MPI: it must not touch MPI."""
        return os.getpid() != self._process


def _leave_fork(status: int, text: str = "") -> NoReturn:
    """End a fork of a rank; the interpreter's own end would finalize MPI in the name of the parent, and wait there."""
    if text:
        print(printable(text), file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    leave(status)


def tell_launcher(status: int) -> bool:
    """Tell MPICH's launcher which status the job is to have, and return whether it is the launcher."""
    with contextlib.suppress(KeyError, ValueError, OSError):  # it would tell of the signal that ends the ranks
        os.write(int(os.environ["PMI_FD"]), b"cmd=abort exitcode=%d\n" % status)
        return True
    return False


def forget_memory() -> None:
    """Remove the names of MPICH's shared memory, which it leaves behind after an abort; who has it mapped keeps it."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/maps").read_text().splitlines()
        for name in {line.split()[-1] for line in lines if "/dev/shm/mpich_shm_" in line}:
            with contextlib.suppress(OSError):
                os.unlink(name)


def describe_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> tuple[int, str]:
    """Return the status that an uncaught exception ends the program with, and what to print of it.

    Of nnmpi's own errors the sentence is printed, of any other the traceback, and of Ctrl-C nothing.

    Args:
        kind, error, trace: as `sys.excepthook` gets them.
    """
    if isinstance(error, NnmpiError):
        return error.exit_status, str(error)
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED, ""
    return 1, "".join(traceback.format_exception(kind, error, trace)).rstrip()


# ---- noticing sys.exit ----


class WatchedExit(SystemExit):
    """A SystemExit that calls `uncaught(status, text)` at the moment when nobody has caught it.

    The interpreter offers no such hook: a SystemExit does not reach `sys.excepthook`, and `atexit` is not given the
    status. But it reads the exception's `code` once, with no Python code running, when nobody has caught the exception.
    """

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


def watch_leaving(leaves: Callable[[int], None]) -> None:
    """Let `os._exit` call `leaves(status)` before it ends the process."""

    def watched_leave(status: int) -> NoReturn:
        """Exit to the system with specified status, without normal exit processing."""
        leaves(status)
        leave(status)

    os._exit = watched_leave


@contextlib.contextmanager
def leaving_refused(alone: bool) -> Iterator[None]:
    """Let nothing inside the block, such as a user's model, end the program as if it were well.

    Args:
        alone: whether this process is the only one, so that nobody watches its `os._exit` yet.

    Raises:
        RuntimeError: in the place of SystemExit, which would be a good end, for which other ranks wait.
    """
    process, before = os.getpid(), os._exit

    def leaves(status: int) -> None:
        if os.getpid() == process:
            sys.stderr.write(f"os._exit({status}) before the end of the command\n")
            sys.stderr.flush()
            leave(status or 1)

    if alone:
        watch_leaving(leaves)
    try:
        yield
    except SystemExit as left:
        raise RuntimeError(f"SystemExit({left.code!r}) before the end of the command") from left
    finally:
        os._exit = before


def watch_exit(uncaught: Callable[[int, str], None]) -> None:
    """Let `sys.exit` call `uncaught(status, text)` before the program ends with a status other than 0.

    It replaces `sys.exit`, whose exceptions can be caught as before. An `exit` that was imported earlier stays as it
    is.
    """

    def watched_exit(code: object = None, /) -> NoReturn:
        """Exit the interpreter by raising SystemExit(code)."""
        raise WatchedExit(code, uncaught)

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
